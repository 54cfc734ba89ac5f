"""Where one worker's step goes: watched from outside of the method, in every runtime."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean, median
from typing import Any

import torch

from paceline.interfaces import Runtime
from paceline.interfaces.buckets import wire_bytes
from paceline.records import Span, StepRecord
from paceline.tools.doctor.evidence import Measured, StepEvidence
from paceline.torch_internals import Uncopied, is_compiled_whole

MOST_STEPS = 200
"""What is kept: the last ones."""
LATE = 0.9
"""What becomes ready after this part of backward is ready at the end."""
TIMES = (
    *("step", "input", "forward", "backward", "update"),
    *("first_wait", "exposed"),
)


class StepWatch:
    """Is told a training's events (`paceline.core.step_listeners`), and its recorder's waits.

    A step is from the end of the one before to its own end. *Forward* is from a call of the model to
    its return, *backward* from there to the last gradient, so the loss is in it; *input* is what
    comes before them, and *update* what comes after, and waits for the network are in none of these. On a CUDA device each
    of these moments waits for the device, so that its work counts where it was asked for.
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
        self._steps: list[tuple[int, dict[str, float]]] = []
        """Each with its number, as the recorder counts."""
        self._passes: list[_Pass] = []
        self._waits: list[tuple[float, float]] = []
        self._end: float | None = None
        self._means_at: float | None = None
        self._messages = runtime.recorder.messages
        model.register_forward_hook(Uncopied(self._forward_ended))
        runtime.recorder.subscribe(self)

    # ---- what the training tells ----

    def step_begins(self) -> None:
        self._passes.append(_Pass(begin=self._now()))

    def gradient(self, index: int) -> None:
        if not self._passes:
            # A part of the model was called, and not the model itself.
            self._passes.append(_Pass(begin=None))
        one, mark = self._passes[-1], self._stopwatch.mark()
        if one.mark is None:
            one.split, one.mark = self._runtime.clock.now(), mark
        one.ready.append((index, mark))

    def gradient_taken(self) -> None:
        self._passes[-1].taken.append(self._stopwatch.mark())

    def means_are_there(self) -> None:
        if self._is_cuda:
            # What a stream waits for, the recorder does not see.
            self._means_at = self._now()

    def span(self, span: Span) -> None:
        if span.row == "wait":
            self._waits.append((span.start, span.end))

    def step(self, record: StepRecord) -> None:
        """A step has ended."""
        before, now = self._end, self._now()
        # An evaluation with gradients, or a pass that failed, has none.
        self._passes = [one for one in self._passes if one.ready]
        if before is not None and self._passes:
            count = self._recorder.step_count
            self._steps.append((count, self._note(before, now, record)))
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

    # ---- what it makes of it ----

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
            # Where nobody has told, all before the first gradient is the forward pass.
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
        """The part of the gradient that became ready at the end of a backward pass, without what paceline
        does meanwhile."""
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

    def evidence(self) -> StepEvidence | None:
        """Medians over the recorder's steps in steady state, or over all where it has none; where workers do
        not communicate in each step alike, over means of as many as it takes to repeat. None where
        there was no step."""
        steps = self._recorder.usual_of(self._steps)
        if not steps:
            return None
        first_steady = self._recorder.settled_from
        period = max(1, min(self._recorder.period, len(steps)))
        first = len(steps) % period
        rounds = [steps[i : i + period] for i in range(first, len(steps), period)]

        def means(name: str) -> list[float]:
            return [fmean(step[name] for step in one) for one in rounds]

        return StepEvidence(
            steps=len(steps),
            **{name: measured(means(name)) for name in TIMES},
            messages=median(means("messages")),
            bytes_sent=median(means("bytes_sent")),
            at_end=median(means("at_end")),
            compiled_whole=self.compiled_whole,
            passes=round(median(means("passes"))),
            steady=0 < first_steady <= self._steps[-1][0],
        )


class _Pass:
    """One forward pass with gradients, and the backward pass that followed: it was split into these at *split*
    (and *mark*). *ready*: the tensors whose gradients came, and when; *taken*: when backward went on."""

    def __init__(self, begin: float | None) -> None:
        self.begin = begin
        self.split = 0.0
        self.mark: Any = None
        self.ready: list[tuple[int, Any]] = []
        self.taken: list[Any] = []


def measured(values: Sequence[float]) -> Measured:
    """Their median, and that of their distances to it."""
    middle = median(values)
    return Measured(middle, median(abs(value - middle) for value in values))
