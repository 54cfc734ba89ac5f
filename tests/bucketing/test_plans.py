"""Plans from measured times: the paper's figures, brute force, and laws."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from paceline import bucketing
from paceline.bucketing import AffineCost, Cost, TableCost
from paceline.errors import UsageError
from tests.bucketing.cases import (
    Step,
    all_plans,
    one_lane_end,
    random_cost,
    random_step,
    random_steps,
)

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


def ends(rule: str, step: Step, lanes: int = 1) -> float:
    """When the last all-reduce ends by *rule*'s plan."""
    plan = bucketing.plan(
        rule, step.sizes, step.ready, step.cost, kinds=step.kinds, lanes=lanes
    )
    return bucketing.finish(plan, step.sizes, step.ready, step.cost, lanes=lanes)


# ---- the paper's trace ----


@pytest.mark.parametrize("row", GOLDEN["rows"], ids=lambda row: row["workers"])
@pytest.mark.parametrize("rule", ["wfbp", "single", "greedy", "optimal", "ddp"])
def test_iteration_times_of_the_trace(rule: str, row: dict[str, Any]) -> None:
    cost = paper_cost(row["workers"])
    assert cost.start_up == pytest.approx(row["a_seconds"])
    assert cost.seconds_per_byte == pytest.approx(row["b_seconds_per_byte"])
    end = ends(OUR_NAMES.get(rule, rule), Step(SIZES, READY, cost))
    assert 1000 * end == pytest.approx(row["iteration_ms"][rule], abs=0.01)


@pytest.mark.parametrize("rule", ["wfbp", "single", "mg_wfbp"])
def test_efficiencies_of_figure_10a(rule: str) -> None:
    figure = GOLDEN["paper_efficiency_fig10a"]
    ours = [
        READY[-1] / ends(OUR_NAMES.get(rule, rule), Step(SIZES, READY, paper_cost(n)))
        for n in figure["workers"]
    ]
    assert len(ours) == 10
    assert ours == pytest.approx(figure[rule], abs=0.01)


def test_numbers_of_messages_that_the_paper_gives() -> None:
    figure = GOLDEN["paper_efficiency_fig10a"]
    counts = [
        len(bucketing.plan("mg-wfbp", SIZES, READY, paper_cost(n)))
        for n in figure["workers"]
    ]
    assert counts == figure["buckets_mg_wfbp"]


# ---- Theorem 1 does not hold ----


def test_three_tensors_for_which_the_papers_rule_is_not_optimal() -> None:
    step = Step([3.0] * 3, [0.0, 3.0, 6.0], AffineCost(4.0, 1.0))
    assert bucketing.plan("mg-wfbp", step.sizes, step.ready, step.cost) == [3]
    assert ends("mg-wfbp", step) == 19.0
    assert bucketing.plan("optimal", step.sizes, step.ready, step.cost) == [1, 2]
    assert ends("optimal", step) == 17.0


def test_ten_tensors_that_snowball() -> None:
    step = Step([3.0] * 10, [3.0 * i for i in range(10)], AffineCost(4.0, 1.0))
    assert ends("mg-wfbp", step) == 61.0
    assert ends("optimal", step) == 46.0
    assert ends("wfbp", step) == 70.0
    one = bucketing.finish([2, 3, 5], step.sizes, step.ready, step.cost)
    assert one == 46.0  # the notes' plan


# ---- brute force ----


def best_by_trying(step: Step, lanes: int = 1) -> float:
    plans = all_plans(len(step.sizes), step.kinds)
    if lanes == 1:
        return min(one_lane_end(plan, step) for plan in plans)
    return min(
        bucketing.finish(plan, step.sizes, step.ready, step.cost, lanes=lanes)
        for plan in plans
    )


@pytest.mark.parametrize("kinds", [False, True], ids=["one kind", "two kinds"])
def test_optimal_is_what_trying_all_plans_finds(kinds: bool) -> None:
    for step in random_steps(1, 250, 10, kinds=kinds):
        assert ends("optimal", step) == best_by_trying(step), step


