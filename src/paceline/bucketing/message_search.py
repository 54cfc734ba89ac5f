"""Plans to begin with, where messages are waited for in the order of their use.

Merges of several sizes under Jackson's rule, whole, in equal pieces, or cut where something
more urgent is ready; and for the ready order the exact merges.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.bucketing.cost_models import Seconds, many
from paceline.bucketing.exposed_time import LANES_COST, Group, Piece, Problem
from paceline.bucketing.timeline import send
from paceline.interfaces import Half

FINEST_EXPONENT = 9
"""Merges of down to 2 to the minus so much of all bytes are tried."""

MOST_PIECES = 64
"""Of one bucket."""

MOST_FOR_EXACT = 1000
"""Tensors: for more, exact merges would take too long."""

PATIENCE = (0.5, 1.0, 2.0, 4.0, 8.0)
"""What is under way is not interrupted to gain less than so many start-ups."""


@dataclass(frozen=True)
class Grain:
    """In which sizes messages go.

    *most*: bytes of a piece, where several lanes hide that pieces start up. *patience*:
    what is under way is not interrupted to gain less than so many seconds (infinity: never).
    *gathered*: bytes of groups that are ready, and go together.
    """

    most: float = math.inf
    patience: float = math.inf
    gathered: float = 0.0


def groupings(problem: Problem) -> Iterator[list[Group]]:
    """Merges of neighbours in ready order, of one kind each, coarse to fine."""
    total = sum(problem.sizes)
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for k in range(2 * FINEST_EXPONENT + 1):
        groups = _merged(problem, total / 2 ** (k / 2))
        key = tuple(group.positions for group in groups)
        if key not in seen:
            seen.add(key)
            yield groups
    yield [problem.group([position]) for position in range(len(problem.sizes))]


def _merged(problem: Problem, most: float) -> list[Group]:
    """Groups that are closed before they have more than *most* bytes."""
    groups: list[Group] = []
    open_ones: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, float] = {}
    for position, (size, kind) in enumerate(
        zip(problem.sizes, problem.kinds, strict=True)
    ):
        if kind in open_ones and filled[kind] + size > most:
            groups.append(problem.group(open_ones.pop(kind)))
        if kind not in open_ones:
            open_ones[kind], filled[kind] = [], 0.0
        open_ones[kind].append(position)
        filled[kind] += size
    groups += [problem.group(positions) for positions in open_ones.values()]
    return sorted(groups, key=lambda group: group.positions[-1])


def grains(problem: Problem) -> tuple[list[float], list[float], list[float]]:
    """What to try of each of a `Grain`'s sizes: coarse to fine, beside none."""
    total, start_up = sum(problem.sizes), problem.cost(0.0)
    most, gathered = [math.inf], [0.0]
    for k in range(2, 2 * FINEST_EXPONENT + 1):
        size = total / 2 ** (k / 2)
        gathered.append(size)
        seconds = problem.cost(size)
        # Beside smaller pieces not even one start-up is hidden; in one lane pieces cost
        # start-ups, unless large messages are dearer than small ones.
        hidden = problem.lanes > 1 and seconds >= 1.5 * problem.overlap
        if hidden or problem.cost(2 * size) > 2 * seconds * (1 + 1e-9):
            most.append(size)
    patience = [math.inf, *(start_ups * start_up for start_ups in PATIENCE)]
    return most, patience, gathered


def by_use(
    problem: Problem,
    groups: Sequence[Group],
    grain: Grain | None = None,
    *,
    halves: bool = False,
) -> list[Piece]:
    """Jackson's rule: whenever something can be sent, of the groups that are ready, a part
    of the one that is used first. With *halves*, groups go whole, and their second halves
    are ready when the first are in."""
    queue = _ByUse(problem, groups, grain or Grain(), halves)
    send(queue, problem.lanes)
    problem.worked += len(queue.pieces) * (10 if problem.lanes == 1 else LANES_COST)
    return joined_neighbours(problem, queue.pieces)


