"""Models of the time of an all-reduce by its size.

A cost is a function from bytes to seconds. Concurrent all-reduces share the wire, and parts of
their start-ups overlap. The attribute ``overlappable_startup`` of a cost is that part, in seconds.
A plain function has no overlappable start-up.

- `AffineCost`: a formula of start-up and bandwidth.
- `MeasuredCost`: a measured curve.
- `fit`, `lines_below`: affine approximations and lower bounds of a cost.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError

Cost = Callable[[float], float]
"""Seconds of an all-reduce by its bytes; must not decrease with the bytes."""

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class AffineCost:
    """Computes ``start_up + seconds_per_byte * bytes`` (MG-WFBP, equation 5: a and b).

    Attributes:
        start_up: Seconds of an all-reduce without data.
        seconds_per_byte: Seconds that each byte adds.
        overlappable_startup: Seconds of the start-up that overlap other all-reduces; None: all of
            it.

    Raises:
        UsageError: A figure is negative, or the overlappable part exceeds the start-up.

    Example:
        ::

            AffineCost(start_up=1e-3, seconds_per_byte=8e-9)(1_000_000)  # 0.009 s
    """

    start_up: float
    seconds_per_byte: float
    overlappable_startup: float | None = None

    def __post_init__(self) -> None:
        for key in ("start_up", "seconds_per_byte", "overlappable_startup"):
            value = getattr(self, key)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise UsageError(f"{key}: expected zero or more seconds, got {value}")
        overlap = self.overlappable_startup
        if overlap is not None and overlap > self.start_up:
            raise UsageError(
                f"overlappable_startup: expected at most the start-up, {self.start_up} s, got "
                f"{overlap} s"
            )

    def __call__(self, size: float) -> float:
        return self.start_up + self.seconds_per_byte * size

    def many(self, sizes: Seconds) -> Seconds:
        """Return the seconds of an all-reduce for each of *sizes* (bytes)."""
        return self.start_up + self.seconds_per_byte * sizes


@dataclass(frozen=True)
class MeasuredCost:
    """Interpolates a measured curve between its points.

    Below the first size the curve is flat, since only the start-up is left there. Beyond the last
    size it has the slope of the last two points.

    Attributes:
        sizes: Bytes, rising.
        seconds: Seconds of an all-reduce at each size.
        overlappable_startup: Seconds of the start-up that overlap other all-reduces.

    Raises:
        UsageError: The curve is empty, falls or is negative.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    overlappable_startup: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        object.__setattr__(self, "seconds", tuple(self.seconds))
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise UsageError(
                "a curve: expected as many times as sizes and at least one, got "
                f"{len(self.seconds)} times and {len(self.sizes)} sizes"
            )
        for key, values in (("size", self.sizes), ("time", self.seconds)):
            for before, value in zip((0.0, *values), values, strict=False):
                if not (math.isfinite(value) and value >= before):
                    raise UsageError(
                        f"a curve: expected each {key} to be finite and no less than the "
                        f"one before, got {value} after {before}"
                    )
        if len(set(self.sizes)) < len(self.sizes):
            raise UsageError(
                "a curve: expected different sizes, got one size twice. Remove one of its times"
            )
        if not 0 <= self.overlappable_startup <= self.seconds[0]:
            raise UsageError(
                f"overlappable_startup: expected zero to the curve's first time, "
                f"{self.seconds[0]} s, got {self.overlappable_startup} s"
            )

    def __call__(self, size: float) -> float:
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0]:
            return seconds[0]
        if size >= sizes[-1]:
            return seconds[-1] + (size - sizes[-1]) * self._last_slope
        above = bisect_right(sizes, size)
        low, high = sizes[above - 1], sizes[above]
        part = (size - low) / (high - low)
        return seconds[above - 1] + part * (seconds[above] - seconds[above - 1])

    def many(self, sizes: Seconds) -> Seconds:
        """Return the seconds of an all-reduce for each of *sizes* (bytes)."""
        inside: Seconds = np.interp(sizes, self.sizes, self.seconds)
        return inside + np.maximum(sizes - self.sizes[-1], 0.0) * self._last_slope

    @property
    def _last_slope(self) -> float:
        if len(self.sizes) == 1:
            return self.seconds[0] / self.sizes[0] if self.sizes[0] else 0.0
        run = self.sizes[-1] - self.sizes[-2]
        return (self.seconds[-1] - self.seconds[-2]) / run