def test_optimal_with_figures_that_are_not_whole() -> None:
    draw = random.Random(2)
    for _ in range(100):
        count = draw.randint(1, 10)
        at = sorted(draw.uniform(1e3, 1e7) for _ in range(4))
        seconds = sorted(draw.uniform(1e-4, 5e-2) for _ in range(4))
        gaps = [draw.choice([0.0, draw.uniform(0, 1e-2)]) for _ in range(count)]
        costs: list[Cost] = [
            TableCost(tuple(at), tuple(seconds)),
            AffineCost(draw.uniform(0, 1e-2), draw.uniform(0, 1e-8)),
            lambda size: 1e-3 * (1 + size) ** 0.5 / 1e2,
        ]
        step = Step(
            [draw.uniform(0, 4e6) for _ in range(count)],
            list(itertools.accumulate(gaps)),
            draw.choice(costs),
        )
        assert ends("optimal", step) == pytest.approx(best_by_trying(step), rel=1e-12)


@pytest.mark.parametrize("lanes", [2, 3])
def test_with_lanes_optimal_is_exact_where_few_plans_exist(lanes: int) -> None:
    for step in lanes_cases(3, 150, 2, 8):
        assert ends("optimal", step, lanes) == pytest.approx(
            best_by_trying(step, lanes)
        ), step


@pytest.mark.parametrize("lanes", [2, 3])
def test_with_lanes_and_more_tensors_optimal_is_near(lanes: int) -> None:
    ratios = []
    for step in lanes_cases(4, 60, 10, 12):
        end, least = ends("optimal", step, lanes), bound_of(step)
        if end > least * (1 + 1e-12):  # what meets the bound is the best there is
            least = best_by_trying(step, lanes)
        ratios.append(end / least)
    assert max(ratios) <= 1.08
    assert sum(ratios) / len(ratios) <= 1.01


def lanes_cases(seed: int, count: int, fewest: int, most: int) -> list[Step]:
    """Start-up and wire of the same order: where the number of lanes matters most."""
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


def runs_of(kinds: list[str] | None, count: int) -> list[int]:
    """For each tensor, where the run of tensors of its kind began."""
    kinds = kinds or [""] * count
    starts = [0] * count
    for i in range(1, count):
        starts[i] = starts[i - 1] if kinds[i] == kinds[i - 1] else i
    return starts


def bound_of(step: Step) -> float:
    return bucketing.bound(
        step.sizes, step.ready, step.cost, runs_of(step.kinds, len(step.sizes))
    )


@pytest.mark.parametrize("kinds", [False, True], ids=["one kind", "two kinds"])
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_optimal_is_never_worse_and_nothing_beats_the_bound(
    lanes: int, kinds: bool
) -> None:
    for step in random_steps(5, 80, 30, kinds=kinds, overlap=True):
        best = ends("optimal", step, lanes)
        for rule in bucketing.RULES:
            assert best <= ends(rule, step, lanes) * (1 + 1e-12), (rule, step)
        least = bound_of(step)
        assert least <= best * (1 + 1e-12), step
        if isinstance(step.cost, AffineCost) and step.cost.overlapping == 0:
            assert best == pytest.approx(least)  # lanes do nothing for the wire


@pytest.mark.parametrize("lanes", [2, 3])
def test_no_plan_at_all_beats_the_bound(lanes: int) -> None:
    for step in random_steps(6, 40, 8, kinds=True, overlap=True):
        assert bound_of(step) <= best_by_trying(step, lanes) * (1 + 1e-12), step


@pytest.mark.parametrize("rule", bucketing.RULES)
@pytest.mark.parametrize("lanes", [1, 2])
def test_kinds_are_never_mixed(rule: str, lanes: int) -> None:
    for step in random_steps(7, 60, 20, kinds=True, overlap=True):
        assert step.kinds is not None
        plan = bucketing.plan(
            rule, step.sizes, step.ready, step.cost, kinds=step.kinds, lanes=lanes
        )
        assert sum(plan) == len(step.sizes)
        kinds = iter(step.kinds)
        for length in plan:
            assert length >= 1
            assert len(set(itertools.islice(kinds, length))) == 1, (plan, step)


