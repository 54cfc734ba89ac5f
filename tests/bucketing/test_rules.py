"""Bucket rules: the paper's figures, torch's own rule, brute force, and laws."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.bucketing.cost_models import AffineCost, Cost, MeasuredCost
from paceline.bucketing.rules import (
    FIXED,
    MEASURED,
    RULES,
    _neighbours,
    check_rule,
    lower_bound,
    plan_buckets,
)
from paceline.errors import UsageError
from tests.bucketing.cases import (
    Step,
    all_plans,
    buckets_of,
    end_one_by_one,
    random_cost,
    random_step,
    random_steps,
)
from tests.support.profiles import examples

MIB = 1024 * 1024

DATA = Path(__file__).parent / "data"
ALPHA, BETA, GAMMA = 45.25e-6, 1.2 / (9 * 2**30 / 8), 2.5e-9
"""Seconds of a message, of a byte on the wire, of adding one: the paper's simulation."""


def read(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())


TRACE = read("googlenet_k80_trace")
GOLDEN = read("googlenet_k80_golden")
SIZES: list[float] = TRACE["gradient_bytes"]
FORWARD = 0.5 * sum(TRACE["backward_seconds"])
READY = list(itertools.accumulate(TRACE["backward_seconds"], initial=FORWARD))[1:]
OUR_NAMES = {"greedy": "mg-wfbp", "mg_wfbp": "mg-wfbp"}


def paper_cost(workers: int) -> AffineCost:
    """The ring of the paper's simulation, whose start-up is 2 N alpha, not 2(N-1)."""
    turns = (workers - 1) / workers
    return AffineCost(2 * workers * ALPHA, turns * (2 * BETA + GAMMA))


# ---- the paper's trace ----


@pytest.mark.parametrize("row", GOLDEN["rows"], ids=lambda row: row["workers"])
@pytest.mark.parametrize("rule", ["wfbp", "single", "greedy", "optimal", "ddp"])
def test_iteration_times_of_the_trace(rule: str, row: dict[str, Any]) -> None:
    cost = paper_cost(row["workers"])
    assert cost.start_up == pytest.approx(row["a_seconds"])
    assert cost.seconds_per_byte == pytest.approx(row["b_seconds_per_byte"])
    end = Step(SIZES, READY, cost).end_by(OUR_NAMES.get(rule, rule))
    assert 1000 * end == pytest.approx(row["iteration_ms"][rule], abs=0.01)


@pytest.mark.parametrize("rule", ["wfbp", "single", "mg_wfbp"])
def test_efficiencies_of_figure_10a(rule: str) -> None:
    figure = GOLDEN["paper_efficiency_fig10a"]
    name = OUR_NAMES.get(rule, rule)
    steps = [Step(SIZES, READY, paper_cost(n)) for n in figure["workers"]]
    ours = [READY[-1] / step.end_by(name) for step in steps]
    assert len(ours) == 10
    assert ours == pytest.approx(figure[rule], abs=0.01)


def test_numbers_of_messages_that_the_paper_gives() -> None:
    figure = GOLDEN["paper_efficiency_fig10a"]
    steps = [Step(SIZES, READY, paper_cost(n)) for n in figure["workers"]]
    counts = [len(step.plan("mg-wfbp")) for step in steps]
    assert counts == figure["buckets_mg_wfbp"]


# ---- Theorem 1 does not hold ----


def test_three_tensors_for_which_the_papers_rule_is_not_optimal() -> None:
    step = Step([3.0] * 3, [0.0, 3.0, 6.0], AffineCost(4.0, 1.0))
    assert (step.plan("mg-wfbp"), step.end_by("mg-wfbp")) == ([[0, 1, 2]], 19.0)
    assert (step.plan("optimal"), step.end_by("optimal")) == ([[0], [1, 2]], 17.0)


def test_ten_tensors_that_snowball() -> None:
    step = Step([3.0] * 10, [3.0 * i for i in range(10)], AffineCost(4.0, 1.0))
    ends = {rule: step.end_by(rule) for rule in ("mg-wfbp", "optimal", "wfbp", "2+3+5")}
    assert ends == {"mg-wfbp": 61.0, "optimal": 46.0, "wfbp": 70.0, "2+3+5": 46.0}


