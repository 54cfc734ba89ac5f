"""What a worker sees of its steps, and how much of its model it would let wait."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from paceline.interfaces import Run
from paceline.methods.osp.deferral import Parts, Rate, StepTimes, measured_rate
from paceline.methods.osp.deferral_policy import LOOK
from paceline.methods.osp.options import EPOCHS, OSPOptions
from paceline.methods.osp.reports import Measured

NO_LOSS = "no step has told a finite loss: step(loss=loss) or paceline.log(loss=loss)"

FADES = 0.98
"""A network of which nothing is seen is taken for a little faster with each decision:
conditions may have improved, and then less needs to be deferred."""


class Growth:
    """The part of the budget that may be used: 0 at first, 1 in the end.

    ``"loss"``: 1 - L/L0, where L0 is the mean loss of the first *ramp* / `EPOCHS` steps,
    and L the least mean since, over as many. ``"linear"``: in *ramp* steps. Early
    gradients are large, and differ between workers; late ones can wait. Without a loss
    the linear one is used, and *say* is told so once.
    """

    def __init__(self, kind: str, ramp: int, say: Callable[[str], None]) -> None:
        self._kind, self._ramp, self._say = kind, ramp, say
        self.epoch = max(1, ramp // EPOCHS)
        self._steps = 0
        self._losses: list[float] = []
        self._first = self._least = math.nan

    def step(self, loss: float | None) -> None:
        """A step has ended, with this *loss* if the script tells it."""
        self._steps += 1
        if self._kind != "loss":
            return
        if loss is not None and math.isfinite(loss):
            self._losses.append(loss)
        if self._steps % self.epoch:
            return
        begins, why = math.isnan(self._first), NO_LOSS
        if self._losses:
            mean = statistics.fmean(self._losses)
            self._losses.clear()
            self._first = mean if begins else self._first
            self._least = mean if begins else min(self._least, mean)
            why = f"the first losses' mean is {mean:.3g}: how far it has fallen cannot be told"
        if begins and not self._first > 0:
            self._kind = "linear"
            self._say(
                f"osp: budget=loss, and {why}. The budget grows over {self._ramp} steps instead"
            )

    @property
    def part(self) -> float:
        """Between 0 and 1."""
        if self._kind == "constant":
            return 1.0
        if self._kind == "linear":
            return min(1.0, self._steps / self._ramp)
        if math.isnan(self._first):
            return 0.0
        return min(1.0, max(0.0, 1 - self._least / self._first))


class StepWatch:
    """The last steps since the layout of buckets and messages has changed."""

    def __init__(self, options: OSPOptions, run: Run) -> None:
        self._options, self._stopwatch = options, run.stopwatch
        budget = "constant" if options.defer == "nothing" else options.budget
        self.growth = Growth(budget, options.ramp, run.report)
        self.rate = Rate(0.0, 0.0)
        """Of the network: *per_byte* is 0 while no step was seen to wait for it."""
        self.delivered = 0  # buckets, in the step under way
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

    def times(self) -> StepTimes | None:
        """Medians; None if nothing was seen."""
        if not self._steps:
            return None
        *ready, end, _, _ = self._medians()
        if not self._options.overlap:
            ready = [end] * len(ready)  # nothing leaves before
        return StepTimes(ready, end)

    def measured(
        self,
        times: StepTimes | None,
        parts: Parts,
        deferred: Sequence[int],
        fades: float,
    ) -> Measured:
        """What steps of these *times* tell, with *deferred* pieces. A network of which nothing
        is seen takes *fades* times what it took."""
        per_byte = whole = 0.0
        if times is not None:
            *_, arrived, whole = self._medians()
            late, left = parts.total(deferred), parts.left(deferred)
            seen = measured_rate(times, late, left, self.rate, arrived)
            per_byte = fades * self.rate.per_byte if seen is None else seen
            self.rate = self.rate._replace(per_byte=per_byte)
        return Measured(
            ready=list(times.ready) if times else [],
            end=times.end if times else 0.0,
            start_up=self.rate.start_up,
            per_byte=per_byte,
            bytes=parts.left(()),
            part=self.growth.part,
            whole=whole if len(self._steps) >= LOOK else 0.0,
        )

    def _medians(self) -> list[float]:
        """Of all marks of a step but the first, in seconds since that one."""
        steps = [self._stopwatch.seconds(start, marks) for start, *marks in self._steps]
        return [statistics.median(one) for one in zip(*steps, strict=True)]

    def why_nothing(self, steps: int) -> str | None:
        """Why nothing was deferred in a training of so many *steps*, for people who see
        figures like bsp's; None if they asked for that."""
        options, part = self._options, self.growth.part
        if options.defer == "nothing" or options.most == 0:
            return None
        if part == 0 and options.budget == "loss":
            why = (
                "budget=loss grows as the loss falls, which is seen after "
                f"{2 * self.growth.epoch} steps "
                f"(of {steps} here); budget=constant defers from the start"
            )
        elif steps <= options.interval + 1:
            why = f"what may wait is decided every {options.interval} steps, and there were {steps}"
        elif options.defer == "measured" and not self.rate.per_byte > 0:
            why = "steps did not wait for the network"
        else:
            most = 100 * options.most * part
            why = f"it would not have made steps shorter, with {most:.3g} % of the model that may wait"
        return f"osp deferred nothing: {why}"
