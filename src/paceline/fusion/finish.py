"""When the last all-reduce of a plan ends."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from paceline.errors import UsageError
from paceline.fusion.cost import Cost, overlapping_seconds


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
    if lanes == 1:
        free = 0.0
        for time, duration in zip(ready, seconds, strict=True):
            free = max(free, time) + duration
        return free
    return _with_lanes(ready, seconds, overlapping_seconds(cost), lanes)


def _with_lanes(
    ready: Sequence[float], seconds: Sequence[float], start_up: float, lanes: int
) -> float:
    """Several at a time: start-ups pass side by side, the wire is shared fairly."""
    now = end = 0.0
    queue = 0  # the next bucket to take a lane
    starting: list[tuple[float, float]] = []  # (when on the wire, seconds of wire)
    moving: list[float] = []  # seconds of wire left, if alone
    while queue < len(ready) or starting or moving:
        while (
            queue < len(ready)
            and ready[queue] <= now
            and len(starting) + len(moving) < lanes
        ):
            starting.append((now + start_up, max(0.0, seconds[queue] - start_up)))
            queue += 1
        starting.sort()
        while starting and starting[0][0] <= now:
            moving.append(starting.pop(0)[1])
        moving.sort()
        # What happens next: a bucket is ready, one gets on the wire, one has arrived.
        next_ready = ready[queue] if queue < len(ready) else math.inf
        if next_ready <= now:  # ready, and waiting for a lane
            next_ready = math.inf
        next_start = starting[0][0] if starting else math.inf
        next_end = now + moving[0] * len(moving) if moving else math.inf
        then = min(next_ready, next_start, next_end)
        if moving:
            moved = (then - now) / len(moving)
            moving = [left - moved for left in moving]
            if then == next_end:
                moving.pop(0)
                end = then
        now = then
    return end


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