# ---- brute force ----


def best_by_trying(step: Step, at_once: int = 1) -> float:
    """Of all plans that merge neighbours of one kind."""
    plans = all_plans(len(step.sizes), step.kinds)
    if at_once == 1:
        return min(end_one_by_one(plan, step) for plan in plans)
    return min(step.end(buckets_of(plan), at_once) for plan in plans)


def test_optimal_is_what_trying_all_plans_finds() -> None:
    for step in random_steps(1, 250, 10):
        assert step.end_by("optimal") == best_by_trying(step), step


def test_with_two_kinds_optimal_is_that_or_better() -> None:
    """It may also merge tensors that are no neighbours."""
    for step in random_steps(1, 250, 10, kinds=True):
        assert step.end_by("optimal") <= best_by_trying(step), step


def test_optimal_with_figures_that_are_not_whole() -> None:
    draw = random.Random(2)
    for _ in range(100):
        count = draw.randint(1, 10)
        at = sorted(draw.uniform(1e3, 1e7) for _ in range(4))
        seconds = sorted(draw.uniform(1e-4, 5e-2) for _ in range(4))
        gaps = [draw.choice([0.0, draw.uniform(0, 1e-2)]) for _ in range(count)]
        costs: list[Cost] = [
            MeasuredCost(tuple(at), tuple(seconds)),
            AffineCost(draw.uniform(0, 1e-2), draw.uniform(0, 1e-8)),
            lambda size: 1e-3 * (1 + size) ** 0.5 / 1e2,
        ]
        step = Step(
            [draw.uniform(0, 4e6) for _ in range(count)],
            list(itertools.accumulate(gaps)),
            draw.choice(costs),
        )
        assert step.end_by("optimal") == pytest.approx(best_by_trying(step), rel=1e-12)


@pytest.mark.parametrize("at_once", [2, 3])
def test_with_several_at_once_optimal_is_exact_where_few_plans_exist(
    at_once: int,
) -> None:
    for step in cases_of_equal_costs(3, 150, 2, 8):
        assert step.end_by("optimal", at_once) == pytest.approx(
            best_by_trying(step, at_once)
        ), step


@pytest.mark.parametrize("at_once", [2, 3])
def test_with_more_tensors_optimal_is_near(at_once: int) -> None:
    ratios = []
    for step in cases_of_equal_costs(4, 60, 10, 12):
        end, least = step.end_by("optimal", at_once), lower_bound(*known(step))
        if end > least * (1 + 1e-12):  # what meets the bound is the best there is
            least = best_by_trying(step, at_once)
        ratios.append(end / least)
    assert max(ratios) <= 1.08
    assert sum(ratios) / len(ratios) <= 1.01


def test_a_plan_has_neighbours_with_each_bucket_cut_in_two() -> None:
    alike = [0] * 5  # tensors of one kind
    assert list(_neighbours([5], alike)) == [[2, 3], [4, 1]]
    assert [1, 1, 3] in list(_neighbours([2, 3], alike))


def cases_of_equal_costs(seed: int, count: int, fewest: int, most: int) -> list[Step]:
    """Start-up and wire of the same order: where the number at a time matters most."""
    draw = random.Random(seed)
    steps = []
    for _ in range(count):
        tensors = draw.randint(fewest, most)
        start_up, gap = draw.choice([1.0, 3.0, 6.0]), draw.choice([1, 2, 4, 8])
        overlap = draw.choice([None, start_up / 2, 0.0])
        biggest = draw.choice([2, 6, 12])
        gaps = [float(draw.randint(0, gap)) for _ in range(tensors)]
        steps.append(
            Step(
                [float(draw.randint(0, biggest)) for _ in range(tensors)],
                list(itertools.accumulate(gaps)),
                AffineCost(start_up, 1.0, overlap),
            )
        )
    return steps


# ---- laws ----


def known(step: Step) -> tuple[list[float], list[float], Cost, list[int]]:
    """What `lower_bound` takes, for tensors of one kind."""
    return step.sizes, step.ready, step.cost, [0] * len(step.sizes)


