"""A job whose servers are ``paceline serve``, and what a process manager does for it.

``python -m tests.chaos.served_job METHOD WORKERS SERVERS SNAPSHOT SCRIPT WORDS``. With a SNAPSHOT the job survives: each
worker is ``paceline run --survive --server``, and whatever ends badly is started again. Without (``-``) all workers
are one ``paceline run``. The status is that of the process that ended the job.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

from paceline.runtimes import exec_with_parent
from tests.support.hanging import free_port

MOST_STARTS = 9
"""Of one process. A campaign has at most three faults."""
PIPE_STATUS = 128 + signal.SIGPIPE
LATE = "process manager: a server has ended before"
"""Printed before the name of a worker that died after its training: only the training survives that."""


class Manager:
    """Starts the processes of one job; each ends with this process."""

    def __init__(self) -> None:
        self._commands: dict[str, list[str]] = {}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._starts: dict[str, int] = {}

    def start(self, name: str, *words: str) -> None:
        self._commands[name] = [
            *(sys.executable, exec_with_parent.__file__, str(os.getpid())),
            *(sys.executable, "-m", "paceline", *words),
        ]
        self._start(name)

    def _start(self, name: str) -> None:
        self._starts[name] = self._starts.get(name, 0) + 1
        self.running[name] = subprocess.Popen(self._commands[name])

    def wait(self, *names: str, again: bool = False) -> int:
        """Wait until all of *names* have ended with status 0, or one has not; its status.

        *again*: start what has ended badly again, named here or not.
        """
        while any(self.running[name].poll() != 0 for name in names):
            for name, process in list(self.running.items()):
                if not (status := process.poll()):
                    continue
                if again and self.running["server"].poll() == 0:
                    print(f"{LATE} {name}", file=sys.stderr)
                    return status
                may = again and self._starts[name] < MOST_STARTS
                if may and status != PIPE_STATUS:
                    self._start(name)
                    if name == "server":
                        self._start_once_more()
                elif again or name in names:
                    return status
            time.sleep(0.01)
        return 0

    def _start_once_more(self) -> None:
        """A server that is started again waits for workers that have ended: see survive-failures.md."""
        for name, process in list(self.running.items()):
            if process.poll() == 0:
                self._start(name)

    def started_once(self, name: str) -> bool:
        return self._starts[name] == 1

    def end(self, name: str) -> int:
        """End it as an operator does; its status."""
        if self.running[name].poll() is None:
            self.running[name].terminate()
        return self.running[name].wait()


def survive(
    method: str, workers: int, port: int, snapshot: str, script: list[str]
) -> int:
    manager, ranks = Manager(), [f"worker {rank}" for rank in range(workers)]
    words = ["--survive", "--once", f"--workers={workers}", f"--port={port}"]
    manager.start("server", "serve", *words, f"--snapshot={snapshot}")
    words = ["--survive", "--server", f"127.0.0.1:{port}", f"--workers={workers}"]
    for rank, name in enumerate(ranks):
        own = [f"--rank={rank}", f"--method={method}"]
        manager.start(name, "run", *words, *own, *script)
    if status := manager.wait(*ranks, again=True):
        return status
    if not manager.started_once("server"):
        # A server that died while workers left waits for them, who have ended.
        manager.end("server")
        return 0
    # The training is complete: a signal to the server ends no job any more.
    return max(0, manager.wait("server"))


def train(method: str, workers: int, ports: list[int], script: list[str]) -> int:
    manager, servers = Manager(), [f"server {port}" for port in ports]
    for port, name in zip(ports, servers, strict=True):
        manager.start(name, "serve", "--once", f"--workers={workers}", f"--port={port}")
    places = "+".join(f"127.0.0.1:{port}" for port in ports)
    method += ("," if ":" in method else ":") + f"servers={places}"
    manager.start(
        "launcher", "run", f"--workers={workers}", f"--method={method}", *script
    )
    status = manager.wait("launcher")
    trained = {file.name.split("-")[1] for file in Path(script[1]).glob("steps-*-*")}
    if status and len(trained) < workers:
        # Not all workers have come to the servers, which wait for them.
        for name in servers:
            manager.end(name)
    elif status:
        for name in servers:
            manager.running[name].wait()
    if not status and (status := manager.wait(*servers)):
        print(f"process manager: a server ended with status {status}", file=sys.stderr)
    return status


def main() -> None:
    method, workers, servers, snapshot, *script = sys.argv[1:]
    os.environ["PACELINE_SERVERS_TOKEN"] = secrets.token_hex()
    ports = [free_port() for _ in range(int(servers))]
    if snapshot == "-":
        status = train(method, int(workers), ports, script)
    else:
        status = survive(method, int(workers), *ports, snapshot, script)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
