"""How late the messages of a plan are, where the next forward pass waits for them.

A step's forward pass begins at 0, and its backward pass ends when the last gradient is
ready: at E. The next forward pass then begins, and uses bucket b's first tensor u seconds
later, unless it has to wait. With b in at C, it is C - E - u late. What one use has waited
for delays those after it, so the step takes E and the most by which any bucket is late.

That is a shop with one machine, release times, delivery times and start-ups
(1 | r, q | Cmax): without start-ups, and where a message can be interrupted at any time,
Jackson's rule is optimal: of what is there, send what is used first.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from paceline.bucketing.cost_models import Cost, lines_below, overlapping_seconds
from paceline.bucketing.timeline import arrivals
from paceline.interfaces import Half

LANES_COST = 20
"""How much longer than with one lane it takes to find out when messages are in."""


@dataclass(eq=False, slots=True)
class Group:
    """A bucket to be: *positions* of its tensors in ready order, its *size* in bytes, when
    it is *ready*, and when the next forward pass would use it (*due*)."""

    positions: tuple[int, ...]
    size: float
    ready: float
    due: float
    kind: Hashable = None


@dataclass(eq=False, slots=True)
class Piece:
    """A message: so large a *part* of a *group*; it takes *seconds* if alone."""

    group: Group
    part: float
    half: Half
    seconds: float


class Problem:
    """One step's gradients, in ready order, and the network. *worked* counts messages that
    were looked at."""

    def __init__(
        self,
        sizes: Sequence[float],
        kinds: Sequence[Hashable],
        ready: Sequence[float],
        uses: Sequence[float],
        cost: Cost,
        lanes: int,
    ) -> None:
        self.sizes, self.kinds = list(sizes), list(kinds)
        self.ready, self.uses = list(ready), list(uses)
        self.cost, self.lanes = cost, lanes
        self.end = ready[-1]
        self.overlap = overlapping_seconds(cost)
        self.worked = 0

    def group(self, positions: Iterable[int]) -> Group:
        """A bucket of the tensors at *positions*."""
        inside = tuple(sorted(positions))
        return Group(
            inside,
            sum(self.sizes[p] for p in inside),
            self.ready[inside[-1]],
            self.end + min(self.uses[p] for p in inside),
            self.kinds[inside[0]],
        )

    def piece(self, group: Group, part: float = 1.0, half: Half = "all") -> Piece:
        """A message of it."""
        seconds = self.cost(group.size * part)
        # Each half of an all-reduce is taken to cost half of it, start-up included. So it is
        # in a ring: n - 1 of its 2 (n - 1) rounds, of 1/n of the bytes each.
        return Piece(group, part, half, seconds if half == "all" else seconds / 2)

    def start_up(self, piece: Piece) -> float:
        """How much of its time passes beside others."""
        return self.overlap if piece.half == "all" else self.overlap / 2

    def ends(self, pieces: Sequence[Piece]) -> list[float]:
        """When each message is in."""
        self.worked += len(pieces) * (1 if self.lanes == 1 else LANES_COST)
        start_ups = [self.start_up(piece) for piece in pieces]
        scattered: dict[Group, int] = {}
        after = []
        for number, piece in enumerate(pieces):
            after.append(scattered[piece.group] if piece.half == "gather" else -1)
            if piece.half == "scatter":
                scattered[piece.group] = number
        return arrivals(
            [piece.group.ready for piece in pieces],
            [piece.seconds for piece in pieces],
            start_ups,
            lanes=self.lanes,
            after=after,
        )

    def lateness(self, pieces: Sequence[Piece]) -> list[float]:
        """By how much each message is later than its use; below zero: earlier."""
        if self.lanes > 1:
            ends = self.ends(pieces)
            return [
                end - piece.group.due for end, piece in zip(ends, pieces, strict=True)
            ]
        self.worked += len(pieces)
        late, free = [], 0.0
        for piece in pieces:
            group = piece.group
            free = (free if free > group.ready else group.ready) + piece.seconds
            late.append(free - group.due)
        return late


def least_lateness(
    sizes: Sequence[float],
    ready: Sequence[float],
    uses: Sequence[float],
    cost: Cost,
    *,
    halves: bool = False,
) -> float:
    """No plan's latest bucket is less late, on any number of lanes.

    Take any tensors: the first message of them begins when the first is ready, at best;
    all of them take at least one start-up, and their bytes' time of the wire; and at best
    the one that is used last is in last. Jackson's rule gives the most of this over all
    choices of tensors.
    """
    if not ready:
        return 0.0
    # A first half can start up beside others while the second one still does.
    apart = overlapping_seconds(cost) / (2 if halves else 1)
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
    """The most by which a job ends after its use, where each can be interrupted at no
    cost: of those *released* (times that do not fall), what is used first goes on."""
    late, now = float("-inf"), 0.0
    waiting: list[tuple[float, int, float]] = []  # (use, which, seconds left)
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
