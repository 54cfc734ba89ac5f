"""The pure parts of OSP: what to defer, how much, which first, and how it is laid out."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks.osp_comparisons import Inverse, InverseOSP, Random
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.settings import parse_method
from paceline.errors import UsageError
from paceline.interfaces.buckets import make_buckets
from paceline.methods.osp.deferral import (
    VISIBLE,
    Parts,
    Rate,
    StepTimes,
    choose,
    fill,
    levelled,
    measured_rate,
    step_seconds,
)
from paceline.methods.osp.deferral_policy import Decision
from paceline.methods.osp.measurement import Growth
from paceline.methods.osp.options import EPOCHS, Importance, OSPOptions
from paceline.methods.osp.piece_layout import Layout
from paceline.parameter_server.optim.partitioned import (
    PartitionedOptimizer,
    split_pieces,
)

# ---- what to defer ----


def turns(options: OSPOptions, parts: Parts, values: list[float]) -> list[int]:
    """In which order pieces of such importance are deferred."""
    decision = Decision(options, pulls=False)
    for number, value in enumerate(values):
        decision.importance.rate(number, torch.tensor([value]), torch.ones(1))
    return decision.order(parts, step=0)


@st.composite
def steps(draw):
    """A model in buckets, its times, a network, and an order of importance."""
    count = draw(st.integers(1, 5))
    buckets = sorted(draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=12)))
    sizes = [draw(st.integers(1, 1000)) for _ in buckets]
    ready = sorted(draw(st.floats(0.001, 1.0)) for _ in range(count))
    times = StepTimes(ready, ready[-1] + draw(st.floats(0, 0.2)))
    rate = Rate(draw(st.floats(0, 0.05)), draw(st.floats(1e-7, 1e-2)))
    order = draw(st.permutations(range(len(buckets))))
    return Parts(sizes, buckets, count), times, rate, list(order)


@given(steps(), st.floats(0, 2), st.floats(0, 1e-4))
def test_what_is_chosen_fits_and_pays(step, most, cost):
    parts, times, rate, order = step
    budget = most * sum(parts.sizes)
    chosen = choose(parts, [order], times, rate, budget, cost)
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
    assert choose(parts, [order], times, Rate(0.0, 1e-12), math.inf) == []


@given(steps(), st.floats(0, 1))
def test_the_measured_rate_explains_the_observed_time(step, part):
    parts, times, rate, order = step
    deferred = fill(parts, order, part * sum(parts.sizes))
    size, left = parts.total(deferred), parts.left(deferred)
    observed = step_seconds(times, size, left, rate)
    measured = measured_rate(times, size, left, rate, observed)
    free = step_seconds(times, size, left, Rate(rate.start_up, 0.0))
    if measured is None:
        assert observed <= free * (1 + VISIBLE)
    else:
        again = step_seconds(times, size, left, Rate(rate.start_up, measured))
        assert again == pytest.approx(observed, rel=1e-6)
        assert measured == pytest.approx(rate.per_byte, rel=1e-3)


def test_where_nothing_is_sent_nothing_is_measured():
    assert measured_rate(StepTimes([1.0], 1.0), 0, [0], Rate(0.0, 0.0), 9.0) is None


def test_a_step_by_hand():
    # 2 s for what was deferred; bucket 0 waits for it, bucket 1 for its gradients.
    times, rate = StepTimes([1.0, 8.0], 8.5), Rate(1.0, 0.01)
    assert step_seconds(times, 100, [200, 50], rate) == pytest.approx(8 + 1.5)
    assert step_seconds(times, 100, [900, 50], rate) == pytest.approx(2 + 10 + 1.5)
    # Workers meet in the last bucket's message also where it is empty.
    assert step_seconds(times, 100, [200, 0], rate) == pytest.approx(8 + 1)
    assert step_seconds(times, 0, [0, 0], Rate(0.0, 0.01)) == 8.5


def test_the_unimportant_half_is_deferred_where_that_hides_the_rest():
    # Four pieces, ready when backward ends; r = 1: each half takes half a computation.
    parts = Parts([100] * 4, [0, 0, 0, 0], 1)
    times, rate = StepTimes([4.0], 4.0), Rate(0.0, 0.01)
    assert choose(parts, [[2, 0, 3, 1]], times, rate, 200) == [0, 2]
    assert choose(parts, [[2, 0, 3, 1]], times, rate, 99) == []
    # deferring costs as much as it saves
    assert choose(parts, [[2, 0, 3, 1]], times, rate, 200, 0.01) == []


def test_what_backward_hides_is_not_deferred():
    # Bucket 0 is sent long before backward ends: only bucket 1 is waited for.
    parts = Parts([100, 100], [0, 1], 2)
    times, rate = StepTimes([1.0, 4.0], 4.0), Rate(0.0, 0.01)
    assert choose(parts, [[0, 1]], times, rate, 200) == [1]


def test_what_is_ready_last_is_deferred_first_and_of_that_the_least_important() -> None:
    parts, values = Parts([1] * 5, [2, 0, 1, 2, 0], 3), [5.0, 4.0, 3.0, 2.0, 1.0]
    assert turns(OSPOptions(), parts, values) == [3, 0, 2, 4, 1]
    assert turns(InverseOSP(), parts, values) == [0, 3, 2, 1, 4]
    by_importance = [4, 3, 2, 1, 0]
    assert turns(OSPOptions(order="importance"), parts, values) == by_importance
    assert turns(OSPOptions(overlap=False), parts, values) == by_importance


@given(steps(), st.floats(0, 2))
def test_in_turns_as_much_is_gained_as_in_any_other_order_of_as_many(step, most):
    """Where pieces are of one size: what is ready last is what a step waits for."""
    parts, times, rate, order = step
    parts = Parts([100] * len(parts.sizes), parts.buckets, parts.bucket_count)
    rate = Rate(0.0, rate.per_byte)  # deferring all of a bucket saves a message
    budget = most * sum(parts.sizes)
    late = turns(OSPOptions(), parts, [0.0] * len(order))

    def takes(turn: list[int]) -> float:
        chosen = fill(parts, turn, budget)
        return step_seconds(times, parts.total(chosen), parts.left(chosen), rate)

    assert takes(late) <= takes(order) * (1 + 1e-9)


def test_where_pulls_follow_pushes_the_largest_bucket_is_waited_for_twice() -> None:
    # Pushed 1, 3 and 2, and pulled in turn: the three pieces of bucket 1 are in the way.
    parts = Parts([100] * 6, [0, 1, 1, 1, 2, 2], 3)
    times, rate = StepTimes([0.9, 1.0, 1.1], 1.1), Rate(0.0, 0.01, pulls=True)
    late = turns(OSPOptions(), parts, [0.0] * 6)
    assert levelled(parts, late) == [1, 4, 2, 5, 3, 0]
    assert step_seconds(times, 0, [100, 300, 200], rate) == pytest.approx(9.9)
    assert step_seconds(times, 100, [100, 300, 100], rate) == pytest.approx(9.0)
    assert step_seconds(times, 100, [100, 200, 200], rate) == pytest.approx(8.0)
    assert choose(parts, [late, levelled(parts, late)], times, rate, 100) == [1]
    assert choose(parts, [late], times, rate, 100) == [4]


@given(steps())
def test_levelling_takes_each_piece_once_from_what_is_largest(step):
    parts, _, _, order = step
    left = parts.left(())
    turn = levelled(parts, order)
    assert sorted(turn) == list(range(len(parts.sizes)))
    for number, piece in enumerate(turn):
        open_ = {parts.buckets[other] for other in turn[number:]}
        assert left[parts.buckets[piece]] == max(left[bucket] for bucket in open_)
        left[parts.buckets[piece]] -= parts.sizes[piece]


@given(st.lists(st.integers(1, 100), max_size=20), st.floats(0, 500), st.randoms())
def test_fill_takes_what_fits_in_order(sizes, budget, random):
    parts = Parts(sizes, [0] * len(sizes), 1)
    order = list(range(len(sizes)))
    random.shuffle(order)
    taken, room = fill(parts, order, budget), budget
    for piece in order:
        if piece in taken:
            room -= sizes[piece]
        else:
            assert sizes[piece] > room
    assert room >= 0


# ---- how much ----


def growth(kind, ramp=20):
    said = []
    return Growth(kind, ramp, said.append), said


def test_constant_growth_is_all_from_the_start():
    grows, said = growth("constant")
    assert grows.part == 1.0
    assert not said


def test_linear_growth_takes_its_ramp():
    grows, said = growth("linear", 4)
    parts = [grows.part]
    for _ in range(6):
        grows.step(None)
        parts.append(grows.part)
    assert parts == [0, 0.25, 0.5, 0.75, 1, 1, 1]
    assert not said


def test_growth_follows_the_least_mean_loss():
    grows, said = growth("loss", 2 * EPOCHS)  # means over two steps
    parts = []
    for loss in (9.0, 7.0, 4.0, 4.0, 6.0, 6.0, math.nan, 2.0, -1.0, -1.0):
        grows.step(loss)
        parts.append(grows.part)
    # means 8, 4, 6 (the least stays 4), 2 (a loss that is not a number is left out), -1
    assert parts == [0, 0, 0, 0.5, 0.5, 0.5, 0.5, 0.75, 0.75, 1.0]
    assert not said


def test_without_a_loss_growth_is_linear_and_says_so_once():
    grows, said = growth("loss", 2 * EPOCHS)
    for step in range(1, 2 * EPOCHS + 1):
        grows.step(None)
        assert grows.part == (0 if step == 1 else step / (2 * EPOCHS))
    assert len(said) == 1
    assert "step(loss=loss)" in said[0]
    assert f"{2 * EPOCHS} steps" in said[0]


def test_a_loss_that_is_no_longer_told_leaves_growth_where_it_is():
    grows, said = growth("loss", EPOCHS)
    for loss in (4.0, 1.0, None, None, None):
        grows.step(loss)
    assert grows.part == 0.75
    assert not said


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


# ---- how it is laid out ----


@st.composite
def layouts(draw):
    """Parameters of some kinds in buckets, cut into pieces, some deferred. Some
    parameters may be unknown to the optimizer."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=7))
    kinds = [draw(st.sampled_from([torch.float32, torch.float64])) for _ in sizes]
    parameters = [
        (f"p{i}", torch.nn.Parameter(torch.zeros(size, dtype=kind)))
        for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True))
    ]
    order = draw(st.permutations(range(len(sizes))))
    groups: list[list[int]] = []
    for index in order:
        last = groups[-1] if groups else None
        if last and kinds[last[0]] == kinds[index] and draw(st.booleans()):
            last.append(index)
        else:
            groups.append([index])
    known = [p for _, p in parameters if draw(st.integers(0, 4))]
    known = known or [parameters[0][1]]
    optimizer = torch.optim.SGD(known[::-1], lr=0.1)
    pieces = split_pieces(optimizer, draw(st.integers(8, 200)))
    deferred = [n for n in range(len(pieces)) if draw(st.booleans())]
    return parameters, groups, PartitionedOptimizer(optimizer, pieces), pieces, deferred


