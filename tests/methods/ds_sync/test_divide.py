"""Divide: groups that spare scarce links, on any cluster partitions that connect; and those that
follow from the workers' digits alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster import Cluster, Rack, uniform_cluster
from paceline.errors import UsageError
from paceline.methods.ds_sync.cost import group_seconds, period_rate, step_seconds
from paceline.methods.ds_sync.divide import digits, divide, make_plan, sites_of
from paceline.methods.ds_sync.plan import Plan, check_partition, cut, parts
from tests.methods.ds_sync.clusters import LINK, any_cluster, rack, racks
from tests.support.profiles import examples

PAYLOAD = 100e6


def rack_of(cluster, worker):
    return cluster.rack_of_host(cluster.host_of(worker))


def crossing(cluster, groups):
    """How many groups are on each rack's uplink."""
    on = [0] * len(cluster.racks)
    for group in groups:
        touched = {rack_of(cluster, worker) for worker in group}
        for number in touched if len(touched) > 1 else ():
            on[number] += 1
    return on


@given(any_cluster, st.data())
@settings(max_examples=examples(60))
def test_any_cluster_is_divided_into_partitions_that_connect(cluster, data):
    everybody = range(cluster.workers)
    gone = data.draw(st.sets(st.sampled_from(everybody), max_size=3))
    members = sorted(set(everybody).difference(gone))
    if len(members) < 2:
        return
    options = {
        "size": data.draw(st.integers(2, len(members))),
        "seed": data.draw(st.integers(0, 5)),
        "cross_rack_every": data.draw(st.integers(1, 3)),
    }
    payload = data.draw(st.sampled_from([0, 1e3, 1e8]))
    phases = divide(members, cluster, payload, **options)
    for number, groups in enumerate(phases):
        check_partition(groups, members, f"phase {number}")
    assert len(parts(phases)) == 1
    assert period_rate(Plan(phases)) < 1 - 1e-6
    assert phases == divide(members[::-1], cluster, payload, **options)
    assert len(phases) <= 60 * options["cross_rack_every"]


@given(any_cluster, st.integers(0, 5))
@settings(max_examples=examples(40))
def test_an_uplink_carries_no_more_groups_than_it_has_time_for(cluster, seed):
    if cluster.workers < 2:
        return
    sites = sites_of(range(cluster.workers), cluster)
    for groups in divide(range(cluster.workers), cluster, PAYLOAD, seed=seed):
        for number, count in enumerate(crossing(cluster, groups)):
            assert count <= min(sites[number].crossings, sites[number].count)


@pytest.mark.parametrize(
    ("uplink", "pairs"), [(0.1, 1), (0.25, 1), (1, 1), (1.2, 2), (2, 3), (3, 5)]
)
def test_as_many_pairs_cross_as_take_no_longer_than_a_mean_in_the_rack(uplink, pairs):
    cluster = racks(2, 8, uplink)
    for groups in divide(range(16), cluster, PAYLOAD):
        assert crossing(cluster, groups) == [pairs, pairs]
    in_rack = 2 * 7 / 8 * PAYLOAD / LINK
    across = PAYLOAD / (uplink * LINK)
    assert pairs * across <= in_rack or pairs == 1
    assert (pairs + 1) * across > in_rack


@pytest.mark.parametrize(("count", "workers"), [(2, 4), (2, 8), (3, 5), (4, 8), (5, 3)])
def test_every_worker_takes_its_turn_to_cross(count, workers):
    cluster = racks(count, workers)
    crossed = [0] * cluster.workers
    phases = divide(range(cluster.workers), cluster, PAYLOAD)
    for groups in phases:
        for group in groups:
            if len({rack_of(cluster, worker) for worker in group}) > 1:
                for worker in group:
                    crossed[worker] += 1
    assert min(crossed) >= 1
    assert max(crossed) - min(crossed) <= 2


def test_pairs_cross_and_the_rest_of_a_rack_stays_together():
    cluster = racks(2, 8)
    for groups in divide(range(16), cluster, PAYLOAD):
        assert sorted(len(group) for group in groups) == [2, 7, 7]


