"""Measures steps and all-reduces for the bucket tuner.

- `StepTimer`: times gradients and parameter uses within a step.
- `measure_all_reduce`: measures the cost of an all-reduce by its size.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.bucketing.cost_models import MeasuredCost
from paceline.interfaces import Comm, Pending, Runtime, Stopwatch

SMALLEST_BYTES = 4096
LARGEST_BYTES = 8 * 1024 * 1024
"""The largest buffer that is measured.

Beyond it, the curve keeps its slope. Larger buffers would take long on a slow network and gain
little.
"""

STEP = 4
"""Ratio of one size to the next."""

REPEATS = 5
SECONDS_PER_SIZE = 0.05
"""The time for the repeats at each size, of which there are at most `REPEATS`."""


@dataclass
class Pass:
    """Time marks of one backward pass and of the forward passes before it, on this rank.

    It is empty if this rank is out of data and only takes part in shadow collectives.

    Attributes:
        first: The start of the step's first forward pass.
        start: The start of the step's last forward pass.
        uses: Each parameter's first use, by index.
        order: Indices of parameters in the order in which their gradients became ready.
        marks: When each of these gradients became ready.
        end: The end of the backward pass and of the waits at its end.
    """

    first: Any = None
    start: Any = None
    uses: dict[int, Any] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)
    end: Any = None


class StepTimer:
    """Times one worker's steps: when gradients become ready and when parameters are used.

    It listens to a training's events (`paceline.core.step_listeners`).

    Args:
        stopwatch: Takes time marks.
        order: Indices of parameters in the order in which their gradients are expected.
    """

    def __init__(self, stopwatch: Stopwatch, order: Sequence[int]) -> None:
        self._stopwatch = stopwatch
        self.order = list(order)
        self.listening = True
        self._now = Pass()
        self._before: Any = None
        """The end of the previous pass, if that was timed."""

    # ---- events of a training ----

    def step_begins(self) -> None:
        """Mark the start of a forward pass that belongs to the next backward pass."""
        if self.listening:
            mark = self._stopwatch.mark()
            first = mark if self._now.first is None else self._now.first
            self._now = Pass(first, mark, self._now.uses)

    def used(self, index: int) -> None:
        """Mark the first use of parameter *index* in this step."""
        this = self._now
        if this.first is not None and not this.order and index not in this.uses:
            this.uses[index] = self._stopwatch.mark()

    def gradient_ready(self, index: int) -> None:
        """Mark that the gradient of parameter *index* is ready."""
        if self.listening:
            self._now.order.append(index)
            self._now.marks.append(self._stopwatch.mark())

    def ended(self) -> None:
        """Mark the end of the backward pass and of the waits at its end."""
        if self.listening and self._now.start is not None:
            self._now.end = self._stopwatch.mark()

    def forget(self) -> None:
        """Discard this pass's marks, and begin the next pass."""
        self._before = self._now.end
        self._now = Pass()

    # ---- measurements of the last pass ----

    def seen_order(self) -> list[int]:
        """Return the ready order of this pass; empty if there was no gradient.

        Tensors without a gradient come last, in their previous order: they are ready when the pass
        ends.
        """
        seen = set(self._now.order)
        if not seen:
            return []
        return self._now.order + [i for i in self.order if i not in seen]

    def ready_times(self) -> list[float] | None:
        """Return the seconds from the last forward pass's start to each gradient, in ready order.

        None if the order of this pass differs from `order`.
        """
        this = self._now
        if this.start is None or self.seen_order() != self.order:
            return None
        times = self._stopwatch.seconds(this.start, this.marks)
        return times + times[-1:] * (len(self.order) - len(times))

    def use_times(self) -> list[float]:
        """Return the seconds from the step's start to each parameter's first use, in ready order.

        The value is 0 for a parameter whose use was not observed. The pass must not have waited for
        averages. A step of several passes starts with the first of them.
        """
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
        """Return a number for each parameter that rises in the order of first uses.

        The number is 0 for a parameter whose use was not observed.
        """
        places = {index: place for place, index in enumerate(self._now.uses)}
        return [places.get(index, 0) for index in range(len(self.order))]

    def duration(self) -> list[float]:
        """Return the seconds from the last forward pass's start until backward and its waits ended.

        The list has one element; it is empty if this rank was out of data.
        """
        this = self._now
        if this.start is None or not this.order:
            return []
        return self._stopwatch.seconds(this.start, [this.end])

    def period(self) -> list[float]:
        """Return the seconds from the end of the previous backward pass to the end of this one.

        They include the waits and updates between the two. The list has one element. It is empty if
        this rank was out of data or the previous pass was not timed.
        """
        this = self._now
        if this.end is None or self._before is None or not this.order:
            return []
        return self._stopwatch.seconds(self._before, [this.end])


