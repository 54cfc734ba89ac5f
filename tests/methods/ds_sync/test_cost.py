"""Seconds of a plan: rings, shared links, and what waits for what."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster import Cluster
from paceline.errors import UsageError
from paceline.methods.ds_sync.cost import group_seconds, steady_seconds, step_seconds
from paceline.methods.ds_sync.divide import make_plan
from paceline.methods.ds_sync.plan import Plan
from tests.methods.ds_sync.clusters import LINK, any_cluster, rack, racks
from tests.support.profiles import examples

PAYLOAD = 1e8


@given(st.integers(2, 16), st.sampled_from([0.0, 1e-3]))
@settings(max_examples=examples(40))
def test_a_group_takes_what_a_ring_does(count, latency):
    plan = make_plan(range(count), groups="digits", size=count)
    cluster = Cluster((rack(count, latency=latency),))
    around = 2 * (count - 1) * (PAYLOAD / count / LINK + latency)
    assert step_seconds(plan, cluster, PAYLOAD) == pytest.approx((around,))
    assert steady_seconds(plan, cluster, PAYLOAD, 0.3) == pytest.approx(0.3 + around)


def test_groups_that_cross_one_uplink_share_it():
    cluster = racks(2, 4, 0.25)
    alone = Plan((((0, 4), (1, 2, 3), (5, 6, 7)),))
    three = Plan((((0, 4), (1, 5), (2, 6), (3, 7)),))
    across = PAYLOAD / (0.25 * LINK)
    assert group_seconds(alone, cluster, PAYLOAD)[0] == pytest.approx(
        (across, 4 / 3 * PAYLOAD / LINK, 4 / 3 * PAYLOAD / LINK), rel=1e-2
    )
    assert group_seconds(three, cluster, PAYLOAD)[0] == pytest.approx(
        (4 * across,) * 4, rel=1e-2
    )


def test_workers_of_one_host_share_its_link_and_need_none_among_themselves():
    cluster = Cluster((rack(4, workers_per_host=2, latency=0.0),))
    plan = Plan((((0, 1), (2, 3)), ((0, 2), (1, 3))))
    pair = PAYLOAD / LINK
    assert step_seconds(plan, cluster, PAYLOAD) == pytest.approx((0.0, 2 * pair))


def test_a_crossing_delays_its_rack_only_one_phase_later():
    # Nobody crosses twice in a row: one waits for the uplink while the other's rack goes on.
    cluster = racks(2, 8, 0.25)
    plan = make_plan(range(16), cluster=cluster, bytes=PAYLOAD)
    compute = 3.0
    slowest = compute + max(step_seconds(plan, cluster, PAYLOAD))
    steady = steady_seconds(plan, cluster, PAYLOAD, compute)
    across, inside = PAYLOAD / (0.25 * LINK), 2 * 6 / 7 * PAYLOAD / LINK
    assert steady == pytest.approx(compute + (across + inside) / 2, rel=0.02)
    assert steady < 0.9 * slowest


@given(any_cluster, st.sampled_from(["digits", "topology"]))
@settings(max_examples=examples(20))
def test_a_step_takes_between_computing_and_its_slowest_group(cluster, groups):
    if not 2 <= cluster.workers <= 24:
        return
    plan = make_plan(range(cluster.workers), groups=groups, cluster=cluster, bytes=1)
    compute = 0.2 / min(cluster.speeds)
    steady = steady_seconds(plan, cluster, PAYLOAD, 0.2)
    # Groups of different steps may meet on a link: then all of them are slower.
    assert steady >= compute * (1 - 1e-9)
    slowest = max(step_seconds(plan, cluster, PAYLOAD))
    assert steady <= (compute + 2.5 * slowest) * (1 + 1e-9)


def test_a_cluster_without_some_of_the_workers_is_told():
    plan = make_plan(range(6), groups="digits")
    for price in (step_seconds, steady_seconds, group_seconds):
        with pytest.raises(UsageError, match=r"4 workers.*worker 4"):
            price(plan, racks(1, 4), PAYLOAD)
