"""Searches for the message plan with the shortest step: `plan_messages`.

Candidates merge tensors into buckets of several sizes, and send them by Jackson's rule. Buckets go
whole, in equal parts, or cut where a more urgent bucket becomes ready. For the ready order, the
best merges are found exactly.
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
"""A plan is good enough if every bucket arrives this part of a step before its use. Measured times
vary, so more precision gains nothing."""

MOST_WORK = 1_000_000
"""Messages that a search evaluates at most, which takes half a second to a second."""

SAME = 0.002
"""Plans that differ by less than this part of a step count as equal: the one with fewer messages is
used."""

FINEST_EXPONENT = 9
"""The smallest merges have 2 to the power of minus this exponent of all bytes."""

MOST_PARTS = 64
"""The most parts that a bucket is cut into."""

MOST_FOR_EXACT = 1000
"""With more tensors, exact merges would take too long."""

PATIENCE = (0.5, 1.0, 2.0, 4.0, 8.0)
"""A message is not interrupted to gain less than this number of start-ups."""


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

    With one message at a time and without *halves*, its predicted step is no longer than that of a
    bucket rule whose averages are waited for where backward ends.

    Args:
        sizes: Bytes of each gradient, in ready order.
        kinds: The kind of each gradient: a bucket has one kind.
        ready: Seconds of computing from the step's start to each gradient.
        uses: Seconds of computing from the start of a forward pass to each tensor's first use; 0
            where no use was observed.
        cost: Seconds of an all-reduce by its bytes.
        max_in_flight: The number of messages that may be under way at a time.
        halves: Whether each bucket goes whole in two messages, a reduce-scatter and an all-gather.

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
    """The best plan so far for each number of messages. *goal*: an exposed time that is good
    enough."""

    def __init__(self, problem: MessageProblem, goal: float) -> None:
        self.problem, self.goal = problem, goal
        self.late = self.most = math.inf
        """`late` is the best plan's exposed time. `most` is the limit for any plan: the first
        offered plan's."""
        self._same = SAME * (problem.end + max(0.0, goal))
        self._shortest: dict[int, tuple[float, list[PlannedMessage]]] = {}
        """The best plan by its number of messages."""

    @property
    def is_over(self) -> bool:
        """Whether the goal is met, or `MOST_WORK` is used up."""
        met = self.late <= self.goal + self._same
        return met or self.problem.worked > MOST_WORK

    def offer(self, messages: list[PlannedMessage]) -> float:
        """Keep this plan if it is among the best. Return its exposed time."""
        late, count = max(self.problem.exposed_times(messages)), len(messages)
        if count not in self._shortest or late < self._shortest[count][0]:
            self._shortest[count] = late, messages
        if self.most == math.inf:
            self.most = late
        self.late = min(self.late, late)
        return late

    def simplest(self) -> list[PlannedMessage]:
        """The plan with the fewest messages among those as good as the best one."""
        most = min(self.most, max(self.late, self.goal) + self._same)
        good = [n for n, (late, _) in self._shortest.items() if late <= most]
        return self._shortest[min(good)][1]

    def tune(self, merges: Sequence[list[BucketCandidate]]) -> None:
        """Try Jackson's rule with several merges and message sizes.

        From each of a few starting points, change one choice after the other for as long as that
        helps.
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

    The first plans are those of bucket rules, so the result is no worse than waiting where backward
    ends.
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
        most: Bytes of a message at most; several at a time hide start-ups of small ones.
        patience: A message is not interrupted to gain less than these seconds; infinity: never.
        gathered: Bytes up to which buckets that are ready are merged.
    """

    most: float = math.inf
    patience: float = math.inf
    gathered: float = 0.0


