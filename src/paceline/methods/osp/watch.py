"""When a worker's gradients are ready, and when all has arrived: medians over some steps."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.interfaces import Stopwatch
from paceline.methods.osp.choice import StepTimes
from paceline.methods.osp.options import INTERVAL
from paceline.methods.osp.trial import LOOK


class _Step(NamedTuple):
    """Marks of one step, from the end of the last."""

    start: Any
    ready: Sequence[Any]
    end: Any
    arrived: Any
    over: Any


class StepWatch:
    """The last steps since the layout of buckets and messages changed. *overlap*: gradients
    leave when they are ready, and not after backward."""

    def __init__(self, stopwatch: Stopwatch, overlap: bool) -> None:
        self._stopwatch, self._overlap = stopwatch, overlap
        self._origin: Any = None
        self._ready: list[Any] = []
        self._end: Any = None
        self._arrived: Any = None
        self._steps: deque[_Step] = deque(maxlen=INTERVAL)
        self._layout = -1

    def step_begins(self) -> None:
        """The update before has ended: what was deferred is on its way."""
        self._ready, self._origin = [], self._stopwatch.mark()

    def bucket_ready(self) -> None:
        self._ready.append(self._stopwatch.mark())

    def backward_ended(self) -> None:
        self._end = self._stopwatch.mark()

    def all_arrived(self) -> None:
        """Everything that the step waits for is here."""
        self._arrived = self._stopwatch.mark()

    def step_ended(self, layout: int) -> None:
        """*layout* is another number whenever the layout has changed; the step in which it
        did belongs to neither."""
        if self._layout != layout:
            self._layout = layout
            self._steps.clear()
        elif self._origin is not None and self._ready:
            self._steps.append(
                _Step(
                    self._origin,
                    self._ready,
                    self._end,
                    self._arrived,
                    self._stopwatch.mark(),
                )
            )

    @property
    def delivered(self) -> int:
        """How many buckets the step under way has delivered."""
        return len(self._ready)

    def times(self) -> StepTimes | None:
        """Medians; None if nothing was seen."""
        if not self._steps:
            return None
        times = [
            self._stopwatch.seconds(step.start, [*step.ready, step.end])
            for step in self._steps
        ]
        *ready, end = (statistics.median(one) for one in zip(*times, strict=True))
        if not self._overlap:
            ready = [end] * len(ready)  # nothing leaves before
        return StepTimes(ready, end)

    def arrived(self) -> float:
        """Seconds until everything had arrived: the median."""
        return statistics.median(
            self._stopwatch.seconds(step.start, [step.arrived])[0]
            for step in self._steps
        )

    def whole(self) -> float:
        """Seconds of a step, its update included: the median; 0 if there were fewer than
        `LOOK`."""
        if len(self._steps) < LOOK:
            return 0.0
        return statistics.median(
            self._stopwatch.seconds(step.start, [step.over])[0] for step in self._steps
        )