def test_without_start_up_a_bucket_per_tensor_is_optimal() -> None:
    for step in affine_cases(8, start_up=0.0):
        assert ends("wfbp", step) == ends("optimal", step)
        assert ends("mg-wfbp", step) == ends("optimal", step)


@pytest.mark.parametrize("rule", bucketing.MEASURED)
def test_without_bandwidth_cost_a_huge_start_up_makes_one_bucket(rule: str) -> None:
    for step in affine_cases(9, start_up=0.0):
        cost = AffineCost(2 * step.ready[-1] + 1, 0.0)
        plan = bucketing.plan(rule, step.sizes, step.ready, cost)
        assert plan == [len(step.sizes)]


def test_gradients_that_are_ready_together_travel_together() -> None:
    for step in affine_cases(10, start_up=3.0):
        cuts = itertools.accumulate(
            bucketing.plan("mg-wfbp", step.sizes, step.ready, step.cost)[:-1]
        )
        assert all(step.ready[cut - 1] < step.ready[cut] for cut in cuts)
        # The optimum may tie with plans that part them, and then prefers fewer messages.
        together = [
            len(list(same)) for _, same in itertools.groupby(step.ready, lambda r: r)
        ]
        merged = Step(
            [
                sum(step.sizes[b - n : b])
                for n, b in zip(together, itertools.accumulate(together), strict=True)
            ],
            sorted(set(step.ready)),
            step.cost,
        )
        assert ends("optimal", merged) == ends("optimal", step)
    assert bucketing.plan("optimal", [1] * 5, [7.0] * 5, AffineCost(1.0, 1.0)) == [5]


@pytest.mark.parametrize("rule", bucketing.MEASURED)
def test_plans_do_not_depend_on_the_unit_of_time(rule: str) -> None:
    for step in affine_cases(11, start_up=3.0):
        cost = AffineCost(3.0 / 1024, 1.0 / 1024)
        scaled = [time / 1024 for time in step.ready]
        assert bucketing.plan(rule, step.sizes, scaled, cost) == bucketing.plan(
            rule, step.sizes, step.ready, step.cost
        )


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
        step = random_step(draw, 25)
        a, b = float(draw.randint(0, 12)), float(draw.randint(0, 3))
        ours = bucketing.plan("mg-wfbp", step.sizes, step.ready, AffineCost(a, b))
        assert ours == algorithm_1(step, a, b), (step, a, b)
    for workers in range(2, 600, 20):
        cost = paper_cost(workers)
        step = Step(SIZES, READY, cost)
        ours = bucketing.plan("mg-wfbp", SIZES, READY, cost)
        assert ours == algorithm_1(step, cost.start_up, cost.seconds_per_byte)


def test_the_paper_s_rule_fits_a_line_to_a_curve() -> None:
    at = (1e4, 1e6, 1e8)
    line = AffineCost(5e-3, 4.4e-9)
    curve = TableCost(at, tuple(line(size) for size in at))
    sizes = [size + 1e4 for size in SIZES]
    assert bucketing.plan("mg-wfbp", sizes, READY, curve) == bucketing.plan(
        "mg-wfbp", sizes, READY, line
    )


# ---- groups where kinds alternate ----


@pytest.mark.parametrize("rule", bucketing.RULES)
def test_groups_partition_the_tensors_whatever_the_times(rule: str) -> None:
    for step in random_steps(13, 60, 15, kinds=True, overlap=True):
        groups = group(rule, step)
        assert sorted(itertools.chain(*groups)) == list(range(len(step.sizes)))
        assert step.kinds is not None
        for positions in groups:
            assert positions == sorted(positions)
            assert len({step.kinds[p] for p in positions}) == 1
        last = [positions[-1] for positions in groups]
        assert last == sorted(last)


