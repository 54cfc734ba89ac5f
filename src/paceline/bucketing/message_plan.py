"""In which messages gradients travel, where the next forward pass waits for them.

Methods that end a step where backward ends wait for the last message; those that go past it
wait for each bucket where its tensors are used again, so that what is used first should go
first, and the rest moves beside the next forward pass (ByteScheduler, Peng et al., SOSP
2019; P3, Jayarajan et al., MLSys 2019; US-Byte, Gao et al., 2023). `plan` says which
tensors share a bucket, in which parts buckets are cut, and in which order these go;
`period` says how long a step then takes, and `bound` how short it can be at best. All are
pure functions of what was measured. See `paceline.bucketing.exposed_time` for what is minimised.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from paceline.bucketing import rules
from paceline.bucketing.cost_models import Cost
from paceline.bucketing.exposed_time import Group, Piece, Problem, least_lateness
from paceline.bucketing.local_search import neighbours
from paceline.bucketing.message_search import (
    MOST_FOR_EXACT,
    Grain,
    InReadyOrder,
    by_use,
    grains,
    groupings,
    scatters_first,
)
from paceline.bucketing.timeline import check
from paceline.errors import UsageError
from paceline.interfaces import Message

SPARE = 0.05
"""A plan is good enough if every bucket is in so much of a step before its use: what is
measured varies."""

MOST_WORK = 1_000_000
"""Messages that a search looks at: half a second to a second."""

STARTS = 5
"""Plans that are improved by small changes."""

SAME = 0.002
"""Of a step: plans that differ by less are as good, and the one of fewer messages is used."""

UNITS = 2**20
"""Parts of a bucket are multiples of 1 / UNITS, so that ranks can agree on whole numbers."""


@dataclass(frozen=True)
class Plan:
    """*groups*: buckets, as positions in ready order, in the order in which they are ready;
    *messages*: their parts, in the order in which they are sent."""

    groups: list[list[int]]
    messages: tuple[Message, ...]


def plan(
    sizes: Sequence[float],
    kinds: Sequence[Hashable],
    ready: Sequence[float],
    uses: Sequence[float],
    cost: Cost,
    *,
    lanes: int = 1,
    halves: bool = False,
) -> Plan:
    """The best plan that a search of bounded length finds.

    *sizes* (bytes), *kinds* and *ready* (seconds from a step's start) are those of the
    gradients in ready order, and *uses* the seconds from the start of a forward pass to each
    tensor's first use, all of compute alone; 0 for what nobody is seen to use. *cost* is
    that of an all-reduce. With *halves*, buckets are whole, and go in two messages each:
    a reduce-scatter and an all-gather. Kinds never share a bucket.

    In one lane, without *halves*, it predicts no longer period than any plan of `bucketing`
    whose means are waited for where backward ends. Raises `UsageError` for sizes and times
    that cannot be.
    """
    _check(sizes, ready, uses, lanes)
    if len(kinds) != len(sizes):
        raise UsageError(
            f"kinds: expected one per tensor, {len(sizes)}, got {len(kinds)}"
        )
    if not sizes:
        return Plan([], ())
    problem = Problem(sizes, kinds, ready, uses, cost, lanes)
    least = least_lateness(sizes, ready, uses, cost, halves=halves)
    search = _Search(problem, max(least, -SPARE * problem.end))
    (_search_halves if halves else _search_whole)(problem, search)
    return _as_plan(search.simplest())


def fixed(
    groups: Sequence[Sequence[int]],
    uses: Sequence[float] = (),
    *,
    halves: bool = False,
) -> Plan:
    """The plan of given *groups*, in the order in which they are ready: each goes whole and
    in that order; with *halves*, first halves in that order, and then second halves in the
    order of their first use (DeAR, Zhang et al., 2023; the last bucket first, where *uses*
    are not known)."""
    count = len(groups)
    order = list(range(count))
    if not halves:
        return Plan(_lists(groups), tuple(Message(number) for number in order))
    first_use = [
        min(uses[position] for position in group) if uses else 0.0 for group in groups
    ]
    order.sort(key=lambda number: (first_use[number], -number))
    scatters = [Message(number, half="scatter") for number in range(count)]
    gathers = [Message(number, half="gather") for number in order]
    return Plan(_lists(groups), (*scatters, *gathers))


def period(
    plan: Plan,
    sizes: Sequence[float],
    ready: Sequence[float],
    uses: Sequence[float],
    cost: Cost,
    *,
    lanes: int = 1,
) -> float:
    """Seconds from a step's start to the next one's, if all goes by *plan*: the end of
    backward, and what is waited for in the next forward pass. Each half of an all-reduce
    takes half its time. Raises `UsageError` for what cannot be, as `plan` does."""
    _check(sizes, ready, uses, lanes)
    positions = sorted(itertools.chain.from_iterable(plan.groups))
    if positions != list(range(len(sizes))):
        raise UsageError(
            f"groups: expected each of the {len(sizes)} tensors once, got {plan.groups}"
        )
    if not sizes:
        return 0.0
    problem = Problem(sizes, [None] * len(sizes), ready, uses, cost, lanes)
    groups = [problem.group(group) for group in plan.groups]
    pieces = [
        problem.piece(groups[m.bucket], m.stop - m.start, m.half) for m in plan.messages
    ]
    return problem.end + max(0.0, *problem.lateness(pieces))


def bound(
    sizes: Sequence[float],
    ready: Sequence[float],
    uses: Sequence[float],
    cost: Cost,
    *,
    halves: bool = False,
) -> float:
    """Seconds below which no plan's `period` is, on any number of lanes."""
    _check(sizes, ready, uses, lanes=1)
    if not sizes:
        return 0.0
    least = least_lateness(sizes, ready, uses, cost, halves=halves)
    return float(ready[-1]) + max(0.0, least)


class _Search:
    """The best plans so far. *goal*: a lateness that is good enough."""

    def __init__(self, problem: Problem, goal: float) -> None:
        self.problem, self.goal = problem, goal
        self.late = self.most = math.inf
        """The lateness of the best plan; and the most that any plan may have: that of the
        first one that was offered."""
        self._close = 1e-9 * (problem.end + abs(goal))
        self._same = SAME * (problem.end + max(0.0, goal))
        self._shortest: dict[int, tuple[float, list[Piece]]] = {}
        """The best plan of so many messages."""

    @property
    def is_over(self) -> bool:
        """Whether the goal is met, or the work done."""
        met = self.late <= self.goal + self._same
        return met or self.problem.worked > MOST_WORK

    def offer(self, pieces: list[Piece]) -> tuple[float, float]:
        """Keep this plan if it is among the best. Returns its lateness, and by how much all
        of its messages are later than the goal: of equally late plans, the one in which
        fewer are is nearer to something better."""
        each = self.problem.lateness(pieces)
        late, count = max(each), len(pieces)
        if count not in self._shortest or late < self._shortest[count][0]:
            self._shortest[count] = late, pieces
        if self.most == math.inf:
            self.most = late
        self.late = min(self.late, late)
        return late, sum(max(0.0, lateness - self.goal) for lateness in each)

    def simplest(self) -> list[Piece]:
        """The plan of fewest messages that is as good as the best one."""
        most = min(self.most, max(self.late, self.goal) + self._same)
        good = [n for n, (late, _) in self._shortest.items() if late <= most]
        return self._shortest[min(good)][1]

    def tune(self, groupings: Sequence[list[Group]]) -> None:
        """Jackson's rule with several merges and grains: from each of a few, one of these
        is changed after the other for as long as that helps."""
        most, patience, gathered = grains(self.problem)
        tried: dict[tuple[int, Grain], float] = {}

        def late(recipe: tuple[int, Grain]) -> float:
            if recipe not in tried and not self.is_over:
                number, grain = recipe
                pieces = by_use(self.problem, groupings[number], grain)
                tried[recipe], _ = self.offer(pieces)
            return tried.get(recipe, math.inf)

        def near(number: int, grain: Grain) -> list[list[tuple[int, Grain]]]:
            return [
                [(number, replace(grain, most=size)) for size in most],
                [(other, grain) for other in range(len(groupings))],
                [(number, replace(grain, patience=time)) for time in patience],
                [(number, replace(grain, gathered=size)) for size in gathered],
            ]

        middle = most[len(most) * 2 // 3]
        for begin in (Grain(), Grain(most=middle), Grain(patience=patience[2])):
            best = min(((n, begin) for n in range(len(groupings))), key=late)
            before = math.inf
            while late(best) < before:
                before = late(best)
                for number in range(4):
                    best = min([best, *near(*best)[number]], key=late)

    def improve(self) -> None:
        """Make small changes to each of the best plans, for as long as one helps."""
        starts = sorted(self._shortest.values(), key=lambda known: known[0])
        for _, pieces in starts[:STARTS]:
            best, climbing = self.offer(pieces), True
            while climbing and not self.is_over:
                climbing = False
                for changed in neighbours(self.problem, pieces):
                    late, more = self.offer(changed)
                    less = late < best[0] - self._close
                    as_late = late <= best[0] + self._close
                    if less or (as_late and more < best[1] - self._close):
                        pieces, best, climbing = changed, (late, more), True
                    if climbing or self.is_over:
                        break


def _search_whole(problem: Problem, search: _Search) -> None:
    """Simple plans first: those that are waited for where backward ends are among them."""
    known = []
    for rule in ("optimal", "mg-wfbp"):
        known.append(_by_rule(problem, rule))
        search.offer([problem.piece(group) for group in known[-1]])
    if search.is_over:
        return
    if len(problem.sizes) <= MOST_FOR_EXACT:
        for apart in {0.0, problem.overlap if problem.lanes > 1 else 0.0}:
            exact = InReadyOrder(problem, apart).least_late(search.goal, search.late)
            if exact is not None:
                known.append(exact)
                search.offer([problem.piece(group) for group in exact])
    search.tune([*known, *groupings(problem)])
    search.improve()


def _search_halves(problem: Problem, search: _Search) -> None:
    for groups in itertools.chain([_by_rule(problem, "optimal")], groupings(problem)):
        halves = [scatters_first(problem, [group]) for group in groups]
        search.offer(list(itertools.chain(*halves)))
        search.offer(scatters_first(problem, groups))
        search.offer(by_use(problem, groups, halves=True))
        if search.is_over:
            return
    search.improve()


def _by_rule(problem: Problem, rule: str) -> list[Group]:
    known = problem.sizes, problem.kinds, problem.ready, problem.cost
    groups = rules.group(rule, *known, lanes=problem.lanes)
    return [problem.group(group) for group in groups]


def _as_plan(pieces: Sequence[Piece]) -> Plan:
    groups: list[Group] = sorted(
        {piece.group for piece in pieces}, key=lambda group: group.positions[-1]
    )
    number_of = {group: number for number, group in enumerate(groups)}
    left = {(piece.group, piece.half): 0 for piece in pieces}
    for piece in pieces:
        left[piece.group, piece.half] += 1
    sent = dict.fromkeys(left, 0.0)
    messages = []
    for piece in pieces:
        key = piece.group, piece.half
        left[key] -= 1
        start = round(sent[key] * UNITS) / UNITS
        sent[key] = sent[key] + piece.part if left[key] else 1.0
        stop = round(sent[key] * UNITS) / UNITS
        if stop > start:
            messages.append(Message(number_of[piece.group], start, stop, piece.half))
    return Plan(_lists([group.positions for group in groups]), tuple(messages))


def _lists(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(group) for group in groups]


def _check(
    sizes: Sequence[float], ready: Sequence[float], uses: Sequence[float], lanes: int
) -> None:
    check(sizes, ready, lanes)
    if len(uses) != len(sizes):
        raise UsageError(
            f"uses: expected one time per tensor, {len(sizes)}, got {len(uses)}"
        )
    for use in uses:
        if not (use >= 0 and math.isfinite(use)):
            raise UsageError(f"uses: expected times of zero or more, got {use}")
