"""Blocks as integers: no overflow, the stated error, and what no integer can stand for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives.in_network.fixed_point import (
    NOT_FINITE,
    SMALLEST,
    FixedPoint,
    exponents_of,
)
from paceline.errors import UsageError
from tests.support.profiles import examples

LAW = settings(max_examples=examples(100))
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def summed(fixed, blocks, exponents):
    """The sum that an aggregator forms, with room to see an overflow."""
    integers = [fixed.to_integers(block, exponents) for block in blocks]
    return np.sum(integers, axis=0, dtype=np.int64)


@LAW
@given(
    values=st.lists(FLOATS, min_size=1, max_size=8),
    workers=st.integers(1, 1 << 16),
)
def test_no_sum_overflows_when_all_have_the_largest_values(values, workers):
    block = np.array([values], np.float32)
    exponents = exponents_of(block)
    fixed = FixedPoint(workers)
    each = fixed.to_integers(block, exponents).astype(np.int64)
    assert (np.abs(each) * workers < 2**31).all()


def test_the_published_factor_overflows():
    """The control: roundings of n values exceed (2^31 - 1)/(n 2^e)."""
    peak = np.array([[np.nextafter(np.float32(1), np.float32(0))]], np.float32)
    exponents = exponents_of(peak)
    assert exponents == [0]
    many = range(2, 2000)
    assert any(n * round((2**31 - 1) / n * float(peak[0, 0])) >= 2**31 for n in many)
    assert not any(
        n * int(FixedPoint(n).to_integers(peak, exponents)[0, 0]) >= 2**31 for n in many
    )


@LAW
@given(
    seed=st.integers(0, 999),
    workers=st.integers(1, 20),
    spread=st.integers(0, 60),
)
def test_a_sum_is_off_by_no_more_than_the_bound(seed, workers, spread):
    random = np.random.default_rng(seed)
    scale = np.exp2(random.integers(-spread, spread + 1, (workers, 3, 5)))
    blocks = (random.standard_normal((workers, 3, 5)) * scale).astype(np.float32)
    exponents = np.max([exponents_of(block) for block in blocks], axis=0)
    fixed = FixedPoint(workers)
    sums = summed(fixed, blocks, exponents)
    assert (np.abs(sums) < 2**31).all()
    numbers = fixed.to_numbers(sums.astype(np.int32), exponents)
    exact = blocks.sum(axis=0, dtype=np.float64)
    bound = fixed.bound(exponents)[:, None] * (1 + 1e-9)
    assert (np.abs(numbers - exact) <= bound + np.abs(numbers) * 2.0**-24).all()
    # the figure of the published code's formula, a bit more for the headroom of roundings
    figure = workers**2 * np.exp2(exponents.astype(float)) / 2**32
    assert (fixed.bound(exponents) <= figure * (1 + 2.0**-26)).all()


def test_an_exponent_is_that_of_a_power_above_the_peak():
    blocks = np.array([[1.0, -0.5], [0.0, -2.0], [0.75, 0.1]], np.float32)
    assert exponents_of(blocks).tolist() == [1, 2, 0]


def test_blocks_of_zeros_and_of_the_smallest_numbers():
    blocks = np.array([[0.0, 0.0], [1e-45, 0.0]], np.float32)
    exponents = exponents_of(blocks)
    assert exponents.tolist() == [SMALLEST, SMALLEST]
    fixed = FixedPoint(4)
    numbers = fixed.to_numbers(fixed.to_integers(blocks, exponents), exponents)
    assert (numbers == blocks).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_what_no_integer_can_stand_for_is_nan_for_all(bad):
    mine = np.array([[1.0, bad]], np.float32)
    theirs = np.array([[1.0, 2.0]], np.float32)
    assert exponents_of(mine).tolist() == [NOT_FINITE]
    agreed = np.maximum(exponents_of(mine), exponents_of(theirs))
    fixed = FixedPoint(2)
    sums = summed(fixed, [mine, theirs], agreed)
    assert (sums == 0).all()
    assert np.isnan(fixed.to_numbers(sums, agreed)).all()
    assert np.isnan(fixed.bound(agreed)).all()


def test_too_many_workers_are_refused():
    with pytest.raises(UsageError, match="65537 workers"):
        FixedPoint((1 << 16) + 1)