def measure_all_reduce(
    comm: Comm,
    runtime: Runtime,
    device: torch.device,
    largest: int,
    all_reduce: Callable[[torch.Tensor], Pending],
) -> MeasuredCost:
    """Measure the cost of an all-reduce in place. Collective.

    Times are means over ranks of each rank's median, so all ranks return the same curve. If several
    all-reduces may be in flight, pairs of small ones show how much of the start-up overlaps.

    Args:
        comm: The communicator that training uses.
        runtime: Makes buffers, and a stopwatch.
        device: The device of the buffers.
        largest: Bytes of all gradients. The curve goes from `SMALLEST_BYTES` to these, and to
            `LARGEST_BYTES` at most.
        all_reduce: Starts an all-reduce as training does, with its compression.

    Returns:
        The curve from bytes to seconds, equal on all ranks.
    """
    stopwatch = runtime.clock.stopwatch(device)
    top = max(SMALLEST_BYTES, min(largest, LARGEST_BYTES))
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * STEP < top:
        sizes.append(sizes[-1] * STEP)
    if top > sizes[-1]:
        sizes.append(top)

    def timed(size: int, together: int) -> float:
        buffers = [runtime.blank(size, device) for _ in range(together)]
        # This all-reduce makes all ranks begin together, as after equal backward passes. A tree
        # all-reduce ends earlier on some ranks than on others.
        _mean(comm, device, 0.0)
        start = stopwatch.mark()
        for pending in [all_reduce(buffer) for buffer in buffers]:
            pending.wait()
        return stopwatch.seconds(start, [stopwatch.mark()])[0]

    def typical(size: int, together: int = 1) -> float:
        first = _mean(comm, device, timed(size, together))
        if stopwatch.repeats:
            return first
        # All ranks repeat equally often, because the time of one run is a mean over ranks.
        repeats = min(REPEATS, int(SECONDS_PER_SIZE / first) if first > 0 else REPEATS)
        if not repeats:
            return first
        times = [timed(size, together) for _ in range(repeats)]
        return _mean(comm, device, statistics.median(times))

    # The first all-reduce opens connections and allocates buffers, so it does not count.
    timed(SMALLEST_BYTES, 1)
    seconds = [typical(size) for size in sizes]
    # A cost must not fall with the size, but noise can make measurements fall.
    seconds = list(itertools.accumulate(seconds, max))
    overlapping = 0.0
    if comm.max_in_flight(device) > 1:
        both = typical(SMALLEST_BYTES, 2)
        # One alone takes the start-up and the wire's time w. Two together take the start-up and
        # 2w if the start-ups overlap.
        overlapping = min(seconds[0], max(0.0, 2 * seconds[0] - both))
    return MeasuredCost(tuple(sizes), tuple(seconds), overlapping)


def _mean(comm: Comm, device: torch.device, value: float) -> float:
    mean = torch.tensor([value], dtype=torch.float64, device=device)
    comm.all_reduce(mean, "sum").wait()
    return float(mean.item()) / comm.size
