"""Searches for the message plan with the shortest step.

Candidates merge tensors into buckets of several sizes, and send them by Jackson's rule. A bucket is
sent whole, in equal parts, or cut at the time when a more urgent bucket becomes ready. For the ready
order, the search finds the best merges exactly.

- `plan_messages`: the search; start here.
- `candidate_buckets`, `size_choices`: the buckets and message sizes to try.
- `earliest_use_first`, `scatters_first`: order messages.
- `ReadyOrderMerges`: finds the exact merges for the ready order.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.bucketing.cost_models import Cost, Seconds, many
from paceline.bucketing.message_plan import (
    CONCURRENT_COST,
    UNITS,
    BucketCandidate,
    MessagePlan,
    MessageProblem,
    PlannedMessage,
    check_uses,
    least_exposed_time,
)
from paceline.bucketing.rules import plan_buckets
from paceline.bucketing.timeline import send
from paceline.errors import UsageError
from paceline.interfaces import Half, Message

SLACK = 0.05
"""A plan is good enough if every bucket arrives this share of a step before its use.

Measured times vary, so more precision gains nothing.
"""

MOST_WORK = 1_000_000
"""The most messages that a search evaluates, which takes half a second to a second."""

SAME = 0.002
"""Plans that differ by less than this share of a step count as equal.

The search then returns the plan with fewer messages.
"""

FINEST_EXPONENT = 9
"""The smallest merges have a share of 2**-FINEST_EXPONENT of all bytes."""

MOST_PARTS = 64
"""The most parts that a bucket is cut into."""

MOST_FOR_EXACT = 1000
"""The most tensors for which exact merges are computed, since more would take too long."""

PATIENCE = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Thresholds to try: a message is not interrupted to gain less than this number of start-ups."""


def plan_messages(
    sizes: Sequence[float],
    kinds: Sequence[Hashable],
    ready: Sequence[float],
    uses: Sequence[float],
    cost: Cost,
    *,
    max_in_flight: int = 1,
    halves: bool = False,
) -> MessagePlan:
    """Find the best message plan, by a search of bounded length.

    With one message at a time and without *halves*, its predicted step is never longer than under a
    bucket rule with waits at the end of backward.

    Args:
        sizes: Bytes of each gradient, in ready order.
        kinds: The kind of each gradient: a bucket has one kind.
        ready: Seconds of computing from the step's start to each gradient.
        uses: Seconds of computing from the start of a forward pass to each tensor's first use; 0
            where no use was observed.
        cost: Seconds of an all-reduce by its bytes.
        max_in_flight: The number of messages that may be in flight at a time.
        halves: Whether each bucket is sent in two messages, a reduce-scatter and an all-gather.

    Returns:
        The plan; `period` predicts its step.

    Raises:
        UsageError: Sizes, kinds or times are impossible.
    """
    check_uses(sizes, ready, uses, max_in_flight)
    if len(kinds) != len(sizes):
        raise UsageError(
            f"kinds: expected one per tensor, {len(sizes)}, got {len(kinds)}"
        )
    if not sizes:
        return MessagePlan([], ())
    problem = MessageProblem(sizes, kinds, ready, uses, cost, max_in_flight)
    least = least_exposed_time(sizes, ready, uses, cost, halves=halves)
    search = _Search(problem, max(least, -SLACK * problem.end))
    (_search_halves if halves else _search_whole)(problem, search)
    return _as_plan(search.simplest())


