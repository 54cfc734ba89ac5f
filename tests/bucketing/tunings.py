"""Trainings whose plans are watched, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import paceline
from paceline.bucketing.cost_models import AffineCost
from paceline.cluster import Cluster, Workload
from paceline.runtimes.simulated import Simulation
from paceline.testing import inspect
from tests.support.simulations import LATENCY, LINK, run_on, simulation

UNEVEN = Workload(
    names=("in", "out", "block.a", "block.b", "block.c", "deep.x", "deep.y"),
    sizes=(400_000, 40_000, 24_000, 800_000, 12_000, 1_200_000, 8_000),
    forward=(2e-3, 2e-3, 1e-3, 5e-3, 1e-3, 4e-3, 1e-3),
    backward=(9e-3, 6e-3, 3e-3, 31e-3, 2e-3, 22e-3, 1e-3),
    order=(1, 6, 5, 4, 2, 3, 0),
    update=3e-3,
    batch=4,
)
"""Tensors of unequal size and time; sizes are multiples of 2, 4 and 5 workers."""


def ring_cost(
    workers: int, at_once: int, link: float = LINK, latency: float = LATENCY
) -> AffineCost:
    """A ring all-reduce in the simulated runtime, of sizes that are multiples of *workers*."""
    rounds = 2 * (workers - 1)
    start_up = rounds * latency
    overlapping = start_up if at_once > 1 else 0.0
    return AffineCost(start_up, rounds / workers / link, overlapping)


@dataclass
class Watched:
    """What one rank saw of its training."""

    groups: list[list[tuple[str, ...]]] = field(default_factory=list)
    """Each step's buckets, by name, after its backward pass."""
    parameters: list[torch.Tensor] = field(default_factory=list)
    """All parameters, flat, after each step."""
    bytes_sent: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    settled_after: int = 0

    @property
    def plan(self) -> list[tuple[str, ...]]:
        return self.groups[-1]


def groups_of(optimizer: Any) -> list[tuple[str, ...]]:
    return [bucket.names for bucket in inspect(optimizer).buckets]


def flat(model: nn.Module) -> torch.Tensor:
    tensors = [p.detach() for p in model.parameters()]
    real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    return torch.cat([t.reshape(-1).double() for t in real])


def note(watched: Watched, model: nn.Module, optimizer: Any) -> None:
    """After a step."""
    watched.groups.append(groups_of(optimizer))
    watched.parameters.append(flat(model))


def ended(watched: Watched, optimizer: Any) -> Watched:
    optimizer.finish()
    recorder = inspect(optimizer).recorder
    watched.bytes_sent = [step.bytes_sent for step in recorder.steps]
    watched.step_seconds = [step.step_seconds for step in recorder.steps]
    watched.settled_after = recorder.tuned_after
    return watched


def sgd(model: nn.Module, **options: Any) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return paceline.distribute(model, inner, **options)


def train_stand_in(workload: Workload, steps: int, **options: Any) -> Watched:
    model = paceline.stand_in(workload)
    optimizer = sgd(model, **options)
    watched = Watched()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4)).backward()
        optimizer.step()
        note(watched, model, optimizer)
    return ended(watched, optimizer)


def on(
    where: int | Cluster, body: Callable[[int], Any], **options: Any
) -> tuple[list[Any], Simulation]:
    """What *body* returned on each rank, and the simulation."""
    runtime = simulation(where, **options)
    return run_on(runtime, body), runtime


def batch(rank: int, step: int, size: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, size, generator=generator)
