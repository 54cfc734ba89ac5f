"""Message plans: schedule the messages of gradients that overlap the next forward pass.

Methods that wait for each bucket where the next forward pass uses it (`priority`, `dear`) need
a plan: the buckets, the parts in which they are sent, and their order. Such plans come from
ByteScheduler (Peng et al., SOSP 2019), P3 (Jayarajan et al., MLSys 2019) and US-Byte (Gao et al.,
2023). All functions here are pure functions of measured times.

- `messages_of`: plans the messages of given buckets, without a search.
- `period`: predicts the time of a step under a plan.
- `lower_bound`: bounds the time of a step under any plan.
- `MessageProblem`: the data of one step, for `paceline.bucketing.message_search`, which finds a plan.

A step's forward pass begins at 0, and its backward pass ends when the last gradient is
ready: at E. The next forward pass then begins, and uses bucket b's first tensor u seconds
later, unless it has to wait. If b arrives at C, its exposed time is C - E - u. Waiting for one
bucket delays the uses that follow, so a step takes E plus the largest exposed time of a bucket.

This is single-machine scheduling with release times, delivery times and start-ups
(1 | r, q | Cmax). Without start-ups, and if messages can be interrupted at any time, Jackson's
rule is optimal: of the gradients that are ready, send the one that is used first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from paceline.bucketing.cost_models import Cost, lines_below, overlappable_startup
from paceline.bucketing.timeline import arrivals, check_buckets, check_times
from paceline.errors import UsageError
from paceline.interfaces import Half, Message

CONCURRENT_COST = 20
"""The factor by which predicting arrivals takes longer if several messages are in flight at a time."""

UNITS = 2**20
"""Parts of a bucket are multiples of 1 / UNITS, so that ranks can exchange them as whole numbers."""


@dataclass(frozen=True)
class MessagePlan:
    """Buckets, and the messages in which they are sent.

    Attributes:
        buckets: Each bucket's tensors, as positions in ready order; buckets in the order in which
            they become ready.
        messages: Parts of buckets, in the order of sending.
    """

    buckets: list[list[int]]
    messages: tuple[Message, ...]


def messages_of(
    buckets: Sequence[Sequence[int]],
    uses: Sequence[float] = (),
    *,
    halves: bool = False,
) -> MessagePlan:
    """Plan messages of given buckets, without a search.

    Args:
        buckets: Positions of each bucket's tensors, in the order in which buckets are ready.
        uses: Seconds to each tensor's first use, by position.
        halves: Whether each bucket is sent in two halves: first halves in ready order, then second
            halves in the order of their first use (DeAR, Zhang et al., 2023). Without *uses*,
            second halves begin with the last bucket.

    Returns:
        The plan: each bucket is sent whole in ready order, or in halves.
    """
    count = len(buckets)
    order = list(range(count))
    if not halves:
        return MessagePlan(_lists(buckets), tuple(Message(number) for number in order))
    first_use = [
        min(uses[position] for position in bucket) if uses else 0.0
        for bucket in buckets
    ]
    order.sort(key=lambda number: (first_use[number], -number))
    scatters = [Message(number, half="scatter") for number in range(count)]
    gathers = [Message(number, half="gather") for number in order]
    return MessagePlan(_lists(buckets), (*scatters, *gathers))


def period(
    plan: MessagePlan,
    sizes: Sequence[float],
    ready: Sequence[float],
    uses: Sequence[float],
    cost: Cost,
    *,
    max_in_flight: int = 1,
) -> float:
    """Predict the time of a step under a plan.

    It is the end of backward plus the waits in the next forward pass. Each half of an all-reduce
    takes half its time.

    Args:
        plan: Buckets and messages.
        sizes: Bytes of each gradient, in ready order.
        ready: Seconds from the step's start to each gradient.
        uses: Seconds from the start of a forward pass to each tensor's first use; 0 where unknown.
        cost: Seconds of an all-reduce by its bytes.
        max_in_flight: The number of messages that may be in flight at a time.

    Returns:
        Seconds from a step's start to the next one's.

    Raises:
        UsageError: The plan does not hold each tensor once, or sizes or times are impossible.
    """
    check_uses(sizes, ready, uses, max_in_flight)
    check_buckets(plan.buckets, len(sizes))
    if not sizes:
        return 0.0
    problem = MessageProblem(
        sizes, [None] * len(sizes), ready, uses, cost, max_in_flight
    )
    buckets = [problem.bucket(bucket) for bucket in plan.buckets]
    messages = [
        problem.message(buckets[m.bucket], m.stop - m.start, m.half)
        for m in plan.messages
    ]
    return problem.end + max(0.0, *problem.exposed_times(messages))


def lower_bound(
    sizes: Sequence[float],
    ready: Sequence[float],
    uses: Sequence[float],
    cost: Cost,
    *,
    halves: bool = False,
) -> float:
    """Return a lower bound of any plan's `period`, for any number of messages in flight.

    Args:
        sizes: Bytes of each gradient, in ready order.
        ready: Seconds from the step's start to each gradient.
        uses: Seconds from the start of a forward pass to each tensor's first use; 0 where unknown.
        cost: Seconds of an all-reduce by its bytes.
        halves: Whether each bucket is sent in two halves, a reduce-scatter and an all-gather.

    Returns:
        Seconds from a step's start to the next one's.

    Raises:
        UsageError: Sizes or times are impossible.
    """
    check_uses(sizes, ready, uses, max_in_flight=1)
    if not sizes:
        return 0.0
    least = least_exposed_time(sizes, ready, uses, cost, halves=halves)
    return float(ready[-1]) + max(0.0, least)


@dataclass(eq=False, slots=True)
class BucketCandidate:
    """A bucket that a plan may contain.

    Attributes:
        positions: Its tensors, as positions in ready order.
        size: Bytes.
        ready: Seconds from the step's start until all its gradients are ready.
        due: Seconds from the step's start until the next forward pass uses it, without waits.
        kind: Its tensors' kind.
    """

    positions: tuple[int, ...]
    size: float
    ready: float
    due: float
    kind: Hashable = None


@dataclass(eq=False, slots=True)
class PlannedMessage:
    """A message of a plan.

    Attributes:
        bucket: The bucket.
        part: The share of the bucket that it carries, from 0 to 1.
        half: Which half of the all-reduce it is, or all of it.
        seconds: The time that it takes alone.
    """

    bucket: BucketCandidate
    part: float
    half: Half
    seconds: float


class MessageProblem:
    """Holds one step's gradients and the network's cost, and evaluates lists of messages.

    Args:
        sizes: Bytes of each gradient, in ready order.
        kinds: The kind of each gradient: a bucket has one kind.
        ready: Seconds from the step's start to each gradient.
        uses: Seconds from the start of a forward pass to each tensor's first use; 0 where unknown.
        cost: Seconds of an all-reduce by its bytes.
        max_in_flight: The number of messages that may be in flight at a time.

    Attributes:
        end: Seconds from the step's start to the end of backward.
        overlap: Seconds of an all-reduce's start-up that overlap other messages.
        worked: The number of messages that a search has evaluated.
    """

    def __init__(
        self,
        sizes: Sequence[float],
        kinds: Sequence[Hashable],
        ready: Sequence[float],
        uses: Sequence[float],
        cost: Cost,
        max_in_flight: int,
    ) -> None:
        self.sizes, self.kinds = list(sizes), list(kinds)
        self.ready, self.uses = list(ready), list(uses)
        self.cost, self.max_in_flight = cost, max_in_flight
        self.end = ready[-1]
        self.overlap = overlappable_startup(cost)
        self.worked = 0

    def bucket(self, positions: Iterable[int]) -> BucketCandidate:
        """Return the bucket of the tensors at *positions*."""
        inside = tuple(sorted(positions))
        return BucketCandidate(
            inside,
            sum(self.sizes[p] for p in inside),
            self.ready[inside[-1]],
            self.end + min(self.uses[p] for p in inside),
            self.kinds[inside[0]],
        )

    def message(
        self, bucket: BucketCandidate, part: float = 1.0, half: Half = "all"
    ) -> PlannedMessage:
        """Return a message of a bucket: a part of it, or a half of its all-reduce."""
        seconds = self.cost(bucket.size * part)
        # Each half is estimated at half the cost of the all-reduce, start-up included. This is
        # exact for a ring: a half is n - 1 of its 2 (n - 1) rounds, of 1/n of the bytes each.
        return PlannedMessage(
            bucket, part, half, seconds if half == "all" else seconds / 2
        )

    def overlappable_startup(self, message: PlannedMessage) -> float:
        """Return the seconds of a message's start-up that overlap other messages."""
        return self.overlap if message.half == "all" else self.overlap / 2

    def ends(self, messages: Sequence[PlannedMessage]) -> list[float]:
        """Predict the seconds from the step's start until each message arrives."""
        self.worked += len(messages) * (
            1 if self.max_in_flight == 1 else CONCURRENT_COST
        )
        start_ups = [self.overlappable_startup(message) for message in messages]
        scattered: dict[BucketCandidate, int] = {}
        after = []
        for number, message in enumerate(messages):
            after.append(scattered[message.bucket] if message.half == "gather" else -1)
            if message.half == "scatter":
                scattered[message.bucket] = number
        return arrivals(
            [message.bucket.ready for message in messages],
            [message.seconds for message in messages],
            start_ups,
            max_in_flight=self.max_in_flight,
            after=after,
        )

    def exposed_times(self, messages: Sequence[PlannedMessage]) -> list[float]:
        """Predict the seconds by which each message arrives after its use; negative if before it."""
        if self.max_in_flight > 1:
            ends = self.ends(messages)
            return [
                end - message.bucket.due
                for end, message in zip(ends, messages, strict=True)
            ]
        self.worked += len(messages)
        late, free = [], 0.0
        for message in messages:
            bucket = message.bucket
            free = (free if free > bucket.ready else bucket.ready) + message.seconds
            late.append(free - bucket.due)
        return late


