"""OSP's measurements: a worker's steps, the network's rate, and the budget of deferred bytes.

The model of a step (`step_seconds`) treats the network as one queue:

- Deferred pieces are sent when the step begins.
- The rest of each bucket is sent when its gradients are ready.
- The step ends when all messages have arrived.

Two streams that share the network end when they would end one after the other.

- `StepTimer`: times one worker's steps and estimates the network's rate; start here.
- `Budget`: the share of the budget of deferred bytes that may be used.
- `WorkerReport`: the measurements that a push carries to servers.
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
"""A wait for the network shorter than this share of a step is ignored."""

PIPELINED = 4 * 1024 * 1024
"""Bytes of the last piece. Pulls of earlier deferred pieces overlap with pushes of later ones."""

TRIAL_STEPS = 5
"""Steps after which a trial is first evaluated.

The median of five steps tolerates two outliers. More steps would make a failed trial cost more.
"""

RATE_DECAY = 0.98
"""Each decision multiplies the seconds per byte by this if steps did not wait for the network.

Conditions may have improved, and then less needs to be deferred.
"""


class StepTimes(NamedTuple):
    """The times of a step, in seconds since the last update ended.

    Attributes:
        ready: When each bucket's gradients were ready.
        end: When backward ended.
    """

    ready: Sequence[float]
    end: float


class Rate(NamedTuple):
    """The cost of a message.

    Attributes:
        start_up: Seconds of each message, whatever its size.
        per_byte: Seconds per byte.
        pulls: Pushed bytes are also pulled, in the other direction, during the next push.
    """

    start_up: float
    per_byte: float
    pulls: bool = False

    def seconds(self, size: float) -> float:
        """Return the seconds of a message of *size* bytes; 0 if it is empty."""
        return self.start_up + size * self.per_byte if size > 0 else 0.0


class ModelPieces(NamedTuple):
    """The pieces of a model.

    Attributes:
        sizes: Bytes of each piece.
        buckets: The bucket of each piece.
        bucket_count: Number of buckets.
    """

    sizes: Sequence[int]
    buckets: Sequence[int]
    bucket_count: int

    def total(self, pieces: Iterable[int]) -> int:
        """Return the bytes of *pieces* together."""
        return sum(self.sizes[piece] for piece in pieces)

    def left(self, deferred: Iterable[int]) -> list[int]:
        """Return the bytes of each bucket that are not in *deferred* pieces."""
        left = [0] * self.bucket_count
        for piece in set(range(len(self.sizes))).difference(deferred):
            left[self.buckets[piece]] += self.sizes[piece]
        return left


def step_seconds(
    times: StepTimes, deferred: float, left: Sequence[float], rate: Rate
) -> float:
    """Predict the seconds until all messages of a step have arrived.

    The last bucket always sends a message, even an empty one: it is the workers' barrier.

    Args:
        times: When each bucket is ready, and when backward ends.
        deferred: Bytes that the previous step has deferred.
        left: Bytes of each bucket that this step does not defer.
        rate: The cost of messages.

    Returns:
        Seconds since the last update ended.
    """
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
    """Find the seconds per byte that explain an observed step time.

    Args:
        times: When each bucket is ready, and when backward ends.
        deferred: Bytes that the previous step has deferred.
        left: Bytes of each bucket that this step does not defer.
        rate: The start-up time of messages; its *per_byte* is ignored.
        observed: Measured seconds until all messages arrived.

    Returns:
        Seconds per byte. None if start-ups alone explain the time, or if no bytes were sent: the
        step then shows only that the network is fast enough.
    """

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
    """The share of the budget of deferred bytes that may be used: it grows from 0 to 1.

    Early gradients are large, and differ between workers. Late gradients can be deferred.

    Args:
        kind: ``"loss"``: the share is 1 - L/L0. L0 is the mean loss of the first *ramp* / `EPOCHS`
            steps, and L the least mean of as many steps since. Without a loss the share is linear.
            ``"linear"``: the share grows over *ramp* steps. ``"constant"``: the share is 1.
        ramp: Steps over which a linear budget grows.
        run: Reports once if no loss was logged.
    """

    def __init__(self, kind: str, ramp: int, run: Run) -> None:
        self._kind, self._ramp, self._run = kind, ramp, run
        self.epoch = max(1, ramp // EPOCHS)
        self._steps = 0
        self._losses: list[float] = []
        self._first = self._least = math.nan

    def step(self, loss: float | None) -> None:
        """Count a step, and its *loss* if the script logs it."""
        self._steps += 1
        if self._kind != "loss":
            return
        if loss is not None and math.isfinite(loss):
            self._losses.append(loss)
        if self._steps % self.epoch:
            return
        begins = math.isnan(self._first)
        problem = "no step has logged a finite loss"
        remedy = "Log it with step(loss=loss) or paceline.log(loss=loss)"
        if self._losses:
            mean = statistics.fmean(self._losses)
            self._losses.clear()
            self._first = mean if begins else self._first
            self._least = mean if begins else min(self._least, mean)
            problem = f"the first losses' mean is {mean:.3g}, expected above 0"
            remedy = "Choose its growth with budget=linear or budget=constant"
        if begins and not self._first > 0:
            self._kind = "linear"
            self._run.report(
                f"osp: budget=loss cannot follow the loss: {problem}. The budget grows over "
                f"{self._ramp} steps instead. {remedy}"
            )

    @property
    def part(self) -> float:
        """The share that may be used, between 0 and 1."""
        if self._kind == "constant":
            return 1.0
        if self._kind == "linear":
            return min(1.0, self._steps / self._ramp)
        if math.isnan(self._first):
            return 0.0
        return min(1.0, max(0.0, 1 - self._least / self._first))


class StepTimer:
    """Times the last steps since the layout of buckets and messages changed."""

    def __init__(self, options: OSPOptions, run: Run) -> None:
        self._options, self._stopwatch = options, run.stopwatch
        budget = "constant" if options.defer == "nothing" else options.budget
        self.budget = Budget(budget, options.ramp, run)
        self.rate = Rate(0.0, 0.0)
        """The network's rate. *per_byte* is 0 until a step waits for the network."""
        self.delivered = 0
        """Buckets that are ready in the current step."""
        self._marks: list[Any] = []
        self._steps: deque[list[Any]] = deque(maxlen=options.interval)
        self._layout = -1

    def step_begins(self) -> None:
        """Start timing a step: the previous update has ended, and deferred pieces are being sent."""
        self._marks, self.delivered = [self._stopwatch.mark()], 0

    def bucket_ready(self) -> None:
        """Record that a bucket's gradients are ready."""
        self.mark()
        self.delivered += 1

    def mark(self) -> None:
        """Record that backward has ended, or that all messages of the step have arrived."""
        self._marks.append(self._stopwatch.mark())

    def step_ended(self, layout: int, loss: float | None) -> None:
        """Record that a step has ended.

        Args:
            layout: Number of the layout. The step in which it changes is not counted.
            loss: The step's loss, if the script logs it.
        """
        self.budget.step(loss)
        if self._layout != layout:
            self._layout = layout
            self._steps.clear()
        elif self.delivered:
            self._steps.append([*self._marks, self._stopwatch.mark()])

    def times(self) -> StepTimes | None:
        """Return the median times of the last steps; None if no step was timed."""
        if not self._steps:
            return None
        *ready, end, _, _ = self._medians()
        if not self._options.overlap:
            # Without overlap no bucket is sent before backward ends.
            ready = [end] * len(ready)
        return StepTimes(ready, end)

    def report(
        self,
        times: StepTimes | None,
        parts: ModelPieces,
        deferred: Sequence[int],
        decay: float,
    ) -> WorkerReport:
        """Estimate the network's rate, and report this worker's measurements.

        Args:
            times: Median times of the last steps; None after too few steps.
            parts: The pieces of the model.
            deferred: The pieces that these steps deferred.
            decay: Factor for the seconds per byte if steps did not wait for the network.
        """
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
        """Return the median of each mark, in seconds since the step's first mark."""
        steps = [self._stopwatch.seconds(start, marks) for start, *marks in self._steps]
        return [statistics.median(one) for one in zip(*steps, strict=True)]

    def why_nothing(self, steps: int) -> str | None:
        """Explain why a training of *steps* steps deferred no gradient, as its times equal bsp's.

        Returns:
            The explanation. None if the options forbid deferring.
        """
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
            why = f"it decides every {options.interval} steps, and training had {steps}"
        elif options.defer == "measured" and not self.rate.per_byte > 0:
            why = "steps did not wait for the network"
        else:
            most = 100 * options.most * part
            why = f"deferring up to {most:.3g} % of the model would not have made steps shorter"
        return f"osp deferred nothing: {why}"


