"""Runs ``paceline run --survive``: a job that continues when its processes die.

The supervisor is the parent of all processes, and they all end with it, even if it is killed. They
are one parameter server, or one for each group of workers, and the workers, which communicate
through servers only.

- A worker dies: its connections are lost, so the servers evict it at once. It is restarted with a
  higher incarnation, joins the servers, and pulls the present parameters.
- A server dies: no worker can continue, as each has a connection to every server. If another server
  has the model, the dead one is restarted and enters from there. Otherwise all servers start from
  the snapshot. Then all workers are restarted. Without a snapshot the training begins anew.
- A silent worker is evicted too, and learns it when it sends again. If it has not ended after
  `Timeouts.workers_end`, it is killed and restarted.

*Snapshot.* Without a named file, the snapshot has a name of this job's own. It is in the folder for
records or in a temporary folder of the job. A named file that exists at the start may belong to
another job. So the job starts only if ``PACELINE_RESUME=1`` asks it to continue from that file. A
job that ends well removes its own.

*Steps.* A restarted script begins at its top. ``--steps N`` counts the job's steps, so it does the
remaining ones; a script that counts epochs itself reads ``optimizer.first_step``. So a script has
one training. After its end, servers keep the finished model until all scripts have ended well: a
worker that dies meanwhile is restarted, finds it, and has no more steps. A failure after the start
of a second training fails the job.

*Errors.* An error that a restart cannot fix (`PacelineError.restart_helps`), such as an unknown
method, ends the job.

`survive_policy` decides what follows an exit. This module starts, watches and ends processes.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from paceline import methods, spec
from paceline.core.settings import Settings
from paceline.errors import UsageError
from paceline.interfaces import UpdatesOnServer
from paceline.interfaces.server_messages import Describe, PeerAddress
from paceline.parameter_server.process import snapshot as snapshots
from paceline.parameter_server.process.control import (
    HoldsModel,
    TrainingOver,
    WorkerEvicted,
    WorkerFinished,
    WorkerLost,
)
from paceline.parameter_server.process.surviving import checked
from paceline.run_options import CLUSTER_VARIABLE, RunOptions, ScriptJob
from paceline.runtimes import progress
from paceline.runtimes.processes import (
    ERROR_FILE_VARIABLE,
    ProcessSupervisor,
    WorkerExit,
    ends_with_this,
    how_it_ended,
    wait_for_all,
)
from paceline.runtimes.progress import WorkerProgress
from paceline.runtimes.real.cluster_check import load_of
from paceline.runtimes.real.server_process import (
    ADDRESSES_VARIABLE,
    INCARNATION_VARIABLE,
    SILENT_VARIABLE,
    SURVIVE_VARIABLE,
    KilledAtStartError,
    ServerProcess,
)
from paceline.runtimes.real.survive_policy import (
    ServersAction,
    ServersStatus,
    SurvivePolicy,
    WorkerAction,
)
from paceline.runtimes.temporary_folder import LauncherInterrupted, scratch_folder
from paceline.timeouts import timeouts
from paceline.transport.security import TOKEN

RESUME_VARIABLE = "PACELINE_RESUME"
"""Set to 1 to continue from the snapshot that an earlier job left."""
SNAPSHOT_VARIABLE = "PACELINE_SNAPSHOT_SECONDS"
_HOST = "127.0.0.1"
MOST_SERVER_STARTS = 3
"""A server that signals end so often before it listens ends the job."""
_LOOK_SECONDS = 1.0
"""Longest time between two checks of all processes."""


class Supervisor:
    """Runs a *job* in *workers* processes on this machine.

    Args:
        job: The script and its options.
        workers: Number of workers.
        snapshot: Server 0 writes its parameters to this file, see `SupervisedServers`; None: to a
            file of this job's own.
        resume: Begin with the existing snapshot (without one: from the beginning).

    Raises:
        UsageError: The method's workers use collectives, or the snapshot exists already.
    """

    def __init__(
        self,
        job: ScriptJob,
        workers: int,
        snapshot: Path | None = None,
        resume: bool = False,
    ) -> None:
        if workers < 1:
            raise UsageError(f"--workers: expected 1 or more, got {workers}")
        resume = resume or os.environ.get(RESUME_VARIABLE) == "1"
        self._servers = SupervisedServers(
            workers, _groups(job.options, workers), snapshot, resume
        )
        self._job = job
        self._workers: list[SupervisedWorker] = []
        self._policy = SurvivePolicy(workers)
        self._processes = ProcessSupervisor()

    def run(self) -> int:
        """Run until all workers have ended well; return the exit status.

        No process is left in any case. Raises `UsageError` if a server does not start, or another
        job uses this one's snapshot file.
        """
        with scratch_folder() as folder:
            records = self._job.options.records
            named = self._servers.snapshot
            # Use a file that no other job can name.
            if named is None:
                self._servers.keep_snapshot_in(Path(records or folder))
            with snapshots.snapshot_lock(named):
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

    def progress(self) -> WorkerProgress | None:
        """Return the progress of the worker that is ahead of the others; None if no worker trains."""
        found = [one for w in self._workers if (one := w.progress) is not None]
        return max(found, key=lambda one: one.step, default=None)

    def _run(self, folder: str) -> int:
        command = [sys.executable, self._job.script, *self._job.arguments]
        self._workers = [
            SupervisedWorker(rank, command, folder)
            for rank in range(len(self._policy.workers))
        ]
        try:
            self._supervise()
        except LauncherInterrupted as interruption:
            return interruption.report()
        finally:
            self._processes.stop()
            self._servers.close()
        return 1 if self._policy.unfinished else 0

    def _supervise(self) -> None:
        step = self._servers.start()
        if step:
            print(
                f"paceline: the job goes on from {self._servers.snapshot}: step {step}",
                file=sys.stderr,
            )
        for worker in self._workers:
            self._start(worker)
        while self._processes.is_running:
            exits = self._processes.wait(_LOOK_SECONDS, self._servers.descriptors())
            for evicted in self._servers.look():
                self._workers[evicted.worker].was_evicted(evicted.incarnation)
            for worker in self._workers:
                worker.kill_if_evicted()
            # Judge all exits of one turn by the same status, so that the rule for servers sees the
            # effects of a worker's exit.
            status = self._servers.status()
            for ended in exits:
                self._worker_exited(ended, status)
            self._servers_exited(status)

    def _start(self, worker: SupervisedWorker) -> None:
        count = str(len(self._workers))
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            **self._job.options.to_environment(),
            "GROUP_RANK": "0",
            "WORLD_SIZE": count,
            "LOCAL_WORLD_SIZE": count,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            SURVIVE_VARIABLE: "1",
            ADDRESSES_VARIABLE: self._servers.addresses,
            TOKEN: self._servers.token,
        }
        incarnation = self._policy.workers[worker.rank].incarnation
        process = worker.start(environment, incarnation)
        self._processes.add(worker.rank, process, worker.error_file)

    def _worker_exited(self, ended: WorkerExit, status: ServersStatus) -> None:
        worker = self._workers[ended.rank]
        action = self._policy.worker_exited(ended, worker.last_step, status)
        if ended.status == 0:
            self._servers.report_done(ended.rank)
        if action is WorkerAction.RESTART:
            last_step = self._policy.workers[ended.rank].last_step
            print(
                f"paceline: worker {ended.rank} {how_it_ended(ended.status)} after step "
                f"{last_step}; it is started again",
                file=sys.stderr,
            )
            self._start(worker)

    def _servers_exited(self, status: ServersStatus) -> None:
        steps = [worker.last_step for worker in self._workers]
        action = self._policy.servers_exited(status, steps)
        match action:
            case ServersAction.IGNORE:
                return
            case ServersAction.NEXT_TRAINING:
                self._servers.remove_snapshot()
                self._servers.start(self._policy.done)
                return
            case ServersAction.STOP_ALL:
                self._stop_all(status.loss)
                return
        self._processes.stop()
        reached = self._policy.last_step
        goes_on = self._restart_servers(action)
        print(
            f"paceline: {status.loss} after step {reached}; {goes_on}", file=sys.stderr
        )
        for rank in self._policy.unfinished:
            self._start(self._workers[rank])

    def _restart_servers(self, action: ServersAction) -> str:
        """Restart the servers; return how the job continues, as text."""
        if action is ServersAction.RESTART_LOST:
            self._servers.restart_lost(self._policy.done)
            return (
                "the others hold the model, and it takes that over: what it had not passed on "
                "to them is lost, and all workers are started again"
            )
        step = self._servers.start(self._policy.done)
        lost = self._policy.went_back(step)
        if action is ServersAction.RESTART_TRAINING:
            return f"no snapshot was taken yet, and the training begins anew: {lost} steps are lost"
        if len(self._servers.each) > 1:
            return (
                "no other holds the model, and all servers go on from the snapshot of "
                f"step {step}: {lost} steps are lost"
            )
        return f"it goes on from its snapshot of step {step}: {lost} steps are lost"

    def _stop_all(self, loss: str) -> None:
        """Fail the job, because no server has the model of a training after the script's first.

        Workers that train report the loss themselves. Other workers may still look for a server,
        and the supervisor does not wait for them.
        """
        print(
            f"paceline: {loss} after a training was over, and there is no snapshot of the next one: "
            "only the first training of a script survives that",
            file=sys.stderr,
        )
        # This includes servers that wait for the others.
        self._servers.close()
        training = [w.process for w in self._workers if w.process and w.last_step]
        wait_for_all(training, timeouts.workers_end)
        self._processes.stop()


class SupervisedWorker:
    """The processes of worker *rank*, one per incarnation.

    They run *command*, and write their steps to *folder*.
    """

    def __init__(self, rank: int, command: Sequence[str], folder: str) -> None:
        self.rank = rank
        self.process: subprocess.Popen[bytes] | None = None
        """The current incarnation's process."""
        self.error_file = Path(folder) / f"error-{rank}"
        self._command = command
        self._progress_file = Path(folder) / f"progress-{rank}"
        self._incarnation = 0
        self._evicted: float | None = None
        """When the server evicted the current incarnation."""

    def start(
        self, environment: Mapping[str, str], incarnation: int
    ) -> subprocess.Popen[bytes]:
        """Begin an incarnation, with *environment* and its own variables."""
        self._progress_file.unlink(missing_ok=True)
        self.error_file.unlink(missing_ok=True)
        self._incarnation, self._evicted = incarnation, None
        own = {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            INCARNATION_VARIABLE: str(incarnation),
            progress.FILE_VARIABLE: str(self._progress_file),
            ERROR_FILE_VARIABLE: str(self.error_file),
        }
        # A terminal sends Ctrl-C to a whole session; the supervisor ends this process itself.
        self.process = subprocess.Popen(
            ends_with_this(self._command),
            env={**environment, **own},
            start_new_session=True,
        )
        return self.process

    @property
    def last_step(self) -> int:
        """The last step of the job that this incarnation has completed; 0: none."""
        return progress.last_step(self._progress_file)

    @property
    def progress(self) -> WorkerProgress | None:
        """The progress of this incarnation; None: it has not begun to train."""
        return progress.read(self._progress_file)

    def was_evicted(self, incarnation: int) -> None:
        """Note that the server has evicted this incarnation, or an earlier one."""
        if self._incarnation == incarnation:
            self._evicted = time.monotonic()

    def kill_if_evicted(self) -> None:
        """Kill it if it has not ended within `Timeouts.workers_end` of its eviction."""
        if self._evicted is None or self.process is None:
            return
        if time.monotonic() > self._evicted + timeouts.workers_end:
            self.process.kill()