@pytest.mark.parametrize("kinds", [False, True], ids=["one kind", "two kinds"])
@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_optimal_is_never_worse_and_nothing_beats_the_bound(
    at_once: int, kinds: bool
) -> None:
    for step in random_steps(5, 80, 30, kinds=kinds, overlap=True):
        best = step.end_by("optimal", at_once)
        for rule in RULES:
            assert best <= step.end_by(rule, at_once) * (1 + 1e-12), (rule, step)
        least = lower_bound(*known(step))
        if not kinds:
            assert least <= best * (1 + 1e-12), step
        if not kinds and getattr(step.cost, "overlappable_startup", 1) == 0:
            # More at a time do nothing for the wire.
            assert isinstance(step.cost, MeasuredCost) or best == pytest.approx(least)


@pytest.mark.parametrize("at_once", [2, 3])
def test_no_plan_at_all_beats_the_bound(at_once: int) -> None:
    for step in random_steps(6, 40, 8, overlap=True):
        least = lower_bound(*known(step))
        assert least <= best_by_trying(step, at_once) * (1 + 1e-12), step


def assert_partition(buckets: list[list[int]], kinds: Sequence[Any]) -> None:
    """Each tensor is in one bucket, of one kind; buckets are in the order of their last tensors."""
    assert sorted(itertools.chain(*buckets)) == list(range(len(kinds)))
    for positions in buckets:
        assert positions == sorted(positions)
        assert len({kinds[p] for p in positions}) == 1
    last = [positions[-1] for positions in buckets]
    assert last == sorted(last)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("at_once", [1, 2])
def test_buckets_partition_the_tensors_whatever_the_times(
    rule: str, at_once: int
) -> None:
    for step in random_steps(13, 60, 15, kinds=True, overlap=True):
        assert step.kinds is not None
        assert_partition(step.plan(rule, at_once), step.kinds)
        if rule in FIXED:  # times change nothing
            assert plan_buckets(rule, step.sizes, step.kinds) == step.plan(rule)


def test_without_start_up_a_bucket_per_tensor_is_optimal() -> None:
    for step in affine_cases(8, start_up=0.0):
        assert step.end_by("wfbp") == step.end_by("optimal") == step.end_by("mg-wfbp")


@pytest.mark.parametrize("rule", MEASURED)
def test_without_bandwidth_cost_a_huge_start_up_makes_one_bucket(rule: str) -> None:
    for step in affine_cases(9, start_up=0.0):
        cost = AffineCost(2 * step.ready[-1] + 1, 0.0)
        assert len(Step(step.sizes, step.ready, cost).plan(rule)) == 1


def test_gradients_that_are_ready_together_travel_together() -> None:
    for step in affine_cases(10, start_up=3.0):
        for bucket in step.plan("mg-wfbp")[:-1]:
            assert step.ready[bucket[-1]] < step.ready[bucket[-1] + 1]
        # The optimum may tie with plans that part them, and then prefers fewer messages.
        sizes: dict[float, float] = {}
        for size, ready in zip(step.sizes, step.ready, strict=True):
            sizes[ready] = sizes.get(ready, 0.0) + size
        merged = Step(list(sizes.values()), list(sizes), step.cost)
        assert merged.end_by("optimal") == step.end_by("optimal")
    together = Step([1.0] * 5, [7.0] * 5, AffineCost(1.0, 1.0))
    assert len(together.plan("optimal")) == 1


@pytest.mark.parametrize("rule", MEASURED)
def test_plans_do_not_depend_on_the_unit_of_time(rule: str) -> None:
    for step in affine_cases(11, start_up=3.0):
        scaled = [time / 1024 for time in step.ready]
        other = Step(step.sizes, scaled, AffineCost(3.0 / 1024, 1.0 / 1024))
        assert other.plan(rule) == step.plan(rule)


def affine_cases(seed: int, start_up: float) -> list[Step]:
    draw = random.Random(seed)
    steps = [random_step(draw, 20) for _ in range(100)]
    return [Step(s.sizes, s.ready, AffineCost(start_up, 1.0)) for s in steps]