def test_groups_in_a_rack_are_as_large_as_the_crossing_pair_gives_them_time():
    # An uplink of 2.4 host links: 4 pairs on it take 4/2.4 = 1.67, a ring of g takes 2(g-1)/g.
    cluster = racks(2, 12, 2.4)
    plan = Plan(divide(range(24), cluster, PAYLOAD))
    sizes = {
        len(group)
        for groups in plan.phases
        for group in groups
        if len({rack_of(cluster, worker) for worker in group}) == 1
    }
    assert max(sizes) <= 6
    assert max(sizes) >= 4
    for seconds in group_seconds(plan, cluster, PAYLOAD):
        assert max(seconds) < 1.4 * min(seconds)


def test_rows_and_columns_of_a_grid_agree_in_two_steps():
    for side in (2, 4, 8):
        for uplink in (None, float(side)):
            cluster = racks(side, side, uplink)
            plan = Plan(divide(range(side**2), cluster, PAYLOAD, size=side))
            assert len(plan.phases) == 2
            assert period_rate(plan) == 0
            rows, columns = plan.phases
            assert crossing(cluster, rows) == [0] * side
            assert all(
                {rack_of(cluster, worker) for worker in group} == set(range(side))
                for group in columns
            )


@given(st.integers(1, 6), st.integers(1, 6), st.integers(2, 6))
@settings(max_examples=examples(40))
def test_links_that_are_not_scarce_leave_racks_of_one_size_exact(count, side, size):
    if count * side < 2:
        return
    cluster = racks(count, side, None)
    plan = Plan(divide(range(count * side), cluster, PAYLOAD, size=size))
    smooth = {1, 2, 3, 4, 6} if size < 4 else {1, 2, 3, 4, 5, 6}  # of factors that fit
    if {count, side} <= smooth:
        assert period_rate(plan) == 0


@given(st.integers(3, 9), st.integers(0, 8), st.sampled_from([0.1, 0.25, 0.5]))
@settings(max_examples=examples(40))
def test_a_slow_host_is_with_one_other_and_with_each_of_them_in_turn(
    workers, host, part
):
    host %= workers
    cluster = Cluster((rack(workers, None, slow=(host,), part=part),))
    phases = divide(range(workers), cluster, PAYLOAD)
    partners = set()
    for groups in phases:
        mine = next(group for group in groups if host in group)
        # of three, the one who is left has nowhere else to go
        assert len(mine) == (2 if workers > 3 else 3)
        partners.update(mine)
    assert partners == set(range(workers))


def test_a_slow_host_is_with_its_best_connected_neighbours():
    links = (LINK, 0.9 * LINK, 0.2 * LINK, LINK, 0.9 * LINK)
    cluster = Cluster((Rack(workers=5, link=links, latency=0.0),))
    partners = set()
    for groups in divide(range(5), cluster, PAYLOAD):
        partners.update(next(group for group in groups if 2 in group))
    assert partners == {0, 2, 3}


def test_a_slow_host_costs_half_of_what_it_would_in_a_ring():
    cluster = Cluster((rack(8, None, slow=(3,)),))
    paired = Plan(divide(range(8), cluster, PAYLOAD))
    ring = Plan(((tuple(range(8)),),))
    slowest = max(step_seconds(paired, cluster, PAYLOAD))
    assert slowest == pytest.approx(
        max(step_seconds(ring, cluster, PAYLOAD)) / (2 * 7 / 8), rel=1e-2
    )


def test_slow_hosts_do_not_cross():
    cluster = Cluster((rack(8, 0.25, slow=(2,)), rack(8, 0.25)))
    for groups in divide(range(16), cluster, PAYLOAD):
        mine = next(group for group in groups if 2 in group)
        assert {rack_of(cluster, worker) for worker in mine} == {0}


