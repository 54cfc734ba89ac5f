"""One rank's end of sums that servers form behind switches: see `atp_routes` for who is told what.

A server beside a worker is a thread of that worker's process; those on hosts of their own are
services (`collectives.in_network.sums_service`), to which rank 0 speaks.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from paceline.collectives.in_network.atp_routes import (
    End,
    at_server,
    at_switch,
    at_worker,
)
from paceline.collectives.in_network.atp_server import Route, UdpFallbackServer
from paceline.collectives.in_network.atp_tree import Ways
from paceline.collectives.in_network.client import SLOTS
from paceline.collectives.in_network.ends import Lossy
from paceline.collectives.in_network.job_end import (
    Address,
    Card,
    Exchange,
    JobEnd,
    numeric,
    towards,
)
from paceline.collectives.in_network.jobs import key_of, number_of
from paceline.collectives.in_network.packets import (
    IP6_BYTES,
    IP_BYTES,
    Array,
    elements_for,
)
from paceline.collectives.in_network.served import ServedClient
from paceline.collectives.in_network.sums_service import ServerHosts
from paceline.errors import PeerLostError


class _Card(Card):
    """What a rank tells the others: where datagrams come to it, and to the *servers* of the parts
    that it has opened."""

    worker: Address = ("", 0)
    servers: dict[int, Address] = msgspec.field(default_factory=dict)


class ServedEnd(JobEnd[_Card, ServedClient]):
    """*rank*'s end of the sums of *ways*. *hosts*: of dedicated servers, where there are any.
    All else: as `RingEnd`, whose methods it has.

    Collective. Raises, on all ranks alike, `UsageError` where somebody refuses or datagrams do not
    get through, and `PeerLostError` where there is no aggregator, or no server.
    """

    def __init__(
        self,
        ways: Ways,
        hosts: ServerHosts | None,
        rank: int,
        aggregators: Mapping[int, Address],
        exchange: Exchange,
        *,
        job: str,
        token: str,
        slots: int = SLOTS,
        mtu: int = 1500,
        watch: Callable[[], None] | None = None,
        lossy: Lossy | None = None,
    ) -> None:
        super().__init__(_Card)
        self._ways, self._hosts, self._rank = ways, hosts, rank
        self._job, self._token, self._lossy = job, token, lossy
        parts = len(ways.servers)
        self._slots = -(-max(slots, parts) // parts) * parts
        self._servers: dict[int, UdpFallbackServer] = {}
        self._threads: list[threading.Thread] = []
        card = self._try(lambda: self._open(aggregators, mtu))
        try:
            cards = self._tell(exchange, card)
            find = partial(_find, cards, aggregators)
            card = self._try(lambda: self._join(find))
            self._tell(exchange, card)
            card = self._try(self._try_ways)
            self._tell(exchange, card)
        except BaseException:
            self.close(well=False)
            raise
        self.watch = partial(_both, self._look_at_servers, watch)

    # ---- how all find each other ----

    def _open(self, aggregators: Mapping[int, Address], mtu: int) -> _Card:
        """The sockets that need nobody's answer."""
        known = list(aggregators.values())
        mine = aggregators.get(self._ways.racks[self._rank])
        if mine is None:
            mine = (
                known[0] if known or self._hosts is None else self._hosts.addresses[0]
            )
        family, host = towards(mine)
        ip_bytes = IP6_BYTES if family.name == "AF_INET6" else IP_BYTES
        elements = elements_for(mtu, ip_bytes=ip_bytes)
        self._end = ServedClient(
            host,
            job=self._job,
            worker=self._rank,
            workers=len(self._ways.racks),
            token=self._token,
            slots=self._slots,
            elements=elements,
            servers=len(self._ways.servers),
            sharing=self._ways.most_streams / len(self._ways.servers),
            lossy=self._lossy,
        )
        terms = {
            "workers": len(self._ways.racks),
            "slots": self._slots,
            "elements": elements,
        }
        opened: dict[int, Address] = {}
        for part, server in enumerate(self._ways.servers):
            if server.rank == self._rank:
                self._servers[part] = UdpFallbackServer(
                    host,
                    number=number_of(self._token, self._job),
                    key=key_of(self._token, self._job),
                    lossy=self._lossy,
                    **terms,
                )
                opened[part] = self._servers[part].address
        if self._hosts is not None and self._rank == 0:
            at = self._hosts.open(self._job, self._token, **terms)
            opened |= dict(enumerate(at))
        return _Card(elements=elements, worker=self._end.address, servers=opened)

    def _join(self, find: Callable[[End], Address]) -> _Card:
        """Everybody has opened what he has."""

        def routes(ways: Sequence[tuple[int, End]]) -> list[Route]:
            return [(bits, *find(end)) for bits, end in ways]

        assert self._end is not None
        of_parts = [
            routes(at_server(self._ways, p)) for p in range(len(self._ways.servers))
        ]
        for part, server in self._servers.items():
            server.lead(of_parts[part])
            thread = threading.Thread(
                target=_run,
                args=(server,),
                name=f"paceline server of part {part}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()
        if self._hosts is not None and self._rank == 0:
            self._hosts.lead(self._job, self._token, of_parts)
        self._end.lead([find(end) for end in at_worker(self._ways, self._rank)])
        rack = self._ways.racks[self._rank]
        if rack in self._ways.merging:
            told = at_switch(self._ways, rack)
            self._end.register(
                find(End("switch", rack)),
                here=told.here,
                expected=told.expected,
                behind=[find(end) for end in told.next],
                routes=routes(told.routes),
            )
        return _Card()

    def _look_at_servers(self) -> None:
        """Raise `PeerLostError` where one that this rank is to look after has ended."""
        for part, server in self._servers.items():
            if server.fault is not None:
                raise PeerLostError(
                    f"the server of part {part}, beside worker {self._rank}, has failed: "
                    f"{type(server.fault).__name__}: {server.fault}"
                ) from server.fault
        if self._hosts is not None:
            self._hosts.look()

    def _try_ways(self) -> _Card:
        assert self._end is not None
        self._end.probe()
        return _Card()

    # ---- sums ----

    def sum_integers(self, values: Array) -> None:
        """*values*, int32, flat and contiguous, become their sums over all workers, exact modulo
        2^32. Collective. Raises `PeerLostError` where an aggregator, a server or a worker is
        lost, and what the watch raises; *values* are then as they were."""
        assert self._end is not None
        sums = values.copy()
        self._end.sum_integers(sums)
        values[:] = sums

    def idle(self, seconds: float, wake: int) -> None:
        super().idle(seconds, wake)
        self._look_at_servers()

    def close(self, *, well: bool = True) -> None:
        """Give back what was leased; not *well*: at once, and for all workers."""
        if self._end is not None:
            self._end.close(well=well)
        for server in self._servers.values():
            if self._threads:
                server.stop()
            else:
                server.close()
        for thread in self._threads:
            thread.join()
        self._servers.clear()
        self._threads.clear()
        if self._hosts is not None and self._rank == 0:
            self._hosts.forget(self._job, self._token)


def _find(
    cards: Sequence[_Card], aggregators: Mapping[int, Address], end: End
) -> Address:
    """Where an end is, in numbers."""
    if end.kind == "switch":
        return numeric(aggregators[end.number])
    if end.kind == "worker":
        return cards[end.number].worker
    return next(
        card.servers[end.number] for card in cards if end.number in card.servers
    )


def _run(server: UdpFallbackServer) -> None:
    """The job goes on without a server that fails, so its error is printed here."""
    server.run()
    if server.fault is not None:
        traceback.print_exception(server.fault)


def _both(first: Callable[[], None], second: Callable[[], None] | None) -> None:
    first()
    if second is not None:
        second()