def least_exposed_time(
    sizes: Sequence[float],
    ready: Sequence[float],
    uses: Sequence[float],
    cost: Cost,
    *,
    halves: bool = False,
) -> float:
    """Return a lower bound of any plan's largest exposed time, for any number of messages in flight.

    Take any set of tensors. At best, its first message begins when its first tensor is ready, and
    the tensor used last arrives last. All of its messages take at least one start-up and the wire's
    time of their bytes. Jackson's rule gives the maximum of this bound over all sets.

    Args:
        sizes: Bytes of each gradient, in ready order.
        ready: Seconds from the step's start to each gradient.
        uses: Seconds from the start of a forward pass to each tensor's first use; 0 where unknown.
        cost: Seconds of an all-reduce by its bytes.
        halves: Whether each bucket is sent in two halves.

    Returns:
        Seconds; negative if every tensor can arrive before its use.
    """
    if not ready:
        return 0.0
    # With halves, a first half's start-up can overlap a second half's, so half of it counts.
    apart = overlappable_startup(cost) / (2 if halves else 1)
    return max(
        _jackson(
            [time + apart + line.start_up for time in ready],
            [line.seconds_per_byte * size for size in sizes],
            uses,
        )
        for line in lines_below(cost, sum(sizes))
    ) - float(ready[-1])


