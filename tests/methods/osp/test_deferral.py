"""Which pieces are deferred, in which order, and how a trial of deferring ends: in the same step
everywhere.

In virtual time nothing but the network is shared. Where processors carry the messages a script
computes for longer while something is deferred: it paces itself so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from benchmarks.papers.osp_comparisons import Inverse, InverseOSP, Random
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import paceline
from paceline.cluster import Cluster, Rack, ServerHost, Workload
from paceline.cluster.cluster import Rule, throttle
from paceline.methods.osp.deferral import (
    MUCH_LONGER,
    PATIENCE,
    DeferralPolicy,
    StepSummary,
    Trial,
    choose_deferred,
    fill_budget,
    largest_bucket_first,
)
from paceline.methods.osp.measurement import (
    TRIAL_STEPS,
    ModelPieces,
    Rate,
    StepTimes,
    step_seconds,
)
from paceline.methods.osp.options import Importance, OSPOptions
from paceline.runtimes.simulated import ComputeModel, Simulation
from paceline.testing import inspect
from tests.methods.osp.helpers import (
    AGAIN,
    INTERVAL,
    NATIVE_TRIAL,
    SERVER_TRIAL,
    steps,
)
from tests.support import training
from tests.support.tables import crossed
from tests.support.training import plain_sgd

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


# ---- whole trainings: what is deferred follows the network ----

NATIVE = "osp:collective=native,budget=constant"
COMPUTE = 0.03
"""Seconds that a step computes."""

Mask = tuple[int, ...]


def layers(count: int, size: int) -> Workload:
    """Equal ones; forward takes a third of the time."""
    return Workload(
        names=tuple(f"layer{number}" for number in range(count)),
        sizes=(size,) * count,
        forward=(COMPUTE / 3 / count,) * count,
        backward=(COMPUTE * 2 / 3 / count,) * count,
    )


SMALL, FOUR, SIXTEEN = layers(4, 2**17), layers(4, 2**20), layers(16, 2**18)


def link_for(ratio: float, workload: Workload) -> float:
    """Bytes a second with which a ring of two moves the model in *ratio* computations."""
    return sum(workload.sizes) / (ratio * COMPUTE)


class Played(NamedTuple):
    """Per rank, after each step: what is deferred, where something is; and when that was."""

    masks: list[dict[int, Mask]]
    moments: list[list[float]]
    parts: list[float]
    """Of worker 0: how much of the model is deferred."""

    def step_seconds(self, last: int = 20) -> float:
        return (self.moments[0][-1] - self.moments[0][-1 - last]) / last

    def took(self, step: int) -> float:
        return self.moments[0][step] - self.moments[0][step - 1]


def play(
    method: str,
    steps: int | Sequence[int],
    workload: Workload = SMALL,
    ratio: float = 1.0,
    *,
    workers: int = 2,
    servers: int = 0,
    buckets: str = "wfbp",
    rules: tuple[Rule, ...] = (),
    slower: Callable[[int, int], float] | None = None,
) -> Played:
    """Train on a network that takes *ratio* computations for a model. *slower*: a rank computes so
    many times as long in a step while something is deferred."""
    played = Played([{} for _ in range(workers)], [[] for _ in range(workers)], [])

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        if slower is not None:
            longer = step - 1 in played.masks[rank]
            paceline.pace(COMPUTE * (slower(rank, step) if longer else 1.0))
        value: torch.Tensor = model(torch.ones(1))
        return value

    def watch(rank: int, step: int, model: nn.Module, optimizer: Any) -> None:
        layout = getattr(inspect(optimizer).worker, "layout", None)
        mask = () if layout is None else tuple(layout.deferred)
        if mask:
            played.masks[rank][step] = mask
        played.moments[rank].append(paceline.now())
        if rank == 0:
            sizes = (1,) if layout is None else layout.sizes
            played.parts.append(sum(sizes[n] for n in mask) / sum(sizes))

    rack = Rack(workers=workers, link=link_for(ratio, workload), latency=5e-6)
    cluster = Cluster((rack,), rules, servers=(ServerHost(),) * servers)
    compute = ComputeModel(workload=workload) if slower is None else None
    training.train(
        method,
        Simulation(cluster, compute=compute),
        steps,
        make=lambda: paceline.stand_in(workload),
        optimizer=plain_sgd,
        loss=loss,
        watch=watch,
        buckets=buckets,
        reads=False,
    )
    return played


def test_a_fast_network_defers_nothing_until_it_becomes_slow() -> None:
    slow = link_for(1.5, FOUR)
    rules = tuple(throttle(f"worker {w}", slow, step=50) for w in range(2))
    played = play(NATIVE, 105, FOUR, 1.5 / 1000, rules=rules)
    assert played.parts[:50] == [0.0] * 50
    # Decisions are made every twenty steps, of the medians over as many, and hold a
    # step later: one in step 80 has seen the throttled network alone.
    assert min(played.parts[82:]) >= 0.3
    throttled = (played.moments[0][58] - played.moments[0][52]) / 6
    assert played.step_seconds() < 0.8 * throttled


def test_what_backward_hides_stays() -> None:
    """Only the last layer's gradients are waited for, a quarter of all."""
    ratio = 0.5
    plain = play("bsp", 15, FOUR, ratio).step_seconds(10)
    assert plain == pytest.approx(COMPUTE * (1 + ratio / 4), rel=0.01)
    played = play(NATIVE, 45, FOUR, ratio)
    assert 0 < played.parts[-1] <= 0.25
    assert played.step_seconds() == pytest.approx(COMPUTE, rel=0.01)


