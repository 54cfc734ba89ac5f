"""ATP's sums as a schedule: see `atp_tree` for who merges what.

Each part is cut into pieces, which go through the same stages one after the other, each a
step behind the one before it:

===== ==========================================================================
stage what moves
===== ==========================================================================
0     contributions, to the switch of their rack; from racks that merge nothing to
      the gate of the server's rack, or else to the server
1     sums of racks, to the gate or else to the server
2     the sum of all, from the gate to the server
3     the result, from the server to the gate, or else to all that is below it
4     from the gate to all that is below it
5     from the switch of each rack to its workers
===== ==========================================================================

*Priced* it is one activity: datagrams are so small that all stages move at once, so the link
that most streams share sets the pace. With n = racks that merge + workers in others, the link
of a dedicated server has n streams each way, and 1 where the server's own switch merges.
*Played* it takes about (pieces + stages) / pieces times as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.collectives.in_network.atp_tree import Server, Ways
from paceline.collectives.schedules import offset_of, segment
from paceline.interfaces import Transfer

STAGES = 6
PIECES = 32
"""Of each part, where a schedule is played."""


@dataclass(frozen=True)
class ServerBehindSwitches:
    """The schedule over *size* units. Nodes are the workers, then the switches of all racks
    in *switches*, then dedicated *servers*."""

    ways: Ways
    size: int
    pieces: int = 1

    @property
    def ranks(self) -> int:
        return len(self.ways.racks)

    @cached_property
    def switches(self) -> tuple[int, ...]:
        """The racks of workers and of servers; those that merge nothing pass on."""
        homes = (server.rack for server in self.ways.servers)
        return tuple(sorted({*self.ways.racks, *homes}))

    @cached_property
    def servers(self) -> tuple[int, ...]:
        """Numbers of the dedicated hosts."""
        return tuple(s.number for s in self.ways.servers if s.rank is None)

    @property
    def steps(self) -> int:
        return self.pieces + STAGES - 1

    def step(self, number: int) -> Iterator[Transfer]:
        for piece in range(max(0, number - STAGES + 1), min(number + 1, self.pieces)):
            for part, server in enumerate(self.ways.servers):
                whole = self._part(part)
                size = segment(whole, self.pieces, piece)
                if not size:
                    continue
                offset = offset_of(self.size, len(self.ways.servers), part)
                offset += offset_of(whole, self.pieces, piece)
                stage = number - piece
                for source, destination in self._stage(stage, server):
                    adds = stage < STAGES // 2
                    yield Transfer(source, destination, size, offset, adds)

    def _stage(self, stage: int, server: Server) -> Iterator[tuple[int, int]]:
        """The connections of one stage."""
        if stage >= STAGES // 2:  # results go back by the same ways
            back = self._stage(STAGES - 1 - stage, server)
            yield from ((destination, source) for source, destination in back)
            return
        ways, node = self.ways, self._switch
        gate, at = ways.gate(server), self._node(server)
        to = at if gate is None else node[gate]
        racks, alone = ways.below(server)
        if stage == 0:
            for rack in ways.merging:
                yield from ((rank, node[rack]) for rank in ways.of_rack(rack, server))
            yield from ((rank, to) for rank in alone)
        elif stage == 1:
            yield from ((node[rack], to) for rack in racks)
        elif gate is not None:
            yield to, at

    @cached_property
    def _switch(self) -> dict[int, int]:
        return {rack: self.ranks + place for place, rack in enumerate(self.switches)}

    def _node(self, server: Server) -> int:
        if server.rank is not None:
            return server.rank
        first = self.ranks + len(self.switches)
        return first + self.servers.index(server.number)

    def _part(self, part: int) -> int:
        return segment(self.size, len(self.ways.servers), part)

    def bytes_sent(self, rank: int) -> int:
        own = [
            (self._part(part), server)
            for part, server in enumerate(self.ways.servers)
            if server.rank == rank
        ]
        sent = self.size
        for size, server in own:  # the server beside it sends results
            sent += size * (self._copies(server) - 1)
        return sent

    def _copies(self, server: Server) -> int:
        if self.ways.gate(server) is not None:
            return 1
        racks, alone = self.ways.below(server)
        return len(racks) + len(alone)

    # ---- priced ----

    @property
    def priced(self) -> Sequence[Sequence[ServerBehindSwitches]]:
        return ((self,),)

    @property
    def members(self) -> Sequence[int]:
        return range(self.ranks)

    @property
    def pattern(self) -> Hashable:
        return ServerBehindSwitches, self.ways

    @property
    def connections(self) -> Iterable[tuple[int, int]]:
        return self.streams

    @property
    def messages_sent(self) -> int:
        return len(self.ways.servers)

    @property
    def bytes_per_connection(self) -> int:
        return -(-self.size // len(self.ways.servers))

    @cached_property
    def streams(self) -> Mapping[tuple[int, int], int]:
        """How many parts' streams move from node to node. What goes from rack to rack is
        listed by way of both switches, merging or not: so 1024 servers beside as many workers
        are some thousand pairs, not a million."""
        up: Counter[tuple[int, int]] = Counter()
        own = Counter(server.rank for server in self.ways.servers)
        count, node = len(self.ways.servers), self._switch
        for rack in self.ways.merging:
            for rank in self.ways.members[rack]:
                up[rank, node[rack]] += count - own[rank]
        homes = Counter(server.rack for server in self.ways.servers)
        for rank in self.ways.alone:
            up[rank, node[self.ways.racks[rank]]] += (
                count - homes[self.ways.racks[rank]]
            )
        loads = Counter(self.ways.racks[rank] for rank in self.ways.alone)
        loads.update(dict.fromkeys(self.ways.merging, 1))
        for source, streams in loads.items():
            for home, servers in homes.items():
                if source != home:
                    up[node[source], node[home]] += streams * servers
        for server in self.ways.servers:
            self._into(server, loads, up)
        up = Counter({pair: streams for pair, streams in up.items() if streams})
        return up + Counter({(b, a): streams for (a, b), streams in up.items()})

    def _into(
        self, server: Server, loads: Counter[int], up: Counter[tuple[int, int]]
    ) -> None:
        """Add what goes to *server* inside its rack."""
        at, home = self._node(server), self._switch[server.rack]
        if self.ways.gate(server) is not None:
            up[home, at] += 1
            return
        up[home, at] += sum(loads.values()) - loads[server.rack]
        for rank in self.ways.members.get(server.rack, ()):
            if rank != server.rank:  # perhaps on the same host: by no link
                up[rank, at] += 1

    def latency(self, one_way: Callable[[int, int], float]) -> float:
        """From the worker that is furthest from a server, there and back to the one that is
        furthest."""
        to_switch, from_switch = (
            {
                self._switch[rack]: max(hop(rank, self._switch[rack]) for rank in ranks)
                for rack, ranks in self.ways.members.items()
            }
            for hop in (one_way, lambda rank, switch: one_way(switch, rank))
        )
        longest = 0.0
        known: dict[int, float] = {}
        for server in self.ways.servers:
            at, home = self._node(server), self._switch[server.rack]
            if home not in known:
                out = max(s + one_way(n, home) for n, s in to_switch.items())
                back = max(s + one_way(home, n) for n, s in from_switch.items())
                known[home] = out + back
            there = known[home] + one_way(home, at) + one_way(at, home)
            longest = max(longest, there)
        return longest if self.ranks > 1 or self.servers else 0.0
