"""Where a worker lives: its rank, its clock, its way to spend compute time, its services.

`paceline.runtimes` implements `Runtime`; `distribute`, `paceline.core` and the
collectives use it, among others. Methods never see it. A runtime also brings `Compute`, which
charges or measures compute time as `paceline.core` reports it, and a `Stopwatch`, with which the
planner and methods time work.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import torch

from paceline.cluster import Cluster, Workload
from paceline.interfaces.communication import Endpoint, Runner
from paceline.interfaces.compression import Compressor
from paceline.interfaces.method import UpdatesOnServer
from paceline.interfaces.server import Groups
from paceline.interfaces.server_messages import Replies
from paceline.interfaces.trainings import Job
from paceline.records import Journal

__all__ = [
    "CodingStage",
    "Compute",
    "Runtime",
    "ServerJob",
    "Service",
    "ServiceJob",
    "Start",
    "Stopwatch",
    "current_runtime",
    "enter_runtime",
    "enter_runtime_in_this_thread",
]

CodingStage = Literal["encode", "decode"]
"""Until the first code of a bucket is there; and all that follows."""


class Compute(Protocol):
    """Charges a model's compute time where no real time passes for it, or measures it."""

    def forward(self, samples: int | None, training: bool) -> None:
        """A forward pass begins, over *samples* samples (None: not known)."""
        ...

    def used(self, index: int) -> None:
        """The forward pass is about to use one tensor, and may have to wait for it."""
        ...

    def usable(self) -> None:
        """It may go on."""
        ...

    def gradient(self, index: int) -> None:
        """The gradient of one tensor was computed; paceline's own work begins."""
        ...

    def gradient_taken(self) -> None:
        """paceline's own work is done; backward goes on."""
        ...

    def codes_with(self, compressor: Compressor) -> None:
        """From now on this compressor may code what has the model's tensors."""
        ...

    def coded(
        self, compressor: Compressor, workers: int, size: float, stage: CodingStage
    ) -> None:
        """A compressor has coded, or decoded, so many bytes of the model's tensors, among so
        many workers."""
        ...

    def update_begins(self) -> None:
        """The optimizer is about to step."""
        ...

    def step_ended(self) -> None:
        """The optimizer stepped: the next step draws its own jitter."""
        ...


class Stopwatch(Protocol):
    """Marks moments without waiting for them, and says later how far apart they were.

    *repeats*: equal work takes equal time, to the bit, and whoever measures may do so once.
    """

    @property
    def repeats(self) -> bool: ...

    def mark(self) -> Any:
        """This moment: on the host's clock, or in the device's stream of work."""
        ...

    def seconds(self, start: Any, marks: Sequence[Any]) -> list[float]:
        """Seconds from *start* to each of *marks*. Waits until the device is past them."""
        ...


@dataclass(frozen=True)
class Start:
    """What a service is told when it starts.

    *workers*: how many there are. *services*: the names of all of its job's, in order; number
    *i* of them asks as sender *workers* + *i*. *peers*: those of them that this one may ask.
    *method*: as in `ServiceJob`.
    """

    name: str
    workers: int
    services: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    method: UpdatesOnServer | None = None

    def name_of(self, sender: int) -> str:
        """What people call a sender: ``"worker 3"``, or a service by its name."""
        if sender < self.workers:
            return f"worker {sender}"
        return self.services[sender - self.workers]


@dataclass(frozen=True)
class Service:
    """One thing to start beside the workers, for all of them.

    *kind* is a row of `paceline.parameter_server.process.service_registry`. *peers* are names of services of
    the same job that this one asks. There is one service on each host of a *place*, of which the
    *i*-th is called ``"NAME i"``: ``"embedded"`` (beside rank 0 alone), ``"per-node"`` (on each
    host), ``"dedicated"`` (on hosts of their own), ``"auto"`` (dedicated where there are any, else
    embedded), or addresses ``"HOST:PORT"`` joined by "+", where servers run already.

    *beside*: as many services, called ``"NAME i"``, which have all others of them as peers. They
    stand on the first hosts of the place; with ``"auto"``, where there are fewer of these,
    the *i*-th stands beside that worker. On workers' hosts they go round.
    """

    name: str
    kind: str = "server"
    place: str = "auto"
    peers: tuple[str, ...] = ()
    beside: tuple[int, ...] = ()


@dataclass(frozen=True)
class ServiceJob:
    """What is to run for one purpose. *method*: whose updates servers apply, where it is at
    hand; elsewhere they learn its spec from who joins."""

    services: tuple[Service, ...]
    method: UpdatesOnServer | None = None


