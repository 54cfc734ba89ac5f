"""Break-even links, other ways to gain, and more workers: right where a formula tells."""

import math
from dataclasses import replace

import pytest

from paceline.cluster import Cluster, Rack
from paceline.tools.plan import plan
from paceline.tools.plan.predict import TrainingJob, predict
from paceline.tools.plan.predictor import Predictor
from paceline.tools.plan.what_if import (
    _LinkSearch,
    break_even_links,
    fastest_first,
    scaling_grid,
    shortlist,
    suggestions,
    with_hosts,
    with_links,
)
from tests.tools.plan.helpers import cluster, layers, made, row


def test_the_break_even_link_is_where_one_bucket_takes_as_long():
    """n workers take compute + 2 (n - 1) / n S / b, and are as fast as one at n computes."""
    job = TrainingJob(cluster=cluster(4, latency="0s"), workload=layers(1))
    (found,) = break_even_links(job, ["bsp:buckets=single"], 0.09)
    size = sum(layers(1).sizes)
    assert found.rate == pytest.approx(1.5 * size / (3 * 0.09), rel=0.03)
    assert "as fast as one machine at" in found.words


@pytest.mark.slow
def test_a_link_search_that_the_limit_ends_has_no_answer():
    """And one that it does not end has the same as without a limit."""
    job = TrainingJob(cluster=cluster(4, latency="0s"), workload=layers(1))
    specs = ["bsp:buckets=single", "bsp:buckets=ddp"]
    predictor = Predictor()
    both = break_even_links(job, specs, 0.09, predictor)
    assert [one.spec for one in both] == specs
    ample = Predictor(max_events=predictor.events)
    assert break_even_links(job, specs, 0.09, ample) == both
    assert break_even_links(job, specs, 0.09, Predictor(max_events=1)) == []


def test_no_link_helps_where_latency_is_all():
    job = TrainingJob(cluster=cluster(2, latency="1s"), workload=layers(1))
    (found,) = break_even_links(job, ["bsp:buckets=single"], 0.09)
    assert found.rate is None
    assert "no link" in found.words


@pytest.mark.parametrize(
    ("name", "seconds", "rate"),
    [
        # A step of 4 workers; one machine takes 1 s, so links are wanted that make it 4 s.
        ("waits for all", lambda link: 1 + 6 / link, 2.0),
        ("hides two seconds", lambda link: 1 + max(0.0, 8 / link - 2), 1.6),
        ("fast anyway", lambda link: 1 + 1e-3 / link, 1 / 3000),
        ("starts cost most", lambda link: 3.9 + 1 / link, 10.0),
        ("in leaps", lambda link: 1.0 if link > 7.3 else 9.0, 7.3),
        ("cannot run when slow", lambda link: 2.0 if link > 0.1 else math.inf, 0.1),
        ("never", lambda link: 5.0, None),
        ("always", lambda link: 4.0, None),
    ],
)
def test_a_break_even_is_found_in_few_looks(name, seconds, rate):
    search = _LinkSearch(name, 4.0, 1.0)
    looks = 0
    while scales := search.next():
        for scale in scales:
            assert 1 / 1024 <= scale <= 1024
            search.learn(scale, seconds(scale))
            looks += 1
    found = search.found(100.0)
    if rate is None or rate < 1 / 1024:
        assert found.rate is None
    else:
        assert seconds(found.rate / 100) <= 4.0 < seconds(found.rate / 100 / 1.021)
    assert looks <= (20 if name in ("in leaps", "cannot run when slow") else 9), looks


@pytest.mark.slow
def test_what_would_help_is_what_it_gives_when_it_runs():
    job = TrainingJob(cluster=cluster(4), workload=layers(2))
    whole = plan(job.cluster, job.workload, allowed=("exact",))
    found = suggestions(whole, job)
    by_name = {one.what: one for one in found.helps}
    sixteen = by_name["gradient accumulation over 16 batches"]
    said = predict(
        TrainingJob(cluster=job.cluster, workload=job.workload, accumulate=16),
        sixteen.spec,
    )
    assert sixteen.speedup == pytest.approx(4 * 16 * 0.09 / said.step_seconds)
    assert sixteen.speedup > by_name["gradient accumulation over 4 batches"].speedup
    assert "2 workers instead of 4" not in by_name  # less than four give
    assert found.tried > len(found.helps)
    now = whole.baseline.speedup(whole.recommended["exact"])
    assert all(one.speedup > now for one in found.helps)
    gains = [one.speedup for one in found.helps]
    assert gains == sorted(gains, reverse=True)


