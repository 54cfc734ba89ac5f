"""Processes that the keeper starts in hosts, and their ends."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from paceline.runtimes.emulated import namespaces
from paceline.runtimes.emulated.control_messages import Spawn, Spawned


class Processes:
    """The keeper's children, by a number that is never used twice.

    The keeper is also the first process of its process-number namespace, so orphans
    become its children and are collected here too.
    """

    def __init__(self, proc: Path) -> None:
        """*proc* is a /proc that numbers processes as the rest of the machine does."""
        self._proc = proc
        self._running: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
        self._codes: dict[int, int] = {}
        self._started = 0

    def spawn(
        self, request: Spawn, namespace: int, streams: list[int]
    ) -> tuple[Spawned, int]:
        """Start a process in a network namespace, with the given standard streams.

        Returns what to tell, and a descriptor of the process. Raises `OSError`.
        """
        standard_input, output, errors = streams
        with namespaces.inside(namespace):
            child = subprocess.Popen(
                request.arguments,
                env=dict(request.environment),
                cwd=request.directory,
                stdin=standard_input,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        self._started += 1
        self._running[child.pid] = (self._started, child)
        descriptor = os.pidfd_open(child.pid)
        return Spawned(
            process=self._started, pid=self._machine_pid(descriptor)
        ), descriptor

    def collect(self) -> None:
        """Note how those have ended that ended, orphans included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number, child = self._running.pop(pid, (0, None))
            if child is not None:
                child.returncode = os.waitstatus_to_exitcode(status)
                self._codes[number] = child.returncode

    def code(self, process: int) -> int | None:
        """How a process ended, or None."""
        self.collect()
        return self._codes.get(process)

    def _machine_pid(self, descriptor: int) -> int:
        """The number that a process has outside. Only a process that has not been
        collected has one, so it is asked for at once."""
        text = (self._proc / "self" / "fdinfo" / str(descriptor)).read_text()
        (line,) = (line for line in text.splitlines() if line.startswith("Pid:"))
        return int(line.split()[1])
