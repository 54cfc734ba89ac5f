"""The best of each class, trained for real in virtual time until a metric is reached."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.errors import PacelineError, UsageError
from paceline.instruments import StepRecord
from paceline.interfaces import Quality
from paceline.network import Cluster
from paceline.options import RunOptions
from paceline.worlds.virtual import ComputeModel, Simulation
from paceline.worlds.virtual.script import run_script
from paceline.worlds.virtual.set_aside import checkpoints_set_aside


@dataclass(frozen=True)
class Goal:
    """A logged *metric* and its *value*."""

    metric: str
    value: float

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


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """When *spec* reached the goal: *seconds* of training and *steps*; None where it did not.
    *last*: the metric at the end of the script. *failed*: why it did not train."""

    spec: str
    quality: Quality
    seconds: float | None = None
    steps: int | None = None
    last: float | None = None
    failed: str = ""


def until(
    best: Mapping[Quality, str],
    goal: Goal,
    script: str,
    arguments: Sequence[str],
    cluster: Cluster,
    compute: ComputeModel,
    scratch: Path,
    told: Callable[[str, int, int], None] = lambda spec, number, count: None,
) -> list[Reached]:
    """Trains *script* with each spec, and ranks them by the time to the goal.

    Raises `UsageError` where the script never logs that metric.
    """
    found = []
    for number, (quality, spec) in enumerate(best.items()):
        told(spec, number, len(best))
        simulation = Simulation(
            cluster,
            options=RunOptions(method=spec, seed=compute.seed, tells=False),
            compute=compute,
            trace=True,
            output="first",
        )
        quiet = io.StringIO()
        try:
            with (
                redirect_stdout(quiet),
                redirect_stderr(quiet),
                checkpoints_set_aside(scratch),
            ):
                outcome = run_script(simulation, script, arguments)
        except PacelineError as error:
            found.append(Reached(spec=spec, quality=quality, failed=str(error)))
            continue
        journal = outcome.journals[0]
        _check(goal, journal.metrics)
        values = _values(goal, outcome.kept[0].steps, journal.metrics[goal.metric])
        found.append(_reached(spec, quality, goal, values))
    return sorted(found, key=lambda one: (one.seconds is None, one.seconds or 0.0))


def _values(
    goal: Goal, steps: Sequence[StepRecord], last: float
) -> list[tuple[StepRecord, float]]:
    """Worker 0's, as it logged them; *last* came after the last step, or with it."""
    values = [
        (step, value)
        for step in steps
        if (value := step.metrics.get(goal.metric)) is not None
    ]
    return [*values, (steps[-1], last)]


def _reached(
    spec: str, quality: Quality, goal: Goal, values: Sequence[tuple[StepRecord, float]]
) -> Reached:
    """Whether the metric is to rise or to fall is told by its first value."""
    first, last = values[0][1], values[-1][1]
    when = next(
        (
            step
            for step, value in values
            if (value >= goal.value if first <= goal.value else value <= goal.value)
        ),
        None,
    )
    if when is None:
        return Reached(spec=spec, quality=quality, last=last)
    return Reached(
        spec=spec, quality=quality, seconds=when.end_seconds, steps=when.step, last=last
    )


def _check(goal: Goal, metrics: Mapping[str, float]) -> None:
    if goal.metric not in metrics:
        there = ", ".join(sorted(metrics)) or "none"
        raise UsageError(
            f"--until {goal.metric}: the script logs no such metric (it logs {there}): "
            f"paceline.log({goal.metric}=...)"
        )
