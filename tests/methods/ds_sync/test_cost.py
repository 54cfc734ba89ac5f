"""Seconds of a plan: rings, shared links, and what waits for what. And its mixing: formulas of how
far workers stay apart, held against simulated noise."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster import Cluster
from paceline.errors import UsageError
from paceline.methods.ds_sync.cost import (
    describe,
    group_seconds,
    matrix,
    period_matrix,
    period_rate,
    rate_per_step,
    spread,
    steady_seconds,
    step_seconds,
)
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


# ---- mixing ----


def simulated(plan, steps, width=1000, seed=0):
    """The variance of a worker around the mean of all, after each of *steps* steps of noise."""
    noise = np.random.default_rng(seed)
    values = np.zeros((len(plan.members), width))
    for step in range(steps):
        values += noise.standard_normal(values.shape)
        values = matrix(plan.groups_at(step), plan.members) @ values
        yield np.mean((values - values.mean(0)) ** 2)


def settled(plan, steps=400):
    """What that is once it no longer grows."""
    return np.mean(list(simulated(plan, steps))[steps // 2 :])


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [
        (4, 2, 1 / 2 - 1 / 4),
        (16, 4, 1 / 4 - 1 / 16),
        (9, 3, 1 / 3 - 1 / 9),
    ],
)
def test_the_steady_spread_is_that_of_the_formula(count, size, expected):
    plan = make_plan(range(count), size=size)
    assert spread(plan) == pytest.approx(expected)
    assert settled(plan) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("count", "size"), [(11, 2), (11, 4), (10, 3)])
def test_uneven_groups_have_their_spread_too(count, size):
    plan = make_plan(range(count), size=size)
    assert settled(plan) == pytest.approx(spread(plan), rel=0.05)


def test_a_divided_cluster_has_its_spread_too():
    plan = make_plan(range(12), cluster=racks(3, 4), bytes=1e8)
    assert settled(plan, 600) == pytest.approx(spread(plan), rel=0.05)


def test_fixed_groups_grow_apart_for_ever():
    plan = Plan((((0, 1), (2, 3), (4, 5), (6, 7)),))
    assert period_rate(plan) == 1
    assert spread(plan) == math.inf
    grown = list(simulated(plan, 400, width=4000))
    # between groups: one half of a step's variance each step, less that of the mean
    slope = 1 / 2 - 1 / 8
    assert grown[-1] / 400 == pytest.approx(slope, rel=0.05)
    assert grown[-1] == pytest.approx(2 * grown[199], rel=0.05)


@given(any_cluster, st.sampled_from(["digits", "topology"]), st.integers(0, 9))
@settings(max_examples=examples(60))
def test_every_phase_is_a_projection_that_keeps_the_mean(cluster, groups, seed):
    if cluster.workers < 2:
        return
    plan = make_plan(
        range(cluster.workers), groups=groups, cluster=cluster, bytes=1e8, seed=seed
    )
    for groups in plan.phases:
        mean = matrix(groups, plan.members)
        np.testing.assert_allclose(mean, mean.T)
        np.testing.assert_allclose(mean @ mean, mean, atol=1e-12)
    period = period_matrix(plan)
    np.testing.assert_allclose(period.sum(0), 1)
    np.testing.assert_allclose(period.sum(1), 1)
    assert period.min() > -1e-12
    assert 0 <= period_rate(plan) <= rate_per_step(plan) < 1


def test_a_rate_is_how_fast_differences_shrink():
    plan = make_plan(range(11))
    values = np.random.default_rng(1).standard_normal(11)
    values -= values.mean()
    sizes = []
    for step in range(80):
        values = matrix(plan.groups_at(step), plan.members) @ values
        sizes.append(np.linalg.norm(values))
    measured = (sizes[39] / sizes[19]) ** (1 / 20)
    assert measured == pytest.approx(rate_per_step(plan), rel=0.02)


def test_one_sentence_says_agreement_and_speed():
    divided = make_plan(range(8), cluster=racks(2, 4), bytes=1e8)
    said = describe(divided, racks(2, 4), 1e8, compute=0.1)
    for words in ("8 workers", "groups of 2 to 3", "4 phases", "spread", "a step"):
        assert words in said
    assert "exactly after 2 steps" in describe(make_plan(range(4)))
    assert "no averages" in describe(make_plan([3]))
