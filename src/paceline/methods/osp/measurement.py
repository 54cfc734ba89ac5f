"""OSP's measurements: a worker's steps, the network's rate, and the budget of deferred bytes.

A step from its network's side: deferred pieces begin to travel when the step begins, each bucket's rest
when its gradients are ready, and everything has arrived at the step's end. The network is one queue: two
streams that share it end when one after the other would.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from paceline.errors import UsageError
from paceline.interfaces import Run
from paceline.methods.osp.options import EPOCHS, OSPOptions

VISIBLE = 0.01
"""Waiting for less than this part of a step is none."""

PIPELINED = 4 * 1024 * 1024
"""What is deferred comes back in pieces, so that only the last one's way back is seen."""

TRIAL_STEPS = 5
"""The steps after which a trial is first looked at. Two of five may be outliers without moving
the median; more steps would make a trial that fails cost more."""

NO_LOSS = "no step has told a finite loss: step(loss=loss) or paceline.log(loss=loss)"

RATE_DECAY = 0.98
"""A network of which nothing is seen is taken for a little faster with each decision:
conditions may have improved, and then less needs to be deferred."""


class StepTimes(NamedTuple):
    """Seconds since the last update ended: until each bucket's gradients are *ready*, and
    until the *end* of backward."""

    ready: Sequence[float]
    end: float


class Rate(NamedTuple):
    """What a message costs: *start_up* seconds, and *per_byte*. *pulls*: what was pushed
    comes back the other way, while the next message is pushed."""

    start_up: float
    per_byte: float
    pulls: bool = False

    def seconds(self, size: float) -> float:
        """Of one message; nothing if it is empty."""
        return self.start_up + size * self.per_byte if size > 0 else 0.0


class ModelPieces(NamedTuple):
    """The pieces of a model: *sizes* in bytes, the bucket that each is in, and how many buckets
    there are."""

    sizes: Sequence[int]
    buckets: Sequence[int]
    bucket_count: int

    def total(self, pieces: Iterable[int]) -> int:
        """Bytes of some pieces."""
        return sum(self.sizes[piece] for piece in pieces)

    def left(self, deferred: Iterable[int]) -> list[int]:
        """Bytes of each bucket that are not deferred."""
        left = [0] * self.bucket_count
        for piece in set(range(len(self.sizes))).difference(deferred):
            left[self.buckets[piece]] += self.sizes[piece]
        return left


def step_seconds(
    times: StepTimes, deferred: float, left: Sequence[float], rate: Rate
) -> float:
    """Until everything has arrived: *deferred* bytes of the step before, and what is *left*
    of each bucket of this one. The last bucket always sends a message: workers meet there."""
    free = rate.seconds(deferred)
    back = free + min(deferred, PIPELINED) * rate.per_byte
    for ready, size in zip(times.ready, left, strict=True):
        if size > 0:
            free = max(free, ready) + rate.seconds(size)
            back = max(back, free) + size * rate.per_byte
    if not left[-1] > 0:
        free = max(free, times.ready[-1]) + rate.start_up
    return max(free, back if rate.pulls else 0.0, times.end)


def measured_rate(
    times: StepTimes,
    deferred: float,
    left: Sequence[float],
    rate: Rate,
    observed: float,
) -> float | None:
    """Seconds per byte, instead of *rate*'s, with which a step takes what it was *observed* to
    take; None if start-ups explain it, which says only that the network is fast enough."""

    def takes(per_byte: float) -> float:
        return step_seconds(times, deferred, left, rate._replace(per_byte=per_byte))

    if observed <= takes(0.0) * (1 + VISIBLE) or not deferred + sum(left) > 0:
        return None
    low, high = 0.0, observed / max(1.0, deferred + sum(left))
    while takes(high) < observed:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if takes(middle) < observed else (low, middle)
    return high


# ---- one worker's measurements ----


