"""Which plan is found, adopted and announced, in virtual time without jitter: exact."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.bucketing.rules import plan_buckets
from paceline.bucketing.timeline import finish_time
from paceline.bucketing.tuner import PROFILED_STEPS, TRIAL_STEPS
from paceline.cluster import Workload
from paceline.collectives.schedules import Ring
from paceline.runtimes.simulated import ComputeModel
from paceline.runtimes.simulated.launch import result_of
from tests.bucketing.cases import buckets_of
from tests.bucketing.tunings import UNEVEN, Watched, on, ring_cost, train_stand_in
from tests.support.simulations import cluster, rack

TRIED = 1 + PROFILED_STEPS + 2 * TRIAL_STEPS
"""Backward passes until a plan was tried once: the first, those profiled, both sides."""


def planned(
    rule: str, workload: Workload, workers: int, at_once: int
) -> tuple[list[tuple[str, ...]], float]:
    """The buckets that *rule* makes of the workload's own times, and when they end."""
    cost = ring_cost(workers, at_once)
    sizes, ready = workload.gradient_bytes, workload.ready_seconds
    groups = plan_buckets(rule, sizes, None, ready, cost, max_in_flight=at_once)
    names = [workload.names[i] for i in workload.order]
    end = finish_time(groups, sizes, ready, cost, max_in_flight=at_once)
    return [tuple(names[p] for p in positions) for positions in groups], end


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("workers", [2, 4, 5])
def test_the_plan_adopted_is_that_of_the_workloads_own_times(workers, at_once):
    answers, _ = on(workers, lambda rank: train_stand_in(UNEVEN, 30), lanes=at_once)
    expected, end = planned("optimal", UNEVEN, workers, at_once)
    _, end_of_ddp = planned("ddp", UNEVEN, workers, at_once)
    assert end < 0.99 * end_of_ddp  # there is something to gain
    plan = answers[0].plan
    assert [name for group in plan for name in group] == [
        UNEVEN.names[i] for i in UNEVEN.order
    ]
    adopted = finish_time(
        buckets_of([len(names) for names in plan]),
        UNEVEN.gradient_bytes,
        UNEVEN.ready_seconds,
        ring_cost(workers, at_once),
        max_in_flight=at_once,
    )
    assert plan == expected or adopted <= end * (1 + 1e-9)
    for watched in answers:
        assert watched.plan == plan
        assert watched.settled_after == TRIED
        for seconds in watched.step_seconds[TRIED:]:
            assert seconds == pytest.approx(adopted + UNEVEN.update, rel=1e-9)


def test_where_a_plan_is_adopted_one_line_says_so(capsys):
    answers, runtime = on(4, lambda rank: train_stand_in(UNEVEN, 30))
    _, end = planned("optimal", UNEVEN, 4, 2)
    _, end_of_ddp = planned("ddp", UNEVEN, 4, 2)
    count = len(answers[0].plan)
    line = (
        f"paceline: bucketing: {count} buckets planned from measured times, "
        f"{1e3 * end:.4g} ms a pass in a trial (one forward, one backward, and waiting "
        f"for its averages); DDP's rule, 2 buckets, {1e3 * end_of_ddp:.4g} ms: the plan is "
        "used"
    )
    assert capsys.readouterr().err == f"{line}\n"
    recorder = runtime.result.recorders[0]
    assert [f"paceline: {note}" for note in recorder.notes] == [line]


def test_ddps_rule_stays_where_it_is_as_fast(capsys):
    """All is ready at once and a message costs nothing: one bucket, or DDP's two."""
    workload = Workload(
        names=("b", "a"),
        sizes=(2_000_000, 1_200_000),
        forward=(1e-3, 1e-3),
        backward=(0.0, 7e-3),
    )
    where = cluster(rack(2, latency=0.0))
    answers, _ = on(where, lambda rank: train_stand_in(workload, 20), lanes=1)
    (line,) = capsys.readouterr().err.splitlines()
    assert answers[0].groups[1 + PROFILED_STEPS] == [("a", "b")]  # on trial
    assert answers[0].plan == [("a",), ("b",)]
    assert line == (
        "paceline: bucketing: 1 bucket planned from measured times, 137 ms a pass in a "
        "trial (one forward, one backward, and waiting for its averages); DDP's rule, 2 "
        "buckets, 137 ms: the plan is no faster, and DDP's rule is kept"
    )


