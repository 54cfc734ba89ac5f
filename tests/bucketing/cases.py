"""Random steps, and plans found by trying all of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.bucketing.cost_models import AffineCost, Cost, MeasuredCost
from paceline.bucketing.rules import plan_buckets
from paceline.bucketing.timeline import finish_time


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
