"""Mixing: formulas of how far workers stay apart, held against simulated noise."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.methods.ds_sync.cost import (
    describe,
    matrix,
    period_matrix,
    period_rate,
    rate_per_step,
    spread,
)
from paceline.methods.ds_sync.divide import make_plan
from paceline.methods.ds_sync.plan import Plan
from tests.methods.ds_sync.clusters import any_cluster, racks
from tests.support.profiles import examples


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
    assert "nobody" in describe(make_plan([3]))
