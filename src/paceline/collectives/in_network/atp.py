"""All-reduce by servers behind aggregating switches, after ATP (Lao et al., NSDI 2021).

`atp_tree` says who merges what, `atp_pricing` when, `atp_routes` what datagrams' ends are told.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, cast

from paceline.collectives.in_network.algorithms import Aggregated
from paceline.collectives.in_network.atp_pricing import PIECES, ServerBehindSwitches
from paceline.collectives.in_network.atp_session import ServedEnd
from paceline.collectives.in_network.atp_tree import Server, Ways, beside_workers
from paceline.collectives.in_network.sum_queue import MakeEnd
from paceline.collectives.in_network.sums_service import KIND, ServerHosts
from paceline.collectives.in_network.topology import Group
from paceline.collectives.schedules import Ring
from paceline.errors import UsageError
from paceline.interfaces import (
    CollectiveSummary,
    Comm,
    Runtime,
    Schedule,
    Service,
    ServiceJob,
)
from paceline.torch_internals import simulated_end

if TYPE_CHECKING:
    from paceline.collectives.communicator import TorchComm
    from paceline.transport.connection import RemoteServer


class ATP(Aggregated):
    """Sums that servers form, behind switches that add up what comes from their racks."""

    name: ClassVar[str] = "atp"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        formed_by=(
            "servers, behind switches of which those that aggregate add up what comes "
            "from their rack, and that of a server's own rack what comes from all "
            "(ATP, NSDI 2021): on hosts of their own where the cluster has some, else "
            "one beside each worker"
        ),
        sends=(
            "the buffer once per rank; n times the buffer, divided by the number of "
            "servers, goes to each of them and back, n being racks that aggregate and "
            "workers in others"
        ),
        good_for="clusters whose switches all aggregate",
    )

    def __init__(self) -> None:
        super().__init__()
        self._hosts: ServerHosts | None = None

    def ways(self, comm: Comm) -> Ways:
        """Who merges what for *comm*."""
        places = cast("TorchComm", comm).places
        racks = tuple(comm.racks or (0,) * comm.size)
        servers = beside_workers(racks)
        if places.cluster is not None and places.cluster.servers:
            servers = tuple(
                Server(server.rack, None, number)
                for number, server in enumerate(places.cluster.servers)
            )
        return Ways(racks, tuple(sorted(comm.aggregating)), servers)

    def groups(self, comm: Comm) -> tuple[Group, ...]:
        ways = self.ways(comm)
        return (
            *(Group(ways.members[rack], rack) for rack in ways.merging),
            *(Group((rank,)) for rank in ways.alone),
        )

    def plain(self, comm: Comm) -> bool:
        if comm.size == 1:
            return True
        ways = self.ways(comm)
        return not ways.merging and all(s.rank is not None for s in ways.servers)

    def end(self, comm: TorchComm) -> MakeEnd:
        return partial(ServedEnd, self.ways(comm), self._hosts)

    def begin(self, comm: TorchComm, runtime: Runtime) -> str:
        if self.plain(comm):
            return super().begin(comm, runtime)
        ways = self.ways(comm)
        own = sum(server.rank is None for server in ways.servers)
        if own and simulated_end(comm.process_group) is None:
            self._hosts = self._found(comm, runtime, own)
        super().begin(comm, runtime)
        where = "on hosts of their own" if own else "beside workers"
        count = len(ways.servers)
        streams = len(ways.merging) + len(ways.alone)
        return (
            f"collective={self.name}: {count} server{'s' * (count > 1)} {where}: sums of "
            f"{streams} streams, {len(ways.merging)} of which are added up at their "
            "racks' switches"
        )

    def _found(self, comm: TorchComm, runtime: Runtime, own: int) -> ServerHosts:
        """The servers on hosts of their own. Collective."""
        job = ServiceJob((Service("sums", kind=KIND, place="dedicated"),))
        ends = cast("Sequence[RemoteServer]", runtime.services(job))
        for end in ends:
            comm.at_close(end.close)
        if len(ends) != own:
            raise UsageError(
                f"collective={self.name}: the cluster has {own} hosts for servers, and "
                f"{len(ends)} servers have been started: start one on each"
            )
        return ServerHosts(ends)

    def schedule(self, size: int, comm: Comm, racks: Sequence[int] | None) -> Schedule:
        return self._in_pieces(size, comm, 1)

    def timed(self, size: int, comm: Comm) -> Schedule:
        return self._in_pieces(size, comm, PIECES)

    def _in_pieces(self, size: int, comm: Comm, pieces: int) -> Schedule:
        if self.plain(comm):
            return Ring(comm.size, size)
        return ServerBehindSwitches(self.ways(comm), size, pieces)
