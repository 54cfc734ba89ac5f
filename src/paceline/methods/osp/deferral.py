"""Which pieces can wait: those that a step waits for, as few as make it wait no longer.

The first layers' gradients are ready last, so they are what a step waits for, and deferring
them shortens it. What is ready early hides behind backward: deferring it gains nothing.

A step as its network sees it: what was deferred begins to travel when the step begins, each
bucket's rest when its gradients are ready, and all of it is there at the step's end. The network
is one queue: two streams that share it end when one after the other would.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

VISIBLE = 0.01
"""Waiting for less than this part of a step is none."""

PIPELINED = 4 * 1024 * 1024
"""What is deferred comes back in pieces, so that only the last one's way back is seen."""

WORTH_IT = 0.02
"""Deferring must shorten a step by this part of it."""


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


class Parts(NamedTuple):
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


def levelled(parts: Parts, order: Sequence[int]) -> list[int]:
    """Pieces of the bucket that is then the largest first, in *order* among themselves. Where
    a bucket is pulled when it has been pushed, a step that only communicates waits for the
    largest one twice."""
    left, turn = parts.left(()), list[int]()
    waiting: list[list[int]] = [[] for _ in left]
    for piece in reversed(order):
        waiting[parts.buckets[piece]].append(piece)
    while any(waiting):
        _, bucket = max((left[b], b) for b, pieces in enumerate(waiting) if pieces)
        turn.append(waiting[bucket].pop())
        left[bucket] -= parts.sizes[turn[-1]]
    return turn


def choose(
    parts: Parts,
    orders: Sequence[Sequence[int]],
    times: StepTimes,
    rate: Rate,
    budget: float,
    update_seconds_per_byte: float = 0.0,
) -> list[int]:
    """The pieces to defer, at most *budget* bytes, in the first of *orders* unless another
    makes steps shorter.

    What backward hides is not deferred. Nothing is where that would not pay: a deferred byte
    costs a worker *update_seconds_per_byte* for its tentative step.
    """
    plain = step_seconds(times, 0.0, parts.left(()), rate)
    if plain <= times.end * (1 + WORTH_IT):
        return []
    if rate.per_byte > 0:
        budget = min(budget, times.end / rate.per_byte)  # what one computation covers
    takes, chosen = math.inf, list[int]()
    for order in orders:
        kept = _least(parts, order, times, rate, budget)
        size = parts.total(kept)
        seconds = step_seconds(times, size, parts.left(kept), rate)
        seconds += size * update_seconds_per_byte
        if seconds < takes * (1 - WORTH_IT):
            takes, chosen = seconds, sorted(kept)
    return chosen if takes < plain * (1 - WORTH_IT) else []


def _least(
    parts: Parts, order: Sequence[int], times: StepTimes, rate: Rate, budget: float
) -> list[int]:
    """Of what fits into *budget*, no more than it takes for steps as short."""
    deferred = fill(parts, order, budget)
    left, size = parts.left(deferred), parts.total(deferred)
    enough = step_seconds(times, size, left, rate) * (1 + VISIBLE / 2)
    kept = []
    for piece in reversed(deferred):
        bucket, own = parts.buckets[piece], parts.sizes[piece]
        left[bucket] += own
        if step_seconds(times, size - own, left, rate) > enough:
            left[bucket] -= own
            kept.append(piece)
        else:
            size -= own
    return kept


def fill(parts: Parts, order: Sequence[int], budget: float) -> list[int]:
    """The first pieces of *order* that fit into *budget* bytes; one that does not is
    skipped, and smaller ones behind it are taken."""
    taken = []
    for piece in order:
        if parts.sizes[piece] <= budget:
            budget -= parts.sizes[piece]
            taken.append(piece)
    return taken
