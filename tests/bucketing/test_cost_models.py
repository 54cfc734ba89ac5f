"""Costs of messages, and when messages of a step end."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest

from paceline.bucketing.cost_models import (
    AffineCost,
    Cost,
    MeasuredCost,
    fit,
    lines_below,
    many,
    overlappable_startup,
)
from paceline.bucketing.timeline import finish_time
from paceline.errors import UsageError
from tests.bucketing.cases import (
    Step,
    buckets_of,
    end_one_by_one,
    random_cost,
    random_steps,
)


def test_affine_is_a_start_up_and_a_price_per_byte() -> None:
    cost = AffineCost(2.0, 0.5)
    assert [cost(size) for size in (0, 1, 10)] == [2.0, 2.5, 7.0]
    assert overlappable_startup(cost) == 2.0
    assert overlappable_startup(AffineCost(2.0, 0.5, 0.75)) == 0.75
    assert overlappable_startup(AffineCost(2.0, 0.5, 0.0)) == 0.0


@pytest.mark.parametrize("overlap", [None, 0.0, 0.75])
def test_the_largest_lower_bound_of_an_affine_cost_is_the_wires_time(
    overlap: float | None,
) -> None:
    cost = AffineCost(2.0, 0.5, overlap)
    for size in (0, 5, 10):
        found = max(line(size) for line in lines_below(cost, 10))
        assert found == pytest.approx(cost(size) - overlappable_startup(cost))


@pytest.mark.parametrize(
    ("sizes", "seconds", "times"),
    [
        # Interpolated, flat below the first size, and beyond the last one as steep as before.
        (
            (10, 20, 40),
            (1.0, 2.0, 8.0),
            {0: 1.0, 5: 1.0, 10: 1.0, 15: 1.5, 20: 2.0, 25: 3.5, 40: 8.0, 50: 11.0},
        ),
        ((10,), (2.0,), {0: 2.0, 10: 2.0, 30: 6.0}),  # in proportion beyond one point
        ((0,), (2.0,), {30: 2.0}),
        ([1, 2, 3], [1.0, 1.0, 1.0], {100: 1.0}),
    ],
)
def test_times_of_a_curve(
    sizes: tuple[int, ...], seconds: tuple[float, ...], times: dict[int, float]
) -> None:
    curve = MeasuredCost(sizes, seconds)
    assert curve.sizes == tuple(sizes)
    assert {size: curve(size) for size in times} == times


def test_a_curve_overlaps_what_it_is_told() -> None:
    assert overlappable_startup(MeasuredCost((10,), (2.0,))) == 0.0
    assert overlappable_startup(MeasuredCost((10,), (2.0,), 1.5)) == 1.5
    assert overlappable_startup(lambda size: size) == 0.0


def test_many_at_once_are_each_alone() -> None:
    draw = random.Random(1)
    sizes = np.array([0.0, 0.5, 4.0, 7.0, 8.0, 20.0, 21.0, 1e6])
    for _ in range(50):
        cost = random_cost(draw)
        one_by_one = [cost(size) for size in sizes.tolist()]
        assert many(cost, sizes).tolist() == pytest.approx(one_by_one, rel=1e-12)
    single = MeasuredCost((0,), (2.0,))
    assert many(single, sizes).tolist() == [2.0] * len(sizes)


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ((-1.0, 0.0), "start_up: .*got -1.0"),
        ((0.0, -1.0), r"seconds_per_byte: .* got -1.0"),
        ((math.inf, 0.0), r"start_up: .* got inf"),
        ((0.0, math.nan), r"seconds_per_byte: .* got nan"),
        ((1.0, 0.0, -0.5), r"overlappable_startup: .* got -0.5"),
        (
            (1.0, 0.0, 1.5),
            "overlappable_startup: .*1.0 s, got 1.5",
        ),
    ],
)
def test_affine_figures_that_cannot_be(
    figures: tuple[float, ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        AffineCost(*figures)


@pytest.mark.parametrize(
    ("sizes", "seconds", "overlapping", "message"),
    [
        ((), (), 0.0, r"at least one, got 0 times and 0 sizes"),
        ((1, 2), (1.0,), 0.0, "1 times and 2 sizes"),
        ((1, 2), (2.0, 1.0), 0.0, r"each time .* got 1.0 after 2.0"),
        ((2, 1), (1.0, 2.0), 0.0, r"each size .* got 1 after 2"),
        ((1, 1), (1.0, 2.0), 0.0, "twice"),
        ((-1, 1), (1.0, 2.0), 0.0, r"each size .* got -1"),
        ((1, 2), (-1.0, 2.0), 0.0, r"each time .* got -1.0"),
        ((1, math.inf), (1.0, 2.0), 0.0, r"each size .* finite .* got inf"),
        ((1, 2), (1.0, math.nan), 0.0, r"each time .* finite .* got nan"),
        ((1, 2), (1.0, 2.0), 1.5, r"first time, 1.0 s, got 1.5 s"),
        ((1, 2), (1.0, 2.0), -0.5, r"overlappable_startup: .* got -0.5 s"),
    ],
)
def test_curves_that_cannot_be(
    sizes: tuple[float, ...],
    seconds: tuple[float, ...],
    overlapping: float,
    message: str,
) -> None:
    with pytest.raises(UsageError, match=message):
        MeasuredCost(sizes, seconds, overlapping)


# ---- the line nearest to a curve ----


def test_a_line_s_fit_is_the_line() -> None:
    line = AffineCost(2.0, 0.5)
    assert fit(line, [1, 2]) is line
    fitted = fit(lambda size: 2.0 + 0.5 * size, [1, 5, 5, 9])
    assert fitted.start_up == pytest.approx(2.0)
    assert fitted.seconds_per_byte == pytest.approx(0.5)


def test_a_fit_is_never_negative() -> None:
    fitted = fit(lambda size: size * size, [1, 2, 3])
    assert fitted.start_up == 0.0
    # least squares through the origin: sum of x^3 over sum of x^2
    assert fitted.seconds_per_byte == pytest.approx(36 / 14)
    assert fit(lambda size: 3.0, [1, 2, 3]).start_up == pytest.approx(3.0)


def test_a_fit_to_one_size_is_flat() -> None:
    assert fit(lambda size: 3.0 * size, [2, 2]) == AffineCost(6.0, 0.0)


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