@pytest.mark.parametrize("lanes", [1, 2])
def test_optimal_groups_never_end_later_than_another_rule_s(lanes: int) -> None:
    for step in random_steps(14, 150, 10, kinds=True, overlap=True):
        best = group_end(group("optimal", step, lanes), step, lanes)
        for rule in bucketing.RULES:
            other = group_end(group(rule, step, lanes), step, lanes)
            assert best <= other * (1 + 1e-12), (rule, step)


def group(rule: str, step: Step, lanes: int = 1) -> list[list[int]]:
    sizes = [int(size) for size in step.sizes]
    kinds = step.kinds or [""] * len(sizes)
    return bucketing.group(rule, sizes, kinds, step.ready, step.cost, lanes=lanes)


def group_end(groups: list[list[int]], step: Step, lanes: int = 1) -> float:
    sizes = [int(size) for size in step.sizes]
    return bucketing.finish_groups(groups, sizes, step.ready, step.cost, lanes=lanes)


def test_a_huge_start_up_sends_alternating_kinds_one_message_each() -> None:
    step = Step([1.0] * 4, [0.0, 1.0, 2.0, 3.0], AffineCost(100.0, 1.0), list("abab"))
    groups = group("optimal", step)
    assert groups == [[0, 2], [1, 3]]
    # The first is ready at 2 and ends at 2 + 102; the second then ends at 206.
    assert group_end(groups, step) == 206.0


def test_without_start_up_alternating_kinds_travel_as_they_become_ready() -> None:
    step = Step([5.0] * 4, [0.0, 5.0, 10.0, 15.0], AffineCost(0.0, 1.0), list("abab"))
    groups = group("optimal", step)
    assert group_end(groups, step) == 20.0


def test_without_times_groups_of_fixed_rules_are_as_ever() -> None:
    step = random_step(random.Random(15), 20, kinds=True)
    assert step.kinds is not None
    sizes = [int(size) for size in step.sizes]
    for rule in bucketing.FIXED:
        assert bucketing.group(rule, sizes, step.kinds) == group(rule, step)


# ---- bad input ----


@pytest.mark.parametrize("rule", bucketing.RULES)
def test_no_tensors_make_no_buckets(rule: str) -> None:
    assert bucketing.plan(rule, [], [], AffineCost(1.0, 1.0)) == []
    assert bucketing.group(rule, [], [], [], AffineCost(1.0, 1.0)) == []


@pytest.mark.parametrize("rule", bucketing.MEASURED)
@pytest.mark.parametrize(
    ("sizes", "ready", "lanes", "message"),
    [
        ([1, 2], [0.0], 1, r"one time per tensor, 2, got 1"),
        ([1, -2], [0.0, 1.0], 1, "gradient_bytes: .*got -2"),
        ([1, float("nan")], [0.0, 1.0], 1, r"gradient_bytes: .* got nan"),
        ([1, 2], [1.0, 0.5], 1, r"do not fall, .* got 0.5 after 1.0"),
        ([1, 2], [-1.0, 0.5], 1, r"zero or more .* got -1.0 after 0.0"),
        ([1, 2], [0.0, float("inf")], 1, r"ready_seconds: .* got inf"),
        ([1, 2], [0.0, float("nan")], 1, r"ready_seconds: .* got nan"),
        ([1, 2], [0.0, 1.0], 0, r"lanes: expected 1 or more, got 0"),
    ],
)
def test_times_and_sizes_that_cannot_be(
    rule: str, sizes: list[float], ready: list[float], lanes: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        bucketing.plan(rule, sizes, ready, AffineCost(1.0, 1.0), lanes=lanes)


def test_a_measured_rule_needs_a_cost() -> None:
    with pytest.raises(UsageError, match=r"'optimal': expected ready_seconds and a"):
        bucketing.plan("optimal", [1], [0.0])


def test_one_kind_per_tensor() -> None:
    with pytest.raises(UsageError, match=r"kinds: .*2, got 1"):
        bucketing.plan("single", [1, 2], kinds=["a"])


def test_random_costs_never_fall() -> None:
    """What these tests rely on."""
    draw = random.Random(16)
    for _ in range(100):
        cost = random_cost(draw, overlap=True)
        times = [cost(float(size)) for size in range(40)]
        assert times == sorted(times)
