"""What would help: found by running it, and right where a formula tells."""

import math
from dataclasses import replace

import pytest

from paceline.cluster import Cluster, Rack
from paceline.tools.plan import plan
from paceline.tools.plan.break_even import _Search, break_evens, with_links
from paceline.tools.plan.predict import TrainingJob, predict
from paceline.tools.plan.prediction_cost import Budget, cost
from paceline.tools.plan.predictor import in_this_process
from paceline.tools.plan.suggestions import fastest_first, helps, with_hosts
from tests.tools.plan.helpers import cluster, layers
from tests.tools.plan.test_more import made, row


def test_the_break_even_link_is_where_one_bucket_takes_as_long():
    """n workers take compute + 2 (n - 1) / n S / b, and are as fast as one at n computes."""
    job = TrainingJob(cluster=cluster(4, latency="0s"), workload=layers(1))
    (found,) = break_evens(job, ["bsp:buckets=single"], 0.09)
    size = sum(layers(1).sizes)
    assert found.rate == pytest.approx(1.5 * size / (3 * 0.09), rel=0.03)
    assert "as fast as one machine at" in found.words


def test_looks_at_links_are_counted_as_many_as_there_are():
    """And a search that the budget does not see to its end has no answer."""
    job = TrainingJob(cluster=cluster(4, latency="0s"), workload=layers(1))
    spec = "bsp:buckets=single"
    price = cost(job, spec, short=True)
    asked = []

    class Counts:
        def each(self, runs, *, short):
            asked.extend(runs)
            return in_this_process.each(runs, short=short)

    ample = Budget(100 * price)
    (found,) = break_evens(job, [spec], 0.09, Counts(), ample)
    assert found == break_evens(job, [spec], 0.09)[0]
    assert ample.left == pytest.approx((100 - len(asked)) * price)
    scarce = Budget((len(asked) - 0.5) * price)
    assert break_evens(job, [spec], 0.09, budget=scarce) == []
    assert scarce.left >= 0


def test_no_link_helps_where_latency_is_all():
    job = TrainingJob(cluster=cluster(2, latency="1s"), workload=layers(1))
    (found,) = break_evens(job, ["bsp:buckets=single"], 0.09)
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
    search = _Search(name, 4.0, 1.0)
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
    found = helps(whole, job)
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
    found = helps(plan_, job)
    assert [one.spec for one in found.break_even] == [spec]
    assert {one.spec for one in found.helps} == {spec}
    assert "16x larger batches" in [one.what for one in found.helps]


def test_a_script_that_accumulates_is_not_told_to_accumulate_as_much():
    work = replace(layers(1), passes=4)
    found = helps(
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
