"""Designs: partitions that follow from the workers alone, and how fast they agree."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.methods.ds_sync.groups import check_partition, cut, parts
from paceline.methods.ds_sync.plan import make_plan
from paceline.methods.ds_sync.shuffle import digits, pairs, random_groups
from tests.support.profiles import examples


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
@settings(max_examples=examples(200))
def test_groups_are_as_equal_as_can_be_and_nobody_is_alone(count, size):
    groups = cut(range(count), min(size, count))
    sizes = {len(group) for group in groups}
    assert [worker for group in groups for worker in group] == list(range(count))
    assert min(sizes) >= 2
    assert max(sizes) - min(sizes) <= 1
    # no larger than asked for, except where an odd worker has nowhere else to go
    assert max(sizes) <= size + (size == 2 and count % 2)


@given(st.integers(2, 90), st.integers(2, 12), st.integers(0, 1000))
@settings(max_examples=examples(100))
def test_every_design_partitions_and_connects_any_workers(count, size, first):
    members = range(first, first + 3 * count, 3)
    size = min(size, count)
    for phases in (digits(members, size), pairs(members)):
        for number, groups in enumerate(phases):
            check_partition(groups, members, f"phase {number}")
        assert len(parts(phases)) == 1
        np.testing.assert_allclose(product(phases).sum(0), 1)
        np.testing.assert_allclose(product(phases).sum(1), 1)


@pytest.mark.parametrize(
    ("count", "size", "steps"),
    [(4, 2, 2), (8, 2, 3), (16, 4, 2), (16, 2, 4), (64, 8, 2), (27, 3, 3)]
    + [(12, 4, 2), (24, 4, 3), (6, 2, 2), (20, 4, 2)],
)
def test_digits_agree_exactly_after_as_many_steps_as_there_are_digits(
    count, size, steps
):
    phases = digits(range(count), size)
    assert len(phases) == steps
    np.testing.assert_allclose(product(phases), 1 / count)
    assert not np.allclose(product(phases[:-1]), 1 / count)


def test_pairs_are_those_of_the_authors_and_exact_for_powers_of_two():
    assert pairs(range(4)) == (((0, 1), (2, 3)), ((0, 3), (1, 2)))
    for power in range(1, 7):
        phases = pairs(range(2**power))
        assert len(phases) == power
        assert {len(group) for groups in phases for group in groups} == {2}
        np.testing.assert_allclose(product(phases), 0.5**power)


def test_fixed_groups_never_agree():
    plan = make_plan(range(8), shuffle="fixed", size=2)
    period = product(plan.phases)
    np.testing.assert_allclose(np.linalg.matrix_power(period, 50), period)
    assert len(parts(plan.phases)) == 4


@given(
    st.integers(2, 40), st.integers(2, 9), st.integers(), st.integers(0), st.integers(0)
)
@settings(max_examples=examples(200))
def test_random_groups_follow_from_seed_step_and_version(
    count, size, seed, step, version
):
    members, size = tuple(range(count)), min(size, count)
    groups = random_groups(members, size, seed, step, version)
    check_partition(groups, members, "random")
    random_groups.cache_clear()
    assert groups == random_groups(members, size, seed, step, version)


def test_each_of_them_changes_random_groups():
    members = tuple(range(32))
    drawn = {
        random_groups(members, 2, seed, step, version)
        for seed in range(3)
        for step in range(3)
        for version in range(3)
    }
    assert len(drawn) == 27


def test_every_pair_of_workers_is_as_likely_as_any_other():
    draws, count = 4000, 6
    met = np.zeros((count, count))
    for step in range(draws):
        for a, b in random_groups(tuple(range(count)), 2, 7, step, 0):
            met[a, b] += 1
    share = met[np.triu_indices(count, 1)] / draws
    deviation = np.sqrt(0.2 * 0.8 / draws)
    np.testing.assert_allclose(share, 0.2, atol=4.5 * deviation)


@pytest.mark.parametrize(
    ("size", "words"), [(1, "two or more"), (0, "two or more"), (5, "2 to 4")]
)
def test_sizes_that_cannot_be_are_told(size, words):
    with pytest.raises(UsageError, match=words):
        make_plan(range(4), shuffle="digits", size=size)
