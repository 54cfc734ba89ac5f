"""A ring of racks: who its members are, and one worker's part of a sum around it. No I/O.

After Rina (ICNP 2024: the idea; what follows is this project's own design). All workers of a rack
that has an aggregator are one *group*, every other worker is one by himself. The sum is that of a
ring of G groups: group p of them deals in its stage s with part (p - s) mod G.

================ ==================== ============================ =========================
stage            comes from the       what the group does          goes to
                 group before
================ ==================== ============================ =========================
0                -                    sums its own                 the next group
1 to G - 2       sum of those before  adds its own                 the next group
G - 1            sum of all others    adds its own: the part is    all of its own, and the
                                      whole                        next group
G to 2 G - 3     a whole part         spreads it                   all of its own, and the
                                                                   next group
2 G - 2          a whole part         spreads it                   all of its own
================ ==================== ============================ =========================

With one group stage 0 is all there is, and its sum goes to all (SwitchML). A group of one worker
sends its own sums, and no more in the last stage.

All stages are one stream of datagrams: a datagram of a stage leaves as soon as that of the stage
before is here, whatever the others do. Each waits only for one of an earlier stage elsewhere, so
nobody waits in a circle, whatever the numbers of slots. Stages take turns in the stream, each
a little behind the one before (`STAGGER_BYTES`): parts that are summed load the way to the aggregator,
parts that are spread the way from it, and so both ways are busy at once.

What comes for a group its workers take in turn, slot by slot; the one whose turn it is, the
datagram's *agent*, adds it to its own, and brings it where it is spread. So no worker's link
carries more than another's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from paceline.collectives.in_network.packets import LOCAL, Array, Flag

STAGGER_BYTES = 48 << 10
"""Of the stream, that all stages together are apart: half of a window's, so that what a stage
waits for has come when its turn does; more would leave ways idle at both ends of a sum."""


@dataclass(frozen=True)
class Group:
    """One member of the ring: *ranks* that the aggregator of *rack* sums, or a worker alone
    (*rack* None)."""

    ranks: tuple[int, ...]
    rack: int | None = None


def ring_of_racks(
    racks: Sequence[int], aggregating: Collection[int]
) -> tuple[Group, ...]:
    """The ring of workers in *racks* (one each), of which *aggregating* have an aggregator:
    ordered by lowest rank, those of a rack beside each other.

    A worker that is the only one in its rack is alone: there is nothing to aggregate.
    """
    members: dict[int, list[int]] = {}
    for rank, rack in enumerate(racks):
        members.setdefault(rack, []).append(rank)
    groups = []
    for rack, ranks in members.items():  # in the order of their lowest ranks
        if rack in aggregating and len(ranks) > 1:
            groups.append(Group(tuple(ranks), rack))
        else:
            groups += [Group((rank,)) for rank in ranks]
    return tuple(groups)


def one_switch(workers: int, rack: int) -> tuple[Group, ...]:
    """All workers at the aggregator of one rack."""
    return (Group(tuple(range(workers)), rack),)


@lru_cache(maxsize=64)
def _in_order(stages: int, datagrams: int, behind: int) -> Array:
    """Which datagram of all stages, counted stage by stage, comes when in the stream, where each
    stage is so many *behind* the one before."""
    stage = np.repeat(np.arange(stages), datagrams)
    within = np.tile(np.arange(datagrams), stages)
    return np.lexsort((stage, within + behind * stage))


@dataclass(frozen=True)
class Stages:
    """What group *position* of *groups* does, in parts of so many *datagrams*; *alone*: it is
    one worker without an aggregator. *stagger*: datagrams of the stream that all stages together
    are apart. A *step* is a datagram of all stages, counted stage by
    stage; a *chunk* one of the stream."""

    groups: int
    position: int
    datagrams: int
    alone: bool
    stagger: int = 1

    @property
    def chunks(self) -> int:
        """Datagrams of the group's own stream."""
        return len(self.steps)

    @property
    def steps(self) -> Array:
        """The step of each chunk."""
        stages = 2 * self.groups - 1
        behind = max(1, self.stagger // stages)  # the same in all groups: no circle
        return _in_order(stages - self.alone, self.datagrams, behind)

    def rows(self, steps: Array) -> Array:
        """Which row of the values a step is about, where rows are datagrams."""
        stage, within = np.divmod(steps, self.datagrams)
        return (self.position - stage) % self.groups * self.datagrams + within

    def is_spread(self, steps: Array) -> Array:
        """Which steps' rows are whole already, and only spread."""
        return np.asarray(steps >= self.groups * self.datagrams)

    def modes(self) -> Array:
        """Of each chunk: where its sum goes."""
        stage = self.steps // self.datagrams
        if self.alone:
            return np.full(self.chunks, int(Flag.FORWARD), np.uint8)
        modes = np.full(self.chunks, int(Flag.ONWARD), np.uint8)
        modes[stage < self.groups - 1] = int(Flag.FORWARD)
        modes[stage == 2 * self.groups - 2] = int(LOCAL)
        return modes

    def leaving(self) -> Array:
        """Of each chunk: whether its sum goes to the next group."""
        return np.asarray(self.modes() != LOCAL)


def datagrams_of(elements: int, groups: int, per_datagram: int) -> int:
    """How many datagrams a part of *elements* has."""
    return max(1, -(-elements // (groups * per_datagram)))


class RingSum:
    """One worker's *values*, int32 and flat, become the sums over all workers of the ring.

    An `Operation` for the worker's `Stream`, of datagrams of *elements*; `arrive` takes what
    comes from the group *before*. *turns*: which chunks of that one's stream come to this worker
    (`Inbox.turns`).
    """

    def __init__(
        self,
        values: Array,
        elements: int,
        stages: Stages,
        before: Stages,
        turns: Array,
    ) -> None:
        self._values, self._elements, self._stages = values, elements, stages
        rows = stages.groups * stages.datagrams
        self._rows = np.zeros((rows, elements), np.int32)
        self._rows.reshape(-1)[: len(values)] = values
        ends = np.arange(1, rows + 1) * elements
        self._lengths = np.clip(len(values) - ends + elements, 0, elements)
        self.chunks = stages.chunks
        self._steps = stages.steps
        self._coming = before.steps + stages.datagrams
        """Of each chunk of the group before: the step that waits for it."""
        every = (2 * stages.groups - 1) * stages.datagrams
        self._mine = np.zeros(every, np.bool_)
        """Of each step: whether this worker is its agent."""
        self._mine[self._coming[turns & before.leaving()]] = True
        self._here = ~self._mine

    def ready(self, chunks: Array) -> Array:
        return np.asarray(self._here[self._steps[chunks]])

    def arrive(self, chunks: Array, packets: Array) -> None:
        """These, of the stream of the group before, are here: once each."""
        steps = self._coming[chunks]
        spread = self._stages.is_spread(steps)
        self._add(self._stages.rows(steps[~spread]), packets[~spread])
        self._put(self._stages.rows(steps[spread]), packets[spread])
        self._here[steps] = True

    def bring(self, chunks: Array, packets: Array) -> None:
        steps = self._steps[chunks]
        rows = self._stages.rows(steps)
        silent = self._stages.is_spread(steps) & ~self._mine[steps]
        packets["header"]["elements"] = np.where(silent, 0, self._lengths[rows])
        packets["values"][:, : self._elements] = self._rows[rows]

    def take(self, chunks: Array, packets: Array) -> None:
        self._put(self._stages.rows(self._steps[chunks]), packets)

    def finish(self) -> None:
        """All is here: hand it over."""
        self._values[:] = self._rows.reshape(-1)[: len(self._values)]

    def _put(self, rows: Array, packets: Array) -> None:
        for part, mine, length in self._by_length(rows):
            self._rows[part, :length] = packets["values"][mine, :length]

    def _add(self, rows: Array, packets: Array) -> None:
        for part, mine, length in self._by_length(rows):
            self._rows[part, :length] += packets["values"][mine, :length]

    def _by_length(self, rows: Array) -> list[tuple[Array, Array, int]]:
        """Rows that have equally many values: all, or all but the last ones."""
        lengths = self._lengths[rows]
        found = []
        for length in np.unique(lengths).tolist():
            mine = np.flatnonzero(lengths == length)
            found.append((rows[mine], mine, int(length)))
        return found
