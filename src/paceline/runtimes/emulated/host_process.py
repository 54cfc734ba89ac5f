"""A process inside a host, seen from outside: what `subprocess.Popen` is to a child."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import IO, Any

from paceline.runtimes.emulated.control import Client
from paceline.runtimes.emulated.control_messages import (
    AskStatus,
    Spawn,
    Spawned,
    Status,
)
from paceline.runtimes.emulated.errors import KeeperLostError

Stream = int | IO[Any] | None
"""As `subprocess` has it: None, a descriptor, a file, ``PIPE``, ``DEVNULL``, ``STDOUT``."""
Argument = str | bytes | os.PathLike[str]


class HostProcess:
    """A process in a host of an emulated cluster; it ends with the cluster, at the latest.

    ``pid`` is its number on the machine (inside its host it has another), and that of
    its session and process group. ``returncode`` is None until `poll` or `wait` saw its
    end, then as in `subprocess`. ``stdin``, ``stdout`` and ``stderr`` are binary files
    where ``subprocess.PIPE`` was asked for, else None.
    """

    def __init__(
        self,
        client: Client,
        host: int,
        arguments: Sequence[Argument],
        *,
        environment: Mapping[str, str] | None,
        directory: Argument | None,
        stdin: Stream,
        stdout: Stream,
        stderr: Stream,
    ) -> None:
        self.args = arguments
        self.returncode: int | None = None
        self._client = client
        self._lock = threading.Lock()
        pipes = _Pipes()
        try:
            standard_input = pipes.source(stdin, 0)
            output = pipes.sink(stdout, 1)
            joined = stderr == subprocess.STDOUT
            errors = output if joined else pipes.sink(stderr, 2)
            request = Spawn(
                host=host,
                arguments=[os.fsencode(word) for word in arguments],
                environment=[
                    (os.fsencode(name), os.fsencode(value))
                    for name, value in (
                        os.environ if environment is None else environment
                    ).items()
                ],
                directory=os.fsencode(os.getcwd() if directory is None else directory),
            )
            spawned, (descriptor,) = client.ask_with(
                request, Spawned, [standard_input, output, errors]
            )
        except BaseException:
            pipes.close_ours()
            raise
        finally:
            pipes.close_theirs()
        self.pid = spawned.pid
        self._number = spawned.process
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self.stdin = pipes.ours.get(0)
        self.stdout = pipes.ours.get(1)
        self.stderr = pipes.ours.get(2)

    def fileno(self) -> int:
        """A descriptor for `select` and its kin: readable once the process has ended."""
        return self._descriptor

    def poll(self) -> int | None:
        """The exit status if it has ended, else None."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, when it has ended.

        Raises `subprocess.TimeoutExpired` after *timeout* seconds.
        """
        code = self._look(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(
                [os.fsdecode(word) for word in self.args], timeout
            )
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal; nothing happens if it has ended."""
        with self._lock:
            if self.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._descriptor, number)

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it (SIGKILL)."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is not None:
            return self.returncode
        watch = select.poll()
        watch.register(self._descriptor, select.POLLIN)
        if not watch.poll(None if timeout is None else max(0.0, timeout) * 1000):
            return None
        with self._lock:
            if self.returncode is None:
                try:
                    answer = self._client.ask(AskStatus(process=self._number), Status)
                    self.returncode = answer.code
                except KeeperLostError:
                    # Whatever had not ended then was ended by the kernel.
                    self.returncode = -signal.SIGKILL
        return self.returncode

    def __repr__(self) -> str:
        return f"<HostProcess {self.pid} {self.args!r} returncode={self.returncode}>"


class _Pipes:
    """Turns what `subprocess` callers write into descriptors, and keeps both ends."""

    def __init__(self) -> None:
        self.ours: dict[int, IO[bytes]] = {}
        self._theirs: list[int] = []

    def source(self, stream: Stream, number: int) -> int:
        """A descriptor to read from."""
        if stream == subprocess.PIPE:
            theirs, ours = os.pipe()
            self._keep(theirs, os.fdopen(ours, "wb"), number)
            return theirs
        return self._given(stream, number)

    def sink(self, stream: Stream, number: int) -> int:
        """A descriptor to write to."""
        if stream == subprocess.PIPE:
            ours, theirs = os.pipe()
            self._keep(theirs, os.fdopen(ours, "rb"), number)
            return theirs
        return self._given(stream, number)

    def close_ours(self) -> None:
        """After a failure."""
        for file in self.ours.values():
            file.close()

    def close_theirs(self) -> None:
        """The process has its own copies."""
        for descriptor in self._theirs:
            os.close(descriptor)

    def _keep(self, theirs: int, ours: IO[bytes], number: int) -> None:
        self._theirs.append(theirs)
        self.ours[number] = ours

    def _given(self, stream: Stream, number: int) -> int:
        if stream is None:
            return number
        if stream == subprocess.DEVNULL:
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            self._theirs.append(null)
            return null
        return stream if isinstance(stream, int) else stream.fileno()
