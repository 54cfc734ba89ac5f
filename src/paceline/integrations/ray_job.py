"""Actors of a job on Ray for `integrations.ray.run`: plain classes, which `run` makes actors of.

Theory of operation
-------------------
There are three kinds of actor. The *server* holds the parameters (`SurvivingJob`). Each *worker* runs the loop. If
their process or node dies, Ray restarts them on any node with enough resources, and repeats the interrupted call.
The *coordinator* runs on the node of the process that called `run`, and ends with that process. It numbers the
workers' incarnations, and keeps their results and progress, so that these survive the loss of a node.

A worker that starts asks the coordinator for its incarnation, and the server for its address; that call waits while
the server restarts. From then on everything is as under ``paceline run --survive``: the server evicts the earlier
incarnation and admits this one. If the server dies, workers lose their connections; each ends its process, and
Ray restarts it.

An error of the loop itself does not cause a restart: the call raises it, and the job ends.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import ray

from paceline.errors import PeerLostError, UsageError
from paceline.parameter_server.process.control import WorkerFinished
from paceline.parameter_server.process.logs import log_to_stderr
from paceline.parameter_server.process.surviving import SurvivingJob
from paceline.run_options import seconds_from
from paceline.runtimes.join import join_runtime
from paceline.runtimes.real.exit import exit_now
from paceline.runtimes.real.external_worker import environment_of
from paceline.runtimes.real.runtime import RealRuntime
from paceline.runtimes.real.server_process import (
    INCARNATION_VARIABLE,
    SERVER_ENVIRONMENT,
    SILENT_VARIABLE,
)
from paceline.runtimes.real.survive_policy import (
    MAX_RESTARTS,
    MAX_RESTARTS_WITHOUT_PROGRESS,
)
from paceline.timeouts import timeouts
from paceline.transport.listener import ServerListener
from paceline.transport.protocol import HAS_BEEN_HERE
from paceline.transport.security import SECRET, TOKEN, TRUSTED

NAMESPACE = "paceline"
NOTE_SECONDS = 0.5
"""A worker reports its progress at most this often."""


class Server:
    """The actor that holds the parameters. A thread of it serves the workers."""

    def __init__(
        self,
        workers: int,
        job: str,
        environment: Mapping[str, str],
        snapshot: str | None,
        snapshot_seconds: float,
    ) -> None:
        os.environ.update({**SERVER_ENVIRONMENT, **environment})
        log_to_stderr()
        self._workers = workers
        self._coordinator = find(job, Coordinator)
        self._path = None if snapshot is None else Path(snapshot)
        self._seconds = snapshot_seconds
        self._address = ""
        self._stop = -1
        self._over = False
        self._thread: threading.Thread | None = None

    def serve(self) -> str:
        """Start to listen, on the first call; returns HOST:PORT. Raises `UsageError` if it cannot, or has
        no state to continue from."""
        if not self._address:
            there = self._path is not None and self._path.exists()
            node = ray.get_runtime_context().get_node_id()
            done = ray.get(self._coordinator.server_started.remote(node, there))
            try:
                self._start(done)
            except UsageError as error:
                ray.get(self._coordinator.give_up.remote(str(error)))
                raise
        if self._over:
            fault = "a loop began a second training: a job on Ray has one; start the next training by another run()"
            ray.get(self._coordinator.give_up.remote(fault))
            raise UsageError(fault)
        return self._address

    def is_done(self, rank: int) -> None:
        """The loop of a worker has returned, and the coordinator knows it: do not wait for the worker any
        more. Otherwise a server that restarts after the worker has left, but before its loop has returned,
        would wait for ever."""
        if self._thread is not None:
            os.write(
                self._stop, msgspec.json.encode(WorkerFinished(worker=rank)) + b"\n"
            )

    def end(self) -> None:
        """All workers are done: end the server."""
        if self._thread is not None:
            os.close(self._stop)
            self._thread.join(timeouts.ray_server_end)
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _start(self, done: list[int]) -> None:
        import torch

        torch.set_num_threads(1)
        host = ray.util.get_node_ip_address()
        listener = ServerListener(
            host, workers=self._workers, token=os.environ[TOKEN], numbers=True
        )
        job = SurvivingJob(
            listener,
            snapshot=self._path,
            snapshot_seconds=self._seconds,
            evict_silent=seconds_from(
                os.environ, SILENT_VARIABLE, timeouts.worker_silent
            ),
            without=done,
            # A worker may die after it has left, before the coordinator has its loop's result.
            until="replaced",
        )
        self._address = f"{host}:{listener.port}"
        reading, self._stop = os.pipe()
        self._thread = threading.Thread(
            target=self._run, args=(job, reading), name="paceline server", daemon=True
        )
        self._thread.start()
        ray.get(self._coordinator.server_resumed.remote(job.step))

    def _run(self, job: SurvivingJob, stop: int) -> None:
        try:
            for silent in job.run(stop):
                self._coordinator.worker_evicted.remote(
                    silent.worker, silent.incarnation
                )
            # The coordinator knows from the loops' results whether the workers have ended without an error.
            self._over = job.service_sessions.all_have_departed
            job.host.close()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # Ray restarts it then.


class Worker:
    """The actor that is worker *rank*."""

    def __init__(
        self,
        rank: int,
        workers: int,
        job: str,
        environment: Mapping[str, str],
    ) -> None:
        self._rank, self._workers = rank, workers
        self._coordinator, self._server = find(job, Coordinator), find(job, Server)
        self._environment = environment
        self._reported = 0.0

    def run(self, loop: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Run one incarnation: join the server, run *loop*, and give its result to the coordinator."""
        if threading.current_thread() is threading.main_thread():
            # Ray's handler raises SystemExit, as if the loop itself had ended.
            signal.signal(
                signal.SIGTERM, lambda *_: exit_now(128 + int(signal.SIGTERM))
            )
        node = ray.get_runtime_context().get_node_id()
        incarnation: Incarnation = ray.get(
            self._coordinator.worker_started.remote(self._rank, node)
        )
        if incarnation.done:
            return
        address = ray.get(self._server.serve.remote())
        os.environ.update(
            {
                **self._environment,
                **environment_of(address, self._rank, self._workers),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                INCARNATION_VARIABLE: str(incarnation.number),
            }
        )
        try:
            runtime = join_runtime()
            assert isinstance(runtime, RealRuntime)
            runtime.recorder.observers.append(lambda step: self._note(runtime, step))
            result = self._result_of(loop, arguments)
            runtime.close()
        except Exception as error:
            if not is_consequence(error):
                raise
            print(
                f"paceline: worker {self._rank}: {error}", file=sys.stderr, flush=True
            )
            exit_now(1)  # A process can train only once: Ray starts the next one.
        ray.get(self._coordinator.worker_finished.remote(self._rank, result))

    def _result_of(self, loop: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        try:
            return loop(*arguments)
        except SystemExit as end:  # A script may end like this after its steps.
            if end.code not in (None, 0):
                raise RuntimeError(
                    f"the loop ended with exit status {end.code}"
                ) from end
            return None

    def _note(self, runtime: RealRuntime, step: int) -> None:
        now = time.monotonic()
        if step == 1 or (step and now > self._reported + NOTE_SECONDS):
            self._reported = now
            reached = runtime.registry.first_step + step
            self._coordinator.step_completed.remote(self._rank, reached)


def find(job: str, kind: type) -> Any:
    """Find a job's actor of that *kind* by its name: an actor handle in arguments would have to outlive the
    actor."""
    return ray.get_actor(actor_name(job, kind), namespace=NAMESPACE)


def actor_name(job: str, kind: type) -> str:
    """The name of an actor that a job has only once."""
    return f"{job} {kind.__name__}"


def protection(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that protect the server's connections: those of *environment*, else a secret for this job
    alone. With a secret connections are encrypted (see `transport.security`)."""
    variables = {
        name: environment[name] for name in (SECRET, TRUSTED) if environment.get(name)
    }
    if not variables:
        variables = {SECRET: secrets.token_hex(32)}
    return {**variables, TOKEN: secrets.token_hex(16)}


# ---- the coordinator, without Ray ----

SERVER = "the server"
_EVICTED = ("taken for lost", HAS_BEEN_HERE)
"""Texts in a server's refusal of an incarnation that it has evicted, or that has joined before: the next
incarnation may join."""


@dataclass(frozen=True)
class Incarnation:
    """One incarnation of a worker: its number, from 0; *done*: the worker has nothing left to do."""

    number: int
    done: bool


@dataclass
class _ActorRecord:
    """State of one actor over all its incarnations.

    Attributes:
        starts: How many incarnations have started.
        starts_without_progress: How many of them since the last completed step.
        last_step: The job's last step that it has completed.
        node: The node of the last incarnation.
    """

    starts: int = 0
    starts_without_progress: int = 0
    last_step: int = 0
    node: str = ""


@dataclass(frozen=True)
class JobNews:
    """News for the caller of `run`: lines to print, and why the job cannot continue, if so. *evicted*: workers
    whose process is to be killed."""

    lines: list[str]
    fault: str
    evicted: list[int]


@dataclass
class Coordinator:
    """Tracks the incarnation, progress and completion of each worker of a job on Ray.

    *snapshot*, *resume*: as in `run`.
    """

    workers: int
    snapshot: str | None
    resume: bool = False
    _records: dict[str, _ActorRecord] = field(default_factory=dict)
    _results: dict[int, Any] = field(default_factory=dict)
    _lines: list[str] = field(default_factory=list)
    _fault: str = ""
    _evicted: list[int] = field(default_factory=list)

    def worker_started(self, rank: int, node: str) -> Incarnation:
        """A worker's process has started, on *node*."""
        name = worker_name(rank)
        record = self._record_start(name, node)
        if rank in self._evicted:  # Its process has ended by itself.
            self._evicted.remove(rank)
        # All workers end with the server: do not count those deaths.
        server = self._records.get(SERVER, _ActorRecord(starts=1))
        if record.starts > MAX_RESTARTS + server.starts:
            self.give_up(f"{name} has died {MAX_RESTARTS} times")
        return Incarnation(record.starts - 1, rank in self._results)

    def step_completed(self, rank: int, step: int) -> None:
        """A worker has completed the job's step *step*."""
        record = self._records[worker_name(rank)]
        record.last_step, record.starts_without_progress = step, 0
        if SERVER in self._records:
            self._records[SERVER].starts_without_progress = 0

    def worker_evicted(self, rank: int, incarnation: int) -> None:
        """The server has evicted this incarnation, whose process still runs."""
        if (
            incarnation == self._records[worker_name(rank)].starts - 1
            and rank not in self._evicted
        ):
            self._evicted.append(rank)

    def server_started(self, node: str, has_snapshot: bool) -> list[int]:
        """The server's process has started; returns the workers that are done. Raises `UsageError` if there
        is no state to continue from, or the snapshot may be another job's."""
        step = self._furthest()
        self._records.setdefault(SERVER, _ActorRecord()).last_step = step
        first = self._record_start(SERVER, node).starts == 1
        if first and has_snapshot and not self.resume:
            self.give_up(
                f"snapshot={self.snapshot!r}: the file exists, and may be what another job left; "
                "remove it to begin anew, or pass resume=True to go on from it"
            )
        if step and not has_snapshot:
            if self.snapshot is None:
                advice = "give snapshot=FILE, where all nodes reach it"
            else:
                advice = (
                    f"none was taken yet, or the node where it was started again does not reach "
                    f"{self.snapshot}"
                )
            self.give_up(
                f"the parameter server died after step {step}, and there is no snapshot: {advice}"
            )
        if self._fault:
            raise UsageError(self._fault)
        return list(self._results)

    def server_resumed(self, step: int) -> None:
        """The server listens, and continues with *step*."""
        if self._records[SERVER].starts > 1:
            self._lines.append(
                f"the parameter server goes on from its snapshot of step {step}: what was done after "
                "that is done again"
            )
        for record in self._records.values():
            record.last_step = min(record.last_step, step)
        # Also for a resumed job without a step so far: a death now loses state.
        self._records[SERVER].last_step = step

    def worker_finished(self, rank: int, result: Any) -> None:
        """A worker's loop has returned *result*."""
        self._results[rank] = result

    def poll(self) -> JobNews:
        """The events since the last call."""
        lines, self._lines = self._lines, []
        evicted, self._evicted = self._evicted, []
        return JobNews(lines, self._fault, evicted)

    def results(self) -> list[Any]:
        """The results by rank, once all workers are done."""
        return [self._results[rank] for rank in range(self.workers)]

    def _record_start(self, name: str, node: str) -> _ActorRecord:
        record = self._records.setdefault(name, _ActorRecord())
        if record.starts:
            place = "" if node == record.node else " on another node"
            self._lines.append(
                f"{name} is gone (last heard of at step {record.last_step}), and is started again{place}"
            )
        record.starts, record.node = record.starts + 1, node
        record.starts_without_progress += 1
        if record.starts_without_progress > MAX_RESTARTS_WITHOUT_PROGRESS:
            self.give_up(
                f"{name} has died {MAX_RESTARTS_WITHOUT_PROGRESS} times in a row without a completed step: see "
                "above for what it said"
            )
        return record

    def _furthest(self) -> int:
        return max((record.last_step for record in self._records.values()), default=0)

    def give_up(self, fault: str) -> None:
        """The job cannot continue. Only the first cause is reported to its caller."""
        self._fault = self._fault or fault


def is_consequence(error: BaseException | None) -> bool:
    """Whether *error* only means that the server is lost, or has evicted this incarnation."""
    while error is not None:
        message = str(error)
        if isinstance(error, PeerLostError) or any(one in message for one in _EVICTED):
            return True
        error = error.__cause__ or error.__context__
    return False


def worker_name(rank: int) -> str:
    """The name of a worker in messages."""
    return f"worker {rank}"
