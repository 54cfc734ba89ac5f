"""Where a worker lives: its rank, its clock, its cluster, its services.

`paceline.runtimes` implements `Runtime`; `distribute`, `paceline.core` and the
collectives use it, among others. Methods never see it. A runtime also brings `Compute`, which
charges or measures compute time as `paceline.core` reports it, and a `Stopwatch`, with which the
bucket tuner and methods time work.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import torch

from paceline.cluster import Cluster, Workload
from paceline.interfaces.communication import Endpoint, Runner, WorkerGroup
from paceline.interfaces.method import UpdatesOnServer
from paceline.interfaces.server import Groups
from paceline.interfaces.server_messages import Replies
from paceline.interfaces.trainings import TrainingRegistry
from paceline.records import StepRecorder

__all__ = [
    "CompressionListener",
    "CompressionStage",
    "Compute",
    "Runtime",
    "RuntimeClock",
    "ServerJob",
    "ServiceJob",
    "ServiceSpec",
    "Stopwatch",
    "current_runtime",
    "enter_runtime",
    "enter_runtime_in_this_thread",
]

CompressionStage = Literal["encode", "decode"]
"""Until the first code of a bucket is there; and all that follows."""


class CompressionListener(Protocol):
    """Is told when gradients are compressed, for example to charge time for it."""

    def compressed(
        self, compression: Any, workers: int, size: float, stage: CompressionStage
    ) -> None:
        """Called when some of the model's tensors were compressed or decompressed.

        Args:
            compression: A `paceline.compression.GradientCompression`.
            workers: Number of workers that average.
            size: Bytes of the tensors.
            stage: ``"encode"`` or ``"decode"``.
        """
        ...


class Compute(CompressionListener, Protocol):
    """Charges a model's compute time where no real time passes for it, or measures it."""

    def forward(self, samples: int | None, training: bool) -> None:
        """Called when a forward pass begins.

        Args:
            samples: Samples of its batch; None: not known.
            training: Whether gradients are wanted.
        """
        ...

    def used(self, index: int) -> None:
        """Called when the forward pass is about to use a tensor, and may have to wait for it.

        Args:
            index: The tensor's number, in the model's order.
        """
        ...

    def usable(self) -> None:
        """Called when the forward pass may go on after `used`."""
        ...

    def gradient(self, index: int) -> None:
        """Called when the gradient of a tensor was computed; paceline's own work begins.

        Args:
            index: The tensor's number, in the model's order.
        """
        ...

    def gradient_taken(self) -> None:
        """Called when paceline's own work is done; backward goes on."""
        ...

    def uses_compressor(self, compression: Any) -> None:
        """Called when the model's tensors may be compressed from now on.

        Args:
            compression: A `paceline.compression.GradientCompression`.
        """
        ...

    def update_begins(self) -> None:
        """Called when the optimizer is about to step."""
        ...

    def step_ended(self) -> None:
        """Called when the optimizer has stepped: the next step draws its own jitter."""
        ...


class Stopwatch(Protocol):
    """Marks moments without waiting for them, and says later how far apart they were."""

    @property
    def repeats(self) -> bool:
        """Whether equal work takes equal time, to the bit: then one measurement is enough."""
        ...

    def mark(self) -> Any:
        """Return this moment: on the host's clock, or in the device's stream of work."""
        ...

    def seconds(self, start: Any, marks: Sequence[Any]) -> list[float]:
        """Return the seconds from *start* to each of *marks*.

        Waits until the device is past them.
        """
        ...


@dataclass(frozen=True)
class ServiceSpec:
    """One thing to start beside the workers, for all of them.

    Attributes:
        name: Its name, or the beginning of the names of several: ``"NAME i"``.
        kind: A row of `paceline.parameter_server.process.services`.
        place: Where services stand, one on each host of the place: ``"embedded"`` (beside rank 0
            alone), ``"per-node"`` (on each host), ``"dedicated"`` (on hosts of their own),
            ``"auto"`` (dedicated where there are any, else embedded), or addresses
            ``"HOST:PORT"`` joined by "+", where servers run already.
        peers: Names of services of the same job that this one asks.
        beside: Workers, for as many services, called ``"NAME i"``, which have all others of them
            as peers. They stand on the first hosts of the place; with ``"auto"``, where there are
            fewer of these, the i-th stands beside the i-th of these workers. On workers' hosts
            they go round.
    """

    name: str
    kind: str = "server"
    place: str = "auto"
    peers: tuple[str, ...] = ()
    beside: tuple[int, ...] = ()


@dataclass(frozen=True)
class ServiceJob:
    """What is to run for one purpose.

    Attributes:
        services: What to start.
        method: Whose updates servers apply, where it is at hand; elsewhere they learn its spec
            from the workers that join.
    """

    services: tuple[ServiceSpec, ...]
    method: UpdatesOnServer | None = None