class _Search:
    """Collects the best plan for each number of messages, until an exposed time of *goal* is met."""

    def __init__(self, problem: MessageProblem, goal: float) -> None:
        self.problem, self.goal = problem, goal
        self.late = self.most = math.inf
        """Exposed times: `late` of the best plan, and `most` of the first plan, a limit for all."""
        self._same = SAME * (problem.end + max(0.0, goal))
        self._shortest: dict[int, tuple[float, list[PlannedMessage]]] = {}
        """The best exposed time and plan, by the number of messages."""

    @property
    def is_over(self) -> bool:
        """Whether the goal is met, or `MOST_WORK` is used up."""
        met = self.late <= self.goal + self._same
        return met or self.problem.worked > MOST_WORK

    def offer(self, messages: list[PlannedMessage]) -> float:
        """Store this plan if it is among the best, and return its exposed time."""
        late, count = max(self.problem.exposed_times(messages)), len(messages)
        if count not in self._shortest or late < self._shortest[count][0]:
            self._shortest[count] = late, messages
        if self.most == math.inf:
            self.most = late
        self.late = min(self.late, late)
        return late

    def simplest(self) -> list[PlannedMessage]:
        """Return the plan with the fewest messages among the plans as good as the best one."""
        most = min(self.most, max(self.late, self.goal) + self._same)
        good = [n for n, (late, _) in self._shortest.items() if late <= most]
        return self._shortest[min(good)][1]

    def tune(self, merges: Sequence[list[BucketCandidate]]) -> None:
        """Try Jackson's rule with several merges and message sizes.

        From each of a few starting points, it changes one choice after the other while the plan
        improves.
        """
        most, patience, gathered = size_choices(self.problem)
        tried: dict[tuple[int, MessageSizes], float] = {}

        def exposed(recipe: tuple[int, MessageSizes]) -> float:
            if recipe not in tried and not self.is_over:
                number, message_sizes = recipe
                messages = earliest_use_first(
                    self.problem, merges[number], message_sizes
                )
                tried[recipe] = self.offer(messages)
            return tried.get(recipe, math.inf)

        def near(
            number: int, message_sizes: MessageSizes
        ) -> list[list[tuple[int, MessageSizes]]]:
            return [
                [(number, replace(message_sizes, most=size)) for size in most],
                [(other, message_sizes) for other in range(len(merges))],
                [(number, replace(message_sizes, patience=time)) for time in patience],
                [(number, replace(message_sizes, gathered=size)) for size in gathered],
            ]

        middle = most[len(most) * 2 // 3]
        for begin in (
            MessageSizes(),
            MessageSizes(most=middle),
            MessageSizes(patience=patience[2]),
        ):
            best = min(((n, begin) for n in range(len(merges))), key=exposed)
            before = math.inf
            while exposed(best) < before:
                before = exposed(best)
                for number in range(4):
                    best = min([best, *near(*best)[number]], key=exposed)


def _search_whole(problem: MessageProblem, search: _Search) -> None:
    """Search plans of whole buckets or parts, simple plans first.

    The first plans come from bucket rules, so the result is no worse than waiting at the end of
    backward.
    """
    known = []
    for rule in ("optimal", "mg-wfbp"):
        known.append(_by_rule(problem, rule))
        search.offer([problem.message(bucket) for bucket in known[-1]])
    if search.is_over:
        return
    if len(problem.sizes) <= MOST_FOR_EXACT:
        for apart in {0.0, problem.overlap if problem.max_in_flight > 1 else 0.0}:
            exact = ReadyOrderMerges(problem, apart).least_late(
                search.goal, search.late
            )
            if exact is not None:
                known.append(exact)
                search.offer([problem.message(bucket) for bucket in exact])
    search.tune([*known, *candidate_buckets(problem)])


def _search_halves(problem: MessageProblem, search: _Search) -> None:
    for buckets in itertools.chain(
        [_by_rule(problem, "optimal")], candidate_buckets(problem)
    ):
        halves = [scatters_first(problem, [bucket]) for bucket in buckets]
        search.offer(list(itertools.chain(*halves)))
        search.offer(scatters_first(problem, buckets))
        search.offer(earliest_use_first(problem, buckets, halves=True))
        if search.is_over:
            return


def _by_rule(problem: MessageProblem, rule: str) -> list[BucketCandidate]:
    known = problem.sizes, problem.kinds, problem.ready, problem.cost
    buckets = plan_buckets(rule, *known, max_in_flight=problem.max_in_flight)
    return [problem.bucket(bucket) for bucket in buckets]


def _as_plan(messages: Sequence[PlannedMessage]) -> MessagePlan:
    buckets: list[BucketCandidate] = sorted(
        {message.bucket for message in messages},
        key=lambda bucket: bucket.positions[-1],
    )
    number_of = {bucket: number for number, bucket in enumerate(buckets)}
    left = {(message.bucket, message.half): 0 for message in messages}
    for message in messages:
        left[message.bucket, message.half] += 1
    sent = dict.fromkeys(left, 0.0)
    planned = []
    for message in messages:
        key = message.bucket, message.half
        left[key] -= 1
        start = round(sent[key] * UNITS) / UNITS
        sent[key] = sent[key] + message.part if left[key] else 1.0
        stop = round(sent[key] * UNITS) / UNITS
        if stop > start:
            planned.append(
                Message(number_of[message.bucket], start, stop, message.half)
            )
    return MessagePlan([list(bucket.positions) for bucket in buckets], tuple(planned))


@dataclass(frozen=True)
class MessageSizes:
    """The sizes of messages under Jackson's rule.

    Attributes:
        most: The largest message, in bytes. Several small ones in flight hide their start-ups.
        patience: The least gain, in seconds, for which a message is interrupted; infinity: never.
        gathered: The size, in bytes, up to which ready buckets are merged.
    """

    most: float = math.inf
    patience: float = math.inf
    gathered: float = 0.0


def candidate_buckets(problem: MessageProblem) -> Iterator[list[BucketCandidate]]:
    """Yield merges of neighbours in ready order, of one kind each, from coarse to fine."""
    total = sum(problem.sizes)
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for k in range(2 * FINEST_EXPONENT + 1):
        buckets = _merged(problem, total / 2 ** (k / 2))
        key = tuple(bucket.positions for bucket in buckets)
        if key not in seen:
            seen.add(key)
            yield buckets
    yield [problem.bucket([position]) for position in range(len(problem.sizes))]


def _merged(problem: MessageProblem, most: float) -> list[BucketCandidate]:
    """Merge tensors into buckets of at most *most* bytes; a larger tensor is a bucket of its own."""
    buckets: list[BucketCandidate] = []
    open_ones: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, float] = {}
    for position, (size, kind) in enumerate(
        zip(problem.sizes, problem.kinds, strict=True)
    ):
        if kind in open_ones and filled[kind] + size > most:
            buckets.append(problem.bucket(open_ones.pop(kind)))
        if kind not in open_ones:
            open_ones[kind], filled[kind] = [], 0.0
        open_ones[kind].append(position)
        filled[kind] += size
    buckets += [problem.bucket(positions) for positions in open_ones.values()]
    return sorted(buckets, key=lambda bucket: bucket.positions[-1])


