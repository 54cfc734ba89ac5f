"""A value of a logged metric, and when a training reached it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.records import StepRecord

ROUNDING = 1e-6
"""Relative: 342 of 360 in single precision is a little less than 0.95."""


@dataclass(frozen=True)
class Goal:
    """A logged *metric* and its *value*."""

    metric: str
    value: float

    def __str__(self) -> str:
        return f"{self.metric}={self.value:g}"

    @classmethod
    def read(cls, text: str) -> Goal:
        """From ``accuracy=0.95``."""
        metric, equals, number = text.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not metric or not equals or not math.isfinite(value):
            raise UsageError(
                f"--until: expected METRIC=VALUE, such as accuracy=0.95, got {text!r}"
            )
        return cls(metric, value)

    def check_logged(self, metrics: Mapping[str, float | None]) -> None:
        """Raise `UsageError` where a script logged only other *metrics*."""
        if self.metric not in metrics:
            there = ", ".join(sorted(metrics)) or "none"
            raise UsageError(
                f"--until {self}: the script logs no such metric (it logs {there}): "
                f"paceline.log({self.metric}=...)"
            )

    def reached(
        self, steps: Sequence[StepRecord], last: float | None
    ) -> StepRecord | None:
        """The first of one worker's *steps* with which it logged as much; *last* came after the
        last step, or with it. Whether the metric is to rise or to fall is told by its first
        value. Who took no step has reached nothing."""
        values = [
            (step, value)
            for step in steps
            if (value := step.metrics.get(self.metric)) is not None
        ]
        if last is not None and steps:
            values.append((steps[-1], last))
        if not values:
            return None
        near = ROUNDING * abs(self.value)
        rises = values[0][1] <= self.value
        return next(
            (
                step
                for step, value in values
                if (value >= self.value - near if rises else value <= self.value + near)
            ),
            None,
        )
