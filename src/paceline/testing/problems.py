"""Test problems of the checks: small models with known results, their optimizers, steps and assertions; and
`inspect`, which shows an optimizer's training state."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import paceline
from paceline.bucketing.tuner import BucketTuner
from paceline.core.broadcast import gather_bytes
from paceline.core.checkpoint.worker_state import worker_states
from paceline.core.distribute import distribute
from paceline.core.optimizer import (
    DistributedOptimizer,
    MethodSwitcher,
    active_training,
)
from paceline.errors import PacelineError
from paceline.interfaces import Comm, Endpoint, Run, WorkerState
from paceline.parameter_server.client.remote_model import RemoteModel
from paceline.records import StepRecorder
from paceline.runtimes.join import join_runtime
from paceline.testing.cases import Case


class Quadratic(torch.nn.Module):
    """``forward(centers)`` is the loss sum of h/2 (p - c)^2 over all parameters p.

    Curvatures h lie in 0.5 to 1.5 and are equal on all workers, so the mean loss has its
    minimum at the mean of the workers' centers. Tensors of several shapes; *dtypes* gives
    each of the three its type.
    """

    def __init__(self, dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.zeros(4, 3, dtype=dtypes[0]))
        self.vector = torch.nn.Parameter(torch.zeros(5, dtype=dtypes[1]))
        self.scalar = torch.nn.Parameter(torch.zeros((), dtype=dtypes[2]))

    def forward(self, centers: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        position = 0
        for parameter in self.parameters():
            count = parameter.numel()
            own = slice(position, position + count)
            distance = parameter.reshape(-1).double() - centers[own].double()
            loss = loss + (curvatures()[own] / 2 * distance.square()).sum()
            position += count
        return loss


class Counting(torch.nn.Module):
    """Every element's gradient is one, or *times* that. So under plain SGD the parameters show how many steps'
    gradients were applied to them."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.zeros(4, 3))
        self.vector = torch.nn.Parameter(torch.zeros(5))
        self.scalar = torch.nn.Parameter(torch.zeros(()))

    def forward(self, times: float = 1.0) -> torch.Tensor:
        return times * (self.matrix.sum() + self.vector.sum() + self.scalar)


SIZE = 18
"""Number of parameters of `Quadratic`."""


def curvatures() -> torch.Tensor:
    """The curvature h of each parameter."""
    return torch.linspace(0.5, 1.5, SIZE, dtype=torch.float64)


def centers_of(rank: int, step: int = 0) -> torch.Tensor:
    """The minimum of worker *rank*'s loss in *step* (0: in all steps)."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(SIZE, generator=generator)


def flat_parameters(model: torch.nn.Module) -> torch.Tensor:
    """All parameters as one copy in double precision."""
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


MakeOptimizer = Callable[[torch.nn.Module, float], torch.optim.Optimizer]


class CheckFailedError(PacelineError, AssertionError):
    """A law that every method must hold is broken."""


def sgd(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=learning_rate)


def momentum(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=learning_rate / 10, momentum=0.9)


def adamw(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=learning_rate / 10)


HARDLY_ANY = 2.0**-60
"""Momentum that has no effect beside any gradient."""

PAUSE = 0.001
"""Seconds by which one worker's step is longer than the next one's."""

OPTIMIZERS: tuple[MakeOptimizer, ...] = (sgd, momentum, adamw)


def begin(
    case: Case, rule: str, make: MakeOptimizer = sgd
) -> tuple[Quadratic, DistributedOptimizer]:
    """A new model, with its optimizer for a case and a bucket rule."""
    model = Quadratic()
    return model, distribute_as(case, rule, model, make(model, case.learning_rate))


def begin_counting(
    case: Case, rule: str, model: Counting | None = None, **settings: Any
) -> tuple[Counting, DistributedOptimizer]:
    """A counting model, and plain SGD."""
    model = model or Counting()
    inner = sgd(model, case.learning_rate)
    return model, distribute_as(case, rule, model, inner, **settings)


def distribute_as(
    case: Case,
    rule: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    **settings: Any,
) -> DistributedOptimizer:
    """`distribute` for a case and a bucket rule, with further *settings*."""
    if case.state:
        for group in optimizer.param_groups:
            if group.get("momentum") == 0:
                group["momentum"] = HARDLY_ANY
    return distribute(model, optimizer, method=case.method, buckets=rule, **settings)


def step(
    model: Quadratic, optimizer: torch.optim.Optimizer, centers: torch.Tensor
) -> None:
    optimizer.zero_grad()
    model(centers).backward()
    optimizer.step()


@contextmanager
def only_these_trainings() -> Iterator[None]:
    """Hide earlier trainings from the runtime while the context is open: `paceline.save` saves only those that
    begin inside."""
    registry = join_runtime().registry
    hidden = registry.hidden
    registry.hidden, registry.trainings = [*hidden, *registry.trainings], []
    try:
        yield
    finally:
        earlier = registry.hidden[len(hidden) :]
        registry.hidden, registry.trainings = hidden, earlier + registry.trainings


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A temporary folder that all workers share. Collective, also when it ends without an error."""
    own = tempfile.mkdtemp() if paceline.rank() == 0 else ""
    names = gather_bytes(own.encode(), torch.device("cpu"))
    with _removed(own):
        yield Path(names[0].decode())
        dist.barrier()


