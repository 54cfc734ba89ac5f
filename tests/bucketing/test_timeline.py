"""When the last all-reduce ends: by hand, and against an exact fluid simulation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import pytest

from paceline.bucketing.cost_models import (
    AffineCost,
    Cost,
    MeasuredCost,
    overlappable_startup,
)
from paceline.bucketing.timeline import finish_time
from paceline.errors import UsageError
from tests.bucketing.cases import Step, buckets_of, end_one_by_one, random_steps

ONE_AND_ONE = AffineCost(1.0, 1.0)
"""1 s of start-up that passes beside others, 1 s of wire per byte."""
CURVE = MeasuredCost((0, 10), (1.0, 11.0), 1.0)


def finish(
    lengths: Sequence[int],
    sizes: Sequence[float],
    ready: Sequence[float],
    cost: Cost,
    at_once: int = 1,
) -> float:
    return finish_time(buckets_of(lengths), sizes, ready, cost, max_in_flight=at_once)


@pytest.mark.parametrize(
    ("at_once", "end"),
    [
        (1, 9.0),  # 3 times 1 + 2
        (2, 8.0),  # two: 1, then 4 for both; then 1 + 2
        (3, 7.0),  # 1, then 6 for all three
        (9, 7.0),
    ],
)
def test_three_equal_all_reduces(at_once: int, end: float) -> None:
    assert finish([1, 1, 1], [2] * 3, [0.0] * 3, ONE_AND_ONE, at_once=at_once) == end


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_more_at_once_do_not_widen_the_wire(at_once: int) -> None:
    nothing_overlaps = AffineCost(1.0, 1.0, 0.0)
    step = ([1, 1, 1], [2] * 3, [0.0] * 3)
    assert finish(*step, nothing_overlaps, at_once=at_once) == 9.0
    assert finish(*step, lambda size: 1.0 + size, at_once=at_once) == 9.0


@pytest.mark.parametrize(
    ("lengths", "sizes", "ready", "cost", "at_once", "end"),
    [
        # A part of the start-up passes beside the other's: each takes 1 s beside others, then
        # 1 + 2 s of wire; two share it from 1 to 7.
        ([1, 1], [2, 2], [0.0, 0.0], AffineCost(2.0, 1.0, 1.0), 2, 7.0),
        # The later one shares what is left: 4 on the wire from 1; the other from 3, each at
        # half: it ends at 5, the first has then 1 left and is alone.
        ([1, 1], [4, 1], [0.0, 2.0], ONE_AND_ONE, 2, 6.0),
        # A third waits in its turn: 6 and 1 share from 1: the short one ends at 3, the third
        # starts up beside the long one (5 - 1 = 4 left at 4) and shares: 1 at 6, and the long
        # one has 3 left: 9.
        ([1, 1, 1], [6, 1, 1], [0.0] * 3, ONE_AND_ONE, 2, 9.0),
        # A gap leaves the wire idle.
        ([1, 1], [1, 1], [0.0, 10.0], ONE_AND_ONE, 2, 12.0),
        ([1, 1], [1, 1], [0.0, 10.0], ONE_AND_ONE, 1, 12.0),
        # Messages of no bytes cost their start-up.
        ([1, 1, 1], [0] * 3, [0.0] * 3, ONE_AND_ONE, 2, 2.0),
        ([1, 1, 1], [0] * 3, [0.0] * 3, ONE_AND_ONE, 1, 3.0),
        ([1, 1], [0, 0], [0.0, 0.0], AffineCost(0.0, 0.0), 2, 0.0),
        # A bucket waits for its last gradient.
        ([2, 1], [1, 1, 1], [0.0, 5.0, 6.0], ONE_AND_ONE, 1, 10.0),
        ([], [], [], ONE_AND_ONE, 1, 0.0),
        # A table's overlap counts, too.
        ([1, 1, 1], [2] * 3, [0.0] * 3, CURVE, 1, 9.0),
        ([1, 1, 1], [2] * 3, [0.0] * 3, CURVE, 2, 8.0),
        ([1, 1, 1], [2] * 3, [0.0] * 3, CURVE, 3, 7.0),
    ],
)
def test_ends_by_hand(
    lengths: list[int],
    sizes: list[float],
    ready: list[float],
    cost: Cost,
    at_once: int,
    end: float,
) -> None:
    assert finish(lengths, sizes, ready, cost, at_once) == end


def test_one_at_a_time_is_the_paper_s_recurrence() -> None:
    draw = random.Random(1)
    for step in random_steps(2, 200, 20):
        plan = random_plan(draw, len(step.sizes))
        end = finish(plan, step.sizes, step.ready, step.cost)
        assert end == end_one_by_one(plan, step)


def random_plan(draw: random.Random, count: int) -> list[int]:
    plan = []
    while count:
        plan.append(draw.randint(1, min(count, 4)))
        count -= plan[-1]
    return plan


# ---- an independent simulation ----


@dataclass
class Message:
    """An all-reduce under way: what is left of its start-up, and of its bytes' time."""

    start_up: Fraction
    wire: Fraction


def fluid_end(plan: Sequence[int], step: Step, at_once: int) -> Fraction:
    """Everything flows at constant rates until the next thing happens; in fractions, so
    that nothing is rounded."""
    overlap = Fraction(overlappable_startup(step.cost))
    waiting = []  # (ready, seconds of wire), in the order in which they are sent
    first = 0
    for length in plan:
        size = sum(step.sizes[first : first + length])
        first += length
        wire = Fraction(step.cost(size)) - overlap
        waiting.append((Fraction(step.ready[first - 1]), wire))
    now = Fraction(0)
    under_way: list[Message] = []
    while waiting or under_way:
        while waiting and waiting[0][0] <= now and len(under_way) < at_once:
            under_way.append(Message(overlap, waiting.pop(0)[1]))
        share = sum(1 for m in under_way if not m.start_up)
        pauses = [m.start_up or m.wire * share for m in under_way]
        if waiting and waiting[0][0] > now:
            pauses.append(waiting[0][0] - now)
        pause = min(pauses)
        now += pause
        for message in under_way:
            if message.start_up:
                message.start_up -= pause
            else:
                message.wire -= pause / share
        under_way = [m for m in under_way if m.start_up or m.wire]
    return now


@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
def test_arrivals_against_a_fluid_simulation(at_once: int) -> None:
    draw = random.Random(3)
    for step in random_steps(4, 200, 15, overlap=True):
        plan = random_plan(draw, len(step.sizes))
        end = finish(plan, step.sizes, step.ready, step.cost, at_once=at_once)
        assert end == pytest.approx(float(fluid_end(plan, step, at_once)), rel=1e-12), (
            plan,
            step,
        )


# ---- bad input ----


@pytest.mark.parametrize(
    "buckets", [[], [[0]], [[0, 1, 2]], [[0], [0]], [[0, 1], []], [[-1], [0]]], ids=str
)
def test_a_plan_that_does_not_fit(buckets: list[list[int]]) -> None:
    with pytest.raises(UsageError, match="each of the 2 tensors"):
        finish_time(buckets, [1, 1], [0.0, 0.0], ONE_AND_ONE)


def test_times_and_numbers_that_cannot_be() -> None:
    with pytest.raises(UsageError, match=r"got 0\.5 after 1\.0"):
        finish([2], [1, 1], [1.0, 0.5], ONE_AND_ONE)
    with pytest.raises(UsageError, match="max_in_flight: expected 1 or more, got -1"):
        finish([2], [1, 1], [0.0, 0.0], ONE_AND_ONE, at_once=-1)
