"""All-reduce at one switch: all workers send to it, and it sends the sum to all.

After SwitchML (Sapio et al., NSDI 2021). It is a ring of one group, see `rina`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from paceline.collectives.in_network.algorithms import Aggregated
from paceline.collectives.in_network.rina import PIECES, RingOfRacks
from paceline.collectives.in_network.topology import Group, one_switch
from paceline.collectives.schedules import Ring
from paceline.interfaces import CollectiveSummary, Comm, Schedule


class SwitchML(Aggregated):
    """One switch that adds up what all workers send."""

    name: ClassVar[str] = "switchml"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        formed_by=(
            "what stands at one rack's switch, which adds up all workers' integers: "
            "that rack, among those that aggregate, in which most of the workers are "
            "(SwitchML, NSDI 2021; none aggregates: a ring)"
        ),
        sends="the buffer once per rank, and once to each",
        good_for=(
            "one rack; other racks' contributions all cross their uplinks, and that "
            "one's downlink"
        ),
    )

    def groups(self, comm: Comm) -> tuple[Group, ...]:
        if not comm.aggregating or comm.racks is None or comm.size == 1:
            return tuple(Group((rank,)) for rank in range(comm.size))
        count = Counter(comm.racks)
        rack = min(comm.aggregating, key=lambda rack: (-count[rack], rack))
        return one_switch(comm.size, rack)

    def schedule(self, size: int, comm: Comm, racks: Sequence[int] | None) -> Schedule:
        if self.plain(comm):
            return Ring(comm.size, size)
        return RingOfRacks(self.groups(comm), size)

    def timed(self, size: int, comm: Comm) -> Schedule:
        if self.plain(comm):
            return Ring(comm.size, size)
        return RingOfRacks(self.groups(comm), size, PIECES)