@given(layouts())
def test_each_gradient_is_in_one_message_once(case):
    parameters, groups, updater, pieces, deferred = case
    buckets = make_buckets(parameters, groups)
    layout = Layout(buckets, updater)
    layout.defer(deferred)
    assert layout.pieces == sorted(pieces)
    number = 1.0
    for bucket in buckets:
        bucket.buffer.copy_(torch.arange(number, number + bucket.buffer.numel()))
        number += bucket.buffer.numel()

    messages = [layout.message(bucket) for bucket in buckets]
    for bucket, message in zip(buckets, messages, strict=True):
        assert message.flat.dtype == bucket.buffer.dtype
        assert not set(message.parts) & set(deferred)
    late = layout.late_messages()
    assert sorted(n for message in late for n in message.parts) == deferred

    found = {}
    for message in [*messages, *late]:
        assert message.flat.numel() == sum(
            part.numel() for part in message.parts.values()
        )
        for piece, part in message.parts.items():
            assert piece not in found
            assert part.dtype == message.flat.dtype
            found[piece] = part
    assert sorted(found) == list(range(len(pieces)))
    views = {
        id(p): view.reshape(-1)
        for bucket in buckets
        for p, view in zip(bucket.parameters, bucket.views, strict=True)
    }
    owners = [p for group in updater._optimizer.param_groups for p in group["params"]]
    names = {id(p): name for name, p in parameters}
    for index, piece in enumerate(layout.pieces):
        owner = owners[piece.parameter]
        expected = views[id(owner)][piece.start : piece.stop]
        assert torch.equal(found[index], expected)
        assert torch.equal(layout.gradient(index), expected)
        assert layout.name_of(index) == names[id(owner)]
    for bucket in buckets:
        bucket.used[:] = [name != "p0" for name in bucket.names]
    gone = {n for n in range(len(pieces)) if layout.name_of(n) == "p0"}
    assert layout.unused() == gone


