"""All-reduce around a ring of racks: all workers of one whose switch adds up are one member.

After Rina (ICNP 2024), of which the idea is certain and what follows is this project's own
design. The buffer has a part for each of G groups (`collectives.in_network.topology`: who they are, and who
does what in which stage), so the ring has 2 (G - 1) steps, however many workers there are. What
comes for a group its workers take in turn, datagram by datagram; the one whose turn it is, the
datagram's *agent*, adds it to its own numbers and sends both to the switch.

===================== ============================= =====================================
moves                 between                       of the buffer, for G groups, w workers
===================== ============================= =====================================
own numbers           each worker to its switch     1
what is whole         agents to their switch        (G - 1) / (G w) each
sums, then what is    a switch, or a worker alone,  2 (G - 1) / (G w) to each of w workers
whole                 to the next group's agents    (1 where that is one alone)
what is whole         the switch to each worker     1
===================== ============================= =====================================

*Priced*: all of this moves at once, as datagrams do that go through all stages in a wavefront,
so the busiest link sets the pace: (1 + 2 (G - 1) / (G w)) times the buffer where all racks
aggregate, 2 (G - 1) / G where a worker is alone. To that comes the latency of all steps in a row.
*Played*, pieces are coarser: it takes about (pieces + 2 stages) / pieces times as long, and
a latency more for each piece.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

from paceline.collectives.in_network.algorithms import Aggregated
from paceline.collectives.in_network.topology import Group, ring_of_racks
from paceline.collectives.schedules import Ring, offset_of, segment
from paceline.interfaces import CollectiveSummary, Comm, Schedule, Transfer

PIECES = 32
"""Of each part, where a schedule is played."""


class Rina(Aggregated):
    """A ring of racks, whose switches add up what their workers send."""

    name: ClassVar[str] = "rina"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        formed_by=(
            "a ring of racks, where all workers behind a switch that adds up are one "
            "member, and every other worker is one (Rina, ICNP 2024; none adds up: a "
            "ring of all)"
        ),
        sends=(
            "the buffer once per rank and a little more; 2 (G - 1) / G of it where a "
            "worker is a member of its own, for G members"
        ),
        good_for=(
            "racks of which some have something that adds up at their switch "
            "(`paceline aggregate`), and latency"
        ),
    )

    def groups(self, comm: Comm) -> tuple[Group, ...]:
        racks = range(comm.size) if comm.racks is None else comm.racks
        return ring_of_racks(racks, comm.aggregating)

    def schedule(self, size: int, comm: Comm, racks: Sequence[int] | None) -> Schedule:
        return self._in_pieces(size, comm, 1)

    def timed(self, size: int, comm: Comm) -> Schedule:
        return self._in_pieces(size, comm, PIECES)

    def _in_pieces(self, size: int, comm: Comm, pieces: int) -> Schedule:
        groups = self.groups(comm)
        if all(group.rack is None for group in groups):
            return Ring(comm.size, size)
        return RingOfRacks(groups, size, pieces)


class Cut(NamedTuple):
    """One of so many equal parts of a piece."""

    parts: int
    number: int


WHOLE = Cut(1, 0)


def turns(group: Group) -> Iterator[tuple[int, Cut]]:
    """What each worker of a group is the agent of, of each piece."""
    for index, rank in enumerate(group.ranks):
        yield rank, Cut(len(group.ranks), index)


@dataclass(frozen=True)
class RingOfRacks:
    """The schedule over *size* units among *groups*, in ring order; each part is cut into
    *pieces*, which go through the stages one behind the other."""

    groups: tuple[Group, ...]
    size: int
    pieces: int = 1

    @cached_property
    def ranks(self) -> int:
        return sum(len(group.ranks) for group in self.groups)

    @cached_property
    def switches(self) -> tuple[int, ...]:
        """The racks whose switches add up."""
        return tuple(g.rack for g in self.groups if g.rack is not None)

    @property
    def stages(self) -> int:
        return 2 * len(self.groups) - 1

    @property
    def steps(self) -> int:
        return self.pieces - 1 + 2 * self.stages

    def step(self, number: int) -> Iterator[Transfer]:
        first = max(0, number - 2 * self.stages + 1)
        for piece in range(first, min(number + 1, self.pieces)):
            stage, out = divmod(number - piece, 2)
            for position in range(len(self.groups)):
                part = position - stage
                whole = segment(self.size, len(self.groups), part)
                size = segment(whole, self.pieces, piece)
                offset = offset_of(self.size, len(self.groups), part)
                offset += offset_of(whole, self.pieces, piece)
                moves = self._out if out else self._in
                for source, destination, cut, adds in moves(stage, position):
                    length = segment(size, cut.parts, cut.number)
                    start = offset + offset_of(size, cut.parts, cut.number)
                    if length:
                        yield Transfer(source, destination, length, start, adds)

    def _in(self, stage: int, position: int) -> Iterator[tuple[int, int, Cut, bool]]:
        """What goes into the switch of a group."""
        group, node = self.groups[position], self._nodes[position]
        if group.rack is None:
            return
        adds = stage < len(self.groups)
        for rank, turn in turns(group):
            yield rank, node, WHOLE if adds else turn, adds

    def _out(self, stage: int, position: int) -> Iterator[tuple[int, int, Cut, bool]]:
        """What leaves a group, and what its switch gives to its own workers."""
        group, node = self.groups[position], self._nodes[position]
        if stage >= len(self.groups) - 1 and group.rack is not None:
            yield from ((node, rank, WHOLE, False) for rank in group.ranks)
        if stage < self.stages - 1:
            for rank, turn in turns(self._after(position)):
                yield node, rank, turn, stage < len(self.groups) - 1

    @cached_property
    def _nodes(self) -> tuple[int, ...]:
        """Where each group's sums are formed: its switch, or the worker itself."""
        switch = iter(range(self.ranks, self.ranks + len(self.switches)))
        return tuple(
            g.ranks[0] if g.rack is None else next(switch) for g in self.groups
        )

    def _after(self, position: int) -> Group:
        return self.groups[(position + 1) % len(self.groups)]

    def bytes_sent(self, rank: int) -> int:
        position = next(i for i, g in enumerate(self.groups) if rank in g.ranks)
        group, count = self.groups[position], len(self.groups)
        parts = [segment(self.size, count, position - s) for s in range(self.stages)]
        if group.rack is None:
            return sum(parts[:-1])
        turn = dict(turns(group))[rank]
        spread = {
            part: sum(
                segment(segment(part, self.pieces, piece), turn.parts, turn.number)
                for piece in range(self.pieces)
            )
            for part in set(parts)
        }
        return self.size + sum(spread[part] for part in parts[count:])

    # ---- priced ----

    @property
    def priced(self) -> Sequence[Sequence[RingOfRacks]]:
        return ((self,),)

    @property
    def members(self) -> Sequence[int]:
        return range(self.ranks)

    @property
    def pattern(self) -> Hashable:
        return RingOfRacks, self.groups

    @property
    def connections(self) -> Iterable[tuple[int, int]]:
        return self.streams

    @property
    def messages_sent(self) -> int:
        return self.stages

    @property
    def bytes_per_connection(self) -> int:
        return self.size

    @cached_property
    def streams(self) -> Mapping[tuple[int, int], float]:
        """How much of the buffer goes from one node to another."""
        found: defaultdict[tuple[int, int], float] = defaultdict(float)
        passed = 1 - 1 / len(self.groups)
        for position, (group, node) in enumerate(
            zip(self.groups, self._nodes, strict=True)
        ):
            if group.rack is not None:
                for rank in group.ranks:
                    found[rank, node] += 1 + passed / len(group.ranks)
                    found[node, rank] += 1
            following = self._after(position).ranks if passed else ()
            for rank in following:
                found[node, rank] += 2 * passed / len(following)
        return found

    def latency(self, one_way: Callable[[int, int], float]) -> float:
        """Of the chain that starts at one group and goes twice around, less two steps, to the
        workers of the last; into and out of the switches on its way. The slowest start
        counts."""
        into, out, own = [], [], []
        for position, (group, node) in enumerate(
            zip(self.groups, self._nodes, strict=True)
        ):
            behind = () if group.rack is None else group.ranks
            into.append(max((one_way(rank, node) for rank in behind), default=0.0))
            own.append(max((one_way(node, rank) for rank in behind), default=0.0))
            out.append(max(one_way(node, rank) for rank in self._after(position).ranks))
        if len(self.groups) == 1:
            return into[0] + own[0]
        steps = [i + o for i, o in zip(into, out, strict=True)]
        around = 2 * sum(steps)
        return max(
            around - steps[last] - steps[last + 1] + into[last] + own[last]
            for last in range(-2, len(self.groups) - 2)
        )
