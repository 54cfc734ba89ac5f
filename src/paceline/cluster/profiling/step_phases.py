"""Measures phases of one worker's steps: input, forward, backward, exposed communication, update.

`StepWatch` observes a training from outside the method, in every runtime. `StepPhases` are its
results.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean, median
from typing import Any

import msgspec
import torch

from paceline.interfaces import Runtime
from paceline.interfaces.buckets import wire_bytes
from paceline.records import Phase, Span, StepRecord, steady_part
from paceline.torch_internals import Uncopied, is_compiled_whole

MOST_STEPS = 200
"""Number of last steps that are kept."""
LATE = 0.9
"""Gradients that become ready after this part of backward count as ready at its end."""
TIMES = (
    *("step", "input", "forward", "backward", "update"),
    *("first_wait", "exposed"),
)


class Measured(msgspec.Struct, frozen=True):
    """The *median* of several measurements; *spread* is the median distance to it."""

    median: float
    spread: float = 0.0


class StepPhases(msgspec.Struct, frozen=True, kw_only=True):
    """Phases of one worker's steps, in seconds: medians over its steady-state steps.

    Attributes:
        steps: Number of these steps.
        step: From the end of a step to the end of the next.
        input: From the end of a step to its first forward pass.
        forward: From the call of the model to its return, without waits.
        backward: From there to the last gradient, without waits; includes the loss.
        update: From there to the end of the step, without waits.
        first_wait: From the end of a step to the first wait for the network. A straggler makes all
            workers' steps equally long, but not this time.
        exposed: All waits for the network.
        messages: Messages that this worker sends in a step.
        bytes_sent: Bytes that this worker sends in a step.
        at_end: Part of the gradients' bytes that becomes ready in the last tenth of backward.
        compiled_whole: Whether the whole model is one compiled graph.
        passes: Forward and backward passes of a step; more than one if gradients are accumulated.
        steady: Whether these are steady-state steps; if not, they are of the warm-up.
    """

    steps: int
    step: Measured
    input: Measured
    forward: Measured
    backward: Measured
    update: Measured
    first_wait: Measured
    exposed: Measured
    messages: float
    bytes_sent: float
    at_end: float = 0.0
    compiled_whole: bool = False
    passes: int = 1
    steady: bool = True


class StepWatch:
    """Observes a training's events (`paceline.core.step_listeners`) and its recorder's waits.

    On a CUDA device each time stamp waits for the device, so that its work counts where it was
    launched.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: torch.nn.Module,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
    ) -> None:
        self._runtime, self._recorder = runtime, runtime.recorder
        self._sizes = [wire_bytes(parameter) for _, parameter in parameters]
        self._device = parameters[0][1].device
        self._is_cuda = self._device.type == "cuda"
        self._stopwatch = runtime.clock.stopwatch(self._device)
        self.compiled_whole = is_compiled_whole(model)
        self._steps: list[tuple[Phase, dict[str, float]]] = []
        """Each step's times, with the phase that the recorder gave it."""
        self._passes: list[_Pass] = []
        self._waits: list[tuple[float, float]] = []
        self._end: float | None = None
        self._means_at: float | None = None
        self._messages = runtime.recorder.messages
        model.register_forward_hook(Uncopied(self._forward_ended))
        runtime.recorder.subscribe(self)

    # ---- events of the training ----

    def step_begins(self) -> None:
        self._passes.append(_Pass(begin=self._now()))

    def gradient(self, index: int) -> None:
        if not self._passes:
            # The script called only a part of the model, not the model itself.
            self._passes.append(_Pass(begin=None))
        one, mark = self._passes[-1], self._stopwatch.mark()
        if one.mark is None:
            one.split, one.mark = self._runtime.clock.now(), mark
        one.ready.append((index, mark))

    def gradient_taken(self) -> None:
        self._passes[-1].taken.append(self._stopwatch.mark())

    def means_are_there(self) -> None:
        if self._is_cuda:
            # The recorder does not see a stream's waits.
            self._means_at = self._now()

    def span(self, span: Span) -> None:
        if span.row == "wait":
            self._waits.append((span.start, span.end))

    def step(self, record: StepRecord) -> None:
        """Record the times of a step that has ended."""
        before, now = self._end, self._now()
        # An evaluation with gradients, or a failed pass, has no such time.
        self._passes = [one for one in self._passes if one.ready]
        if before is not None and self._passes:
            self._steps.append((record.phase, self._note(before, now, record)))
            del self._steps[:-MOST_STEPS]
        self._passes.clear()
        self._waits.clear()
        self._means_at = None
        self._messages, self._end = self._recorder.messages, now

    def _forward_ended(self, *_: Any) -> None:
        if self._passes and not self._passes[-1].ready:
            self._passes[-1].split = self._now()
            self._passes[-1].mark = self._stopwatch.mark()

    def _now(self) -> float:
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
        return self._runtime.clock.now()

    # ---- figures ----

    def _note(self, before: float, end: float, record: StepRecord) -> dict[str, float]:
        ends = [
            one.split + self._stopwatch.seconds(one.mark, one.taken[-1:])[0]
            for one in self._passes
        ]
        if self._means_at is not None:
            self._waits.append((ends[-1], max(ends[-1], self._means_at)))
        forward = backward = data = 0.0
        reached = before
        for one, over in zip(self._passes, ends, strict=True):
            # If the begin is unknown, all time before the first gradient is the forward pass.
            begin = reached if one.begin is None else one.begin
            data += self._without_waits(reached, begin)
            forward += self._without_waits(begin, one.split)
            backward += self._without_waits(one.split, over)
            reached = over
        return {
            "step": end - before,
            "input": data,
            "forward": forward,
            "backward": backward,
            "update": self._without_waits(reached, end),
            "first_wait": min((a for a, _ in self._waits), default=end) - before,
            "exposed": max(
                record.exposed_communication_seconds,
                sum(b - a for a, b in self._waits) if self._is_cuda else 0.0,
            ),
            "messages": self._recorder.messages - self._messages,
            "bytes_sent": record.bytes_sent,
            "at_end": self._at_end(self._passes[-1]),
            "passes": len(self._passes),
        }

    def _without_waits(self, start: float, end: float) -> float:
        waited = sum(max(0.0, min(end, b) - max(start, a)) for a, b in self._waits)
        return max(0.0, end - start - waited)

    def _at_end(self, last: _Pass) -> float:
        """Return the part of the gradient that became ready at the end of a backward pass.

        It excludes the time of paceline's own work in hooks.
        """
        entries = self._stopwatch.seconds(last.mark, [mark for _, mark in last.ready])
        exits = self._stopwatch.seconds(last.mark, last.taken)
        own = [
            max(0.0, there - left)
            for there, left in zip(entries, [0.0, *exits], strict=False)
        ]
        ready = list(accumulate(own))
        sizes = [self._sizes[index] for index, _ in last.ready]
        late = [
            size
            for size, when in zip(sizes, ready, strict=True)
            if when > LATE * ready[-1]
        ]
        return sum(late) / sum(sizes)

    def phases(self) -> StepPhases | None:
        """Return medians over the steady-state steps, or over all if there are none.

        If steps communicate differently, the medians are over means of one period of steps each.
        None if there was no step.
        """
        phases = [phase for phase, _ in self._steps]
        steps = steady_part([step for _, step in self._steps], phases)
        if not steps:
            return None
        period = max(1, min(self._recorder.period, len(steps)))
        first = len(steps) % period
        rounds = [steps[i : i + period] for i in range(first, len(steps), period)]

        def means(name: str) -> list[float]:
            return [fmean(step[name] for step in one) for one in rounds]

        return StepPhases(
            steps=len(steps),
            **{name: measured(means(name)) for name in TIMES},
            messages=median(means("messages")),
            bytes_sent=median(means("bytes_sent")),
            at_end=median(means("at_end")),
            compiled_whole=self.compiled_whole,
            passes=round(median(means("passes"))),
            steady=phases[-1] == "steady",
        )


class _Pass:
    """One forward pass with gradients, and the backward pass that followed.

    The second begins at *split* (and *mark*), where the first ends. *ready* has the tensors whose
    gradients were computed, and the times. *taken* has the times at which backward continued.
    """

    def __init__(self, begin: float | None) -> None:
        self.begin = begin
        self.split = 0.0
        self.mark: Any = None
        self.ready: list[tuple[int, Any]] = []
        self.taken: list[Any] = []


def measured(values: Sequence[float]) -> Measured:
    """Return the median of *values*, and the median of their distances to it."""
    middle = median(values)
    return Measured(middle, median(abs(value - middle) for value in values))
