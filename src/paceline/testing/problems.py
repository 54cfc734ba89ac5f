"""What the checks train with: a model, its optimizer, steps; and what they require."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

import paceline
from paceline.core.distribute import distribute
from paceline.core.optimizer import DistributedOptimizer
from paceline.core.sync import gather_bytes
from paceline.errors import PacelineError
from paceline.runtimes.join import join_runtime
from paceline.testing.cases import Case
from paceline.testing.task import Quadratic, flat_parameters

MakeOptimizer = Callable[[torch.nn.Module, float], torch.optim.Optimizer]


class CheckFailedError(PacelineError, AssertionError):
    """A law that every method promises does not hold."""


def sgd(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=learning_rate)


def momentum(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=learning_rate / 10, momentum=0.9)


def adamw(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=learning_rate / 10)


HARDLY_ANY = 2.0**-60
"""Momentum that vanishes beside any gradient."""

OPTIMIZERS: tuple[MakeOptimizer, ...] = (sgd, momentum, adamw)


def begin(
    case: Case, rule: str, make: MakeOptimizer = sgd
) -> tuple[Quadratic, DistributedOptimizer]:
    """A new model, and its optimizer under a case and a bucket rule."""
    model = Quadratic()
    return model, distribute_as(case, rule, model, make(model, case.learning_rate))


def distribute_as(
    case: Case,
    rule: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    clip_norm: float | None = None,
) -> DistributedOptimizer:
    if case.state:
        for group in optimizer.param_groups:
            if group.get("momentum") == 0:
                group["momentum"] = HARDLY_ANY
    return distribute(
        model, optimizer, method=case.method, buckets=rule, clip_norm=clip_norm
    )


def step(
    model: Quadratic, optimizer: torch.optim.Optimizer, centers: torch.Tensor
) -> None:
    optimizer.zero_grad()
    model(centers).backward()
    optimizer.step()


@contextmanager
def only_these_trainings() -> Iterator[None]:
    """Within it the runtime knows of no training that began before: `paceline.save` holds
    those that begin here."""
    runtime = join_runtime()
    before = list(runtime.job.trainings)
    runtime.job.trainings.clear()
    try:
        yield
    finally:
        runtime.job.trainings[:] = before + runtime.job.trainings


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A temporary folder of all workers. Collective, also where it ends well."""
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


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise CheckFailedError(otherwise)


def require_equal(
    a: torch.nn.Module, b: torch.nn.Module, otherwise: str, rounding: float = 0.0
) -> None:
    difference = (flat_parameters(a) - flat_parameters(b)).abs().max().item()
    require(difference <= rounding, f"{otherwise}: by {difference:.2g}")
