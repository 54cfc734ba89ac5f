"""Steps whose plans are worked out by hand or by trying, and trainings whose plans are watched, in virtual
time.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import paceline
from paceline.bucketing.cost_models import AffineCost, Cost, MeasuredCost
from paceline.bucketing.rules import plan_buckets
from paceline.bucketing.timeline import finish_time
from paceline.cluster import Cluster, Workload
from paceline.runtimes.simulated import Simulation
from paceline.testing import inspect
from tests.support.simulations import LATENCY, LINK, run_on, simulation


@dataclass(frozen=True)
class Step:
    """Gradients in ready order, and what an all-reduce costs."""

    sizes: list[float]
    ready: list[float]
    cost: Cost
    kinds: list[str] | None = None

    def plan(self, rule: str, at_once: int = 1) -> list[list[int]]:
        known = self.sizes, self.kinds, self.ready, self.cost
        return plan_buckets(rule, *known, max_in_flight=at_once)

    def end(self, buckets: list[list[int]], at_once: int = 1) -> float:
        """When the last all-reduce ends."""
        return finish_time(
            buckets, self.sizes, self.ready, self.cost, max_in_flight=at_once
        )

    def end_by(self, rule: str, at_once: int = 1) -> float:
        return self.end(self.plan(rule, at_once), at_once)


def buckets_of(lengths: Sequence[int]) -> list[list[int]]:
    """Neighbours in ready order, so many in each bucket."""
    edges = [0, *itertools.accumulate(lengths)]
    return [list(range(a, b)) for a, b in itertools.pairwise(edges)]


def step_cost(size: float) -> float:
    """A cost that jumps, as where a library changes its protocol: 2, 5, 5, 5, 8, ..."""
    return 2.0 + 3.0 * -(-size // 4)


def random_cost(draw: random.Random, overlap: bool = False) -> Cost:
    """Of whole numbers, so that times are exact: affine, a table or a step function."""
    which = draw.choice(["affine", "table", "steps"])
    start_up = float(draw.randint(0, 12))
    part = float(draw.randint(0, int(start_up))) if overlap else 0.0
    if which == "affine":
        return AffineCost(start_up, float(draw.randint(0, 3)), part)
    if which == "table":
        # Slopes are whole between points four apart: no rounding there either.
        count = draw.randint(1, 5)
        sizes = list(itertools.accumulate([4.0] * count))
        rises = [4.0 * draw.randint(0, 5) for _ in sizes]
        seconds = itertools.accumulate(rises[1:], initial=4 * start_up)
        return MeasuredCost(tuple(sizes), tuple(seconds), part)
    return step_cost


def random_step(
    draw: random.Random, most: int, *, kinds: bool = False, overlap: bool = False
) -> Step:
    """1 to *most* tensors: bursts, gaps and equal times among them."""
    count = draw.randint(1, most)
    gap = draw.choice([0, 1, 3, 10])
    gaps = [float(draw.randint(0, gap)) for _ in range(count)]
    return Step(
        sizes=[float(draw.randint(0, draw.choice([2, 12]))) for _ in range(count)],
        ready=list(itertools.accumulate(gaps)),
        cost=random_cost(draw, overlap),
        kinds=[draw.choice("ab") for _ in range(count)] if kinds else None,
    )


def random_steps(
    seed: int, count: int, most: int, *, kinds: bool = False, overlap: bool = False
) -> list[Step]:
    """The same ones for the same *seed*."""
    draw = random.Random(seed)
    return [random_step(draw, most, kinds=kinds, overlap=overlap) for _ in range(count)]


def all_plans(count: int, kinds: Sequence[str] | None = None) -> Iterator[list[int]]:
    """Every plan of *count* tensors that never mixes kinds."""
    for cuts in itertools.product((False, True), repeat=count - 1):
        if kinds and any(
            not cut and a != b
            for cut, (a, b) in zip(cuts, itertools.pairwise(kinds), strict=True)
        ):
            continue
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), count]
        yield [b - a for a, b in itertools.pairwise(edges)]


def end_one_by_one(plan: Sequence[int], step: Step) -> float:
    """The end of the last all-reduce by the text of MG-WFBP, section 4.1: a message
    starts when its last gradient is ready and the one before it has ended."""
    end, first = 0.0, 0
    for length in plan:
        last = first + length - 1
        end = max(end, step.ready[last]) + step.cost(sum(step.sizes[first : last + 1]))
        first = last + 1
    return end


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
