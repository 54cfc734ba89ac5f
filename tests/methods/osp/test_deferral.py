"""Which pieces are deferred, in which order, and how a trial of deferring ends."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks.papers.osp_comparisons import Inverse, InverseOSP, Random
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.settings import parse_method
from paceline.errors import UsageError
from paceline.methods.osp.deferral import (
    PATIENCE,
    DeferralPolicy,
    StepSummary,
    Trial,
    choose_deferred,
    fill_budget,
    largest_bucket_first,
)
from paceline.methods.osp.measurement import (
    ModelPieces,
    Rate,
    StepTimes,
    step_seconds,
)
from paceline.methods.osp.options import Importance, OSPOptions
from tests.methods.osp.helpers import steps

# ---- what to defer ----


def turns(options: OSPOptions, parts: ModelPieces, values: list[float]) -> list[int]:
    """In which order pieces of such importance are deferred."""
    decision = DeferralPolicy(options, pulls=False)
    for number, value in enumerate(values):
        decision.importance.rate(number, torch.tensor([value]), torch.ones(1))
    return decision.order(parts, step=0)


@given(steps(), st.floats(0, 2), st.floats(0, 1e-4))
def test_what_is_chosen_fits_and_pays(step, most, cost):
    parts, times, rate, order = step
    budget = most * sum(parts.sizes)
    chosen = choose_deferred(parts, [order], times, rate, budget, cost)
    assert chosen == sorted(set(chosen))
    assert parts.total(chosen) <= budget
    plain = step_seconds(times, 0, parts.left(()), rate)
    size = parts.total(chosen)
    with_it = step_seconds(times, size, parts.left(chosen), rate) + cost * size
    assert with_it <= plain
    if plain <= times.end:
        assert chosen == []
    if size:  # all of it hides behind one computation
        assert size * rate.per_byte <= times.end * (1 + 1e-9)


@given(steps())
def test_a_fast_network_defers_nothing(step):
    parts, times, _, order = step
    assert choose_deferred(parts, [order], times, Rate(0.0, 1e-12), math.inf) == []


def test_the_unimportant_half_is_deferred_where_that_hides_the_rest():
    # Four pieces, ready when backward ends; r = 1: each half takes half a computation.
    parts = ModelPieces([100] * 4, [0, 0, 0, 0], 1)
    times, rate = StepTimes([4.0], 4.0), Rate(0.0, 0.01)
    assert choose_deferred(parts, [[2, 0, 3, 1]], times, rate, 200) == [0, 2]
    assert choose_deferred(parts, [[2, 0, 3, 1]], times, rate, 99) == []
    # deferring costs as much as it saves
    assert choose_deferred(parts, [[2, 0, 3, 1]], times, rate, 200, 0.01) == []


def test_what_backward_hides_is_not_deferred():
    # Bucket 0 is sent long before backward ends: only bucket 1 is waited for.
    parts = ModelPieces([100, 100], [0, 1], 2)
    times, rate = StepTimes([1.0, 4.0], 4.0), Rate(0.0, 0.01)
    assert choose_deferred(parts, [[0, 1]], times, rate, 200) == [1]


def test_what_is_ready_last_is_deferred_first_and_of_that_the_least_important() -> None:
    parts, values = ModelPieces([1] * 5, [2, 0, 1, 2, 0], 3), [5.0, 4.0, 3.0, 2.0, 1.0]
    assert turns(OSPOptions(), parts, values) == [3, 0, 2, 4, 1]
    assert turns(InverseOSP(), parts, values) == [0, 3, 2, 1, 4]
    by_importance = [4, 3, 2, 1, 0]
    assert turns(OSPOptions(order="importance"), parts, values) == by_importance
    assert turns(OSPOptions(overlap=False), parts, values) == by_importance


@given(steps(), st.floats(0, 2))
def test_in_turns_as_much_is_gained_as_in_any_other_order_of_as_many(step, most):
    """Where pieces are of one size: what is ready last is what a step waits for."""
    parts, times, rate, order = step
    parts = ModelPieces([100] * len(parts.sizes), parts.buckets, parts.bucket_count)
    rate = Rate(0.0, rate.per_byte)  # deferring all of a bucket saves a message
    budget = most * sum(parts.sizes)
    late = turns(OSPOptions(), parts, [0.0] * len(order))

    def takes(turn: list[int]) -> float:
        chosen = fill_budget(parts, turn, budget)
        return step_seconds(times, parts.total(chosen), parts.left(chosen), rate)

    assert takes(late) <= takes(order) * (1 + 1e-9)


def test_where_pulls_follow_pushes_the_largest_bucket_is_waited_for_twice() -> None:
    # Pushed 1, 3 and 2, and pulled in turn: the three pieces of bucket 1 are in the way.
    parts = ModelPieces([100] * 6, [0, 1, 1, 1, 2, 2], 3)
    times, rate = StepTimes([0.9, 1.0, 1.1], 1.1), Rate(0.0, 0.01, pulls=True)
    late = turns(OSPOptions(), parts, [0.0] * 6)
    assert largest_bucket_first(parts, late) == [1, 4, 2, 5, 3, 0]
    assert step_seconds(times, 0, [100, 300, 200], rate) == pytest.approx(9.9)
    assert step_seconds(times, 100, [100, 300, 100], rate) == pytest.approx(9.0)
    assert step_seconds(times, 100, [100, 200, 200], rate) == pytest.approx(8.0)
    assert choose_deferred(
        parts, [late, largest_bucket_first(parts, late)], times, rate, 100
    ) == [1]
    assert choose_deferred(parts, [late], times, rate, 100) == [4]


@given(steps())
def test_levelling_takes_each_piece_once_from_what_is_largest(step):
    parts, _, _, order = step
    left = parts.left(())
    turn = largest_bucket_first(parts, order)
    assert sorted(turn) == list(range(len(parts.sizes)))
    for number, piece in enumerate(turn):
        open_ = {parts.buckets[other] for other in turn[number:]}
        assert left[parts.buckets[piece]] == max(left[bucket] for bucket in open_)
        left[parts.buckets[piece]] -= parts.sizes[piece]


@given(st.lists(st.integers(1, 100), max_size=20), st.floats(0, 500), st.randoms())
def test_fill_takes_what_fits_in_order(sizes, budget, random):
    parts = ModelPieces(sizes, [0] * len(sizes), 1)
    order = list(range(len(sizes)))
    random.shuffle(order)
    taken, room = fill_budget(parts, order, budget), budget
    for piece in order:
        if piece in taken:
            room -= sizes[piece]
        else:
            assert sizes[piece] > room
    assert room >= 0


# ---- which first ----


def rated(
    kind: type[Importance], *pairs: tuple[torch.Tensor, torch.Tensor]
) -> Importance:
    importance = kind()
    for number, (parameter, gradient) in enumerate(pairs):
        importance.rate(number, parameter, gradient)
    return importance


def test_importance_is_the_sum_of_products_in_size():
    parameter = torch.tensor([[1.0, -2.0], [3.0, 0.0]])
    gradient = torch.tensor([-4.0, 0.5, 2.0, 9.0])
    assert rated(Importance, (parameter, gradient)).values == {0: 4 + 1 + 6}


def test_importance_pairs_elements_whatever_the_memory_format():
    parameter = torch.randn(2, 3, 4, 5)
    gradient = torch.randn(2 * 3 * 4 * 5)
    other = parameter.to(memory_format=torch.channels_last)
    values = rated(Importance, (parameter, gradient), (other, gradient)).values
    assert values[0] == pytest.approx(values[1])


def test_the_order_is_by_importance_then_number():
    values = [torch.tensor([value]) for value in (3.0, 1.0, 2.0, 1.0)]
    pairs = [(value, torch.ones(1)) for value in values]
    assert rated(Importance, *pairs).order(4, seed=0) == [1, 3, 2, 0]
    assert rated(Inverse, *pairs).order(4, seed=0) == [0, 2, 1, 3]
    assert Importance().order(2, seed=0) == [0, 1]  # of nothing rated


def test_a_random_order_repeats_with_its_seed():
    orders = [Random().order(30, seed) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2]) == list(range(30))


# ---- options ----


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("osp:most=2", r"osp:most=2.*between 0 and 1"),
        ("osp:most=-0.1", r"most=-0.1.*between 0 and 1"),
        ("osp:most=nan", r"between 0 and 1"),
        ("osp:ramp=0", r"osp:ramp=0.*1 or more steps"),
        ("osp:chunk=0", r"osp:chunk=0.*1 or more bytes"),
        ("osp:budget=foo", r"budget.*constant.*linear.*loss"),
        ("osp:order=foo", r"order.*importance.*time"),
        ("osp:correction=foo", r"correction.*local.*none"),
        ("osp:correction=plain", r"correction.*local.*none"),
        ("osp:importance=random", r"'osp'.*unknown key 'importance'"),
        ("osp:state=predict", r"'osp'.*unknown key 'state'"),
        ("osp:defer=foo", r"defer.*measured.*most.*nothing"),
        ("osp:overlap=foo", r"overlap"),
        ("osp:frobnicate=1", r"'osp'.*frobnicate"),
    ],
)
def test_bad_options_are_refused(spec, words):
    with pytest.raises(UsageError, match=words):
        parse_method(spec)
    with pytest.raises(UsageError, match=words):
        parse_method(spec.replace("osp:", "osp:collective=native,"))


# ---- a trial of deferring ----


def seen(
    whole: float, per_byte: float = 1e-9, workers: tuple[int, ...] = (0, 1)
) -> StepSummary:
    return StepSummary(None, Rate(0.0, per_byte), whole, workers)


PLAIN = seen(1.0)


def begun() -> Trial:
    trial = Trial()
    assert not trial.rests(False, PLAIN)
    return trial


@pytest.mark.parametrize(
    ("trial", "early", "late"),
    [
        (seen(0.8), False, False),
        (seen(0.995), False, True),  # no shorter
        (seen(1.09), False, True),
        (seen(1.11), True, True),
        (seen(0.0), False, False),  # too few steps to tell
        (seen(1.5, per_byte=2.1e-9), True, False),  # the network has changed
        (seen(1.5, per_byte=0.49e-9), True, False),
        (seen(1.05, per_byte=2.1e-9), False, False),
        (seen(1.5, workers=(0,)), False, True),  # other workers: found out anew
        (seen(0.5, workers=(0,)), False, True),
    ],
)
def test_what_a_trial_shows(trial: StepSummary, early: bool, late: bool) -> None:
    assert begun().stops_early(True, trial) is early
    assert begun().rests(True, trial) is late


def test_steps_that_are_too_few_begin_no_trial() -> None:
    trial = Trial()
    assert trial.rests(False, seen(0.0))
    assert not trial.stops_early(True, seen(9.0))
    assert not trial.rests(False, PLAIN)
    assert not trial.rests(False, seen(0.0))  # known from before
    assert trial.stops_early(True, seen(9.0))


def test_it_is_looked_at_early_only_in_its_first_interval() -> None:
    trial = begun()
    assert not trial.stops_early(False, seen(9.0))
    assert not trial.rests(True, seen(0.8))
    assert not trial.stops_early(True, seen(9.0))
    assert trial.rests(True, seen(9.0))


def test_each_rest_is_twice_as_long_as_the_one_before() -> None:
    trial, rests = begun(), []
    for early in (True, False, True):
        assert (
            trial.stops_early(True, seen(2.0))
            if early
            else trial.rests(True, seen(2.0))
        )
        count = 1
        while trial.rests(False, PLAIN):
            count += 1
        rests.append(count)
    assert rests == [PATIENCE, 2 * PATIENCE, 4 * PATIENCE]


def test_a_network_that_seems_to_be_another_is_no_failure() -> None:
    """Steps that are longer because processors are busy say so as well."""
    trial = begun()
    assert trial.stops_early(True, seen(2.0, per_byte=3e-9))
    assert not trial.rests(False, PLAIN)
    assert trial.stops_early(True, seen(2.0, per_byte=1e-9))
    assert trial.rests(False, PLAIN)


def test_other_workers_are_no_failure() -> None:
    trial = begun()
    assert trial.rests(True, seen(0.8, workers=(1,)))
    assert not trial.rests(False, seen(0.9, workers=(1,)))
