"""``paceline run --survive``: a job that goes on when its processes die.

Theory of operation
-------------------
The supervisor is the parent of all, and all end with it, also where it is killed: one parameter server, or one for each group of workers, and
the workers, which meet only there. A worker that dies is evicted by the servers at once, because
its connections are lost; here it is started again, with a higher incarnation, joins the
servers, and pulls the parameters of that moment. When a server dies, no worker can go on: each
has a connection to every server, and none can be mended. While another server holds the model,
the one that died is started again, and enters from there; else all servers go on from the
snapshot. Then all workers are started again. Where none was taken yet, the training begins anew.

A worker that is silent though it lives is evicted too, and told so when it speaks again;
one that has not ended by itself after `Timeouts.workers_end` is killed, and started again.

Where nobody names a file for the snapshot, it is one of this job's own, with a name that no other
job has: in the folder for records, if there is one, else in a temporary folder that goes with the job.
A named file that is there at the start may be of a job that failed, or of quite another one: the
job does not start then, unless it is told to go on from it (``PACELINE_RESUME=1``). A job that
ends well removes its own.

A restarted script begins at its top. ``--steps N`` counts the job's steps, so it does only
those that are left; a script that counts epochs itself asks ``optimizer.first_step``. So
there is one training to a script. After its end the servers hold the finished model until all
scripts have ended well: a worker that dies meanwhile is started again, finds it, and has no more steps to
do. What fails after the beginning of a second training fails the job.

A worker that ends with an error that a restart cannot mend (`PacelineError.restart_helps`), such as an
unknown method, ends the job.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from paceline import methods, spec
from paceline.core.settings import Settings
from paceline.errors import UsageError
from paceline.interfaces import UpdatesOnServer
from paceline.parameter_server.process.snapshot import snapshot_lock
from paceline.run_options import CLUSTER_VARIABLE, RunOptions
from paceline.runtimes.processes import end_all, how_it_ended, wait_for_all
from paceline.runtimes.progress import WorkerProgress
from paceline.runtimes.real.cluster_check import load_of
from paceline.runtimes.real.server_process import ADDRESSES_VARIABLE, SURVIVE_VARIABLE
from paceline.runtimes.real.supervised_servers import SurvivingServer, SurvivingServers
from paceline.runtimes.real.supervised_worker import MOST_IN_VAIN, SurvivingWorker
from paceline.runtimes.temporary_folder import LauncherInterrupted, scratch_folder
from paceline.timeouts import timeouts
from paceline.transport.security import TOKEN

RESUME_VARIABLE = "PACELINE_RESUME"
"""Set to 1 to begin with the snapshot that an earlier job left."""


class Supervisor:
    """Runs *script* in *workers* processes on this machine.

    *snapshot*: where server 0 keeps its parameters, see `SurvivingServers`; None: in a file of its
    own.
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
        resume: bool = False,
    ) -> None:
        if workers < 1:
            raise UsageError(f"--workers: expected 1 or more, got {workers}")
        resume = resume or os.environ.get(RESUME_VARIABLE) == "1"
        self._servers = SurvivingServers(
            workers, _groups(options, workers), snapshot, resume
        )
        self._command = [sys.executable, script, *arguments]
        self._options = options
        self._size = workers
        self._workers: list[SurvivingWorker] = []
        self._in_vain = 0
        """Deaths of servers in a row without a completed step."""
        self._trained = False
        self._failed = False

    def run(self) -> int:
        """Run until all workers have ended well; returns the exit status.

        Whatever happens, no process is left. Raises `UsageError` where a server does not start, or
        another job keeps its snapshot in this one's file.
        """
        with scratch_folder() as folder:
            records = self._options.records
            named = self._servers.snapshot
            if named is None:  # one that nobody else can name
                self._servers.keep_snapshot_in(Path(records or folder))
            with snapshot_lock(named):
                status = self._run(folder)
                if status == 0:
                    self._servers.remove_snapshot()
            if records is not None and self._servers.has_snapshot:
                print(
                    "paceline: the last snapshot is kept; to go on from it: --snapshot "
                    f"{self._servers.snapshot} --resume",
                    file=sys.stderr,
                )
        return status

    def _run(self, folder: str) -> int:
        self._workers = [
            SurvivingWorker(rank, self._command, folder) for rank in range(self._size)
        ]
        try:
            self._supervise()
        except LauncherInterrupted as told:
            return told.say()
        finally:
            self._end_workers()
            self._servers.close()
        return 1 if self._failed else 0

    def standing(self) -> WorkerProgress | None:
        """How far the worker is that is ahead of the others, if any trains."""
        found = [one for w in self._workers if (one := w.standing) is not None]
        return max(found, key=lambda one: one.step, default=None)

    def _supervise(self) -> None:
        step = self._servers.start()
        if step:
            print(
                f"paceline: the job goes on from {self._servers.snapshot}: step {step}",
                file=sys.stderr,
            )
        for worker in self._workers:
            self._start(worker)
        while not all(worker.done for worker in self._workers):
            self._wait()
            self._look_at_news()
            self._look_at_workers()
            self._look_at_servers()

    # ---- processes ----

    def _start(self, worker: SurvivingWorker) -> None:
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
                ADDRESSES_VARIABLE: self._servers.addresses,
                TOKEN: self._servers.token,
            }
        )

    def _wait(self) -> None:
        """Until a process has ended, or a server has news."""
        descriptors = []
        try:
            watch = select.poll()
            servers = [server.process for server in self._servers.processes]
            for process in (*self._processes, *servers):
                with contextlib.suppress(ProcessLookupError):
                    descriptors.append(os.pidfd_open(process.pid))
                    watch.register(descriptors[-1], select.POLLIN)
            for process in servers:
                assert process.stdout is not None
                if process.poll() is None:
                    watch.register(process.stdout, select.POLLIN)
            watch.poll(1000)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _look_at_news(self) -> None:
        """What servers say about silent workers; who does not end is killed."""
        for news in self._servers.evicted():
            self._workers[news.worker].was_evicted(news.incarnation)
        for worker in self._workers:
            worker.kill_if_evicted()

    def _look_at_workers(self) -> None:
        for worker in self._workers:
            status = worker.ended()
            if status is None:
                continue
            if status == 0:
                worker.done = True
                self._servers.say_done(worker.rank)
                continue
            if self._trained or self._servers.are_gone:
                raise UsageError(
                    f"worker {worker.rank} {how_it_ended(status)} after its training was "
                    "over: only the training itself survives that"
                )
            if not self._servers.dead():  # else it is a consequence
                self._start_again(worker, status)

    def _start_again(self, worker: SurvivingWorker, status: int) -> None:
        worker.count_death(status)
        print(
            f"paceline: worker {worker.rank} {how_it_ended(status)} after step {worker.reached}; it is "
            "started again",
            file=sys.stderr,
        )
        worker.incarnation += 1
        self._start(worker)

    def _look_at_servers(self) -> None:
        servers = self._servers
        if all(worker.done for worker in self._workers):
            return
        if not servers.some_are_over:
            dead = servers.dead()
            if dead:
                self._replace(dead)
        elif servers.all_have_ended:
            self._begin_another()

    def _replace(self, dead: Sequence[SurvivingServer]) -> None:
        """Go on where these servers have died, or end the job."""
        servers, how = self._servers, self._servers.how_they_ended(dead)
        made_steps = any(worker.steps for worker in self._workers)
        for worker in self._workers:
            worker.note_reached()
        reached = max(worker.reached for worker in self._workers)
        some_hold, has_snapshot = servers.some_hold(), servers.has_snapshot
        if self._trained and not some_hold and not has_snapshot:
            self._fail(how)
            return
        self._in_vain = 0 if made_steps else self._in_vain + 1
        if self._in_vain == MOST_IN_VAIN:
            raise UsageError(
                f"{how}, for the {MOST_IN_VAIN}rd time in a row without a completed step: "
                "see above for what it said"
            )
        self._end_workers()
        begins_anew = not some_hold and not has_snapshot
        if begins_anew:
            for worker in self._workers:
                worker.done = False
        done = [worker.rank for worker in self._workers if worker.done]
        if some_hold:
            servers.start_again(dead, done)
            goes_on = (
                "the others hold the model, and it takes that over: what it had not passed on "
                "to them is lost, and all workers are started again"
            )
        else:
            step = servers.start(done)
            lost = max(0, reached - step)
            goes_on = (
                f"it goes on from its snapshot of step {step}: {lost} steps are lost"
            )
            if begins_anew:
                goes_on = (
                    "no snapshot was taken yet, and the training begins anew: "
                    f"{lost} steps are lost"
                )
            elif len(servers.each) > 1:
                goes_on = (
                    "no other holds the model, and all servers go on from the snapshot of "
                    f"step {step}: {lost} steps are lost"
                )
            for worker in self._workers:
                worker.reached = min(worker.reached, step)
        print(f"paceline: {how} after step {reached}; {goes_on}", file=sys.stderr)
        for worker in self._workers:
            if not worker.done:
                worker.incarnation += 1
                self._start(worker)

    def _fail(self, how: str) -> None:
        """No server holds what is trained, and the script's first training is over: it cannot
        begin at its top again. Let workers say so."""
        print(
            f"paceline: {how} after a training was over, and there is no snapshot of the next one: "
            "only the first training of a script survives that",
            file=sys.stderr,
        )
        self._failed = True
        self._servers.close()  # none that waits for the others
        self._let_workers_end()

    def _begin_another(self) -> None:
        """One training is over, and workers begin the next: those that are done do not."""
        self._trained = True
        self._servers.remove_snapshot()
        self._servers.start([worker.rank for worker in self._workers if worker.done])

    def _let_workers_end(self) -> None:
        """Who has trained says what is lost; who has not may still look for a server."""
        trained = [worker.process for worker in self._workers if worker.steps]
        wait_for_all([one for one in trained if one is not None], timeouts.workers_end)
        for worker in self._workers:
            worker.done = True
        self._end_workers()

    @property
    def _processes(self) -> list[subprocess.Popen[bytes]]:
        return [w.process for w in self._workers if w.process is not None]

    def _end_workers(self) -> None:
        end_all(self._processes)


def _groups(options: RunOptions, workers: int) -> int:
    """How many group servers a method has, 0 where one server is alone. Raises `UsageError` for
    a method under which no job survives."""
    if options.method is None:
        return 0  # the script names it; one that has groups is refused there
    text = spec.parse(options.method)
    method, _ = methods.make(text, set(spec.field_types(Settings)))
    methods.check_survives(method)
    file = options.cluster or os.environ.get(CLUSTER_VARIABLE)
    if file:
        method = methods.grouped(method, load_of(file, workers).groups)
    on_server = cast(UpdatesOnServer, method)
    on_server.server(workers)
    groups = on_server.groups(workers)
    return 0 if groups is None else groups.servers
