"""ATP's ways as what each datagram's end is told: see `atp_tree`.

Chunks go to slots in turn and slots to parts: chunk c is of part c mod p, for p servers. Workers
are named by bits, wherever they are. Nothing here knows addresses: ends are `End`s.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from paceline.collectives.in_network.atp_tree import Server, Ways


class End(NamedTuple):
    """The switch of a rack, the server of a part, or a worker."""

    kind: Literal["switch", "server", "worker"]
    number: int


class AtSwitch(NamedTuple):
    """What the aggregator of a rack is told. *here*: the bits of its workers. By part:
    *expected*, the bits of those whose contributions come through it, and *next*, what is behind
    it. *routes*: the way to workers of other racks."""

    here: int
    expected: tuple[int, ...]
    next: tuple[End, ...]
    routes: tuple[tuple[int, End], ...]


def at_switch(ways: Ways, rack: int) -> AtSwitch:
    """For a rack that merges."""
    here = set(ways.members[rack])
    expected = [ways.expected(rack, server) for server in ways.servers]
    beyond = set().union(*expected) - here
    return AtSwitch(
        bits_of(here),
        tuple(bits_of(ranks) for ranks in expected),
        tuple(
            End("server", part) if server.rack == rack else _top(ways, part, server)
            for part, server in enumerate(ways.servers)
        ),
        _routes(ways, beyond),
    )


def at_server(ways: Ways, part: int) -> tuple[tuple[int, End], ...]:
    """The way to each worker from the server of a part: bits, and to where."""
    server = ways.servers[part]
    gate = ways.gate(server)
    others = [rank for rank in range(len(ways.racks)) if rank != server.rank]
    if gate is None:
        routes = _routes(ways, others)
    else:
        routes = ((bits_of(others), End("switch", gate)),) if others else ()
    if server.rank is not None:
        routes += ((1 << server.rank, End("worker", server.rank)),)
    return routes


def at_worker(ways: Ways, rank: int) -> tuple[End, ...]:
    """Where a worker sends its contributions to each part."""
    rack = ways.racks[rank]
    return tuple(
        End("server", part)
        if server.rank == rank
        else End("switch", rack)
        if rack in ways.merging
        else _top(ways, part, server)
        for part, server in enumerate(ways.servers)
    )


def bits_of(ranks: Iterable[int]) -> int:
    """The bitmap of these workers."""
    return sum(1 << rank for rank in ranks)


def _top(ways: Ways, part: int, server: Server) -> End:
    gate = ways.gate(server)
    return End("server", part) if gate is None else End("switch", gate)


def _routes(ways: Ways, ranks: Iterable[int]) -> tuple[tuple[int, End], ...]:
    """From outside of their racks to *ranks*: by their switch, or each by itself."""
    found: dict[End, int] = {}
    for rank in sorted(ranks):
        rack = ways.racks[rank]
        end = End("switch", rack) if rack in ways.merging else End("worker", rank)
        found[end] = found.get(end, 0) | 1 << rank
    return tuple((bits, end) for end, bits in found.items())
