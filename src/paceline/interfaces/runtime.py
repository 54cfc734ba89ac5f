"""What a worker runs on: its rank, its clock, its cluster, its services.

`paceline.runtimes` implements `Runtime`. `distribute`, `paceline.core` and the collectives use it;
methods never see it. A runtime also provides `Compute`, which charges or measures compute time as
`paceline.core` reports it, and a `Stopwatch`, by which the bucket tuner and methods time operations.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import torch

from paceline.cluster import Cluster, Workload
from paceline.interfaces.communication import ContinuationRunner, Endpoint, WorkerGroup
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
"""``"encode"``: until a bucket's first compressed gradient exists. ``"decode"``: all later work."""


class CompressionListener(Protocol):
    """Receives events of compression, for example to charge time for it."""

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
    """Charges a model's compute time if the clock is virtual, or measures it."""

    def forward(self, samples: int | None, training: bool) -> None:
        """Called when a forward pass begins.

        Args:
            samples: Samples of its batch; None: unknown.
            training: Whether gradients are recorded.
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
        """Called when the gradient of a tensor was computed; paceline's own processing begins.

        Args:
            index: The tensor's number, in the model's order.
        """
        ...

    def gradient_taken(self) -> None:
        """Called when paceline's own processing is done; backward continues."""
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
        """Called when the optimizer has stepped: the next step has new random jitter."""
        ...


class Stopwatch(Protocol):
    """Marks moments without waiting for the device, and returns the times between them later."""

    @property
    def repeats(self) -> bool:
        """Whether equal work takes exactly equal time, so that one measurement is enough."""
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
    """One kind of service to start beside the workers, for all of them.

    Attributes:
        name: Its name, or the beginning of the names of several: ``"NAME i"``.
        kind: A key of `paceline.parameter_server.process.services`.
        place: Where the services run, one on each host of the place: ``"embedded"`` (beside rank 0
            alone), ``"per-node"`` (on each host), ``"dedicated"`` (on hosts without workers),
            ``"auto"`` (dedicated if there are such hosts, else embedded). Or addresses
            ``"HOST:PORT"`` of running servers, joined by "+".
        peers: Names of services of the same job that this one sends requests to.
        beside: Workers, one for each of several services, which are called ``"NAME i"`` and have
            each other as peers. They run on the first hosts of the place. With ``"auto"``, if the
            place has fewer hosts, the i-th service runs beside the i-th of these workers. On
            workers' hosts they are assigned in turn.
    """

    name: str
    kind: str = "server"
    place: str = "auto"
    peers: tuple[str, ...] = ()
    beside: tuple[int, ...] = ()


@dataclass(frozen=True)
class ServiceJob:
    """The services to start for one purpose.

    Attributes:
        services: The services.
        method: The method whose updates the servers apply, if its object is available. Otherwise
            servers learn its spec from the workers that join.
    """

    services: tuple[ServiceSpec, ...]
    method: UpdatesOnServer | None = None


@dataclass(frozen=True)
class ServerJob:
    """The servers of one training.

    Attributes:
        method: The method whose updates servers apply; None for servers that only reduce.
        spec: The method's full spec.
        place: As in `ServiceSpec`.
        clip_norm: The largest norm of a step's mean gradient, if servers form it.
        compression: Spec of the compressor of pushed gradients; empty: uncompressed.
        replies: What servers reply with; see `Join`.
        groups: The groups whose servers each hold the whole model, if there are any.
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

        A group's server runs beside the group's first worker, unless *place* says otherwise. Servers
        of empty groups are spread over the workers.
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
    """Whether time passes only when it is charged: then equal work takes exactly equal time."""

    def now(self) -> float:
        """Return the seconds on this clock, from an arbitrary origin."""
        ...

    def pace(self, seconds: float) -> None:
        """Spend *seconds* of compute time, as measured at relative speed 1."""
        ...

    def charge(self, seconds: float, what: str) -> None:
        """Charge compute time of paceline itself, if time is virtual.

        It is charged to the running callback (`Pending.then`), or else to the script.

        Args:
            seconds: Duration at relative speed 1.
            what: Name of the computation, for traces.
        """
        ...

    def external(self, wait: Callable[[], None]) -> None:
        """Call *wait*, which waits for something outside this runtime, such as another process.

        It takes no virtual time.
        """
        ...

    def stopwatch(self, device: torch.device) -> Stopwatch:
        """Return a stopwatch for work on tensors of *device*."""
        ...


class Runtime(Protocol):
    """What one worker runs on."""

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
        """The network of the workers; None if it is unknown.

        The same on all ranks once `connect` has returned, with as many workers as the job.
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
    """In a simulation of representatives: how many workers each running worker represents, by worker.
    None: all workers run."""

    server_only: bool
    """Whether workers communicate only with their servers, so that the job survives lost workers."""

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
        """Return the object that charges or measures one model's compute time.

        Args:
            model: The model.
            parameters: Its trainable tensors, in registration order.
            samples: The batch size that the times of a forward and a backward pass refer to. None:
                the workload's own, or that of the first training batch.

        Returns:
            None if time passes by itself, and is not observed.
        """
        ...

    @property
    def workload(self) -> Workload | None:
        """The compute times that this runtime sets for the first model.

        None if passes take their real time, or the time that the script sets.
        """
        ...

    def blank(self, size: int, device: torch.device) -> torch.Tensor:
        """Return a flat float32 tensor of zeros that counts as *size* bytes on this runtime's network.

        In the simulated runtime it may have fewer elements.
        """
        ...

    def connect(self) -> None:
        """Make sure that torch.distributed is initialized. Collective."""
        ...

    def workers(self, name: str) -> WorkerGroup:
        """Return this worker's handle of the group of all workers.

        Args:
            name: Name of the `Comm` that is built on it; unique in the job.
        """
        ...

    def services(self, job: ServiceJob) -> Sequence[Endpoint]:
        """Start services, or find them. Collective.

        Args:
            job: What to start.

        Returns:
            This worker's endpoints of all services, in the job's order.

        Raises:
            UsageError: A service cannot run at its place, or does not start. Raised on every worker.
        """
        ...

    def runner(self, name: str, *, thread: bool) -> ContinuationRunner:
        """Return a runner for a chain of callbacks (`Pending.then`).

        Args:
            name: Name for errors.
            thread: Whether the operations that callbacks follow may be waited for in another thread
                than the one that issued them.
        """
        ...


_of_thread = threading.local()
_of_process: Runtime | None = None


def current_runtime() -> Runtime | None:
    """Return the caller's runtime, or None before `paceline.init`."""
    runtime: Runtime | None = getattr(_of_thread, "runtime", None)
    return runtime if runtime is not None else _of_process


def enter_runtime(runtime: Runtime) -> None:
    """Set the runtime of this process."""
    global _of_process
    _of_process = runtime


def enter_runtime_in_this_thread(runtime: Runtime | None) -> None:
    """Set the runtime of the calling thread, which has priority over that of the process."""
    _of_thread.runtime = runtime
