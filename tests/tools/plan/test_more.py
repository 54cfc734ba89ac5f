"""More workers and faster links."""

import pytest

from paceline.tools.plan.estimates import Baseline, Estimate, Plan
from paceline.tools.plan.predict import TrainingJob
from paceline.tools.plan.what_if import seconds_at_most, shortlist, what_if
from tests.tools.plan.helpers import cluster, layers


def row(spec, consistency="exact", seconds=0.09, **others):
    figures = {
        "compute_seconds": 0.09,
        "exposed_seconds": seconds - 0.09,
        "bytes_sent": 0.0,
        "buckets": 1,
    }
    return Estimate(
        spec=spec, consistency=consistency, step_seconds=seconds, **(figures | others)
    )


def made(*rows):
    return Plan(
        cluster="4 workers",
        workload="layers",
        baseline=Baseline(
            workers=4,
            batch=32.0,
            single=row("one machine", seconds=4 * 0.09),
            lower_bound_seconds=0.2,
        ),
        estimates=rows,
        infeasible=(),
    )


def test_a_rejected_method_is_the_fastest_only_where_no_other_is():
    rejected = row("dear", seconds=0.1, fidelity="short", rejected=True)
    assert made(rejected, row("bsp", seconds=0.2)).fastest["exact"].spec == "bsp"
    assert made(rejected).fastest["exact"].spec == "dear"
    short = row("dear", seconds=0.1, fidelity="short")
    plan = made(short, row("bsp", seconds=0.2))
    assert plan.fastest["exact"].spec == plan.recommended["exact"].spec == "dear"
    assert shortlist(plan) == {"exact": ["dear", "bsp"]}


def test_a_faster_link_gives_what_it_would_give():
    plan = made(row("bsp:buckets=single", seconds=0.33))
    job = TrainingJob(cluster=cluster(4, latency="0s"), workload=layers(1))
    rates = (12.5e6, 125e6)
    points = what_if(plan, job, workers=(1, 2), rates=rates)
    size = sum(layers(1).sizes)
    by_place = {(point.workers, point.rate): point for point in points}
    assert len(points) == 4
    for rate in rates:
        assert by_place[1, rate].efficiency == 1
        seconds = 0.09 + size / rate
        assert by_place[2, rate].step_seconds == pytest.approx(seconds, rel=1e-6)
        assert by_place[2, rate].speedup == pytest.approx(2 * 0.09 / seconds)


def test_what_waits_for_nothing_is_not_run_with_faster_links():
    """Its figures would be the same; and so no slower link makes anything faster."""
    plan = made(row("bsp:compression=powersgd", "lossy"), row("local-sgd", "local"))
    job = TrainingJob(cluster=cluster(2, latency="0s"), workload=layers(2))
    points = what_if(plan, job, workers=(2, 4), rates=(12.5e6, 1.25e9, 3.125e9))
    assert len(points) == 2 * 2 * 3
    by_place = {(p.consistency, p.workers, p.rate): p.step_seconds for p in points}
    for consistency in ("lossy", "local"):
        for workers in (2, 4):
            mine = [by_place[consistency, workers, p.rate] for p in points[:6:2]]
            assert mine == sorted(mine, reverse=True)
            assert mine[-1] >= 0.09
    assert seconds_at_most(plan, job) > 0


def test_of_each_class_different_methods_or_codes_are_asked_what_if():
    plan = made(
        row("bsp:buckets=wfbp"),
        row("bsp:collective=auto"),
        row("dear", seconds=0.1),
        row("priority", seconds=0.2),
        row("bsp:compression=int8", "lossy"),
        row("bsp:compression=int8,buckets=wfbp", "lossy"),
        row("bsp:compression=bf16", "lossy", 0.1),
    )
    assert shortlist(plan) == {
        "exact": ["bsp:buckets=wfbp", "dear"],
        "lossy": ["bsp:compression=int8", "bsp:compression=bf16"],
    }