def test_what_would_help_is_told_of_the_strongest_class_that_is_allowed():
    job = TrainingJob(cluster=cluster(2), workload=layers(1))
    spec = "bsp:compression=int8"
    plan_ = made(row(spec, "lossy", 0.4))
    found = suggestions(plan_, job)
    assert [one.spec for one in found.break_even] == [spec]
    assert {one.spec for one in found.helps} == {spec}
    assert "16x larger batches" in [one.what for one in found.helps]


@pytest.mark.slow
def test_a_script_that_accumulates_is_not_told_to_accumulate_as_much():
    work = replace(layers(1), passes=4)
    found = suggestions(
        made(row("bsp", seconds=3.6)), TrainingJob(cluster=cluster(2), workload=work)
    )
    said = [one.what for one in found.helps]
    assert "gradient accumulation over 16 batches" in said
    assert "gradient accumulation over 4 batches" not in said


def test_the_slowest_host_is_left_out_first():
    near = Rack(
        workers=4,
        link=(10.0, 20.0),
        latency=0.1,
        workers_per_host=2,
        speed=(1, 1, 2, 2),
    )
    far = Rack(workers=2, link=5.0, latency=0.2, names=("a", "b"), uplink=3.0)
    both = Cluster((near, far))
    assert fastest_first(both) == [1, 0, 2, 3]
    left = with_hosts(both, [1, 0, 3])
    assert [rack.workers for rack in left.racks] == [4, 1]
    assert left.racks[1].names == ("b",)
    assert left.speeds == (1, 1, 2, 2, 1)
    only = with_hosts(both, [1])
    assert only.racks[0].links == (20.0,)
    assert only.speeds == (2, 2)
    assert with_links(both, 2.0).capacities == tuple(
        2 * rate for rate in both.capacities
    )


def test_a_faster_link_gives_what_it_would_give():
    plan_ = made(row("bsp:buckets=single", seconds=0.33))
    job = TrainingJob(cluster=cluster(4, latency="0s"), workload=layers(1))
    rates = (12.5e6, 125e6)
    points = scaling_grid(plan_, job, workers=(1, 2), rates=rates)
    size = sum(layers(1).sizes)
    by_place = {(point.workers, point.rate): point for point in points}
    assert len(points) == 4
    for rate in rates:
        assert by_place[1, rate].efficiency == 1
        seconds = 0.09 + size / rate
        assert by_place[2, rate].step_seconds == pytest.approx(seconds, rel=1e-6)
        assert by_place[2, rate].speedup == pytest.approx(2 * 0.09 / seconds)


@pytest.mark.slow
def test_what_waits_for_nothing_is_not_run_with_faster_links():
    """Its figures would be the same; and so no slower link makes anything faster."""
    plan_ = made(row("bsp:compression=powersgd", "lossy"), row("local-sgd", "local"))
    job = TrainingJob(cluster=cluster(2, latency="0s"), workload=layers(2))
    points = scaling_grid(plan_, job, workers=(2, 4), rates=(12.5e6, 1.25e9, 3.125e9))
    assert len(points) == 2 * 2 * 3
    by_place = {(p.consistency, p.workers, p.rate): p.step_seconds for p in points}
    for consistency in ("lossy", "local"):
        for workers in (2, 4):
            mine = [by_place[consistency, workers, p.rate] for p in points[:6:2]]
            assert mine == sorted(mine, reverse=True)
            assert mine[-1] >= 0.09


def test_of_each_class_different_methods_or_codes_are_in_a_scaling_grid():
    plan_ = made(
        row("bsp:buckets=wfbp"),
        row("bsp:collective=auto"),
        row("dear", seconds=0.1),
        row("priority", seconds=0.2),
        row("bsp:compression=int8", "lossy"),
        row("bsp:compression=int8,buckets=wfbp", "lossy"),
        row("bsp:compression=bf16", "lossy", 0.1),
    )
    assert shortlist(plan_) == {
        "exact": ["bsp:buckets=wfbp", "dear"],
        "lossy": ["bsp:compression=int8", "bsp:compression=bf16"],
    }