def test_where_communication_takes_as_long_as_computing_a_quarter_is_saved() -> None:
    """The paper's best case, over bsp that overlaps as well. A step can be as short as that
    only if the network is busy from its beginning on: what it moves until the first
    gradients are ready is the least that must be deferred."""
    plain = play("bsp", 15, SIXTEEN).step_seconds(10)
    played = play(NATIVE, 45, SIXTEEN)
    idle = (1 / 3 + 2 / 3 / 16) * COMPUTE
    assert plain == pytest.approx(idle + COMPUTE, rel=0.01)
    assert played.step_seconds() <= plain / 1.3
    assert idle / COMPUTE <= played.parts[-1] <= idle / COMPUTE + 1 / 16


@pytest.mark.slow
def test_a_step_that_only_communicates_defers_no_more_than_helps() -> None:
    """At r = 2 the network must be busy all the time, and it is when what is deferred
    lasts until the first gradients are ready."""
    played = play(NATIVE, 65, SIXTEEN, 2.0)
    assert play("bsp", 25, SIXTEEN, 2.0).step_seconds() > 2.3 * COMPUTE
    assert played.step_seconds() == pytest.approx(2 * COMPUTE, rel=0.03)
    assert 0.15 < played.parts[-1] < 0.3


# ---- whole trainings: trials ----

TRYING = f"{NATIVE},most=1"
TRYING_ON_SERVER = "osp:budget=constant,most=1"
BOTH = [(TRYING, 0), (TRYING_ON_SERVER, 1)]


def by(factor: float) -> Callable[[int, int], float]:
    return lambda rank, step: factor


def assert_one_mask(masks: Sequence[dict[int, Mask]], steps: Sequence[int]) -> None:
    """Whoever trains in a step defers what the others do."""
    for one in range(len(steps)):
        for other in range(one):
            both = range(min(steps[one], steps[other]))
            here = [masks[one].get(step) for step in both]
            assert here == [masks[other].get(step) for step in both]


@pytest.mark.parametrize(
    ("of", "workers"),
    crossed(
        3,
        [
            (TRYING, 0, NATIVE_TRIAL),
            (f"{TRYING},overlap=false", 0, NATIVE_TRIAL),
            (TRYING_ON_SERVER, 1, SERVER_TRIAL),
            (TRYING_ON_SERVER, 2, SERVER_TRIAL),
            (f"{TRYING_ON_SERVER},servers=per-node", 0, SERVER_TRIAL),
        ],
        [2, 3],
    ),
)
def test_a_trial_that_makes_steps_much_longer_ends_soon(
    of: tuple[str, int, set[int]], workers: int
) -> None:
    method, servers, trial = of
    played = play(
        method, 3 * INTERVAL, workers=workers, servers=servers, slower=by(4.0)
    )
    for mask in played.masks:
        assert set(mask) == trial
    before, after = played.took(INTERVAL), played.took(3 * INTERVAL - 1)
    assert after == pytest.approx(before, rel=0.01)  # it is as without