def candidate_buckets(problem: MessageProblem) -> Iterator[list[BucketCandidate]]:
    """Merges of neighbours in ready order, of one kind each, coarse to fine."""
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
    """Buckets that are closed before they have more than *most* bytes."""
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
    """The values to try for each field of `MessageSizes`, coarse to fine, after "no limit"."""
    total, start_up = sum(problem.sizes), problem.cost(0.0)
    most, gathered = [math.inf], [0.0]
    for k in range(2, 2 * FINEST_EXPONENT + 1):
        size = total / 2 ** (k / 2)
        gathered.append(size)
        seconds = problem.cost(size)
        # Smaller messages would not hide even one start-up. One at a time, small messages only
        # add start-ups, unless large messages cost more per byte.
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
    """Send by Jackson's rule: whenever the network is free, send a part of the ready bucket used
    first.

    With *halves*, buckets go whole, and a second half is ready when its first half has arrived.
    """
    queue = _EarliestUseFirst(problem, buckets, message_sizes or MessageSizes(), halves)
    send(queue, problem.max_in_flight)
    problem.worked += len(queue.messages) * (
        10 if problem.max_in_flight == 1 else CONCURRENT_COST
    )
    return join_neighbours(problem, queue.messages)


class _EarliestUseFirst:
    """The `Queue` of `earliest_use_first`."""

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
        # Of equally urgent buckets, the first one goes first; but a bucket that has begun
        # continues.
        self._pushed += 1
        order = -self._pushed if left < 1 else self._pushed
        heapq.heappush(self._waiting, (bucket.due, order, left, half, bucket))

    def _with_others(self, bucket: BucketCandidate) -> BucketCandidate:
        """A bucket, merged with the next most urgent ones that are ready."""
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
        """The part of a bucket to send now, of what is *left* of it."""
        problem, message_sizes = self._problem, self._sizes
        part = left
        if bucket.size > message_sizes.most:
            parts = min(MOST_PARTS, math.ceil(bucket.size / message_sizes.most))
            part = 1 / parts
            if now - self._took < 0.3 * problem.overlap:
                # Messages that start together end together, and the wire would rest each time.
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
        """When the next bucket used before *due* is ready; *until* if none is ready before that."""
        for bucket in itertools.islice(self._coming, self._come, None):
            if bucket.ready >= until:
                break
            if bucket.due < due:
                return bucket.ready
        return until

    def _part_that_takes(
        self, bucket: BucketCandidate, most: float, seconds: float
    ) -> float:
        """The part of a bucket that takes *seconds* or slightly longer, so that the urgent bucket
        is ready then."""
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

    Only with one message at a time: concurrent parts overlap their start-ups.
    """
    if problem.max_in_flight > 1:
        return list(messages)  # their start-ups overlap
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
    """DeAR's order: first halves as they are ready, then second halves as they are used."""
    first = [problem.message(bucket, half="scatter") for bucket in buckets]
    by_first_use = sorted(buckets, key=lambda bucket: bucket.due)
    return first + [problem.message(bucket, half="gather") for bucket in by_first_use]


class ReadyOrderMerges:
    """The exact merges of neighbours if buckets go whole and in ready order, one at a time.

    With P the prefix sums of sizes, the first j tensors have arrived at ``f(j) = min over i < j of
    max(f(i), ready(j)) + cost(P(j) - P(i))``. Only those i count whose message is no later than a
    limit. A smaller f(j) never delays later messages. Bisection finds the least limit. *apart*:
    seconds of each start-up that do not occupy the wire, as in `bucketing.rules`.
    """

    def __init__(self, problem: MessageProblem, apart: float = 0.0) -> None:
        self._problem, self._apart = problem, apart
        count = len(problem.sizes)
        prefix: Seconds = np.concatenate(([0.0], np.cumsum(np.asarray(problem.sizes))))
        uses: Seconds = np.asarray(problem.uses, np.float64)
        self._seconds, self._dues, self._first = [], [], []
        run = 0  # start of the current run of tensors of one kind
        for j in range(1, count + 1):
            if j > 1 and problem.kinds[j - 1] != problem.kinds[j - 2]:
                run = j - 1
            self._first.append(run)
            self._seconds.append(many(problem.cost, prefix[j] - prefix[run:j]) - apart)
            first_use = np.minimum.accumulate(uses[run:j][::-1])[::-1]
            self._dues.append(problem.end + first_use)

    def within(self, limit: float) -> list[BucketCandidate] | None:
        """The buckets that arrive soonest, if none is more than *limit* late; else None."""
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
        """The buckets with the least exposed time, or some that meet *goal*.

        None if no plan is better than *known*.
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
