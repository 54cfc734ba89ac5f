"""Designs: partitions that follow from the workers alone, and how fast they agree."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.methods.ds_sync.divide import digits, make_plan
from paceline.methods.ds_sync.plan import check_partition, cut, parts
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


@pytest.mark.parametrize(
    ("size", "words"), [(1, "two or more"), (0, "two or more"), (5, "2 to 4")]
)
def test_sizes_that_cannot_be_are_told(size, words):
    with pytest.raises(UsageError, match=words):
        make_plan(range(4), groups="digits", size=size)
