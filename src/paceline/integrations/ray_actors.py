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
from pathlib import Path
from typing import Any

import msgspec
import ray

from paceline.errors import UsageError
from paceline.integrations.ray_coordinator import (
    Coordinator,
    Life,
    is_consequence,
)
from paceline.parameter_server.process.control import IsDone
from paceline.parameter_server.process.surviving import SurvivingJob
from paceline.run_options import seconds_from
from paceline.runtimes.join import join_runtime
from paceline.runtimes.real.exit import end_at_once
from paceline.runtimes.real.external_worker import environment_of
from paceline.runtimes.real.runtime import RealRuntime
from paceline.runtimes.real.server_process import (
    INCARNATION_VARIABLE,
    SERVER_ENVIRONMENT,
)
from paceline.runtimes.real.supervised_servers import SILENT_VARIABLE
from paceline.timeouts import timeouts
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
            os.write(self._stop, msgspec.json.encode(IsDone(worker=rank)) + b"\n")

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
        job = SurvivingJob(
            self._workers,
            host,
            0,
            os.environ[TOKEN],
            snapshot=self._path,
            snapshot_seconds=self._seconds,
            evict_silent=seconds_from(
                os.environ, SILENT_VARIABLE, timeouts.worker_silent
            ),
            without=done,
            evicted=lambda rank, life: self._coordinator.evicted.remote(rank, life),
        )
        self._address = f"{host}:{job.port}"
        reading, self._stop = os.pipe()
        self._thread = threading.Thread(
            target=self._run, args=(job, reading), name="paceline server", daemon=True
        )
        self._thread.start()
        ray.get(self._coordinator.server_goes_on.remote(job.step))

    def _run(self, job: SurvivingJob, stop: int) -> None:
        try:
            job.run(stop)
            # Whether they have ended well is for the coordinator, which knows what each loop gave.
            self._over = job.shell.all_have_departed
            job.close()
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
            runtime.journal.observers.append(lambda step: self._note(runtime, step))
            result = self._result_of(loop, arguments)
            runtime.close()
        except Exception as error:
            if not is_consequence(error):
                raise
            print(
                f"paceline: worker {self._rank}: {error}", file=sys.stderr, flush=True
            )
            end_at_once(1)  # a process trains once: Ray starts the next
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
            reached = runtime.job.first_step + step
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