@pytest.mark.slow
@pytest.mark.parametrize(("method", "servers"), BOTH)
def test_what_has_failed_is_tried_again_and_then_rests_for_longer(
    method: str, servers: int
) -> None:
    trial = SERVER_TRIAL if servers else NATIVE_TRIAL
    played = play(method, AGAIN + 4 * INTERVAL, servers=servers, slower=by(4.0))
    assert set(played.masks[0]) == trial | {step + AGAIN for step in trial}


@pytest.mark.parametrize(("method", "servers"), BOTH)
def test_a_trial_that_pays_goes_on_though_some_steps_are_longer(
    method: str, servers: int
) -> None:
    steps, odd = 3 * INTERVAL, {INTERVAL + 4: 30.0, INTERVAL + 6: 30.0}
    played = play(
        method, steps, servers=servers, slower=lambda rank, step: odd.get(step, 1.0)
    )
    assert set(played.masks[0]) == set(range(INTERVAL + 1, steps))
    assert played.took(steps - 1) < 0.8 * played.took(INTERVAL)


@pytest.mark.parametrize(("method", "servers"), BOTH)
def test_a_trial_that_gains_nothing_ends_with_its_interval(
    method: str, servers: int
) -> None:
    """Computing takes longer by what the network takes no longer."""
    hidden = play(method, INTERVAL + 10, servers=servers, slower=by(1.0))
    plain = hidden.took(INTERVAL - 1)
    factor = 1 + (plain - hidden.took(INTERVAL + 9)) * 1.1 / COMPUTE
    played = play(method, 2 * INTERVAL + 5, servers=servers, slower=by(factor))
    assert set(played.masks[0]) == set(range(INTERVAL + 1, 2 * INTERVAL + 1))
    assert plain < played.took(2 * INTERVAL - 1) < MUCH_LONGER * plain


# ---- uneven data: a step in which one rank decides and another does not is a hang ----

ENDS = [
    *range(INTERVAL, INTERVAL + 4),
    *range(INTERVAL + TRIAL_STEPS + 1, INTERVAL + TRIAL_STEPS + 6),
]
"""Around all that ranks do together: decisions, and the steps after which they hold."""


@pytest.mark.slow
@pytest.mark.parametrize(("short", "end"), crossed(1, [0, 1], ENDS))
def test_a_rank_runs_out_of_data_around_a_trial(short: int, end: int) -> None:
    """Rank 0 is who decides; who then does has seen no step yet as the one who decides, and
    finds out anew what steps take without."""
    steps = [3 * INTERVAL] * 3
    steps[short] = end
    masks = play(TRYING, steps, workers=3, slower=by(4.0)).masks
    assert_one_mask(masks, steps)
    last = masks[(short + 1) % 3]
    assert set(last) <= set(range(INTERVAL + 1, 3 * INTERVAL))
    assert end < INTERVAL or set(last) >= NATIVE_TRIAL
    assert not set(last).intersection(range(2 * INTERVAL + 1, 3 * INTERVAL))


@pytest.mark.parametrize(
    ("factor", "steps"),
    crossed(
        2,
        [1.0, 4.0],
        [(0, 33, 45), (33, 0, 45), (24, 27, 28), (28, 27, 24), (27, 0, 28)],
    ),
)
def test_ranks_run_out_of_data_one_after_the_other(
    factor: float, steps: tuple[int, ...]
) -> None:
    buckets = "ddp" if sum(steps) % 2 else "optimal"
    played = play(TRYING, steps, workers=3, buckets=buckets, slower=by(factor))
    assert_one_mask(played.masks, steps)


@pytest.mark.parametrize(
    ("method", "end"),
    crossed(
        2,
        [TRYING_ON_SERVER, f"{TRYING_ON_SERVER},servers=per-node"],
        [INTERVAL + 3, INTERVAL + TRIAL_STEPS + 3],
    ),
)
def test_a_rank_runs_out_of_data_over_servers(method: str, end: int) -> None:
    steps = (2 * INTERVAL, end, 2 * INTERVAL)
    servers = 0 if "per-node" in method else 2
    masks = play(method, steps, workers=3, servers=servers, slower=by(4.0)).masks
    assert_one_mask(masks, steps)
    assert set(masks[0]) >= set(range(INTERVAL + 1, end))
