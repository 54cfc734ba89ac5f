"""Adjust: measured times make a new plan, the same one everywhere, and only where they must."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster import Cluster, uniform_cluster
from paceline.errors import UsageError
from paceline.methods.ds_sync.adjust import decide, for_members
from paceline.methods.ds_sync.cost import group_seconds, steady_seconds
from paceline.methods.ds_sync.divide import make_plan
from paceline.methods.ds_sync.plan import NONE, Contention, check_partition, parts
from tests.methods.ds_sync.clusters import any_cluster, rack, racks
from tests.support.profiles import examples

PAYLOAD = 1e8


def measure(plan, cluster, contention=NONE, jitter=0.0, scale=1.0, seed=0):
    """What groups take on the cluster as it is; its rates may be said wrongly by *scale*."""
    noise = np.random.default_rng(seed)
    return [
        [scale * seconds * (1 + jitter * noise.uniform(-1, 1)) for seconds in phase]
        for phase in group_seconds(plan, contention.on(cluster), PAYLOAD)
    ]


def first_plan(cluster, **options):
    return make_plan(range(cluster.workers), cluster=cluster, bytes=PAYLOAD, **options)


def adapt(plan, cluster, contention, rounds=8, **noise):
    """The plan that it comes to, and how many new ones that took."""
    changes = 0
    for seed in range(rounds):
        times = measure(plan, cluster, contention, seed=seed, **noise)
        adjusted = decide(plan, times, cluster, PAYLOAD)
        changes += adjusted is not None
        plan = adjusted or plan
    return plan, changes


ONE_RACK = uniform_cluster(8, "1gbit", "50us")


@pytest.mark.parametrize(
    "cluster", [ONE_RACK, racks(2, 4), racks(3, 8), racks(4, 4, 2.0)]
)
@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_where_nothing_has_moved_the_plan_stays(cluster, scale):
    plan = first_plan(cluster)
    _, changes = adapt(plan, cluster, NONE, jitter=0.15, scale=scale)
    assert changes == 0


@pytest.mark.parametrize("cluster", [ONE_RACK, racks(2, 8), racks(2, 8, 3.0)])
@pytest.mark.parametrize("part", [0.1, 0.25, 0.4])
def test_a_host_that_has_become_slow_is_paired(cluster, part):
    busy = Contention(hosts=((5, part),))
    plan, changes = adapt(first_plan(cluster), cluster, busy, jitter=0.1)
    assert 1 <= changes <= 2
    for groups in plan.phases:
        assert len(next(group for group in groups if 5 in group)) == 2
    hosts = dict(plan.contention.hosts)
    assert list(hosts) == [5]
    assert hosts[5] == pytest.approx(part, rel=0.5)
    # it goes faster than the plan that knew of nothing
    now = busy.on(cluster)
    before = steady_seconds(first_plan(cluster), now, PAYLOAD)
    assert steady_seconds(plan, now, PAYLOAD) <= before * 1.001


@pytest.mark.parametrize("cluster", [ONE_RACK, racks(2, 8), racks(2, 8, 3.0)])
def test_a_host_that_is_free_again_is_no_longer_paired(cluster):
    plan, _ = adapt(first_plan(cluster), cluster, Contention(hosts=((5, 0.2),)))
    plan, changes = adapt(plan, cluster, NONE, jitter=0.1)
    assert 1 <= changes <= 2
    assert plan.contention == NONE
    assert plan.phases == first_plan(cluster).phases


def crossings(plan, cluster):
    """Groups across racks in a phase, in the mean."""
    count = sum(
        len({cluster.rack_of_host(cluster.host_of(worker)) for worker in group}) > 1
        for groups in plan.phases
        for group in groups
    )
    return count / len(plan.phases)


@pytest.mark.parametrize("uplink", [0.5, 1.0, 3.0])
def test_a_congested_uplink_carries_fewer_groups(uplink):
    cluster = racks(2, 8, uplink)
    busy = Contention(racks=((1, 0.3),))
    before = first_plan(cluster)
    plan, changes = adapt(before, cluster, busy, jitter=0.1)
    assert 1 <= changes <= 3
    assert crossings(plan, cluster) < 0.7 * crossings(before, cluster)
    assert plan.contention.hosts == ()
    assert dict(plan.contention.racks)[1] == pytest.approx(0.3, rel=0.6)
    now = busy.on(cluster)
    assert steady_seconds(plan, now, PAYLOAD) < steady_seconds(before, now, PAYLOAD)


def test_an_uplink_that_is_free_again_carries_as_many_as_before():
    cluster = racks(2, 8, 0.5)
    before = first_plan(cluster)
    plan, _ = adapt(before, cluster, Contention(racks=((0, 0.3),)))
    plan, changes = adapt(plan, cluster, NONE, jitter=0.1)
    assert 1 <= changes <= 3
    assert plan.phases == before.phases


def test_only_the_uplink_that_is_congested_counts():
    cluster = racks(4, 4, 0.5)
    plan, _ = adapt(first_plan(cluster), cluster, Contention(racks=((2, 0.25),)))
    assert [number for number, _ in plan.contention.racks] == [2]


@given(
    st.integers(1, 5),
    st.integers(1, 8),
    st.sampled_from([0.125, 0.25, 0.5, 1, 2, 4, 8]),
    st.sampled_from([0.1, 0.25, 0.5, 0.7]),
    st.data(),
)
@settings(max_examples=examples(12))
def test_plans_settle_on_whatever_has_moved(count, workers, uplink, part, data):
    if count * workers < 2:
        return
    cluster = racks(count, workers, uplink)
    host = st.integers(0, count * workers - 1).map(lambda h: Contention(((h, part),)))
    of_rack = st.integers(0, count - 1).map(lambda r: Contention((), ((r, part),)))
    busy = data.draw(st.one_of(host, of_rack))
    plan, _ = adapt(first_plan(cluster), cluster, busy, rounds=6, jitter=0.05)
    _, changes = adapt(plan, cluster, busy, rounds=3, jitter=0.05)
    assert changes == 0


@given(any_cluster, st.integers(0, 2**32))
@settings(max_examples=examples(30))
def test_whatever_was_measured_there_is_one_plan_that_connects_all(cluster, seed):
    if cluster.workers < 2:
        return
    plan, noise = first_plan(cluster), np.random.default_rng(seed)
    for _ in range(3):
        some = [0.0, math.nan, math.inf, 1e-300, 1e9, 1e-3, 1.0, 4.0]
        times = [noise.choice(some, len(groups)).tolist() for groups in plan.phases]
        adjusted = decide(plan, times, cluster, PAYLOAD)
        assert adjusted == decide(plan, times, cluster, PAYLOAD)
        if adjusted is not None:
            assert adjusted.version == plan.version + 1
            plan = adjusted
        for number, groups in enumerate(plan.phases):
            check_partition(groups, range(cluster.workers), f"phase {number}")
        assert len(parts(plan.phases)) == 1


def test_links_that_nobody_described_are_taken_to_be_alike():
    plan = make_plan(range(8), groups="auto")
    busy = Contention(hosts=((2, 0.2),))
    adjusted = decide(plan, measure(plan, ONE_RACK, busy), None, PAYLOAD, begins=40)
    assert (adjusted.version, adjusted.begins) == (1, 40)
    for step in range(40, 60):
        assert len(adjusted.mine(step, 2)) == 2
    fewer = for_members(adjusted, [0, 1, 2, 4, 5], None, PAYLOAD)
    assert len(fewer.mine(0, 2)) == 2


def test_a_design_that_was_asked_for_by_name_stays():
    plan = first_plan(ONE_RACK, groups="digits")
    assert decide(plan, [[9.0, 1.0, 1.0, 1.0]], ONE_RACK, PAYLOAD) is None


def test_groups_that_were_not_measured_say_nothing():
    plan = first_plan(racks(2, 4))
    for nothing in (0.0, math.nan, math.inf):
        times = [[nothing] * len(groups) for groups in plan.phases]
        assert decide(plan, times, racks(2, 4), PAYLOAD) is None


@given(st.sets(st.integers(0, 15), min_size=1), st.sampled_from(["auto", "digits"]))
@settings(max_examples=examples(60))
def test_those_who_remain_have_a_plan(members, groups):
    cluster = Cluster((rack(8, 0.25, slow=(2,)), rack(8, 1.5)))
    plan = first_plan(cluster, groups=groups, size=4)
    fewer = for_members(plan, sorted(members), cluster, PAYLOAD, begins=9)
    assert (fewer.version, fewer.begins) == (1, 9)
    for step in range(9, 14):
        if len(members) > 1:
            check_partition(fewer.groups_at(step), members, "remaining")
        else:
            assert fewer.groups_at(step) == (tuple(members),)


def test_times_of_another_plan_are_told():
    with pytest.raises(UsageError, match="3 phases"):
        decide(first_plan(ONE_RACK), [[1.0, 1.0]], ONE_RACK, PAYLOAD)