def size_choices(
    problem: MessageProblem,
) -> tuple[list[float], list[float], list[float]]:
    """Return the values to try for each field of `MessageSizes`: no limit, then coarse to fine."""
    total, start_up = sum(problem.sizes), problem.cost(0.0)
    most, gathered = [math.inf], [0.0]
    for k in range(2, 2 * FINEST_EXPONENT + 1):
        size = total / 2 ** (k / 2)
        gathered.append(size)
        seconds = problem.cost(size)
        # Smaller messages would not hide even one start-up. With one message at a time, small
        # messages only add start-ups, unless large messages cost more per byte.
        hidden = problem.max_in_flight > 1 and seconds >= 1.5 * problem.overlap
        if hidden or problem.cost(2 * size) > 2 * seconds * (1 + 1e-9):
            most.append(size)
    patience = [math.inf, *(start_ups * start_up for start_ups in PATIENCE)]
    return most, patience, gathered


def earliest_use_first(
    problem: MessageProblem,
    buckets: Sequence[BucketCandidate],
    message_sizes: MessageSizes | None = None,
    *,
    halves: bool = False,
) -> list[PlannedMessage]:
    """Order messages by Jackson's rule: whenever the network is free, send the ready bucket used first.

    Args:
        problem: The step's gradients and the network.
        buckets: The buckets to send.
        message_sizes: How to cut and merge buckets; None: each is sent whole.
        halves: Whether buckets are sent in two halves. A second half is ready when its first half
            has arrived.

    Returns:
        The messages, in the order of sending.
    """
    queue = _EarliestUseFirst(problem, buckets, message_sizes or MessageSizes(), halves)
    send(queue, problem.max_in_flight)
    problem.worked += len(queue.messages) * (
        10 if problem.max_in_flight == 1 else CONCURRENT_COST
    )
    return join_neighbours(problem, queue.messages)


