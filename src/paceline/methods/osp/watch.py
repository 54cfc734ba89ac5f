"""What a worker sees of its steps, and how much of its model it would let wait."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.interfaces import Run
from paceline.methods.osp.budget import EPOCHS, Growth
from paceline.methods.osp.choice import Parts, StepTimes, measured_rate
from paceline.methods.osp.options import OSPOptions
from paceline.methods.osp.trial import LOOK

FADES = 0.98
"""A network of which nothing is seen is taken for a little faster with each decision:
conditions may have improved, and then less needs to be deferred."""


class Took(NamedTuple):
    """Medians over some steps. *arrived*: seconds until everything had; *whole*: of a step,
    its update included, or 0 for fewer than `LOOK` steps."""

    times: StepTimes
    arrived: float
    whole: float


class StepWatch:
    """The last steps since the layout of buckets and messages has changed."""

    def __init__(self, options: OSPOptions, run: Run) -> None:
        self._options, self._stopwatch = options, run.stopwatch
        budget = "constant" if options.defer == "nothing" else options.budget
        self.growth = Growth(budget, options.ramp, run.say)
        self.per_byte = 0.0
        """Seconds per byte of the network; 0 while no step was seen to wait for it."""
        self.delivered = 0
        """How many buckets the step under way has delivered."""
        self._marks: list[Any] = []
        self._steps: deque[list[Any]] = deque(maxlen=options.interval)
        self._layout = -1

    def step_begins(self) -> None:
        """The update before has ended: what was deferred is on its way."""
        self._marks, self.delivered = [self._stopwatch.mark()], 0

    def bucket_ready(self) -> None:
        self.mark()
        self.delivered += 1

    def mark(self) -> None:
        """Backward has ended; or everything that the step waits for is here."""
        self._marks.append(self._stopwatch.mark())

    def step_ended(self, layout: int, loss: float | None) -> None:
        """*layout* is another number whenever the layout has changed: the step in which it has
        belongs to neither."""
        self.growth.step(loss)
        if self._layout != layout:
            self._layout = layout
            self._steps.clear()
        elif self.delivered:
            self._steps.append([*self._marks, self._stopwatch.mark()])

    def took(self) -> Took | None:
        """None if nothing was seen."""
        if not self._steps:
            return None
        steps = [self._stopwatch.seconds(start, marks) for start, *marks in self._steps]
        medians = (statistics.median(one) for one in zip(*steps, strict=True))
        *ready, end, arrived, whole = medians
        if not self._options.overlap:
            ready = [end] * len(ready)  # nothing leaves before
        return Took(
            StepTimes(ready, end), arrived, whole if len(steps) >= LOOK else 0.0
        )

    def measure(
        self,
        took: Took,
        parts: Parts,
        deferred: Sequence[int],
        fades: float,
        **rate: Any,
    ) -> None:
        """Find `per_byte` from what steps with *deferred* pieces *took*; where nothing is seen
        of the network, it is *fades* times what it was. *rate*: see `measured_rate`."""
        late, left = parts.total(deferred), parts.left(deferred)
        seen = measured_rate(took.times, late, left, observed=took.arrived, **rate)
        self.per_byte = fades * self.per_byte if seen is None else seen

    def why_nothing(self, steps: int) -> str | None:
        """Why nothing was deferred in a training of so many *steps*, for people who see
        figures like bsp's; None if they asked for that."""
        options, part = self._options, self.growth.part
        if options.defer == "nothing" or options.most == 0:
            return None
        if part == 0 and options.budget == "loss":
            epoch = max(1, options.ramp // EPOCHS)
            why = (
                f"budget=loss grows as the loss falls, which is seen after {2 * epoch} steps "
                f"(of {steps} here); budget=constant defers from the start"
            )
        elif steps <= options.interval + 1:
            why = f"what may wait is decided every {options.interval} steps, and there were {steps}"
        elif options.defer == "measured" and not self.per_byte > 0:
            why = "steps did not wait for the network"
        else:
            most = 100 * options.most * part
            why = f"it would not have made steps shorter, with {most:.3g} % of the model that may wait"
        return f"osp deferred nothing: {why}"