# ---- reports: measurements as bytes beside pushes ----


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's measurements of its steps; times are in seconds, and 0 after too few steps.

    Attributes:
        ready: When each bucket's gradients were ready, since the last update ended; empty after
            too few steps.
        end: When backward ended, since the last update ended.
        start_up: Seconds of each message, whatever its size.
        per_byte: Seconds per byte of a message.
        bytes: Bytes of each bucket.
        part: Share of the budget that may be used, between 0 and 1.
        whole: Seconds of a step.
    """

    ready: list[float]
    end: float
    start_up: float
    per_byte: float
    bytes: list[int]
    part: float
    whole: float = 0.0


def encode_report(report: WorkerReport) -> bytes:
    """Encode a report as the bytes that a push carries."""
    return msgspec.msgpack.encode(report)


def decode_report(report: bytes, buckets: int) -> WorkerReport:
    """Decode and check a worker's report.

    Args:
        report: The bytes of `encode_report`.
        buckets: Number of buckets of the model.

    Raises:
        UsageError: The bytes are not those of a `WorkerReport`, or its numbers are out of range.
    """
    found: WorkerReport = decode("push", report, WorkerReport)
    times = [*found.ready, found.end, found.start_up, found.per_byte, found.whole]
    if (
        len(found.ready) not in (0, buckets)
        or not all(0 <= number < math.inf for number in (*times, *found.bytes))
        or not 0 <= found.part <= 1
    ):
        raise UsageError(
            f"push: a worker's measurements make no sense: {found}. Expected finite times and bytes of 0 "
            f"or more, a part from 0 to 1, and 0 or {buckets} ready times. Run one version of paceline "
            "on all hosts"
        )
    return found


def decode(what: str, data: bytes, kind: Any) -> Any:
    """Decode MessagePack bytes.

    Args:
        what: The kind of message that carried *data*; the error names it.
        data: The bytes.
        kind: The expected type.

    Raises:
        UsageError: The bytes are not those of a *kind*.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{what}: osp cannot read its bytes: {error}. Run one version of paceline on all hosts"
        ) from None