@dataclass
class SupervisedServer:
    """The processes of server *number*, one per incarnation.

    Attributes:
        process: The current incarnation's.
        incarnation: Its number, from 0; -1: none has begun.
        exit_status: Its exit status, if `SupervisedServers.look` has found one.
        has_model: Whether it has the whole model. It does not have it before it has taken it over
            from other servers, nor after it has left because its group has no workers.
        training_over: Whether all workers have said goodbye to it.
    """

    number: int
    process: ServerProcess | None = None
    incarnation: int = -1
    exit_status: int | None = None
    has_model: bool = False
    training_over: bool = False

    @property
    def name(self) -> str:
        return f"server {self.number}"

    @property
    def port(self) -> int:
        """The port at which it listens; 0: not yet known."""
        return 0 if self.process is None else self.process.port

    def close(self) -> None:
        """End this incarnation."""
        if self.process is not None:
            self.process.close()


class SupervisedServers:
    """The servers of a job with *workers* workers: a single one, or *groups* group servers.

    Each group server holds the whole model. One that dies is restarted at its address, and
    *enters*: it takes over the model from the others, which reconnect to it by themselves. If no
    server is left that holds the model, all are restarted: server 0 from its snapshot, and the
    others enter from there. So the supervisor always knows which servers hold the model, and no two
    servers without it wait for each other.

    *snapshot* is server 0's file, which it writes as often as `SNAPSHOT_VARIABLE` says.

    Raises `UsageError` for a snapshot that exists already, unless it *resumes*.
    """

    def __init__(
        self,
        workers: int,
        groups: int = 0,
        snapshot: Path | None = None,
        resumes: bool = False,
    ) -> None:
        self.token = secrets.token_hex(16)
        self.snapshot = None if snapshot is None else _checked(snapshot, resumes)
        self._workers, self._groups = workers, groups
        self.each = [SupervisedServer(number) for number in range(max(1, groups))]

    # ---- processes ----

    def start(self, without: Sequence[int] = ()) -> int:
        """Start all servers anew, from the snapshot if there is one.

        *without* are workers that are done. Returns the step from which they continue. Raises
        `UsageError` if one does not start.
        """
        for server in self.each:
            server.close()
            server.has_model = server.number == 0 or not self.has_snapshot
        return self._start(self.each, without)

    def restart_lost(self, without: Sequence[int]) -> None:
        """Restart the failed servers, which enter from the others.

        Raises `UsageError` if one does not start.
        """
        lost = self._lost
        for server in lost:
            server.close()
            server.has_model = False
        self._start(lost, without)

    def close(self) -> None:
        """End all servers, and remove a snapshot that is half written."""
        for server in self.each:
            server.close()
        if self.snapshot is not None:
            snapshots.unfinished(self.snapshot).unlink(missing_ok=True)

    def _start(
        self, servers: Sequence[SupervisedServer], without: Sequence[int]
    ) -> int:
        """Start these servers in parallel; return the step from which they continue."""
        for server in servers:
            server.process = self._process_of(server, without)
        step = max(self._listens(server, without) for server in servers)
        if len(self.each) > 1:
            for server in servers:
                assert server.process is not None
                server.process.send(self._description(server))
        return step

    def _listens(self, server: SupervisedServer, without: Sequence[int]) -> int:
        """Wait until a server listens; start it again if a signal ends it before."""
        process = server.process
        assert process is not None
        for _ in range(MOST_SERVER_STARTS - 1):
            try:
                return process.listens()
            except KilledAtStartError:
                how = how_it_ended(process.process.returncode)
                print(
                    f"paceline: {server.name} {how} while it started; it is started again",
                    file=sys.stderr,
                )
                process = server.process = self._process_of(server, without)
        return process.listens()

    def _process_of(
        self, server: SupervisedServer, without: Sequence[int]
    ) -> ServerProcess:
        server.incarnation += 1
        server.exit_status, server.training_over = None, False
        silent = os.environ.get(SILENT_VARIABLE)
        extra = [] if silent is None else [f"--evict-silent={silent}"]
        if self._groups:
            extra += [f"--groups={self._groups}", f"--number={server.number}"]
            extra += [f"--incarnation={server.incarnation}"]
        if not server.has_model:
            extra += ["--enter"]
        if self.snapshot is not None and server.number == 0:
            seconds = float(os.environ.get(SNAPSHOT_VARIABLE, snapshots.SECONDS))
            extra += [f"--snapshot={self.snapshot}", f"--snapshot-seconds={seconds}"]
        if without:
            extra += ["--without", *map(str, without)]
        return ServerProcess(
            server.name,
            self._workers,
            _HOST,
            port=server.port,
            token=self.token,
            extra=extra,
        )

    def _description(self, server: SupervisedServer) -> Describe:
        peers = {
            peer.name: PeerAddress(host=_HOST, port=peer.port, token=self.token)
            for peer in self.each
            if peer is not server
        }
        return Describe(
            kind="group-server",
            services=[one.name for one in self.each],
            number=server.number,
            peers=peers,
        )

    @property
    def _processes(self) -> Iterator[ServerProcess]:
        """The processes of all servers that were started."""
        return (s.process for s in self.each if s.process is not None)

    # ---- messages to and from servers ----

    @property
    def addresses(self) -> str:
        """The servers' addresses for workers, in order of their numbers."""
        return "+".join(f"{_HOST}:{server.port}" for server in self.each)

    def report_done(self, worker: int) -> None:
        """Report that a worker's script has ended well, and is not restarted."""
        for process in self._processes:
            process.send(WorkerFinished(worker=worker))

    def descriptors(self) -> list[int]:
        """Return descriptors; one is readable if a server has sent messages, or ended since `look`."""
        return [
            server.process.news_descriptor
            for server in self.each
            if server.process is not None and server.exit_status is None
        ]

    def look(self) -> list[WorkerEvicted]:
        """Find the servers that have ended, and read the messages of all.

        Returns:
            Incarnations of workers that a server has evicted. This method has reported them to the
            other servers.
        """
        found = []
        for server in self.each:
            assert server.process is not None
            # Check this before reading: then all messages of an ended server are read.
            server.exit_status = server.process.process.poll()
            for news in server.process.news():
                if isinstance(news, HoldsModel):
                    server.has_model = news.holds
                    continue
                if isinstance(news, TrainingOver):
                    server.training_over = True
                    continue
                found.append(news)
                lost = WorkerLost(worker=news.worker, incarnation=news.incarnation)
                for process in self._processes:
                    if process is not server.process:
                        process.send(lost)
        return found

    def status(self) -> ServersStatus:
        """Return the servers' status, as `look` has found it."""
        has_ended = [server.exit_status is not None for server in self.each]
        return ServersStatus(
            loss=self._loss(),
            some_ended=any(has_ended),
            all_ended=all(has_ended),
            training_over=any(server.training_over for server in self.each),
            model_held=any(s.has_model and s.exit_status is None for s in self.each),
            has_snapshot=self.has_snapshot,
        )

    @property
    def _lost(self) -> list[SupervisedServer]:
        """The servers that have failed."""
        return [server for server in self.each if server.exit_status]

    def _loss(self) -> str:
        """Return how servers have failed, with their names if there are several; empty: none has."""
        alone = len(self.each) == 1
        return " and ".join(
            f"{'the parameter server' if alone else server.name} "
            f"{how_it_ended(server.exit_status or 0)}"
            for server in self._lost
        )

    # ---- the snapshot ----

    def keep_snapshot_in(self, folder: Path) -> None:
        """Store snapshots in a file that no other job has.

        Raises `UsageError` if it cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        name = f"server-{secrets.token_hex(8)}.snapshot"
        self.snapshot = _checked(folder / name, resumes=False)

    @property
    def has_snapshot(self) -> bool:
        """Whether there is a snapshot to continue from."""
        return self.snapshot is not None and self.snapshot.exists()

    def remove_snapshot(self) -> None:
        """Remove the snapshot, after the training."""
        if self.snapshot is not None:
            self.snapshot.unlink(missing_ok=True)


def _checked(snapshot: Path, resumes: bool) -> Path:
    """Raise `UsageError` unless a server can store its snapshot in that file."""
    snapshot = checked(snapshot)
    if snapshot.exists() and not resumes:
        raise UsageError(
            f"--snapshot {snapshot}: the file exists, and may be what another job left; "
            f"remove it to begin anew, or pass --resume to go on from it"
        )
    return snapshot


def _groups(options: RunOptions, workers: int) -> int:
    """Return the number of group servers of a method; 0: a single server.

    Raises `UsageError` for a method under which no job survives.
    """
    if options.method is None:
        return 0  # The script names the method; one with groups is refused there.
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