class _ByUse:
    """The `Queue` of `by_use`."""

    def __init__(
        self, problem: Problem, groups: Sequence[Group], grain: Grain, halves: bool
    ) -> None:
        self._problem, self._grain, self._halves = problem, grain, halves
        self._coming = sorted(groups, key=lambda group: group.ready)
        self._come = 0
        self._waiting: list[tuple[float, int, float, Half, Group]] = []
        self._pushed = 0
        self._took = -math.inf
        self.pieces: list[Piece] = []

    def take(self, now: float) -> tuple[float, float] | None:
        half: Half = "scatter" if self._halves else "all"
        while self.next_release(now) <= now:
            self._push(self._coming[self._come], 1.0, half)
            self._come += 1
        if not self._waiting:
            return None
        _, _, left, half, group = heapq.heappop(self._waiting)
        part = left
        if half == "all":
            if left == 1:
                group = self._with_others(group)
            part = self._part(group, left, now)
            if left - part > 1e-9:
                self._push(group, left - part, half)
        self._took = now
        piece = self._problem.piece(group, part, half)
        self.pieces.append(piece)
        return piece.seconds, self._problem.start_up(piece)

    def next_release(self, now: float) -> float:
        more = self._come < len(self._coming)
        return self._coming[self._come].ready if more else math.inf

    def arrived(self, message: int, now: float) -> None:
        piece = self.pieces[message]
        if piece.half == "scatter":
            self._push(piece.group, 1.0, "gather")

    def _push(self, group: Group, left: float, half: Half) -> None:
        # Of equally urgent ones the first; but what has begun goes on.
        self._pushed += 1
        order = -self._pushed if left < 1 else self._pushed
        heapq.heappush(self._waiting, (group.due, order, left, half, group))

    def _with_others(self, group: Group) -> Group:
        """A group, and the next most urgent ones that go along."""
        positions, size = list(group.positions), group.size
        while self._waiting:
            _, _, left, _, other = self._waiting[0]
            size += other.size
            if left < 1 or size > self._grain.gathered or other.kind != group.kind:
                break
            heapq.heappop(self._waiting)
            positions += other.positions
        more = len(positions) > len(group.positions)
        return self._problem.group(positions) if more else group

    def _part(self, group: Group, left: float, now: float) -> float:
        """How much of what is *left* of a group is sent now."""
        problem, grain = self._problem, self._grain
        part = left
        if group.size > grain.most:
            pieces = min(MOST_PIECES, math.ceil(group.size / grain.most))
            part = 1 / pieces
            if now - self._took < 0.3 * problem.overlap:
                # Lanes that start in step end in step: the wire would rest each time.
                part /= 2
            if left - part < 0.3 / pieces:
                part = left
        end = now + problem.cost(group.size * part)
        then = self._next_more_urgent(group.due, end)
        if min(then - now, end - then) > grain.patience:
            within = self._part_that_takes(group, part, then - now)
            part = within if within > 1 / MOST_PIECES else part
        return part

    def _next_more_urgent(self, due: float, until: float) -> float:
        """When the next group is ready that is used before *due*, if before *until*; else
        then."""
        for group in itertools.islice(self._coming, self._come, None):
            if group.ready >= until:
                break
            if group.due < due:
                return group.ready
        return until

    def _part_that_takes(self, group: Group, most: float, seconds: float) -> float:
        """The part of a group that takes so long, or just a little longer: what then comes
        is there."""
        low, high = 0.0, most
        for _ in range(20):
            middle = (low + high) / 2
            if self._problem.cost(group.size * middle) <= seconds:
                low = middle
            else:
                high = middle
        return high


def joined_neighbours(problem: Problem, pieces: Sequence[Piece]) -> list[Piece]:
    """In one lane, parts of one group that follow each other are one message, unless that
    takes longer."""
    if problem.lanes > 1:
        return list(pieces)  # one starts up beside the other
    result: list[Piece] = []
    for piece in pieces:
        before = result[-1] if result else None
        if before and before.group is piece.group and before.half == piece.half:
            part = min(1.0, before.part + piece.part)
            both = problem.piece(piece.group, part, piece.half)
            if both.seconds <= before.seconds + piece.seconds:
                result[-1] = both
                continue
        result.append(piece)
    return result


def scatters_first(problem: Problem, groups: Sequence[Group]) -> list[Piece]:
    """DeAR's order: first halves as they are ready, then second halves as they are used."""
    first = [problem.piece(group, half="scatter") for group in groups]
    by_first_use = sorted(groups, key=lambda group: group.due)
    return first + [problem.piece(group, half="gather") for group in by_first_use]


class InReadyOrder:
    """The exact merges of neighbours where groups go whole and in ready order, one at a time.

    With P the prefix sums of sizes, the first j tensors are in at
    ``f(j) = min over i < j of max(f(i), ready(j)) + cost(P(j) - P(i))``, over those i whose
    message is no later than a limit; a smaller f(j) never makes what follows later. The
    least limit is found by halving. *apart*: seconds of each start-up that do not occupy
    the wire, as in `bucketing.measured_rules`.
    """

    def __init__(self, problem: Problem, apart: float = 0.0) -> None:
        self._problem, self._apart = problem, apart
        count = len(problem.sizes)
        prefix: Seconds = np.concatenate(([0.0], np.cumsum(np.asarray(problem.sizes))))
        uses: Seconds = np.asarray(problem.uses, np.float64)
        self._seconds, self._dues, self._first = [], [], []
        run = 0  # where the run of tensors of one kind began
        for j in range(1, count + 1):
            if j > 1 and problem.kinds[j - 1] != problem.kinds[j - 2]:
                run = j - 1
            self._first.append(run)
            self._seconds.append(many(problem.cost, prefix[j] - prefix[run:j]) - apart)
            first_use = np.minimum.accumulate(uses[run:j][::-1])[::-1]
            self._dues.append(problem.end + first_use)

    def within(self, limit: float) -> list[Group] | None:
        """Groups none of which is more than *limit* late, and that are in soonest."""
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
        groups = []
        while count:
            groups.append(problem.group(range(came_from[count], count)))
            count = came_from[count]
        return groups[::-1]

    def least_late(self, goal: float, known: float) -> list[Group] | None:
        """Groups whose latest is as early as can be, or meets *goal*; None if none is
        earlier than *known*."""
        best = self.within(goal)
        if best is not None:
            return best
        low, high = goal, known
        close = 1e-7 * max(self._problem.end, abs(goal), abs(known))
        while high - low > close:
            groups = self.within((low + high) / 2)
            if groups is None:
                low = (low + high) / 2
            else:
                pieces = [self._problem.piece(group) for group in groups]
                best, high = (
                    groups,
                    min((low + high) / 2, max(self._problem.lateness(pieces))),
                )
        return best
