"""What is drawn against time: each metric of each variant."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import msgspec

from paceline.runtimes.results import RunResult
from paceline.tools.compare.runner import VariantStep

MOST_POINTS, MOST_POINTS_OF_ALL = 500, 4000
"""Of a line, and of all lines of a picture; more would be a big file of dots."""
MOST = 1e300
"""Of a value: beyond it axes overflow."""


@dataclass
class Curve:
    """One variant's values of one metric: *seconds* since training began, and the mean
    over its workers. NaN: something that is no number was logged there."""

    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


def read_steps(folder: str) -> list[VariantStep]:
    """The records that `merge_records` left in *folder*."""
    lines = (Path(folder) / "records.jsonl").read_bytes()
    return msgspec.json.Decoder(VariantStep).decode_lines(lines)


def curves_of(
    results: Sequence[tuple[str, RunResult]], steps: Iterable[VariantStep]
) -> dict[str, list[Curve]]:
    """For each metric, in the order of first mention, a curve per variant.

    A point is the mean over the workers that logged the metric in a step, at the mean of
    the step's ends. What is logged after the last step is in no record: where a metric is
    logged now and then (an accuracy, once an epoch), the last value that rank 0 logged
    makes one more point, at the end.
    """
    points: dict[str, list[dict[int, list[tuple[float, float]]]]] = {}
    by_spec: dict[str, list[int]] = {}
    for i, (spec, result) in enumerate(results):
        by_spec.setdefault(spec, []).append(i)
        for metric in result.metrics:
            points.setdefault(metric, [{} for _ in results])
    ends = [0.0] * len(results)
    last_of_rank_0: dict[tuple[str, int], float | None] = {}
    seen: Counter[tuple[str, int, int]] = Counter()
    for record in steps:
        # A spec that was given twice has each step twice, in the variants' order.
        key = (record.variant, record.worker, record.step)
        variant = by_spec[record.variant][seen[key]]
        seen[key] += 1
        ends[variant] = max(ends[variant], record.end_seconds)
        for metric, value in record.metrics.items():
            runs = points.setdefault(metric, [{} for _ in results])
            point = (record.end_seconds, _finite(value))
            runs[variant].setdefault(record.step, []).append(point)
            if record.worker == 0:
                last_of_rank_0[metric, variant] = value
    curves: dict[str, list[Curve]] = {}
    for metric, runs in points.items():
        curves[metric] = []
        for variant, (_, result) in enumerate(results):
            curve = Curve()
            for _, values in sorted(runs[variant].items()):
                curve.seconds.append(fmean(second for second, _ in values))
                curve.values.append(fmean(value for _, value in values))
            if (
                metric in result.metrics
                and 2 * len(curve.values) <= result.steps
                and last_of_rank_0.get((metric, variant), math.nan)
                != result.metrics[metric]
            ):
                curve.seconds.append(ends[variant])
                curve.values.append(_finite(result.metrics[metric]))
            curves[metric].append(curve)
    return curves


def has_values(curve: Curve) -> bool:
    """Whether there is anything to draw."""
    return any(math.isfinite(value) for value in curve.values)


def most_points(lines: int) -> int:
    """How many points each of so many *lines* of a picture may have."""
    return min(MOST_POINTS, MOST_POINTS_OF_ALL // max(1, lines))


def thinned(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """*curve*, or means of neighbouring points where there are more than *most*: of those that are
    numbers, since one that is none would hide all the others. NaN where none is."""
    width = -(-len(curve.values) // most)
    if width <= 1:
        return curve
    parts = [slice(i, i + width) for i in range(0, len(curve.values), width)]
    return Curve(
        [fmean(curve.seconds[part]) for part in parts],
        [_mean_of_numbers(curve.values[part]) for part in parts],
    )


def _mean_of_numbers(values: Sequence[float]) -> float:
    numbers = [value for value in values if math.isfinite(value)]
    return fmean(numbers) if numbers else math.nan


def _finite(value: float | None) -> float:
    """*value*, or NaN: JSON has null for what is not finite, and axes have no room."""
    return math.nan if value is None or not abs(value) < MOST else value