@given(layouts())
def test_parts_are_the_bytes_of_each_bucket(case):
    parameters, groups, updater, _, deferred = case
    buckets = make_buckets(parameters, groups)
    layout = Layout(buckets, updater)
    parts = layout.parts()
    owned = {
        id(p): p for group in updater._optimizer.param_groups for p in group["params"]
    }
    for bucket, left in zip(buckets, parts.left(()), strict=True):
        mine = [p for p in bucket.parameters if id(p) in owned]
        assert left == sum(p.numel() * p.element_size() for p in mine)
    assert parts.total(deferred) + sum(parts.left(deferred)) == sum(parts.sizes)


def test_a_layout_follows_new_buckets():
    parameters = [(f"p{i}", torch.nn.Parameter(torch.zeros(3))) for i in range(3)]
    optimizer = torch.optim.SGD([p for _, p in parameters], lr=0.1)
    updater = PartitionedOptimizer(optimizer, split_pieces(optimizer, 100))
    buckets = make_buckets(parameters, [[0], [1, 2]])
    layout = Layout(buckets, updater)
    layout.defer([1])
    changes = layout.changes
    layout.defer([1])
    assert layout.changes == changes
    buckets = make_buckets(parameters, [[2, 1, 0]])
    layout.follow(buckets)
    assert layout.changes == changes + 1
    buckets[0].buffer.copy_(torch.arange(9.0))
    message = layout.message(buckets[0])
    assert list(message.parts) == [2, 0]
    assert message.flat.tolist() == [0, 1, 2, 6, 7, 8]
    assert layout.gradient(1).tolist() == [3, 4, 5]


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


@pytest.mark.parametrize("loss", [0.0, -3.0])
def test_a_first_loss_that_cannot_fall_grows_the_budget_linearly(loss):
    said = []
    growth = Growth("loss", 20, said.append)
    for _ in range(10):
        growth.step(loss)
    assert growth.part == 0.5
    assert len(said) == 1
    assert f"the first losses' mean is {loss:.3g}" in said[0]