def many(cost: Cost, sizes: Seconds) -> Seconds:
    """Return the cost of each size, in one call if the cost has a method ``many``."""
    at_once: Any = getattr(cost, "many", None)
    if at_once is not None:
        values: Seconds = at_once(sizes)
        return values
    return np.array([cost(size) for size in sizes.tolist()], dtype=np.float64)


def overlappable_startup(cost: Cost) -> float:
    """Return the seconds of each all-reduce's start-up that overlap other all-reduces."""
    if isinstance(cost, AffineCost) and cost.overlappable_startup is None:
        return cost.start_up
    return float(getattr(cost, "overlappable_startup", 0.0))


def lines_below(cost: Cost, most: float) -> list[AffineCost]:
    """Return lower bounds of the time on the wire, as affine costs.

    Any number of messages with B bytes in total occupy the wire for at least ``start_up +
    seconds_per_byte * B``, besides the overlappable start-up. The largest bound counts.

    Args:
        cost: Seconds of an all-reduce by its bytes.
        most: The largest number of bytes in total for which the bounds hold.

    Returns:
        The bounds, at least one.
    """
    overlap = overlappable_startup(cost)
    points = _lower_hull(
        [(at, max(0.0, seconds - overlap)) for at, seconds in _points(cost, most)]
    )
    lines = []
    for (at, seconds), (then, more) in itertools.pairwise(points):
        slope = (more - seconds) / (then - at)
        # With a negative start-up, many messages would be bounded below the cost of one.
        if (start_up := seconds - slope * at) >= 0:
            lines.append(AffineCost(start_up, slope))
    lines.append(AffineCost(points[0][1], 0.0))
    rates = [seconds / at for at, seconds in points if at > 0]
    lines.append(AffineCost(0.0, min(rates, default=0.0)))
    return lines


SAMPLES = 64
"""The number of points at which a plain function is evaluated."""


def _points(cost: Cost, most: float) -> list[tuple[float, float]]:
    """Return points of the cost up to *most* bytes; the lines between them never exceed the cost."""
    if isinstance(cost, AffineCost | MeasuredCost):
        inside = [] if isinstance(cost, AffineCost) else cost.sizes
        sizes = sorted({0.0, *(size for size in inside if size < most), most})
        return [(size, cost(size)) for size in sizes]
    # The cost does not fall, so at each point it is at least the value at the point before.
    sizes = [most * k / SAMPLES for k in range(SAMPLES + 1)] if most else [0.0]
    before = [cost(0.0), *(cost(size) for size in sizes[:-1])]
    return list(zip(sizes, before, strict=True))


def _lower_hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the lower convex hull of *points*, which are in order of size."""
    hull: list[tuple[float, float]] = []
    for x, y in points:
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull


def fit(cost: Cost, sizes: Sequence[float]) -> AffineCost:
    """Fit an affine cost by least squares, for MG-WFBP's rule.

    The fit depends on the range of the sizes.

    Args:
        cost: Seconds of an all-reduce by its bytes.
        sizes: The sizes of the fit, in bytes.

    Returns:
        An affine cost without negative parts; *cost* itself if it is affine.
    """
    if isinstance(cost, AffineCost):
        return cost
    at = np.unique(np.asarray(sizes, dtype=np.float64))
    seconds = many(cost, at)
    if len(at) == 1:
        return AffineCost(float(seconds[0]), 0.0)
    slope, start_up = np.polyfit(at, seconds, 1)
    # A negative start-up is impossible: fit a line through the origin instead.
    if start_up < 0:
        return AffineCost(0.0, float(at @ seconds / (at @ at)))
    return AffineCost(float(start_up), max(0.0, float(slope)))
