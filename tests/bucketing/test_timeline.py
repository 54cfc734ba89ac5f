"""When the last all-reduce ends: by hand, and against an exact fluid simulation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import pytest

from paceline.bucketing import AffineCost, TableCost, finish
from paceline.bucketing.cost_models import overlapping_seconds
from paceline.errors import UsageError
from tests.bucketing.cases import Step, one_lane_end, random_steps

ONE_AND_ONE = AffineCost(1.0, 1.0)
"""1 s of start-up that passes beside others, 1 s of wire per byte."""


@pytest.mark.parametrize(
    ("lanes", "end"),
    [
        (1, 9.0),  # 3 times 1 + 2
        (2, 8.0),  # two: 1, then 4 for both; then 1 + 2
        (3, 7.0),  # 1, then 6 for all three
        (9, 7.0),
    ],
)
def test_three_equal_all_reduces(lanes: int, end: float) -> None:
    assert finish([1, 1, 1], [2] * 3, [0.0] * 3, ONE_AND_ONE, lanes=lanes) == end


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_lanes_do_not_widen_the_wire(lanes: int) -> None:
    nothing_overlaps = AffineCost(1.0, 1.0, 0.0)
    step = ([1, 1, 1], [2] * 3, [0.0] * 3)
    assert finish(*step, nothing_overlaps, lanes=lanes) == 9.0
    assert finish(*step, lambda size: 1.0 + size, lanes=lanes) == 9.0


def test_a_part_of_the_start_up_passes_beside_others() -> None:
    # Each: 1 s beside others, then 1 + 2 s of wire; two share it from 1 to 7.
    assert finish([1, 1], [2, 2], [0.0, 0.0], AffineCost(2.0, 1.0, 1.0), lanes=2) == 7.0


def test_what_comes_later_shares_what_is_left() -> None:
    # 4 on the wire from 1; the other from 3, each at half: it ends at 5, the first has
    # then 1 left and is alone.
    assert finish([1, 1], [4, 1], [0.0, 2.0], ONE_AND_ONE, lanes=2) == 6.0


def test_a_third_waits_for_a_lane_in_its_turn() -> None:
    # 6 and 1 share from 1: the short one ends at 3, the third starts up beside the long
    # one (5 - 1 = 4 left at 4) and shares: 1 at 6, and the long one has 3 left: 9.
    assert finish([1, 1, 1], [6, 1, 1], [0.0] * 3, ONE_AND_ONE, lanes=2) == 9.0


def test_a_gap_leaves_the_wire_idle() -> None:
    assert finish([1, 1], [1, 1], [0.0, 10.0], ONE_AND_ONE, lanes=2) == 12.0
    assert finish([1, 1], [1, 1], [0.0, 10.0], ONE_AND_ONE) == 12.0


def test_messages_of_no_bytes_cost_their_start_up() -> None:
    assert finish([1, 1, 1], [0] * 3, [0.0] * 3, ONE_AND_ONE, lanes=2) == 2.0
    assert finish([1, 1, 1], [0] * 3, [0.0] * 3, ONE_AND_ONE) == 3.0
    assert finish([1, 1], [0, 0], [0.0, 0.0], AffineCost(0.0, 0.0), lanes=2) == 0.0


def test_a_bucket_waits_for_its_last_gradient() -> None:
    assert finish([2, 1], [1, 1, 1], [0.0, 5.0, 6.0], ONE_AND_ONE) == 10.0
    assert finish([], [], [], ONE_AND_ONE) == 0.0


def test_a_table_s_overlap_counts_too() -> None:
    curve = TableCost((0, 10), (1.0, 11.0), 1.0)
    for lanes, end in ((1, 9.0), (2, 8.0), (3, 7.0)):
        assert finish([1, 1, 1], [2] * 3, [0.0] * 3, curve, lanes=lanes) == end


def test_one_lane_is_the_paper_s_recurrence() -> None:
    draw = random.Random(1)
    for step in random_steps(2, 200, 20):
        plan = random_plan(draw, len(step.sizes))
        end = finish(plan, step.sizes, step.ready, step.cost)
        assert end == one_lane_end(plan, step)


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


def fluid_end(plan: Sequence[int], step: Step, lanes: int) -> Fraction:
    """Everything flows at constant rates until the next thing happens; in fractions, so
    that nothing is rounded."""
    overlap = Fraction(overlapping_seconds(step.cost))
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
        while waiting and waiting[0][0] <= now and len(under_way) < lanes:
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


@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
def test_lanes_against_a_fluid_simulation(lanes: int) -> None:
    draw = random.Random(3)
    for step in random_steps(4, 200, 15, overlap=True):
        plan = random_plan(draw, len(step.sizes))
        end = finish(plan, step.sizes, step.ready, step.cost, lanes=lanes)
        assert end == pytest.approx(float(fluid_end(plan, step, lanes)), rel=1e-12), (
            plan,
            step,
        )


# ---- bad input ----


@pytest.mark.parametrize("plan", [[], [1], [3], [1, 1, 1], [2, 0], [3, -1]], ids=str)
def test_a_plan_that_does_not_fit(plan: list[int]) -> None:
    with pytest.raises(UsageError, match=r"plan: expected lengths .* sum to 2 tensors"):
        finish(plan, [1, 1], [0.0, 0.0], ONE_AND_ONE)


def test_times_and_lanes_that_cannot_be() -> None:
    with pytest.raises(UsageError, match=r"got 0\.5 after 1\.0"):
        finish([2], [1, 1], [1.0, 0.5], ONE_AND_ONE)
    with pytest.raises(UsageError, match="lanes: expected 1 or more, got -1"):
        finish([2], [1, 1], [0.0, 0.0], ONE_AND_ONE, lanes=-1)