def test_racks_meet_as_seldom_as_asked():
    cluster = racks(2, 4)
    phases = divide(range(8), cluster, PAYLOAD, cross_rack_every=3)
    meet = [crossing(cluster, groups)[0] for groups in phases]
    assert meet == [1, 0, 0] * (len(phases) // 3)
    assert all(sorted(map(len, groups)) == [4, 4] for groups in phases[1::3])


def test_racks_of_two_stay_in_every_second_phase():
    cluster = racks(4, 2)
    meet = [sum(crossing(cluster, groups)) for groups in divide(range(8), cluster, 1e8)]
    assert meet == [4, 0] * (len(meet) // 2)


def test_auto_looks_at_the_network():
    for cluster, uneven in (
        (None, False),
        (uniform_cluster(8, "1gbit", "50us"), False),
        (racks(2, 4), True),
        (Cluster((rack(8, None, slow=(5,)),)), True),
    ):
        plan = make_plan(range(8), cluster=cluster, bytes=PAYLOAD)
        plain = make_plan(range(8), groups="digits")
        assert (plan.phases == plain.phases) is not uneven


@pytest.mark.parametrize(
    ("members", "cluster", "words"),
    [
        (range(8), racks(2, 3), "a cluster of 8 workers.* got one of 6"),
        (range(8), racks(2, 5), "a cluster of 8 workers.* got one of 10"),
        (range(8), None, "paceline run --cluster"),
    ],
)
def test_a_cluster_that_is_not_that_of_the_workers_is_told(members, cluster, words):
    with pytest.raises(UsageError, match=words):
        make_plan(members, groups="topology", cluster=cluster, bytes=PAYLOAD)


def test_a_later_plan_may_be_for_a_part_of_the_cluster():
    plan = make_plan(range(7), cluster=racks(2, 4), bytes=PAYLOAD, version=1)
    assert plan.members == tuple(range(7))
    with pytest.raises(UsageError, match="there is a worker 8"):
        make_plan([0, 8], cluster=racks(2, 4), bytes=PAYLOAD, version=1)


# ---- digits ----


def product(phases):
    """What a period does to the workers' values."""
    members = sorted(worker for group in phases[0] for worker in group)
    total = np.eye(len(members))
    for groups in phases:
        mean = np.zeros_like(total)
        for group in groups:
            places = [members.index(worker) for worker in group]
            mean[np.ix_(places, places)] = 1 / len(group)
        total = mean @ total
    return total


@given(st.integers(2, 80), st.integers(2, 12))
@settings(max_examples=examples(60))
def test_groups_are_as_equal_as_can_be_and_nobody_is_alone(count, size):
    groups = cut(range(count), min(size, count))
    sizes = {len(group) for group in groups}
    assert [worker for group in groups for worker in group] == list(range(count))
    assert min(sizes) >= 2
    assert max(sizes) - min(sizes) <= 1
    # no larger than asked for, except where an odd worker has nowhere else to go
    assert max(sizes) <= size + (size == 2 and count % 2)


@given(st.integers(2, 90), st.integers(2, 12), st.integers(0, 1000))
@settings(max_examples=examples(50))
def test_digits_partition_and_connect_any_workers(count, size, first):
    members = range(first, first + 3 * count, 3)
    phases = digits(members, min(size, count))
    for number, groups in enumerate(phases):
        check_partition(groups, members, f"phase {number}")
    assert len(parts(phases)) == 1
    np.testing.assert_allclose(product(phases).sum(0), 1)
    np.testing.assert_allclose(product(phases).sum(1), 1)


@pytest.mark.parametrize(
    ("count", "size", "steps"),
    [(4, 2, 2), (8, 2, 3), (16, 4, 2), (64, 8, 2), (27, 3, 3), (24, 4, 3), (6, 2, 2)],
)
def test_digits_agree_exactly_after_as_many_steps_as_there_are_digits(
    count, size, steps
):
    phases = digits(range(count), size)
    assert len(phases) == steps
    np.testing.assert_allclose(product(phases), 1 / count)
    assert not np.allclose(product(phases[:-1]), 1 / count)


@pytest.mark.parametrize(
    ("size", "words"), [(1, "two or more"), (0, "two or more"), (5, "2 to 4")]
)
def test_sizes_that_cannot_be_are_told(size, words):
    with pytest.raises(UsageError, match=words):
        make_plan(range(4), groups="digits", size=size)
