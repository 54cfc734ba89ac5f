"""What runs on a Ray cluster for `integrations.ray.run`: plain classes, which it makes actors of.

Theory of operation
-------------------
Three kinds of actor. The *server* holds the parameters (`SurvivingJob`). Each *worker* runs
the loop. Ray starts both again wherever there is room when their process or their node dies,
and repeats the call that was under way. The *coordinator* lives on the node of whoever called `run`
and ends with that: it numbers the lives of workers, keeps their results, and knows how far each has
come, so that nothing of it is lost with a node.

A worker that begins asks the coordinator for the number of its life, and the server for its address; that
call waits while the server is started again. From there on all is as under ``paceline run
--survive``: the server takes the earlier life for lost and lets this one in. When the server
dies, workers see their connections end; each then ends its process, and Ray starts it again.

An error of the loop's own is no death: the call raises it, and the job ends.
"""

from __future__ import annotations

import os
import secrets
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
"""A worker says no more often how far it has come."""


class Server:
    """The actor that holds what is trained. Served beside it, on a thread."""

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
        """Where it listens, HOST:PORT; from the first call on. Raises `UsageError` where it cannot, or has
        nothing to go on from."""
        if not self._address:
            there = self._path is not None and self._path.exists()
            node = ray.get_runtime_context().get_node_id()
            done = ray.get(self._coordinator.server_begins.remote(node, there))
            try:
                self._start(done)
            except UsageError as error:
                ray.get(self._coordinator.fails.remote(str(error)))
                raise
        if self._over:
            fault = (
                "a worker died after its training was over, or began another one: only one training "
                "survives that, and not what a loop does after it"
            )
            ray.get(self._coordinator.fails.remote(fault))
            raise UsageError(fault)
        return self._address

    def is_done(self, rank: int) -> None:
        """The loop of a worker has returned, and the coordinator knows: nobody waits for it any more.
        A server that was started again when that worker had said goodbye, but had not
        returned, would wait for ever."""
        if self._thread is not None:
            os.write(
                self._stop, msgspec.json.encode(WorkerFinished(worker=rank)) + b"\n"
            )

    def end(self) -> None:
        """All workers are done: nothing is left."""
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
        )
        self._address = f"{host}:{listener.port}"
        reading, self._stop = os.pipe()
        self._thread = threading.Thread(
            target=self._run, args=(job, reading), name="paceline server", daemon=True
        )
        self._thread.start()
        ray.get(self._coordinator.server_goes_on.remote(job.step))

    def _run(self, job: SurvivingJob, stop: int) -> None:
        try:
            for silent in job.run(stop):
                self._coordinator.evicted.remote(silent.worker, silent.incarnation)
            # Whether they have ended well is for the coordinator, which knows what each loop gave.
            self._over = job.attendance.all_have_departed
            job.host.close()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # so that Ray starts it again


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
        self._told = 0.0

    def run(self, loop: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """One life: from joining the server to the end of *loop*, whose result the coordinator gets."""
        node = ray.get_runtime_context().get_node_id()
        life: Life = ray.get(self._coordinator.begins.remote(self._rank, node))
        if life.done:
            return
        address = ray.get(self._server.serve.remote())
        os.environ.update(
            {
                **self._environment,
                **environment_of(address, self._rank, self._workers),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                INCARNATION_VARIABLE: str(life.number),
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
            exit_now(1)  # a process trains once: Ray starts the next
        ray.get(self._coordinator.done.remote(self._rank, result))

    def _result_of(self, loop: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        try:
            return loop(*arguments)
        except SystemExit as end:  # as a script that has done its steps ends
            if end.code not in (None, 0):
                raise RuntimeError(
                    f"the loop ended with exit status {end.code}"
                ) from end
            return None

    def _note(self, runtime: RealRuntime, step: int) -> None:
        now = time.monotonic()
        if step == 1 or (step and now > self._told + NOTE_SECONDS):
            self._told = now
            reached = runtime.registry.first_step + step
            self._coordinator.reached.remote(self._rank, reached)


def find(job: str, kind: type) -> Any:
    """The actor of that *kind* of a job: by its name, since arguments that refer to an actor must
    outlive what they refer to."""
    return ray.get_actor(called(job, kind), namespace=NAMESPACE)


def called(job: str, kind: type) -> str:
    """The name of an actor of which a job has one."""
    return f"{job} {kind.__name__}"


def protection(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that protect the server's connections: what *environment* says, else a secret of
    this job's own. With a secret they are encrypted (see `transport.security`)."""
    said = {
        name: environment[name] for name in (SECRET, TRUSTED) if environment.get(name)
    }
    if not said:
        said = {SECRET: secrets.token_hex(32)}
    return {**said, TOKEN: secrets.token_hex(16)}


# ---- the coordinator: no Ray in it ----

SERVER = "the server"
_LET_GO = ("taken for lost", HAS_BEEN_HERE)
"""What a server says to a life that it has let go of, or that it knows already: the next one may come."""


@dataclass(frozen=True)
class Life:
    """One life of a worker: its number, from 0; *done*: nothing is left to do."""

    number: int
    done: bool


@dataclass
class _Member:
    """What is known of one actor. *steps*: the job's step that it has reached; *node*: where it
    has begun its last life."""

    lives: int = 0
    in_vain: int = 0
    steps: int = 0
    node: str = ""


@dataclass(frozen=True)
class News:
    """What whoever called `run` is told: sentences, and why the job cannot go on, if so.
    *hang*: workers whose process is to be ended."""

    lines: list[str]
    fault: str
    hang: list[int]


@dataclass
class Coordinator:
    """Who is in which life, how far, and done, of so many *workers*. *snapshot*, *resume*: as
    `run` has them."""

    workers: int
    snapshot: str | None
    resume: bool = False
    _members: dict[str, _Member] = field(default_factory=dict)
    _results: dict[int, Any] = field(default_factory=dict)
    _lines: list[str] = field(default_factory=list)
    _fault: str = ""
    _hang: list[int] = field(default_factory=list)

    def begins(self, rank: int, node: str) -> Life:
        """A worker's process has started, on *node*."""
        name = name_of(rank)
        member = self._begins(name, node)
        if rank in self._hang:  # whose process was to be ended has ended by itself
            self._hang.remove(rank)
        # With the server all end, whatever they are like.
        server = self._members.get(SERVER, _Member(lives=1))
        if member.lives > MAX_RESTARTS + server.lives:
            self.fails(f"{name} has died {MAX_RESTARTS} times")
        return Life(member.lives - 1, rank in self._results)

    def reached(self, rank: int, step: int) -> None:
        """A worker has done the job's step *step*."""
        member = self._members[name_of(rank)]
        member.steps, member.in_vain = step, 0
        if SERVER in self._members:
            self._members[SERVER].in_vain = 0

    def evicted(self, rank: int, life: int) -> None:
        """The server has taken this life for lost, and its process lives."""
        if life == self._members[name_of(rank)].lives - 1 and rank not in self._hang:
            self._hang.append(rank)

    def server_begins(self, node: str, has_snapshot: bool) -> list[int]:
        """The server's process has started; returns the workers that are done. Raises
        `UsageError` where nothing is left to go on from, or the snapshot may be another job's."""
        step = self._furthest()
        self._members.setdefault(SERVER, _Member()).steps = step
        life = self._begins(SERVER, node).lives
        if life == 1 and has_snapshot and not self.resume:
            self.fails(
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
            self.fails(
                f"the parameter server died after step {step}, and there is no snapshot: {advice}"
            )
        if self._fault:
            raise UsageError(self._fault)
        return list(self._results)

    def server_goes_on(self, step: int) -> None:
        """The server listens, and goes on with *step*."""
        if self._members[SERVER].lives > 1:
            self._lines.append(
                f"the parameter server goes on from its snapshot of step {step}: what was done after "
                "that is done again"
            )
        for member in self._members.values():
            member.steps = min(member.steps, step)
        # Also of a job that was resumed and has done no step yet: who dies now has lost something.
        self._members[SERVER].steps = step

    def done(self, rank: int, result: Any) -> None:
        """A worker's loop has returned *result*."""
        self._results[rank] = result

    def look(self) -> News:
        """What has happened since this was last called."""
        lines, self._lines = self._lines, []
        hang, self._hang = self._hang, []
        return News(lines, self._fault, hang)

    def results(self) -> list[Any]:
        """In the order of ranks, once all are done."""
        return [self._results[rank] for rank in range(self.workers)]

    def _begins(self, name: str, node: str) -> _Member:
        member = self._members.setdefault(name, _Member())
        if member.lives:
            place = "" if node == member.node else " on another node"
            self._lines.append(
                f"{name} is gone (last heard of at step {member.steps}), and is started again{place}"
            )
        member.lives, member.node = member.lives + 1, node
        member.in_vain += 1
        if member.in_vain > MAX_RESTARTS_WITHOUT_PROGRESS:
            self.fails(
                f"{name} has died {MAX_RESTARTS_WITHOUT_PROGRESS} times in a row without a completed step: see "
                "above for what it said"
            )
        return member

    def _furthest(self) -> int:
        return max((member.steps for member in self._members.values()), default=0)

    def fails(self, fault: str) -> None:
        """The job cannot go on: the first cause is what its caller is told."""
        self._fault = self._fault or fault


def is_consequence(error: BaseException | None) -> bool:
    """Whether *error* only says that the server is gone, or has let this life go."""
    while error is not None:
        words = str(error)
        if isinstance(error, PeerLostError) or any(one in words for one in _LET_GO):
            return True
        error = error.__cause__ or error.__context__
    return False


def name_of(rank: int) -> str:
    """What a worker is called in sentences."""
    return f"worker {rank}"
