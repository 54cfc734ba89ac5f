"""What passes through the model show of a step's times, on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.interfaces import Stopwatch


@dataclass
class Pass:
    """What one backward pass, and the forward passes before it, showed on this rank; empty
    where a rank only kept company."""

    first: Any = None
    """The start of the first forward pass of the step..."""
    start: Any = None
    """...and of the last one."""
    uses: dict[int, Any] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)
    end: Any = None


class Passes:
    """Listens to passes, and says what the one that has just ended took.

    *order* is the one that gradients are expected in, as parameters' indices.
    """

    def __init__(self, stopwatch: Stopwatch, order: Sequence[int]) -> None:
        self._stopwatch = stopwatch
        self.order = list(order)
        self.listening = True
        self._now = Pass()
        self._before: Any = None
        """The end of the pass before this one, if that was listened to."""

    # ---- what training tells ----

    def step_begins(self) -> None:
        """A forward pass begins that belongs to the next backward pass."""
        if self.listening:
            mark = self._stopwatch.mark()
            first = mark if self._now.first is None else self._now.first
            self._now = Pass(first, mark, self._now.uses)

    def used(self, index: int) -> None:
        """A parameter is used for the first time in this step."""
        this = self._now
        if this.first is not None and not this.order and index not in this.uses:
            this.uses[index] = self._stopwatch.mark()

    def gradient_ready(self, index: int) -> None:
        """The gradient of a parameter is there."""
        if self.listening:
            self._now.order.append(index)
            self._now.marks.append(self._stopwatch.mark())

    def ended(self) -> None:
        """The backward pass has ended, with all that is waited for there."""
        if self.listening and self._now.start is not None:
            self._now.end = self._stopwatch.mark()

    def forget(self) -> None:
        """What comes now belongs to the next pass."""
        self._before = self._now.end
        self._now = Pass()

    # ---- what the pass that has ended showed ----

    def seen_order(self) -> list[int]:
        """The order of this pass, empty if there was no gradient. Tensors that took no
        part are ready when it ends, in the order that they had so far."""
        seen = set(self._now.order)
        if not seen:
            return []
        return self._now.order + [i for i in self.order if i not in seen]

    def ready_times(self) -> list[float] | None:
        """Seconds from the last forward pass's start to each gradient, in ready order; None
        if this pass was not like the planned one."""
        this = self._now
        if this.start is None or self.seen_order() != self.order:
            return None
        times = self._stopwatch.seconds(this.start, this.marks)
        return times + times[-1:] * (len(self.order) - len(times))

    def use_times(self) -> list[float]:
        """Seconds from the first forward pass's start to each parameter's first use, in
        ready order; 0 for what nobody was seen to use. Means must not have been waited for
        in that pass, and steps of several passes are seen from where they begin."""
        this = self._now
        seen = dict(
            zip(
                this.uses,
                self._stopwatch.seconds(this.first, list(this.uses.values())),
                strict=True,
            )
        )
        return [seen.get(index, 0.0) for index in self.order]

    def use_order(self) -> list[int]:
        """For each parameter a number that rises in the order of first uses; 0 for what
        nobody was seen to use."""
        places = {index: place for place, index in enumerate(self._now.uses)}
        return [places.get(index, 0) for index in range(len(self.order))]

    def duration(self) -> list[float]:
        """Seconds from the last forward pass's start until backward ended, with what was
        waited for there, in a list that is empty if this rank only kept company."""
        this = self._now
        if this.start is None or not this.order:
            return []
        return self._stopwatch.seconds(this.start, [this.end])

    def period(self) -> list[float]:
        """Seconds from the end of the backward pass before this one to the end of this one:
        also what was waited for, and updated, between them. Empty as `duration`, and where
        the one before was not seen."""
        this = self._now
        if this.end is None or self._before is None or not this.order:
            return []
        return self._stopwatch.seconds(self._before, [this.end])