def algorithm_1(step: Step, start_up: float, per_byte: float) -> list[int]:
    """MG-WFBP's Algorithm 1 as it is printed: layers L to 1, in ready order; all tau_c
    are computed anew after each merge, in O(L^2)."""
    count = len(step.sizes)
    layers = range(count, 0, -1)  # layer L is ready first
    p = {layer: step.sizes[count - layer] for layer in layers}
    ready = {layer: step.ready[count - layer] for layer in layers}
    t_c = {layer: start_up + per_byte * p[layer] for layer in layers}
    merged = set()

    def starts() -> dict[int, float]:
        tau_c = {count: ready[count]}
        for layer in range(count - 1, 0, -1):
            tau_c[layer] = max(tau_c[layer + 1] + t_c[layer + 1], ready[layer])
        return tau_c

    tau_c = starts()
    for layer in range(count, 1, -1):
        if ready[layer - 1] < tau_c[layer] + start_up:
            merged.add(layer)
            p[layer - 1] += p[layer]
            t_c[layer] = 0.0
            t_c[layer - 1] = start_up + per_byte * p[layer - 1]
            tau_c = starts()
    lengths, length = [], 0
    for layer in layers:
        length += 1
        if layer not in merged:
            lengths.append(length)
            length = 0
    return lengths


def test_the_paper_s_algorithm_in_one_pass() -> None:
    draw = random.Random(12)
    for _ in range(1500):
        random_one = random_step(draw, 25)
        a, b = float(draw.randint(0, 12)), float(draw.randint(0, 3))
        step = Step(random_one.sizes, random_one.ready, AffineCost(a, b))
        assert step.plan("mg-wfbp") == buckets_of(algorithm_1(step, a, b)), step
    for workers in range(2, 600, 20):
        cost = paper_cost(workers)
        step = Step(SIZES, READY, cost)
        lengths = algorithm_1(step, cost.start_up, cost.seconds_per_byte)
        assert step.plan("mg-wfbp") == buckets_of(lengths)


def test_the_paper_s_rule_fits_a_line_to_a_curve() -> None:
    at = (1e4, 1e6, 1e8)
    line = AffineCost(5e-3, 4.4e-9)
    curve = MeasuredCost(at, tuple(line(size) for size in at))
    sizes = [size + 1e4 for size in SIZES]
    by_curve, by_line = (Step(sizes, READY, cost) for cost in (curve, line))
    assert by_curve.plan("mg-wfbp") == by_line.plan("mg-wfbp")


# ---- kinds that alternate ----


def test_a_huge_start_up_sends_alternating_kinds_one_message_each() -> None:
    step = Step([1.0] * 4, [0.0, 1.0, 2.0, 3.0], AffineCost(100.0, 1.0), list("abab"))
    assert step.plan("optimal") == [[0, 2], [1, 3]]
    # The first is ready at 2 and ends at 2 + 102; the second then ends at 206.
    assert step.end_by("optimal") == 206.0


def test_without_start_up_alternating_kinds_travel_as_they_become_ready() -> None:
    step = Step([5.0] * 4, [0.0, 5.0, 10.0, 15.0], AffineCost(0.0, 1.0), list("abab"))
    assert step.end_by("optimal") == 20.0


# ---- rules by size ----

HALF = ["half", "full", "half", "full", "half"]