class Budget:
    """The part of the budget that may be used: 0 at first, 1 in the end.

    ``"loss"``: 1 - L/L0, where L0 is the mean loss of the first *ramp* / `EPOCHS` steps,
    and L the least mean since, over as many. ``"linear"``: in *ramp* steps. Early
    gradients are large, and differ between workers; late ones can wait. Without a loss
    the linear one is used, and *run* reports that once.
    """

    def __init__(self, kind: str, ramp: int, run: Run) -> None:
        self._kind, self._ramp, self._run = kind, ramp, run
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
            self._run.report(
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


class StepTimer:
    """Times the last steps since the layout of buckets and messages has changed."""

    def __init__(self, options: OSPOptions, run: Run) -> None:
        self._options, self._stopwatch = options, run.stopwatch
        budget = "constant" if options.defer == "nothing" else options.budget
        self.budget = Budget(budget, options.ramp, run)
        self.rate = Rate(0.0, 0.0)
        """Of the network: *per_byte* is 0 while no step was seen to wait for it."""
        self.delivered = 0  # buckets, in the step under way
        self._marks: list[Any] = []
        self._steps: deque[list[Any]] = deque(maxlen=options.interval)
        self._layout = -1

    def step_begins(self) -> None:
        """The update before has ended: deferred pieces are on their way."""
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
        self.budget.step(loss)
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

    def report(
        self,
        times: StepTimes | None,
        parts: ModelPieces,
        deferred: Sequence[int],
        decay: float,
    ) -> WorkerReport:
        """A report on steps of these *times*, with *deferred* pieces. A network of which nothing
        is seen takes *decay* times what it took."""
        per_byte = whole = 0.0
        if times is not None:
            *_, arrived, whole = self._medians()
            late, left = parts.total(deferred), parts.left(deferred)
            seen = measured_rate(times, late, left, self.rate, arrived)
            per_byte = decay * self.rate.per_byte if seen is None else seen
            self.rate = self.rate._replace(per_byte=per_byte)
        return WorkerReport(
            ready=list(times.ready) if times else [],
            end=times.end if times else 0.0,
            start_up=self.rate.start_up,
            per_byte=per_byte,
            bytes=parts.left(()),
            part=self.budget.part,
            whole=whole if len(self._steps) >= TRIAL_STEPS else 0.0,
        )

    def _medians(self) -> list[float]:
        """Of all marks of a step but the first, in seconds since that one."""
        steps = [self._stopwatch.seconds(start, marks) for start, *marks in self._steps]
        return [statistics.median(one) for one in zip(*steps, strict=True)]

    def why_nothing(self, steps: int) -> str | None:
        """Why nothing was deferred in a training of so many *steps*, for people who see
        figures like bsp's; None if they asked for that."""
        options, part = self._options, self.budget.part
        if options.defer == "nothing" or options.most == 0:
            return None
        if part == 0 and options.budget == "loss":
            why = (
                "budget=loss grows as the loss falls, which is seen after "
                f"{2 * self.budget.epoch} steps "
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


# ---- reports: measurements as bytes beside pushes ----


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker measured of its steps, all in seconds; 0 after too few steps.

    Attributes:
        ready: Since the last step, until each bucket's gradients were ready; empty after too few
            steps.
        end: Since the last step, until backward ended.
        start_up: Of a message.
        per_byte: Of a message, beyond its start-up.
        bytes: Of each bucket.
        part: Of the budget that may be used, between 0 and 1.
        whole: Of a step.
    """

    ready: list[float]
    end: float
    start_up: float
    per_byte: float
    bytes: list[int]
    part: float
    whole: float = 0.0


def encode_report(report: WorkerReport) -> bytes:
    """A report as a push carries it."""
    return msgspec.msgpack.encode(report)


def decode_report(report: bytes, buckets: int) -> WorkerReport:
    """A worker's report, whose model has so many *buckets*.

    Raises `UsageError` for bytes that are no `WorkerReport`, and for numbers that make no sense.
    """
    found: WorkerReport = decode("push", report, WorkerReport)
    times = [*found.ready, found.end, found.start_up, found.per_byte, found.whole]
    if (
        len(found.ready) not in (0, buckets)
        or not all(0 <= number < math.inf for number in (*times, *found.bytes))
        or not 0 <= found.part <= 1
    ):
        raise UsageError(
            f"push: measured times, bytes or parts that make no sense: {found}"
        )
    return found


def decode(what: str, data: bytes, kind: Any) -> Any:
    """*data* as a *kind*. Raises `UsageError`, which names *what* carried it."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(f"{what}: bytes that osp cannot read: {error}") from None