def test_a_plan_that_equals_ddps_is_not_tried(capsys):
    one = Workload(names=("a",), sizes=(400_000,), forward=(1e-3,), backward=(2e-3,))
    answers, _ = on(2, lambda rank: train_stand_in(one, 30))
    assert answers[0].settled_after == 1 + PROFILED_STEPS
    assert capsys.readouterr().err == ""


def test_mg_wfbp_is_adopted_without_a_trial(capsys):
    answers, _ = on(4, lambda rank: train_stand_in(UNEVEN, 30, buckets="mg-wfbp"))
    expected, _ = planned("mg-wfbp", UNEVEN, 4, 1)
    assert answers[0].groups[PROFILED_STEPS - 1] != expected
    assert all(groups == expected for groups in answers[0].groups[PROFILED_STEPS:])
    assert answers[0].settled_after == 1 + PROFILED_STEPS
    assert capsys.readouterr().err == ""


def ring_bytes(workers: int, groups: Sequence[tuple[str, ...]]) -> int:
    size_of = dict(zip(UNEVEN.names, UNEVEN.sizes, strict=True))
    return sum(
        Ring(workers, sum(size_of[name] for name in group)).bytes_sent(0)
        for group in groups
    )


@pytest.mark.parametrize("rule", ["ddp", "wfbp", "single", "2+4+1"])
def test_rules_that_know_only_sizes_measure_nothing(rule, capsys):
    answers, _ = on(4, lambda rank: train_stand_in(UNEVEN, 8, buckets=rule))
    watched: Watched = answers[0]
    usual = ring_bytes(4, watched.plan)
    order = Ring(4, 8 * len(UNEVEN.names)).bytes_sent(0)  # int64: rank 0's ready order
    assert watched.bytes_sent == [usual + order] + 7 * [usual]
    assert all(groups == watched.groups[0] for groups in watched.groups)
    assert watched.settled_after == 1
    assert capsys.readouterr().err == ""


def test_measured_rules_send_what_they_measure_and_then_no_more():
    answers, _ = on(4, lambda rank: train_stand_in(UNEVEN, 30))
    watched: Watched = answers[0]
    usual = ring_bytes(4, watched.plan)
    ddp = ring_bytes(4, planned("ddp", UNEVEN, 4, 2)[0])
    assert watched.bytes_sent[1:PROFILED_STEPS] == (PROFILED_STEPS - 1) * [ddp]
    assert watched.bytes_sent[PROFILED_STEPS] > 2 * usual  # the curve
    assert watched.bytes_sent[TRIED:] == (30 - TRIED) * [usual]


@pytest.mark.parametrize("rule", ["optimal", "mg-wfbp"])
def test_one_worker_measures_nothing(rule, capsys):
    answers, _ = on(1, lambda rank: train_stand_in(UNEVEN, 20, buckets=rule))
    watched: Watched = answers[0]
    assert watched.bytes_sent == 20 * [0]
    assert watched.settled_after == 1
    whole = UNEVEN.forward_seconds + UNEVEN.backward_seconds + UNEVEN.update
    assert watched.step_seconds == 20 * [pytest.approx(whole, rel=1e-9)]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("rule", "steps", "settled", "note"),
    [
        (
            "optimal",
            TRIED - 5,
            False,
            f"{TRIED - 5} steps did not reach steady state: buckets were",
        ),
        (
            "optimal",
            TRIED,
            False,
            f"{TRIED} steps did not reach steady state: buckets were still",
        ),
        ("optimal", TRIED + 1, True, "figures are of 1 step, from step "),
        ("ddp", 1, False, "one step only: its figures include the start-up"),
        ("ddp", 2, True, "figures are of 1 step, from step 2 on"),
        ("ddp", 11, True, None),
    ],
)
def test_a_result_says_whether_its_figures_are_of_steady_steps(
    rule, steps, settled, note
):
    _, runtime = on(2, lambda rank: train_stand_in(UNEVEN, steps, buckets=rule))
    result = result_of(runtime.result, cluster(rack(2)), ComputeModel())
    assert result.steady is settled
    said = result.cautions
    assert said == result.notes[: len(said)]
    assert [text.startswith(str(note)) for text in said] == [True] * bool(note)


def test_figures_are_of_steady_steps():
    answers, runtime = on(2, lambda rank: train_stand_in(UNEVEN, 30))
    recorder = runtime.result.recorders[0]
    summary = recorder.stats()
    assert summary.steps == 30
    assert summary.step_seconds == pytest.approx(
        recorder.steps[-1].step_seconds, rel=1e-9
    )
    assert recorder.buckets == len(answers[0].plan)
