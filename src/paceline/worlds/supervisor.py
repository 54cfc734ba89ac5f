"""``paceline run --survive``: a job that goes on when its processes die.

Theory of operation
-------------------
The supervisor is the parent of all: one parameter server, and the workers, which meet only
there. A worker that dies is evicted by the server at once, because its connection is lost;
here it is started again, with a higher incarnation, joins the server, and pulls the
parameters of that moment. When the server dies, workers cannot go on: with a snapshot it is
started again from that, and so are the workers; without, each ends with an error that names it.
A worker that is silent though it lives is evicted too, and told so when it speaks again;
one that has not ended by itself after `END_SECONDS` is killed, and started again.

A snapshot that is there at the start may be of a job that failed, or of quite another one: the
job does not start then, unless it is told to go on from it (``PACELINE_RESUME=1``). A job that
ends well removes its own.

A restarted script begins at its top. ``--steps N`` counts the job's steps, so it does only
those that are left; a script that counts epochs itself asks ``optimizer.first_step``. So
there is one training to a script: what fails after its end fails the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from paceline import methods, spec
from paceline.errors import UsageError
from paceline.interfaces import UpdatesOnServer
from paceline.options import RunOptions
from paceline.server.security import TOKEN
from paceline.server.snapshot import unfinished
from paceline.settings import Settings
from paceline.worlds.processes import end_all, how_it_ended, wait_for_all
from paceline.worlds.scratch import ToldToEnd, scratch_folder
from paceline.worlds.servers import (
    ADDRESSES_VARIABLE,
    SURVIVE_VARIABLE,
    ServerProcess,
)
from paceline.worlds.surviving import END_SECONDS, MOST_IN_VAIN, SurvivingWorker

REST_SECONDS = 1.0
"""After a training has ended well, so long before a server is started for another one: most
scripts have none, and end."""
RESUME_VARIABLE = "PACELINE_RESUME"
"""Set to 1 to begin with the snapshot that an earlier job left."""
SNAPSHOT_VARIABLE = "PACELINE_SNAPSHOT_SECONDS"
SNAPSHOT_SECONDS = 10.0
SILENT_VARIABLE = "PACELINE_SILENT_SECONDS"
"""How long a worker may be silent; without it, what `server.process` says."""


class Supervisor:
    """Runs *script* in *workers* processes on this machine.

    *snapshot*: where the server keeps its parameters, every *snapshot_seconds* (None:
    ``PACELINE_SNAPSHOT_SECONDS``, else `SNAPSHOT_SECONDS`); None: its death ends the job.
    *resume*: begin with the snapshot that is there (None is there: from the beginning).

    Raises `UsageError` for a method whose workers meet in collectives, and for a snapshot
    that is there already.
    """

    def __init__(
        self,
        workers: int,
        script: str,
        arguments: Sequence[str],
        options: RunOptions,
        snapshot: Path | None = None,
        snapshot_seconds: float | None = None,
        resume: bool = False,
    ) -> None:
        if workers < 1:
            raise UsageError(f"--workers: expected 1 or more, got {workers}")
        if options.method is not None:
            _check_method(options.method, workers)
        if snapshot is not None:
            snapshot = snapshot.absolute()
            resume = resume or os.environ.get(RESUME_VARIABLE) == "1"
            _check_snapshot(snapshot, resume)
        self._command = [sys.executable, script, *arguments]
        self._options = options
        self._size = workers
        self._workers: list[SurvivingWorker] = []
        self._token = secrets.token_hex(16)
        self._snapshot = snapshot
        self._snapshot_seconds = snapshot_seconds or float(
            os.environ.get(SNAPSHOT_VARIABLE, SNAPSHOT_SECONDS)
        )
        self._server: ServerProcess | None = None
        self._heard = b""
        """What the server said, beyond its last whole line."""
        self._server_in_vain = 0
        self._trained = False
        self._rested: float | None = None
        self._failed = False

    def run(self) -> int:
        """Run until all workers have ended well; returns the exit status.

        Whatever happens, no process is left.
        """
        with scratch_folder() as folder:
            self._workers = [
                SurvivingWorker(rank, self._command, folder)
                for rank in range(self._size)
            ]
            try:
                self._supervise()
            except ToldToEnd as told:
                return told.say()
            finally:
                self._end_workers()
                if self._server is not None:
                    self._server.close()
                if self._snapshot is not None:
                    unfinished(self._snapshot).unlink(missing_ok=True)
        if self._failed:
            return 1
        self._remove_snapshot()
        return 0

    def _supervise(self) -> None:
        self._start_server(port=0)
        if self._server is not None and self._server.step:
            print(
                f"paceline: the job goes on from {self._snapshot}: step "
                f"{self._server.step}",
                file=sys.stderr,
            )
        for worker in self._workers:
            self._start(worker)
        while not all(worker.done for worker in self._workers):
            self._wait()
            self._look_at_news()
            self._look_at_workers()
            self._look_at_server()

    # ---- processes ----

    def _start_server(self, port: int) -> None:
        silent = os.environ.get(SILENT_VARIABLE)
        extra = ["--lost-return"]
        extra += ["--evict-silent" if silent is None else f"--evict-silent={silent}"]
        if self._snapshot is not None:
            extra += [f"--snapshot={self._snapshot}"]
            extra += [f"--snapshot-seconds={self._snapshot_seconds}"]
        gone = [str(worker.rank) for worker in self._workers if worker.done]
        if gone:
            extra += ["--without", *gone]
        self._heard = b""
        self._server = ServerProcess(
            "server 0",
            self._size,
            "127.0.0.1",
            port=port,
            token=self._token,
            extra=extra,
        )

    def _start(self, worker: SurvivingWorker) -> None:
        assert self._server is not None
        count = str(self._size)
        worker.start(
            {
                "OMP_NUM_THREADS": "1",
                **os.environ,
                **self._options.to_environment(),
                "GROUP_RANK": "0",
                "WORLD_SIZE": count,
                "LOCAL_WORLD_SIZE": count,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",
                SURVIVE_VARIABLE: "1",
                ADDRESSES_VARIABLE: f"127.0.0.1:{self._server.port}",
                TOKEN: self._token,
            }
        )

    def _wait(self) -> None:
        """Until a process has ended, or the server has news."""
        assert self._server is not None
        descriptors = []
        try:
            watch = select.poll()
            for process in (*self._processes, self._server.process):
                with contextlib.suppress(ProcessLookupError):
                    descriptors.append(os.pidfd_open(process.pid))
                    watch.register(descriptors[-1], select.POLLIN)
            assert self._server.process.stdout is not None
            if self._server.process.poll() is None:
                watch.register(self._server.process.stdout, select.POLLIN)
            watch.poll(1000)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _look_at_news(self) -> None:
        """What the server says about silent workers; who does not end is killed."""
        assert self._server is not None
        stream = self._server.process.stdout
        assert stream is not None
        news = select.poll()
        news.register(stream, select.POLLIN)
        if news.poll(0):
            self._heard += os.read(stream.fileno(), 65536)
        *lines, self._heard = self._heard.split(b"\n")  # the last may be incomplete
        for words in map(json.loads, filter(None, lines)):
            self._workers[words["evicted"]].was_evicted(words["incarnation"])
        for worker in self._workers:
            worker.kill_if_evicted()

    def _look_at_workers(self) -> None:
        server = self._server
        assert server is not None
        for worker in self._workers:
            status = worker.ended()
            if status is None:
                continue
            of_server = server.process.poll()
            if status == 0:
                worker.done = True
                server.say_done(worker.rank)
                continue
            if self._trained or of_server == 0:
                raise UsageError(
                    f"worker {worker.rank} {how_it_ended(status)} after its training was "
                    "over: only the training itself survives that"
                )
            if of_server is not None:
                return  # a consequence
            self._start_again(worker, how_it_ended(status))

    def _start_again(self, worker: SurvivingWorker, how: str) -> None:
        worker.count_death(how)
        print(
            f"paceline: worker {worker.rank} {how} after step {worker.reached}; it is "
            "started again",
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
        if status == 0:
            self._begin_another(server)
            return
        port = server.port
        server.close()
        how = how_it_ended(status)
        for worker in self._workers:
            worker.note_reached()
        reached = max(worker.reached for worker in self._workers)
        if self._snapshot is None or not self._snapshot.exists():
            advice = "give --snapshot FILE to go on from one"
            if self._snapshot is not None:
                advice = "none was taken yet"
            print(
                f"paceline: the parameter server {how} after step {reached}, and there is "
                f"no snapshot: {advice}",
                file=sys.stderr,
            )
            self._failed = True
            self._let_workers_end()
            return
        made_steps = any(worker.steps for worker in self._workers)
        self._server_in_vain = 0 if made_steps else self._server_in_vain + 1
        if self._server_in_vain == MOST_IN_VAIN:
            raise UsageError(
                f"the parameter server {how}, for the {MOST_IN_VAIN}rd time in a row "
                "without a completed step: see above for what it said"
            )
        self._end_workers()
        self._start_server(port)
        step = self._server.step if self._server is not None else 0
        print(
            f"paceline: the parameter server {how} after step {reached}; it goes on from "
            f"its snapshot of step {step}: {max(0, reached - step)} steps are lost",
            file=sys.stderr,
        )
        for worker in self._workers:
            worker.reached = min(worker.reached, step)
            if not worker.done:
                worker.incarnation += 1
                self._start(worker)

    def _begin_another(self, server: ServerProcess) -> None:
        """One training is over: the next may begin."""
        if self._rested is None:
            self._trained = True
            self._remove_snapshot()
            self._rested = time.monotonic() + REST_SECONDS
        elif time.monotonic() > self._rested:
            self._rested = None
            server.close()
            self._start_server(server.port)

    def _let_workers_end(self) -> None:
        wait_for_all(self._processes, END_SECONDS)
        for worker in self._workers:
            worker.done = True
        self._end_workers()

    @property
    def _processes(self) -> list[subprocess.Popen[bytes]]:
        return [w.process for w in self._workers if w.process is not None]

    def _end_workers(self) -> None:
        end_all(self._processes)

    def _remove_snapshot(self) -> None:
        """The training is over: nobody is to go on from where it was."""
        if self._snapshot is not None:
            self._snapshot.unlink(missing_ok=True)


def _check_method(text: str, workers: int) -> None:
    """Raise `UsageError` for a method under which no job survives."""
    method, _ = methods.make(spec.parse(text), set(spec.field_types(Settings)))
    methods.check_survives(method)
    cast(UpdatesOnServer, method).server(workers)


def _check_snapshot(snapshot: Path, resume: bool) -> None:
    """Raise `UsageError` unless a server can keep its snapshot there."""
    if not snapshot.parent.is_dir():
        raise UsageError(f"--snapshot {snapshot}: there is no folder {snapshot.parent}")
    if snapshot.is_dir():
        raise UsageError(f"--snapshot {snapshot}: expected a file, got a folder")
    if snapshot.exists() and not resume:
        raise UsageError(
            f"--snapshot {snapshot}: the file exists, and may be what another job left; "
            f"remove it to begin anew, or pass --resume to go on from it"
        )
