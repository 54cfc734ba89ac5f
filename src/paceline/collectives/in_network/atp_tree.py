"""Who merges what on the way to which server, for sums behind aggregating switches.

After ATP (Lao et al., NSDI 2021): the first switch that a contribution meets adds up what
comes from its rack, and the switch of the server's own rack what comes from everywhere; results
go back by the same ways, and each switch passes one copy to each of those below it. A
buffer has as many parts as there are servers. One text for schedules and for datagrams.

For part p, whose server stands in rack t ("*gate*": the switch of t, where it merges):

===================== ============================ =======================
who contributes       to                           which passes it on to
===================== ============================ =======================
the server's worker   the server                   -
workers of a rack r   the switch of r, if it       the gate; if there is
                      merges                       none, the server
workers of others     the gate; if there is none,  -
                      the server
the gate              the server                   -
===================== ============================ =======================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Server(NamedTuple):
    """One server, in *rack*: beside a *rank*, or (None) dedicated host *number*."""

    rack: int
    rank: int | None = None
    number: int = 0


@dataclass(frozen=True)
class Ways:
    """*racks*: of each rank. *aggregating*: racks that have an aggregator. *servers*: of each
    part."""

    racks: tuple[int, ...]
    aggregating: tuple[int, ...]
    servers: tuple[Server, ...]

    @cached_property
    def members(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each rack that has some."""
        found: dict[int, list[int]] = {}
        for rank, rack in enumerate(self.racks):
            found.setdefault(rack, []).append(rank)
        return {rack: tuple(ranks) for rack, ranks in found.items()}

    @cached_property
    def merging(self) -> tuple[int, ...]:
        """Racks whose switch has something to add up: two workers of the job, or one and a
        server."""
        homes = {server.rack for server in self.servers}
        return tuple(
            rack
            for rack, ranks in self.members.items()
            if rack in self.aggregating and (len(ranks) > 1 or rack in homes)
        )

    @cached_property
    def alone(self) -> tuple[int, ...]:
        """Ranks in racks that merge nothing."""
        return tuple(r for r, rack in enumerate(self.racks) if rack not in self.merging)

    def gate(self, server: Server) -> int | None:
        """The rack of *server*, if its switch merges."""
        return server.rack if server.rack in self.merging else None

    def below(self, server: Server) -> tuple[list[int], list[int]]:
        """Racks that merge, and ranks that are by themselves, whose streams meet at the gate
        of *server*, or else at *server*."""
        ranks = [rank for rank in self.alone if rank != server.rank]
        racks = [rack for rack in self.merging if rack != server.rack]
        return racks, ranks

    @property
    def most_streams(self) -> int:
        """How many come to one server's link at most."""

        def streams(server: Server) -> int:
            racks, ranks = self.below(server)
            gated = self.gate(server) is not None
            return 1 if gated else len(racks) + len(ranks)

        return max(1, *map(streams, self.servers))

    def of_rack(self, rack: int, server: Server) -> Iterator[int]:
        """The ranks whose contributions for *server* the switch of their *rack* adds up."""
        return (rank for rank in self.members[rack] if rank != server.rank)

    def expected(self, rack: int, server: Server) -> list[int]:
        """All ranks whose contributions for *server* meet at the switch of *rack*."""
        if rack == server.rack:
            return [rank for rank in range(len(self.racks)) if rank != server.rank]
        return list(self.of_rack(rack, server))


def beside_workers(racks: Sequence[int]) -> tuple[Server, ...]:
    """A server beside each worker."""
    return tuple(Server(rack, rank) for rank, rack in enumerate(racks))
