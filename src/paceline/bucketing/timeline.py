"""Predicts when messages arrive, one or several at a time.

- `finish_time`: when the last all-reduce of given buckets ends; start here.
- `arrivals`: when each message arrives, in a given order.
- `send`, `Queue`: the same, for an order that depends on time.
- `check_buckets`, `check_times`, `check_sizes`: check the arguments.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Protocol

from paceline.bucketing.cost_models import Cost, overlappable_startup
from paceline.errors import UsageError


def finish_time(
    buckets: Sequence[Sequence[int]],
    sizes: Sequence[float],
    ready: Sequence[float],
    cost: Cost,
    *,
    max_in_flight: int = 1,
) -> float:
    """Predict when the last all-reduce of a step ends (MG-WFBP, section 4.1, one at a time).

    A bucket is sent when all buckets before it are sent, its last gradient is ready, and fewer
    than *max_in_flight* all-reduces are in flight. Concurrent all-reduces share the wire fairly.

    Args:
        buckets: Positions of each bucket's tensors in ready order, rising, in the order of sending.
        sizes: Bytes of each gradient, in ready order.
        ready: Seconds from the step's start to each gradient.
        cost: Seconds of an all-reduce by its bytes.
        max_in_flight: The number of all-reduces that may be in flight at a time.

    Returns:
        Seconds from the step's start.

    Raises:
        UsageError: The buckets do not hold each tensor once, or sizes or times are impossible.
    """
    check_times(sizes, ready, max_in_flight)
    check_buckets(buckets, len(sizes))
    totals = [sum(sizes[p] for p in positions) for positions in buckets]
    times = [ready[positions[-1]] for positions in buckets]
    return finish_buckets(totals, times, cost, max_in_flight=max_in_flight)


def finish_buckets(
    sizes: Sequence[float],
    ready: Sequence[float],
    cost: Cost,
    *,
    max_in_flight: int = 1,
) -> float:
    """Return `finish_time` of buckets with these *sizes* (bytes) and *ready* times, without checks."""
    seconds = [cost(size) for size in sizes]
    startups = [overlappable_startup(cost)] * len(seconds)
    return max(
        arrivals(ready, seconds, startups, max_in_flight=max_in_flight), default=0.0
    )


def arrivals(
    ready: Sequence[float],
    seconds: Sequence[float],
    startups: Sequence[float],
    *,
    max_in_flight: int = 1,
    after: Sequence[int] | None = None,
) -> list[float]:
    """Predict when each message arrives if messages are sent in this order.

    Args:
        ready: Seconds from the step's start until each message can be sent.
        seconds: The time that each message takes alone.
        startups: The seconds of each message's time that overlap other messages. The rest occupies
            the wire, which messages share fairly.
        max_in_flight: The number of messages that may be in flight at a time.
        after: ``after[i]`` is the number of an earlier message that must have arrived before
            message i starts, or -1. Messages behind i wait, too.

    Returns:
        Seconds from the step's start until each message arrives.
    """
    if max_in_flight > 1:
        return send(_InOrder(ready, seconds, startups, after), max_in_flight)
    ends: list[float] = []
    free = 0.0
    for time, duration in zip(ready, seconds, strict=True):
        free = max(free, time) + duration
        ends.append(free)
    return ends


class Queue(Protocol):
    """Supplies `send` with messages, in an order that may depend on time."""

    def take(self, now: float) -> tuple[float, float] | None:
        """Return the next message that can start now.

        Args:
            now: Seconds from the step's start.

        Returns:
            The seconds that the message takes alone, and the part of them that overlaps other
            messages. None if no message can start now.
        """
        ...

    def next_release(self, now: float) -> float:
        """Return when the next message can start; infinity if that is not known yet."""
        ...

    def arrived(self, message: int, now: float) -> None:
        """Note that a message has arrived; *message* is its number in the order of `take`."""
        ...


def send(queue: Queue, max_in_flight: int) -> list[float]:
    """Predict when the messages of a queue arrive.

    Start-ups overlap, and messages share the wire fairly.

    Args:
        queue: The messages.
        max_in_flight: The number of messages that may be in flight at a time.

    Returns:
        Seconds from the step's start until each message arrives, in the order of `Queue.take`.
    """
    ends: list[float] = []
    now = 0.0
    # Messages in their start-up: when they reach the wire, their number, and their seconds on it.
    starting: list[tuple[float, int, float]] = []
    # Messages on the wire: the seconds left if they were alone, and their number.
    moving: list[tuple[float, int]] = []
    while True:
        while len(starting) + len(moving) < max_in_flight:
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
        # The next event: a message can start, a message reaches the wire, or a message arrives.
        free = len(starting) + len(moving) < max_in_flight
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
    """A `Queue` that sends messages in a fixed order."""

    def __init__(
        self,
        ready: Sequence[float],
        seconds: Sequence[float],
        startups: Sequence[float],
        after: Sequence[int] | None,
    ) -> None:
        self._ready, self._seconds, self._startups = ready, seconds, startups
        self._after = after
        self._next = 0
        self._ends = [math.inf] * len(ready)

    def take(self, now: float) -> tuple[float, float] | None:
        if self.next_release(now) > now:
            return None
        self._next += 1
        return self._seconds[self._next - 1], self._startups[self._next - 1]

    def next_release(self, now: float) -> float:
        if self._next == len(self._ready):
            return math.inf
        time = self._ready[self._next]
        first = -1 if self._after is None else self._after[self._next]
        return time if first < 0 else max(time, self._ends[first])

    def arrived(self, message: int, now: float) -> None:
        self._ends[message] = now


def check_buckets(buckets: Sequence[Sequence[int]], count: int) -> None:
    """Raise `UsageError` unless *buckets* hold each of *count* tensors exactly once."""
    positions = sorted(itertools.chain.from_iterable(buckets))
    if positions != list(range(count)) or not all(buckets):
        raise UsageError(
            f"buckets: expected each of the {count} tensors once, got {list(buckets)}"
        )


def check_times(
    sizes: Sequence[float], ready: Sequence[float], max_in_flight: int
) -> None:
    """Raise `UsageError` for invalid sizes or times."""
    if len(sizes) != len(ready):
        raise UsageError(
            f"ready: expected one time per tensor, {len(sizes)}, got {len(ready)}"
        )
    if max_in_flight < 1:
        raise UsageError(f"max_in_flight: expected 1 or more, got {max_in_flight}")
    check_sizes(sizes)
    before = 0.0
    for time in ready:
        if not (math.isfinite(time) and time >= before):
            raise UsageError(
                "ready: expected times of zero or more that do not fall, in "
                f"gradient-ready order, got {time} after {before}"
            )
        before = time


def check_sizes(sizes: Sequence[float]) -> None:
    """Raise `UsageError` for invalid sizes."""
    for size in sizes:
        if not (size >= 0 and math.isfinite(size)):
            raise UsageError(f"sizes: expected zero or more, got {size}")