@dataclass(frozen=True)
class ServerJob:
    """What a training's servers are started for.

    Attributes:
        method: The method whose updates servers apply; None for servers that only reduce.
        spec: The method's full spec.
        place: As in `ServiceSpec`.
        clip_norm: The largest norm of a step's mean gradient, where servers form it.
        compression: Spec of the compressor of pushed gradients; empty: uncompressed.
        replies: What servers answer with; see `Join`.
        groups: Whose servers hold the whole model each, if they do.
    """

    method: UpdatesOnServer | None
    spec: str
    place: str
    clip_norm: float = math.inf
    compression: str = ""
    replies: Replies = "full"
    groups: Groups | None = None

    @property
    def services(self) -> ServiceJob:
        """These servers as services, for `Runtime.services`.

        A group's server stands beside the group's first worker, unless *place* says otherwise;
        those of groups that are empty as yet beside workers all over.
        """
        service = ServiceSpec("server", place=self.place)
        if self.groups is not None:
            count, workers = self.groups.servers, len(self.groups.of)
            beside = [
                min(self.groups.members(group), default=group * workers // count)
                for group in range(count)
            ]
            service = replace(service, kind="group-server", beside=tuple(beside))
        return ServiceJob((service,), self.method)


class RuntimeClock(Protocol):
    """A worker's time, real or virtual."""

    is_virtual: ClassVar[bool]
    """Whether time passes only where it is charged: then equal work takes equal time, to the bit."""

    def now(self) -> float:
        """Return the seconds on this clock, from an arbitrary origin."""
        ...

    def pace(self, seconds: float) -> None:
        """Spend *seconds* of compute time, at a speed of 1."""
        ...

    def charge(self, seconds: float, what: str) -> None:
        """Charge compute time of paceline itself, where time is virtual.

        It is charged to the work that runs now (`Pending.then`) or else to the script.

        Args:
            seconds: At a speed of 1.
            what: What was computed, for traces.
        """
        ...

    def external(self, wait: Callable[[], None]) -> None:
        """Wait for something outside of this runtime, such as another process.

        Where time is virtual it takes none.
        """
        ...

    def stopwatch(self, device: torch.device) -> Stopwatch:
        """Return what times work on tensors of *device*."""
        ...


class Runtime(Protocol):
    """Where one worker lives."""

    name: ClassVar[str]
    """``"real"``, ``"emulated"`` or ``"simulated"``."""

    @property
    def rank(self) -> int:
        """This worker's number, 0 to `size` - 1."""
        ...

    @property
    def size(self) -> int:
        """Number of workers."""
        ...

    @property
    def cluster(self) -> Cluster | None:
        """The network that the workers are on; None where it is not known.

        The same on all ranks, from `connect` on, and with as many workers as the job.
        """
        ...

    @property
    def recorder(self) -> StepRecorder:
        """Counts this worker's steps, bytes, waits and metrics."""
        ...

    @property
    def clock(self) -> RuntimeClock:
        """This worker's time."""
        ...

    weights: Mapping[int, int] | None
    """In a simulation of representatives, by worker that runs: how many workers it stands for. None:
    all workers run."""

    server_only: bool
    """Whether workers meet only at their servers, so that the job survives deaths."""

    @property
    def registry(self) -> TrainingRegistry:
        """The trainings and the options of this worker's script."""
        ...

    def compute(
        self,
        model: torch.nn.Module,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        samples: float | None,
    ) -> Compute | None:
        """Return what charges, or measures, one model's compute time.

        Args:
            model: The model.
            parameters: Its trainable tensors, in registration order.
            samples: The batch that a forward and a backward pass are given for; None: the
                workload's own, or the first training batch.

        Returns:
            None where time passes by itself, unobserved.
        """
        ...

    @property
    def workload(self) -> Workload | None:
        """The times that the first model's passes are given here.

        None where they take what they take, or what the script says.
        """
        ...

    def blank(self, size: int, device: torch.device) -> torch.Tensor:
        """Return a flat float32 tensor of zeros that is *size* bytes on this runtime's network.

        In the simulated runtime it may have fewer elements.
        """
        ...

    def connect(self) -> None:
        """Make sure that torch.distributed is initialized. Collective."""
        ...

    def workers(self, name: str) -> WorkerGroup:
        """Return this worker's end of the group of all workers.

        Args:
            name: Of the `Comm` that is made of it; unique in the job.
        """
        ...

    def services(self, job: ServiceJob) -> Sequence[Endpoint]:
        """Start services, or find them. Collective.

        Args:
            job: What to start.

        Returns:
            This worker's ends of all of them, in the job's order.

        Raises:
            UsageError: One cannot run in its place, or does not start; on every worker.
        """
        ...

    def runner(self, name: str, *, thread: bool) -> Runner:
        """Return what runs a chain of works (`Pending.then`).

        Args:
            name: For errors.
            thread: Whether what works follow may be waited for in another thread than the one
                that has issued it.
        """
        ...


_of_thread = threading.local()
_of_process: Runtime | None = None


def current_runtime() -> Runtime | None:
    """Return the caller's runtime, or None before `paceline.init`."""
    runtime: Runtime | None = getattr(_of_thread, "runtime", None)
    return runtime if runtime is not None else _of_process


def enter_runtime(runtime: Runtime) -> None:
    """Make *runtime* this process's."""
    global _of_process
    _of_process = runtime


def enter_runtime_in_this_thread(runtime: Runtime | None) -> None:
    """Make *runtime* the calling thread's, before this process's."""
    _of_thread.runtime = runtime