class _EarliestUseFirst:
    """The `Queue` of `earliest_use_first`, which records its messages."""

    def __init__(
        self,
        problem: MessageProblem,
        buckets: Sequence[BucketCandidate],
        message_sizes: MessageSizes,
        halves: bool,
    ) -> None:
        self._problem, self._sizes, self._halves = problem, message_sizes, halves
        self._coming = sorted(buckets, key=lambda bucket: bucket.ready)
        self._come = 0
        self._waiting: list[tuple[float, int, float, Half, BucketCandidate]] = []
        self._pushed = 0
        self._took = -math.inf
        self.messages: list[PlannedMessage] = []

    def take(self, now: float) -> tuple[float, float] | None:
        half: Half = "scatter" if self._halves else "all"
        while self.next_release(now) <= now:
            self._push(self._coming[self._come], 1.0, half)
            self._come += 1
        if not self._waiting:
            return None
        _, _, left, half, bucket = heapq.heappop(self._waiting)
        part = left
        if half == "all":
            if left == 1:
                bucket = self._with_others(bucket)
            part = self._part(bucket, left, now)
            if left - part > 1e-9:
                self._push(bucket, left - part, half)
        self._took = now
        message = self._problem.message(bucket, part, half)
        self.messages.append(message)
        return message.seconds, self._problem.overlappable_startup(message)

    def next_release(self, now: float) -> float:
        more = self._come < len(self._coming)
        return self._coming[self._come].ready if more else math.inf

    def arrived(self, message: int, now: float) -> None:
        arrived = self.messages[message]
        if arrived.half == "scatter":
            self._push(arrived.bucket, 1.0, "gather")

    def _push(self, bucket: BucketCandidate, left: float, half: Half) -> None:
        # Of equally urgent buckets, a bucket that has begun continues. Otherwise the first one
        # goes first.
        self._pushed += 1
        order = -self._pushed if left < 1 else self._pushed
        heapq.heappush(self._waiting, (bucket.due, order, left, half, bucket))

    def _with_others(self, bucket: BucketCandidate) -> BucketCandidate:
        """Merge a bucket with the next most urgent ready buckets, as `MessageSizes` allows."""
        positions, size = list(bucket.positions), bucket.size
        while self._waiting:
            _, _, left, _, other = self._waiting[0]
            size += other.size
            if left < 1 or size > self._sizes.gathered or other.kind != bucket.kind:
                break
            heapq.heappop(self._waiting)
            positions += other.positions
        more = len(positions) > len(bucket.positions)
        return self._problem.bucket(positions) if more else bucket

    def _part(self, bucket: BucketCandidate, left: float, now: float) -> float:
        """Return the part of a bucket to send now; *left* is its unsent part."""
        problem, message_sizes = self._problem, self._sizes
        part = left
        if bucket.size > message_sizes.most:
            parts = min(MOST_PARTS, math.ceil(bucket.size / message_sizes.most))
            part = 1 / parts
            if now - self._took < 0.3 * problem.overlap:
                # Messages that start together end together, and leave the wire idle each time.
                part /= 2
            if left - part < 0.3 / parts:
                part = left
        end = now + problem.cost(bucket.size * part)
        then = self._next_more_urgent(bucket.due, end)
        if min(then - now, end - then) > message_sizes.patience:
            within = self._part_that_takes(bucket, part, then - now)
            part = within if within > 1 / MOST_PARTS else part
        return part

    def _next_more_urgent(self, due: float, until: float) -> float:
        """Return when the next bucket used before *due* is ready, at most *until*."""
        for bucket in itertools.islice(self._coming, self._come, None):
            if bucket.ready >= until:
                break
            if bucket.due < due:
                return bucket.ready
        return until

    def _part_that_takes(
        self, bucket: BucketCandidate, most: float, seconds: float
    ) -> float:
        """Return the part of a bucket that takes *seconds* or slightly longer.

        The urgent bucket is thus ready when that part has been sent.
        """
        low, high = 0.0, most
        for _ in range(20):
            middle = (low + high) / 2
            if self._problem.cost(bucket.size * middle) <= seconds:
                low = middle
            else:
                high = middle
        return high