@pytest.mark.parametrize(
    ("rule", "sizes", "kinds", "buckets"),
    [
        ("wfbp", [5, 0, 7], None, [[0], [1], [2]]),
        ("single", [5, 0, 7], None, [[0, 1, 2]]),
        # 0.6 + 0.6 MiB pass 1 MiB; then 20 + 4 stay under 25 MiB and 1 more reaches it.
        (
            "ddp",
            [6 * MIB // 10, 6 * MIB // 10, 20 * MIB, 4 * MIB, MIB, 10],
            None,
            [[0, 1], [2, 3, 4], [5]],
        ),
        ("single", [1] * 5, HALF, [[1, 3], [0, 2, 4]]),
        ("wfbp", [1] * 5, HALF, [[0], [1], [2], [3], [4]]),
        # Each kind counts its own bytes: "half" reaches 1 MiB with its second tensor.
        ("ddp", [MIB // 2, 10, MIB // 2, 10, 10], HALF, [[0, 2], [1, 3], [4]]),
        ("3+5+2", [1] * 10, None, [[0, 1, 2], [3, 4, 5, 6, 7], [8, 9]]),
        ("4", [1] * 4, None, [[0, 1, 2, 3]]),
        ("2+1", [1] * 3, ["a", "a", "b"], [[0, 1], [2]]),
    ],
)
def test_rules_by_size(
    rule: str, sizes: list[int], kinds: list[str] | None, buckets: list[list[int]]
) -> None:
    assert plan_buckets(rule, sizes, kinds) == buckets


_elements = st.one_of(
    st.integers(0, 1000),
    st.sampled_from([MIB // 4 - 1, MIB // 4, MIB // 4 + 1]),
    st.sampled_from([25 * MIB // 4 - 1, 25 * MIB // 4, 25 * MIB // 4 + 1]),
    st.integers(0, 8 * MIB),
)
"""Of 4 bytes: tiny tensors, some near 1 MiB and 25 MiB, and beyond."""


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(_elements, st.booleans()), min_size=1, max_size=30))
def test_ddp_is_torchs_own_rule(members: list[tuple[int, bool]]) -> None:
    tensors = [
        torch.empty(
            count, dtype=torch.float16 if half else torch.float32, device="meta"
        )
        for count, half in members
    ]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [MIB, 25 * MIB])
    sizes = [t.numel() * t.element_size() for t in tensors]
    # torch orders buckets by their first tensor, we by the one that completes them.
    ours = plan_buckets("ddp", sizes, [t.dtype for t in tensors])
    assert sorted(ours) == sorted(theirs)


# ---- bad input ----


@pytest.mark.parametrize("rule", RULES)
def test_no_tensors_make_no_buckets(rule: str) -> None:
    assert plan_buckets(rule, [], [], [], AffineCost(1.0, 1.0)) == []


def test_rules_are_the_fixed_and_the_measured_ones() -> None:
    assert RULES == ("ddp", "single", "wfbp", "mg-wfbp", "optimal")
    assert set(FIXED) | set(MEASURED) == set(RULES)
    assert [check_rule(rule) for rule in RULES] == list(RULES)


@pytest.mark.parametrize(
    "word", ["", "3+", "+3", "3+0", "3+-1", "3 + 5", "3,5", "1.0", "٣"]
)
def test_what_are_no_lengths_is_an_unknown_rule(word: str) -> None:
    with pytest.raises(UsageError, match=r"unknown bucket rule.*such as '3\+5\+2'"):
        check_rule(word)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("rule", "sizes", "kinds", "message"),
    [
        ("dpd", [1], None, "'dpd'.*Did you mean 'ddp'.*single, wfbp"),
        ("3+5+2", [1] * 9, None, r"'3\+5\+2': .* sum to the 9 gradients .* got 10"),
        ("1", [], None, "sum to the 0 gradients"),
        ("1+2+1", [1] * 4, list("aabb"), r"'1\+2\+1': .* tensors 1 to 2 mixes"),
        ("optimal", [1], None, "'optimal': expected ready times"),
        ("single", [1, 2], ["a"], r"kinds: .*2, got 1"),
        ("single", [1, -2], None, r"sizes: .*got -2"),
        ("single", [1, NAN], None, r"sizes: .*got nan"),
    ],
)
def test_rules_sizes_and_kinds_that_cannot_be(
    rule: str, sizes: list[float], kinds: list[str] | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        plan_buckets(rule, sizes, kinds)


@pytest.mark.parametrize("rule", MEASURED)
@pytest.mark.parametrize(
    ("ready", "at_once", "message"),
    [
        ([0.0], 1, r"one time per tensor, 2, got 1"),
        ([1.0, 0.5], 1, r"do not fall, .* got 0.5 after 1.0"),
        ([-1.0, 0.5], 1, r"zero or more .* got -1.0 after 0.0"),
        ([0.0, INF], 1, r"ready: .* got inf"),
        ([0.0, NAN], 1, r"ready: .* got nan"),
        ([0.0, 1.0], 0, r"max_in_flight: expected 1 or more, got 0"),
    ],
)
def test_times_that_cannot_be(
    rule: str, ready: list[float], at_once: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        plan_buckets(
            rule, [1, 2], None, ready, AffineCost(1.0, 1.0), max_in_flight=at_once
        )


def test_random_costs_never_fall() -> None:
    """What these tests rely on."""
    draw = random.Random(16)
    for _ in range(100):
        cost = random_cost(draw, overlap=True)
        times = [cost(float(size)) for size in range(40)]
        assert times == sorted(times)