def _jackson(
    released: Sequence[float], seconds: Sequence[float], uses: Sequence[float]
) -> float:
    """Return the largest time by which a job ends after its use, under Jackson's rule.

    Jobs can be interrupted at no cost. Of the *released* jobs, the one used first continues.
    """
    late, now = float("-inf"), 0.0
    # Released jobs: when they are used, their number, and their seconds left.
    waiting: list[tuple[float, int, float]] = []
    for number, (time, duration, use) in enumerate(
        zip(released, seconds, uses, strict=True)
    ):
        while waiting and now < time:
            first_use, which, left = heapq.heappop(waiting)
            if now + left > time:
                heapq.heappush(waiting, (first_use, which, left - (time - now)))
                now = time
            else:
                now += left
                late = max(late, now - first_use)
        now = max(now, time)
        heapq.heappush(waiting, (use, number, duration))
    while waiting:
        use, _, left = heapq.heappop(waiting)
        now += left
        late = max(late, now - use)
    return late


def _lists(buckets: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(bucket) for bucket in buckets]


def check_uses(
    sizes: Sequence[float],
    ready: Sequence[float],
    uses: Sequence[float],
    max_in_flight: int,
) -> None:
    """Raise `UsageError` for invalid sizes or times."""
    check_times(sizes, ready, max_in_flight)
    if len(uses) != len(sizes):
        raise UsageError(
            f"uses: expected one time per tensor, {len(sizes)}, got {len(uses)}"
        )
    for use in uses:
        if not (use >= 0 and math.isfinite(use)):
            raise UsageError(f"uses: expected times of zero or more, got {use}")
