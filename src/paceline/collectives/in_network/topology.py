"""Which switch or server sums which contributions: the ring of Rina, and ATP's tree. No I/O.

*Rina* (ICNP 2024: the idea; what follows is this project's own design): all workers of a rack with
an aggregator are one *group*, and every other worker is a group by itself. Groups form a ring. With
one group, all is summed at one switch (SwitchML).

*ATP* (Lao et al., NSDI 2021): the first switch on a contribution's way sums its rack. The switch of
the server's own rack sums the contributions of all racks. Results return on the same ways: each
switch sends one copy to each node below it. A buffer has as many parts as there are servers. For a
part whose server stands in rack t:

===================== ============================ =======================
contributor           sends to                     which sends its sum to
===================== ============================ =======================
the server's worker   the server                   -
workers of a rack r   the switch of r, if it       the switch of t; if it
                      aggregates                   does not aggregate, the
                                                   server
workers of others     the switch of t; if it does  -
                      not aggregate, the server
the switch of t       the server                   -
===================== ============================ =======================

Chunks belong to parts in turn: chunk c is of part c mod p, for p servers. This module knows no
addresses: it names switches and servers by `End`s.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Group:
    """One member of the ring: *ranks* summed by the aggregator of *rack*, or a worker alone (*rack*
    None)."""

    ranks: tuple[int, ...]
    rack: int | None = None


def ring_of_racks(
    racks: Sequence[int], aggregating: Collection[int]
) -> tuple[Group, ...]:
    """The ring of workers, by their *racks*, of which *aggregating* have an aggregator.

    Groups are ordered by lowest rank; workers of one rack are beside each other. The only worker of
    a rack is alone: there is nothing to aggregate.
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
    """One group: all workers at the aggregator of one rack."""
    return (Group(tuple(range(workers)), rack),)


# ---- ATP ----


class ServerPlace(NamedTuple):
    """Where one server stands: in *rack*, beside a *rank*, or (None) on dedicated host *number*."""

    rack: int
    rank: int | None = None
    number: int = 0


@dataclass(frozen=True)
class AtpTree:
    """Which switch or server sums which contributions, on the way to each server.

    Args:
        racks: The rack of each rank.
        aggregating: The racks that have an aggregator.
        servers: The server of each part.
    """

    racks: tuple[int, ...]
    aggregating: tuple[int, ...]
    servers: tuple[ServerPlace, ...]

    @cached_property
    def members(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each rack that has some."""
        found: dict[int, list[int]] = {}
        for rank, rack in enumerate(self.racks):
            found.setdefault(rack, []).append(rank)
        return {rack: tuple(ranks) for rack, ranks in found.items()}

    @cached_property
    def aggregating_racks(self) -> tuple[int, ...]:
        """Racks whose switch has something to sum: two workers of the job, or a worker and a
        server."""
        homes = {server.rack for server in self.servers}
        return tuple(
            rack
            for rack, ranks in self.members.items()
            if rack in self.aggregating and (len(ranks) > 1 or rack in homes)
        )

    @cached_property
    def direct_workers(self) -> tuple[int, ...]:
        """Ranks in racks whose switch sums nothing."""
        return tuple(
            r for r, rack in enumerate(self.racks) if rack not in self.aggregating_racks
        )

    def server_switch(self, server: ServerPlace) -> int | None:
        """The rack of *server*, if its switch aggregates; else None."""
        return server.rack if server.rack in self.aggregating_racks else None

    def below(self, server: ServerPlace) -> tuple[list[int], list[int]]:
        """The racks and the single ranks whose streams meet at the switch of *server*, or at
        *server* itself."""
        ranks = [rank for rank in self.direct_workers if rank != server.rank]
        racks = [rack for rack in self.aggregating_racks if rack != server.rack]
        return racks, ranks

    def streams_into(self, server: ServerPlace) -> int:
        """The number of streams that cross the link of *server*."""
        if self.server_switch(server) is not None:
            return 1
        racks, ranks = self.below(server)
        return len(racks) + len(ranks)

    def expected(self, rack: int, server: ServerPlace) -> list[int]:
        """All ranks whose contributions for *server* meet at the switch of *rack*."""
        if rack == server.rack:
            return [rank for rank in range(len(self.racks)) if rank != server.rank]
        return [rank for rank in self.members[rack] if rank != server.rank]


def beside_workers(racks: Sequence[int]) -> tuple[ServerPlace, ...]:
    """A server beside each worker."""
    return tuple(ServerPlace(rack, rank) for rank, rack in enumerate(racks))


class End(NamedTuple):
    """The switch of a rack, or the server of a part."""

    kind: Literal["switch", "server"]
    number: int


def at_worker(tree: AtpTree, rank: int) -> list[End]:
    """Where a worker sends its contribution to each part."""
    rack = tree.racks[rank]
    return [
        End("server", part)
        if server.rank == rank
        else End("switch", rack)
        if rack in tree.aggregating_racks
        else _top(tree, part, server)
        for part, server in enumerate(tree.servers)
    ]


def next_of(tree: AtpTree, end: End) -> tuple[tuple[int, ...], list[End | None]]:
    """For each part: how many workers' contributions meet at *end*, and where their sum goes next.

    None: the sum is complete there.
    """
    if end.kind == "server":
        everyone, parts = len(tree.racks), range(len(tree.servers))
        expected = tuple(everyone * (part == end.number) for part in parts)
        return expected, [None] * len(parts)
    nexts: list[End | None] = [
        End("server", part) if server.rack == end.number else _top(tree, part, server)
        for part, server in enumerate(tree.servers)
    ]
    return tuple(len(tree.expected(end.number, one)) for one in tree.servers), nexts


def _top(tree: AtpTree, part: int, server: ServerPlace) -> End:
    """Where streams from other racks enter the rack of *server*."""
    rack = tree.server_switch(server)
    return End("server", part) if rack is None else End("switch", rack)
