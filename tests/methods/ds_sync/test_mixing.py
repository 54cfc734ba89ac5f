"""Mixing: formulas of how far workers stay apart, held against simulated noise."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.methods.ds_sync.mixing import (
    describe,
    matrix,
    period_matrix,
    period_rate,
    rate_per_step,
    spread,
)
from paceline.methods.ds_sync.plan import make_plan
from tests.methods.ds_sync.clusters import any_cluster, racks
from tests.support.profiles import examples


def simulated(plan, steps, width=1000, seed=0):
    """The variance of a worker around the mean of all, after each of *steps* steps of noise."""
    noise = np.random.default_rng(seed)
    values = np.zeros((len(plan.members), width))
    for step in range(steps):
        values += noise.standard_normal(values.shape)
        values = matrix(plan.groups(step), plan.members) @ values
        yield np.mean((values - values.mean(0)) ** 2)


def settled(plan, steps=400):
    """What that is once it no longer grows."""
    if plan.phases:
        return np.mean(list(simulated(plan, steps))[steps // 2 :])
    # All noise meets the same groups: it takes many draws of these.
    return np.mean(list(simulated(plan, 6000, width=100))[100:])


@pytest.mark.parametrize(
    ("count", "size", "shuffle", "expected"),
    [
        (4, 2, "pairs", 1 / 2 - 1 / 4),
        (4, 2, "digits", 1 / 2 - 1 / 4),
        (16, 4, "digits", 1 / 4 - 1 / 16),
        (9, 3, "digits", 1 / 3 - 1 / 9),
        (4, 2, "random", 0.375),
        (16, 4, "random", 0.234375),
    ],
)
def test_the_steady_spread_is_that_of_the_formulas(count, size, shuffle, expected):
    plan = make_plan(range(count), shuffle=shuffle, size=size)
    assert spread(plan) == pytest.approx(expected)
    assert settled(plan) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("count", "size", "rho"),
    [(4, 2, 1 / 3), (8, 2, 3 / 7), (8, 4, 1 / 7), (16, 4, 0.2), (32, 8, 3 / 31)],
)
def test_random_groups_of_one_size_leave_what_the_formula_says(count, size, rho):
    plan = make_plan(range(count), shuffle="random", size=size)
    assert period_rate(plan) ** 2 == pytest.approx(
        (count - size) / (size * (count - 1))
    )
    assert period_rate(plan) ** 2 == pytest.approx(rho)


@pytest.mark.parametrize(
    ("count", "size", "shuffle"),
    [(7, 2, "random"), (11, 4, "random"), (11, 2, "pairs"), (10, 3, "digits")],
)
def test_uneven_groups_have_their_spread_too(count, size, shuffle):
    plan = make_plan(range(count), shuffle=shuffle, size=size)
    assert settled(plan) == pytest.approx(spread(plan), rel=0.05)


def test_a_divided_cluster_has_its_spread_too():
    plan = make_plan(range(12), cluster=racks(3, 4), bytes=1e8)
    assert settled(plan, 600) == pytest.approx(spread(plan), rel=0.05)


def test_fixed_groups_grow_apart_for_ever():
    plan = make_plan(range(8), shuffle="fixed", size=2)
    assert period_rate(plan) == 1
    assert spread(plan) == math.inf
    grown = list(simulated(plan, 400, width=4000))
    # between groups: one half of a step's variance each step, less that of the mean
    slope = 1 / 2 - 1 / 8
    assert grown[-1] / 400 == pytest.approx(slope, rel=0.05)
    assert grown[-1] == pytest.approx(2 * grown[199], rel=0.05)


@given(any_cluster, st.sampled_from(["digits", "topology", "pairs"]), st.integers(0, 9))
@settings(max_examples=examples(60))
def test_every_phase_is_a_projection_that_keeps_the_mean(cluster, shuffle, seed):
    if cluster.workers < 2:
        return
    plan = make_plan(
        range(cluster.workers), shuffle=shuffle, cluster=cluster, bytes=1e8, seed=seed
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
    plan = make_plan(range(11), shuffle="pairs")
    values = np.random.default_rng(1).standard_normal(11)
    values -= values.mean()
    sizes = []
    for step in range(80):
        values = matrix(plan.groups(step), plan.members) @ values
        sizes.append(np.linalg.norm(values))
    measured = (sizes[39] / sizes[19]) ** (1 / 20)
    assert measured == pytest.approx(rate_per_step(plan), rel=0.02)


def test_one_sentence_says_agreement_and_speed():
    divided = make_plan(range(8), cluster=racks(2, 4), bytes=1e8)
    said = describe(divided, racks(2, 4), 1e8, compute=0.1)
    for words in ("8 workers", "groups of 2 to 3", "4 phases", "spread", "a step"):
        assert words in said
    assert "exactly after 2 steps" in describe(make_plan(range(4)))
    assert "never agree" in describe(make_plan(range(4), shuffle="fixed"))
    assert "drawn anew" in describe(make_plan(range(4), shuffle="random"))
    assert "nobody" in describe(make_plan([3]))
