"""``paceline run --survive``: a job that goes on when its processes die.

Theory of operation
-------------------
The supervisor is the parent of all: one parameter server, and the workers, which meet only
there. A worker that dies is evicted by the server at once, because its connection is lost;
here it is started again, with a higher incarnation, joins the server, and pulls the
parameters of that moment. When the server dies, workers cannot go on: with a snapshot it is
started again from that, and so are the workers; without, each ends with an error that names it.

A restarted script begins at its top. ``--steps N`` counts the job's steps, so it does only
those that are left; a script that counts epochs itself asks ``optimizer.first_step``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import UsageError
from paceline.options import RunOptions
from paceline.worlds.servers import (
    ADDRESSES_VARIABLE,
    INCARNATION_VARIABLE,
    PROGRESS_VARIABLE,
    SURVIVE_VARIABLE,
    TOKEN_VARIABLE,
    ServerProcess,
)

END_SECONDS = 30.0
"""What workers have to end after their server has."""
TERMINATE_SECONDS = 5.0
MOST_RESTARTS = 100
"""Of one worker: a script that cannot run at all must not be started for ever."""


@dataclass
class _Worker:
    """One worker's present process."""

    rank: int
    incarnation: int = 0
    process: subprocess.Popen[bytes] | None = None
    done: bool = False
    restarts: int = field(default=0)


class Supervisor:
    """Runs *script* in *workers* processes on this machine.

    *snapshot*: where the server keeps its parameters, every *snapshot_seconds*; None: its
    death ends the job.
    """

    def __init__(
        self,
        workers: int,
        script: str,
        arguments: Sequence[str],
        options: RunOptions,
        snapshot: Path | None = None,
        snapshot_seconds: float = 10.0,
    ) -> None:
        if workers < 1:
            raise UsageError(f"--workers: expected 1 or more, got {workers}")
        self._command = [sys.executable, script, *arguments]
        self._options = options
        self._workers = [_Worker(rank) for rank in range(workers)]
        self._token = secrets.token_hex(16)
        self._snapshot = snapshot
        self._snapshot_seconds = snapshot_seconds
        self._server: ServerProcess | None = None
        self._scratch = ""
        self._failed = False

    def run(self) -> int:
        """Run until all workers have ended well; returns the exit status.

        Whatever happens, no process is left.
        """
        with tempfile.TemporaryDirectory(prefix="paceline-") as self._scratch:
            try:
                self._start_server(port=0)
                for worker in self._workers:
                    self._start(worker)
                while not all(worker.done for worker in self._workers):
                    self._wait()
                    self._look_at_workers()
                    self._look_at_server()
                return 1 if self._failed else 0
            except KeyboardInterrupt:
                print("paceline: SIGINT: all workers were ended", file=sys.stderr)
                return 128 + signal.SIGINT
            finally:
                self._end_workers()
                if self._server is not None:
                    self._server.close()

    # ---- processes ----

    def _start_server(self, port: int) -> None:
        extra = []
        if self._snapshot is not None:
            extra = [f"--snapshot={self._snapshot}"]
            extra += [f"--snapshot-seconds={self._snapshot_seconds}"]
        self._server = ServerProcess(
            "server 0",
            len(self._workers),
            "127.0.0.1",
            port=port,
            token=self._token,
            extra=extra,
        )

    def _start(self, worker: _Worker) -> None:
        assert self._server is not None
        count = str(len(self._workers))
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            **self._options.to_environment(),
            "RANK": str(worker.rank),
            "LOCAL_RANK": str(worker.rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": count,
            "LOCAL_WORLD_SIZE": count,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            SURVIVE_VARIABLE: "1",
            INCARNATION_VARIABLE: str(worker.incarnation),
            ADDRESSES_VARIABLE: f"127.0.0.1:{self._server.port}",
            TOKEN_VARIABLE: self._token,
            PROGRESS_VARIABLE: str(self._progress_file(worker.rank)),
        }
        worker.process = subprocess.Popen(self._command, env=environment)

    def _wait(self) -> None:
        """Until a process has ended."""
        assert self._server is not None
        processes = [w.process for w in self._workers if w.process is not None]
        descriptors = []
        try:
            watch = select.poll()
            for process in (*processes, self._server.process):
                with contextlib.suppress(ProcessLookupError):
                    descriptors.append(os.pidfd_open(process.pid))
                    watch.register(descriptors[-1], select.POLLIN)
            watch.poll(1000)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _look_at_workers(self) -> None:
        server = self._server
        assert server is not None
        for worker in self._workers:
            status = None if worker.process is None else worker.process.poll()
            if status is None:
                continue
            worker.process = None
            if status == 0:
                worker.done = True
                continue
            if server.process.poll() is not None:
                return  # a consequence
            worker.restarts += 1
            how = _describe(status)
            if worker.restarts > MOST_RESTARTS:
                raise UsageError(f"worker {worker.rank} {how}, {MOST_RESTARTS} times")
            print(
                f"paceline: worker {worker.rank} {how} after step "
                f"{self._steps_of(worker.rank)}; it is started again",
                file=sys.stderr,
            )
            worker.incarnation += 1
            self._start(worker)

    def _look_at_server(self) -> None:
        server = self._server
        assert server is not None
        status = server.process.poll()
        if status is None or all(worker.done for worker in self._workers):
            return
        port = server.port
        server.close()
        if status == 0:
            self._start_server(port)  # one training is over, the next may begin
            return
        how = _describe(status)
        reached = max(self._steps_of(worker.rank) for worker in self._workers)
        if self._snapshot is None or not self._snapshot.exists():
            print(
                f"paceline: the parameter server {how} after step {reached}, and there is "
                "no snapshot: give --snapshot FILE to go on from one",
                file=sys.stderr,
            )
            self._failed = True
            self._let_workers_end()
            return
        self._end_workers()
        self._start_server(port)
        step = self._server.step if self._server is not None else 0
        print(
            f"paceline: the parameter server {how} after step {reached}; it goes on from "
            f"its snapshot of step {step}: {max(0, reached - step)} steps are lost",
            file=sys.stderr,
        )
        for worker in self._workers:
            if not worker.done:
                worker.incarnation += 1
                self._start(worker)

    def _let_workers_end(self) -> None:
        deadline = time.monotonic() + END_SECONDS
        for worker in self._workers:
            if worker.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(0.0, deadline - time.monotonic()))
            worker.done = True
        self._end_workers()

    def _end_workers(self) -> None:
        alive = [w.process for w in self._workers if w.process is not None]
        for process in alive:
            process.terminate()
        deadline = time.monotonic() + TERMINATE_SECONDS
        for process in alive:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    # ---- progress ----

    def _progress_file(self, rank: int) -> Path:
        return Path(self._scratch) / f"progress-{rank}"

    def _steps_of(self, rank: int) -> int:
        try:
            return int(self._progress_file(rank).read_text() or 0)
        except (OSError, ValueError):
            return 0


def _describe(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"