@contextmanager
def _removed(folder: str) -> Iterator[None]:
    try:
        yield
    finally:
        if folder:
            shutil.rmtree(folder)


def everyone(mine: torch.Tensor) -> torch.Tensor:
    """This tensor of all workers, one row each. Collective."""
    found = torch.empty(paceline.world_size() * mine.numel(), dtype=mine.dtype)
    dist.all_gather_single(found, mine.reshape(-1))
    return found.view(-1, mine.numel())


def counted(model: torch.nn.Module, case: Case) -> torch.Tensor:
    """The number of unit gradients in each parameter of a counting model."""
    return -flat_parameters(model) / case.learning_rate


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CheckFailedError(otherwise)


def require_equal(
    a: torch.nn.Module, b: torch.nn.Module, otherwise: str, rounding: float = 0.0
) -> None:
    difference = (flat_parameters(a) - flat_parameters(b)).abs().max().item()
    require(difference <= rounding, f"{otherwise}, by up to {difference:.2g}")


@dataclass(frozen=True)
class InspectedBucket:
    """One bucket: the *names* of its parameters, in gradient-ready order, its number of
    *elements*, and its *bytes* on the network."""

    index: int
    names: tuple[str, ...]
    elements: int
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """The parts of one worker's training.

    Attributes:
        buckets: Its current gradient buckets, in plan order.
        worker: The method's worker.
        run: The method's view of this worker.
        comm: This worker's communicator.
        recorder: The records of its steps.
        worker_states: The states that a checkpoint saves for this worker alone.
        tuner: Decides its buckets.
        remote: The parameters on their servers, if servers update; else None.
        endpoints: This worker's connections to servers.
        switcher: Switches the method under ``"auto"``; else None.
        step_pending: Whether gradients were delivered, and ``step()`` has not followed.
        uses_grad_scaler: Whether a GradScaler steps the optimizer, as far as that is known.
        meet: Called by `paceline.save`, so that all workers are at one step.
        load_is_complete: Called by `paceline.load`, when everything is loaded.
    """

    buckets: tuple[InspectedBucket, ...]
    worker: Any
    run: Run
    comm: Comm
    recorder: StepRecorder
    worker_states: list[WorkerState]
    tuner: BucketTuner
    remote: RemoteModel | None
    endpoints: tuple[Endpoint, ...]
    switcher: MethodSwitcher | None
    step_pending: bool
    uses_grad_scaler: bool
    meet: Callable[[], bool]
    load_is_complete: Callable[[], bool]


def inspect(optimizer: torch.optim.Optimizer) -> Inspection:
    """Return the parts of a training: its buckets, worker, communicator and others.

    It changes nothing, and sends nothing. Each worker gets its own parts.

    Args:
        optimizer: One that `distribute` returned.

    Example:
        ::

            print([bucket.names for bucket in inspect(optimizer).buckets])
    """
    active = active_training(optimizer)
    training = active.training
    return Inspection(
        buckets=tuple(
            InspectedBucket(one.index, one.names, one.buffer.numel(), one.bytes)
            for one in training.context.buckets
        ),
        worker=training.hooks.worker,
        run=training.run,
        comm=training.context.comm,
        recorder=join_runtime().recorder,
        worker_states=worker_states(training),
        tuner=training.tuner,
        remote=training.remote,
        endpoints=tuple(active.endpoints),
        switcher=active.switcher,
        step_pending=training.step_pending,
        uses_grad_scaler=active.uses_grad_scaler,
        meet=training.meet,
        load_is_complete=training.load_is_complete,
    )