def join_neighbours(
    problem: MessageProblem, messages: Sequence[PlannedMessage]
) -> list[PlannedMessage]:
    """Join consecutive parts of one bucket into one message, unless that takes longer.

    This applies only with one message at a time.

    Args:
        problem: The step's gradients and the network.
        messages: Messages in the order of sending.

    Returns:
        The messages after joining.
    """
    # The start-ups of concurrent parts overlap, so joining them gains nothing.
    if problem.max_in_flight > 1:
        return list(messages)
    result: list[PlannedMessage] = []
    for message in messages:
        before = result[-1] if result else None
        if before and before.bucket is message.bucket and before.half == message.half:
            part = min(1.0, before.part + message.part)
            both = problem.message(message.bucket, part, message.half)
            if both.seconds <= before.seconds + message.seconds:
                result[-1] = both
                continue
        result.append(message)
    return result


def scatters_first(
    problem: MessageProblem, buckets: Sequence[BucketCandidate]
) -> list[PlannedMessage]:
    """Return messages in DeAR's order: first halves in ready order, then second halves by first use."""
    first = [problem.message(bucket, half="scatter") for bucket in buckets]
    by_first_use = sorted(buckets, key=lambda bucket: bucket.due)
    return first + [problem.message(bucket, half="gather") for bucket in by_first_use]


class ReadyOrderMerges:
    """Finds the best merges of neighbours exactly, for whole buckets in ready order, one at a time.

    With P the prefix sums of sizes, the first j tensors have arrived at ``f(j) = min over i < j of
    max(f(i), ready(j)) + cost(P(j) - P(i))``. Only those i count whose message is no later than a
    limit. A smaller f(j) never delays later messages. Bisection finds the least limit.

    Args:
        problem: The step's gradients and the network.
        apart: Seconds of each start-up that do not occupy the wire, as in `bucketing.rules`.
    """

    def __init__(self, problem: MessageProblem, apart: float = 0.0) -> None:
        self._problem, self._apart = problem, apart
        count = len(problem.sizes)
        prefix: Seconds = np.concatenate(([0.0], np.cumsum(np.asarray(problem.sizes))))
        uses: Seconds = np.asarray(problem.uses, np.float64)
        self._seconds, self._dues, self._first = [], [], []
        # The start of the current run of tensors of one kind.
        run = 0
        for j in range(1, count + 1):
            if j > 1 and problem.kinds[j - 1] != problem.kinds[j - 2]:
                run = j - 1
            self._first.append(run)
            self._seconds.append(many(problem.cost, prefix[j] - prefix[run:j]) - apart)
            first_use = np.minimum.accumulate(uses[run:j][::-1])[::-1]
            self._dues.append(problem.end + first_use)

    def within(self, limit: float) -> list[BucketCandidate] | None:
        """Return the buckets that arrive first if no exposed time exceeds *limit*; else None."""
        problem, count = self._problem, len(self._problem.sizes)
        done: Seconds = np.zeros(count + 1)
        came_from = [0] * (count + 1)
        for j in range(1, count + 1):
            first = self._first[j - 1]
            released = problem.ready[j - 1] + self._apart
            ends = np.maximum(done[first:j], released) + self._seconds[j - 1]
            ends[ends > self._dues[j - 1] + limit] = math.inf
            best = int(np.argmin(ends))
            if ends[best] == math.inf:
                return None
            done[j], came_from[j] = ends[best], first + best
        problem.worked += 10 * count
        buckets = []
        while count:
            buckets.append(problem.bucket(range(came_from[count], count)))
            count = came_from[count]
        return buckets[::-1]

    def least_late(self, goal: float, known: float) -> list[BucketCandidate] | None:
        """Search the buckets with the least exposed time.

        Args:
            goal: An exposed time that is good enough, in seconds.
            known: The exposed time of the best known plan, in seconds.

        Returns:
            The buckets, or any buckets that meet *goal*. None if no plan is better than *known*.
        """
        best = self.within(goal)
        if best is not None:
            return best
        low, high = goal, known
        close = 1e-7 * max(self._problem.end, abs(goal), abs(known))
        while high - low > close:
            buckets = self.within((low + high) / 2)
            if buckets is None:
                low = (low + high) / 2
            else:
                messages = [self._problem.message(bucket) for bucket in buckets]
                best, high = (
                    buckets,
                    min((low + high) / 2, max(self._problem.exposed_times(messages))),
                )
        return best
