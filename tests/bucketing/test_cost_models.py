"""Costs of an all-reduce: values, curves, formulas, and figures that cannot be."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from paceline.bucketing.cost_models import (
    AffineCost,
    MeasuredCost,
    fit,
    many,
    overlappable_startup,
)
from paceline.errors import UsageError
from tests.bucketing.cases import random_cost


def test_affine_is_a_start_up_and_a_price_per_byte() -> None:
    cost = AffineCost(2.0, 0.5)
    assert [cost(size) for size in (0, 1, 10)] == [2.0, 2.5, 7.0]
    assert overlappable_startup(cost) == 2.0
    assert overlappable_startup(AffineCost(2.0, 0.5, 0.75)) == 0.75
    assert overlappable_startup(AffineCost(2.0, 0.5, 0.0)) == 0.0


@pytest.mark.parametrize(
    ("sizes", "seconds", "times"),
    [
        # Interpolated, flat below the first size, and beyond the last one as steep as before.
        (
            (10, 20, 40),
            (1.0, 2.0, 8.0),
            {0: 1.0, 5: 1.0, 10: 1.0, 15: 1.5, 20: 2.0, 25: 3.5, 40: 8.0, 50: 11.0},
        ),
        ((10,), (2.0,), {0: 2.0, 10: 2.0, 30: 6.0}),  # in proportion beyond one point
        ((0,), (2.0,), {30: 2.0}),
        ([1, 2, 3], [1.0, 1.0, 1.0], {100: 1.0}),
    ],
)
def test_times_of_a_curve(
    sizes: tuple[int, ...], seconds: tuple[float, ...], times: dict[int, float]
) -> None:
    curve = MeasuredCost(sizes, seconds)
    assert curve.sizes == tuple(sizes)
    assert {size: curve(size) for size in times} == times


def test_a_curve_overlaps_what_it_is_told() -> None:
    assert overlappable_startup(MeasuredCost((10,), (2.0,))) == 0.0
    assert overlappable_startup(MeasuredCost((10,), (2.0,), 1.5)) == 1.5
    assert overlappable_startup(lambda size: size) == 0.0


def test_many_at_once_are_each_alone() -> None:
    draw = random.Random(1)
    sizes = np.array([0.0, 0.5, 4.0, 7.0, 8.0, 20.0, 21.0, 1e6])
    for _ in range(50):
        cost = random_cost(draw)
        one_by_one = [cost(size) for size in sizes.tolist()]
        assert many(cost, sizes).tolist() == pytest.approx(one_by_one, rel=1e-12)
    single = MeasuredCost((0,), (2.0,))
    assert many(single, sizes).tolist() == [2.0] * len(sizes)


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ((-1.0, 0.0), "start_up: .*got -1.0"),
        ((0.0, -1.0), r"seconds_per_byte: .* got -1.0"),
        ((math.inf, 0.0), r"start_up: .* got inf"),
        ((0.0, math.nan), r"seconds_per_byte: .* got nan"),
        ((1.0, 0.0, -0.5), r"overlappable_startup: .* got -0.5"),
        (
            (1.0, 0.0, 1.5),
            "overlappable_startup: .*1.0 s, got 1.5",
        ),
    ],
)
def test_affine_figures_that_cannot_be(
    figures: tuple[float, ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        AffineCost(*figures)


@pytest.mark.parametrize(
    ("sizes", "seconds", "overlapping", "message"),
    [
        ((), (), 0.0, r"at least one, got 0 times and 0 sizes"),
        ((1, 2), (1.0,), 0.0, "1 times and 2 sizes"),
        ((1, 2), (2.0, 1.0), 0.0, r"each time .* got 1.0 after 2.0"),
        ((2, 1), (1.0, 2.0), 0.0, r"each size .* got 1 after 2"),
        ((1, 1), (1.0, 2.0), 0.0, "twice"),
        ((-1, 1), (1.0, 2.0), 0.0, r"each size .* got -1"),
        ((1, 2), (-1.0, 2.0), 0.0, r"each time .* got -1.0"),
        ((1, math.inf), (1.0, 2.0), 0.0, r"each size .* finite .* got inf"),
        ((1, 2), (1.0, math.nan), 0.0, r"each time .* finite .* got nan"),
        ((1, 2), (1.0, 2.0), 1.5, r"first time, 1.0 s, got 1.5 s"),
        ((1, 2), (1.0, 2.0), -0.5, r"overlappable_startup: .* got -0.5 s"),
    ],
)
def test_curves_that_cannot_be(
    sizes: tuple[float, ...],
    seconds: tuple[float, ...],
    overlapping: float,
    message: str,
) -> None:
    with pytest.raises(UsageError, match=message):
        MeasuredCost(sizes, seconds, overlapping)


# ---- the line nearest to a curve ----


def test_a_line_s_fit_is_the_line() -> None:
    line = AffineCost(2.0, 0.5)
    assert fit(line, [1, 2]) is line
    fitted = fit(lambda size: 2.0 + 0.5 * size, [1, 5, 5, 9])
    assert fitted.start_up == pytest.approx(2.0)
    assert fitted.seconds_per_byte == pytest.approx(0.5)


def test_a_fit_is_never_negative() -> None:
    fitted = fit(lambda size: size * size, [1, 2, 3])
    assert fitted.start_up == 0.0
    # least squares through the origin: sum of x^3 over sum of x^2
    assert fitted.seconds_per_byte == pytest.approx(36 / 14)
    assert fit(lambda size: 3.0, [1, 2, 3]).start_up == pytest.approx(3.0)


def test_a_fit_to_one_size_is_flat() -> None:
    assert fit(lambda size: 3.0 * size, [2, 2]) == AffineCost(6.0, 0.0)