@dataclass(frozen=True)
class ServerJob:
    """What a training's servers are started for: a *method* with its full *spec*; None for
    servers that only reduce. *place*: as `Service`
    has it. *clip_norm*: the largest norm of a step's mean gradient,
    where servers form it. *compression*: the spec of the code that gradients are pushed as, if
    any, and *answers*: what servers answer with; see `Join`. *groups*: whose
    servers hold the whole model each, if they do."""

    method: UpdatesOnServer | None
    spec: str
    place: str
    clip_norm: float = math.inf
    compression: str = ""
    replies: Replies = "full"
    groups: Groups | None = None

    @property
    def services(self) -> ServiceJob:
        """These servers as services: for `Runtime.services`. A group's stands beside its first
        worker, unless *place* says otherwise; those of groups that are empty as yet beside
        workers all over."""
        service = Service("server", place=self.place)
        if self.groups is not None:
            count, workers = self.groups.servers, len(self.groups.of)
            beside = [
                min(self.groups.members(group), default=group * workers // count)
                for group in range(count)
            ]
            service = replace(service, kind="group-server", beside=tuple(beside))
        return ServiceJob((service,), self.method)


class Runtime(Protocol):
    """Where one worker lives."""

    name: ClassVar[str]
    """``"real"``, ``"emulated"`` or ``"simulated"``."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def speeds(self) -> Sequence[float] | None:
        """Relative compute speed of each worker, where the runtime knows it."""
        ...

    @property
    def cluster(self) -> Cluster | None:
        """The network that the workers are on, where the runtime knows it: the same on all
        ranks, from `connect` on, and with as many workers."""
        ...

    @property
    def racks(self) -> Sequence[int] | None:
        """In which rack each worker is, where the runtime knows it: the same on all ranks."""
        ...

    @property
    def aggregators(self) -> Mapping[int, tuple[str, int]] | None:
        """Host and port of what adds up at racks' switches, by rack; None where it is as the
        cluster says, and nothing has to be found."""
        ...

    @property
    def journal(self) -> Journal:
        """Where this worker's steps, bytes, waits and metrics are counted."""
        ...

    alone: bool
    """Whether workers meet only at their servers, so that the job survives deaths."""

    @property
    def job(self) -> Job:
        """What this worker's script does."""
        ...

    def compute(
        self,
        model: torch.nn.Module,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        samples: float | None,
    ) -> Compute | None:
        """Where one model's compute time is charged, or measured; None where it passes by
        itself, unobserved.

        *parameters* are the model's trainable tensors, in registration order; *samples* is
        the batch that a forward and a backward pass are given for (None: the workload's
        own, or the first training batch).
        """
        ...

    @property
    def workload(self) -> Workload | None:
        """The times that the first model's passes are given here; None where they take what they
        take, or what the script says."""
        ...

    def stopwatch(self, device: torch.device) -> Stopwatch:
        """What times work on tensors of *device*."""
        ...

    def blank(self, size: int, device: torch.device) -> torch.Tensor:
        """A flat float32 tensor of zeros that is *size* bytes on this runtime's network (in
        the simulated runtime it may have fewer elements)."""
        ...

    def connect(self) -> None:
        """Make sure that torch.distributed is initialized. Collective."""
        ...

    def services(self, job: ServiceJob) -> Sequence[Endpoint]:
        """Start services, or find them; returns this worker's ends of all of them, in the
        job's order. Collective. Raises `UsageError`, on every worker, where one cannot run in
        its place, or does not start."""
        ...

    def runner(self, name: str, *, thread: bool) -> Runner:
        """What runs a chain of works (`Pending.then`). *thread*: whether what they follow
        may be waited for in another thread than the one that has issued it."""
        ...

    def now(self) -> float:
        """Seconds on this runtime's clock, from an arbitrary origin."""
        ...

    def pace(self, seconds: float) -> None:
        """Spend *seconds* of compute time (at a speed of 1)."""
        ...

    def spend(self, seconds: float, what: str) -> None:
        """Paceline itself computes *seconds* (at a speed of 1): charged where time is
        virtual, to the work that runs now (`Pending.then`) or else to the script."""
        ...

    def outside(self, wait: Callable[[], None]) -> None:
        """Wait for something that is outside of this runtime, such as another process: where time is virtual,
        it takes none."""
        ...


_of_thread = threading.local()
_of_process: Runtime | None = None


def current_runtime() -> Runtime | None:
    """The caller's runtime, or None before `paceline.init`."""
    runtime: Runtime | None = getattr(_of_thread, "runtime", None)
    return runtime if runtime is not None else _of_process


def enter_runtime(runtime: Runtime) -> None:
    """Make *runtime* this process's."""
    global _of_process
    _of_process = runtime


def enter_runtime_in_this_thread(runtime: Runtime | None) -> None:
    """Make *runtime* the calling thread's, before this process's."""
    _of_thread.runtime = runtime
