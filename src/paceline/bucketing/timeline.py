"""When the messages of a plan are in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Protocol

from paceline.bucketing.cost_models import Cost, overlapping_seconds
from paceline.errors import UsageError


def finish(
    plan: Sequence[int],
    gradient_bytes: Sequence[float],
    ready_seconds: Sequence[float],
    cost: Cost,
    *,
    lanes: int = 1,
) -> float:
    """Seconds from the start of the step to the end of its last all-reduce.

    *plan*: bucket lengths in gradient-ready order; bucket after bucket is sent when its
    last gradient is ready and, of *lanes* all-reduces at a time, one has ended. What
    several at a time have on the wire shares it fairly. MG-WFBP, section 4.1, for one
    lane. Raises `UsageError` for a plan that does not fit, or times that cannot be.
    """
    check(gradient_bytes, ready_seconds, lanes)
    if any(length < 1 for length in plan) or sum(plan) != len(gradient_bytes):
        raise UsageError(
            f"plan: expected lengths of 1 or more that sum to {len(gradient_bytes)} "
            f"tensors, got {list(plan)}"
        )
    ends = list(itertools.accumulate(plan))
    totals = [0, *itertools.accumulate(gradient_bytes)]
    times = [ready_seconds[end - 1] for end in ends]
    sizes = [totals[b] - totals[a] for a, b in itertools.pairwise([0, *ends])]
    return finish_buckets(sizes, times, cost, lanes=lanes)


def finish_buckets(
    sizes: Sequence[float], ready: Sequence[float], cost: Cost, *, lanes: int = 1
) -> float:
    """The same, for buckets of *sizes* bytes that are *ready* at those times, sent in
    this order."""
    seconds = [cost(size) for size in sizes]
    start_ups = [overlapping_seconds(cost)] * len(seconds)
    return max(arrivals(ready, seconds, start_ups, lanes=lanes), default=0.0)


def arrivals(
    ready: Sequence[float],
    seconds: Sequence[float],
    start_ups: Sequence[float],
    *,
    lanes: int = 1,
    after: Sequence[int] | None = None,
) -> list[float]:
    """When each message is in: they take *seconds* each if alone, and are sent in this
    order, *lanes* at a time.

    *start_ups*: the part of each that passes beside others; the rest is the wire's, which
    is shared fairly. ``after[i]``: the number of an earlier message that must be in before
    message i moves, or -1; message i then has its lane only from that time, and those
    behind it wait, too.
    """
    if lanes > 1:
        return send(_InOrder(ready, seconds, start_ups, after), lanes)
    ends: list[float] = []
    free = 0.0
    for time, duration in zip(ready, seconds, strict=True):
        free = max(free, time) + duration
        ends.append(free)
    return ends


class Queue(Protocol):
    """What is to be sent."""

    def take(self, now: float) -> tuple[float, float] | None:
        """The next message, if there is one that can go now: its seconds, if alone, and how
        much of them passes beside others."""
        ...

    def next_release(self, now: float) -> float:
        """When there will be one, as far as that is known; else infinity."""
        ...

    def arrived(self, message: int, now: float) -> None:
        """Message number *message*, as they were taken, is in."""
        ...


def send(queue: Queue, lanes: int) -> list[float]:
    """When the messages of *queue* are in, as they were taken: *lanes* at a time, whose
    start-ups pass side by side, and which share the wire fairly."""
    ends: list[float] = []
    now = 0.0
    starting: list[tuple[float, int, float]] = []  # (when on the wire, which, wire)
    moving: list[tuple[float, int]] = []  # (seconds of wire left, if alone, which)
    while True:
        while len(starting) + len(moving) < lanes:
            taken = queue.take(now)
            if taken is None:
                break
            seconds, start_up = taken
            starting.append((now + start_up, len(ends), max(0.0, seconds - start_up)))
            ends.append(math.inf)
        starting.sort()
        while starting and starting[0][0] <= now:
            _, message, wire = starting.pop(0)
            moving.append((wire, message))
        moving.sort()
        # What happens next: a message is ready, one gets on the wire, one has arrived.
        free = len(starting) + len(moving) < lanes
        next_ready = queue.next_release(now) if free else math.inf
        next_start = starting[0][0] if starting else math.inf
        next_end = now + moving[0][0] * len(moving) if moving else math.inf
        then = min(next_ready, next_start, next_end)
        if then == math.inf:
            return ends
        if moving:
            moved = (then - now) / len(moving)
            moving = [(left - moved, message) for left, message in moving]
            if then == next_end:
                _, message = moving.pop(0)
                ends[message] = then
                queue.arrived(message, then)
        now = then


class _InOrder:
    """A `Queue` whose order is given."""

    def __init__(
        self,
        ready: Sequence[float],
        seconds: Sequence[float],
        start_ups: Sequence[float],
        after: Sequence[int] | None,
    ) -> None:
        self._ready, self._seconds, self._start_ups = ready, seconds, start_ups
        self._after = after
        self._next = 0
        self._ends = [math.inf] * len(ready)

    def take(self, now: float) -> tuple[float, float] | None:
        if self.next_release(now) > now:
            return None
        self._next += 1
        return self._seconds[self._next - 1], self._start_ups[self._next - 1]

    def next_release(self, now: float) -> float:
        if self._next == len(self._ready):
            return math.inf
        time = self._ready[self._next]
        first = -1 if self._after is None else self._after[self._next]
        return time if first < 0 else max(time, self._ends[first])

    def arrived(self, message: int, now: float) -> None:
        self._ends[message] = now


def check(
    gradient_bytes: Sequence[float], ready_seconds: Sequence[float], lanes: int
) -> None:
    """Raise `UsageError` for sizes and times that cannot be."""
    if len(gradient_bytes) != len(ready_seconds):
        raise UsageError(
            "ready_seconds: expected one time per tensor, "
            f"{len(gradient_bytes)}, got {len(ready_seconds)}"
        )
    if lanes < 1:
        raise UsageError(f"lanes: expected 1 or more, got {lanes}")
    check_sizes(gradient_bytes)
    before = 0.0
    for time in ready_seconds:
        if not (math.isfinite(time) and time >= before):
            raise UsageError(
                "ready_seconds: expected times of zero or more that do not fall, in "
                f"gradient-ready order, got {time} after {before}"
            )
        before = time


def check_sizes(gradient_bytes: Sequence[float]) -> None:
    """Raise `UsageError` for sizes that cannot be."""
    for size in gradient_bytes:
        if not (size >= 0 and math.isfinite(size)):
            raise UsageError(f"gradient_bytes: expected zero or more, got {size}")
