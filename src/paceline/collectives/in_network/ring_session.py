"""One worker's end of a ring of racks, over sockets: see `ring` for what it does.

A worker of a rack that aggregates sends to its aggregator, a worker alone straight to the
next group. What comes from the group before comes to a socket of its own, whatever that group
is: an aggregator's sums, or a worker's.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.collectives.in_network.client import SLOTS, AggregatorClient
from paceline.collectives.in_network.datagrams import Addresses, open_socket
from paceline.collectives.in_network.ends import Lossy, StreamEnd, genuine
from paceline.collectives.in_network.forwarding import Inbox, freed_alone, sent_alone
from paceline.collectives.in_network.job_end import (
    Address,
    Card,
    Exchange,
    JobEnd,
    towards,
)
from paceline.collectives.in_network.jobs import key_of
from paceline.collectives.in_network.packets import (
    IP6_BYTES,
    IP_BYTES,
    Array,
    Seal,
    elements_for,
)
from paceline.collectives.in_network.topology import (
    STAGGER_BYTES,
    Group,
    RingSum,
    Stages,
    datagrams_of,
)
from paceline.collectives.in_network.udp_socket import datagrams
from paceline.errors import UsageError
from paceline.timeouts import timeouts


class _Card(Card):
    """What a rank tells the others. *inbox*: where sums come to it; *sends*: where a worker alone
    has its own acknowledged. *number* and *slots*: of its group's stream, once that is known."""

    inbox: Address = ("", 0)
    sends: Address = ("", 0)
    number: int = 0
    slots: int = 0


class SumsFromBefore:
    """What comes from the group before: an `Inbox` behind a socket."""

    def __init__(self, udp: socket.socket, seal: Seal, lossy: Lossy | None) -> None:
        self._udp, self._seal, self._lossy = udp, seal, lossy
        self._from = Addresses()
        self._inbox: Inbox | None = None

    def comes_from(self, card: _Card, back: Address, turn: tuple[int, int]) -> None:
        """The group before is known; it is answered at *back*."""
        self._from.add(back)
        self._number = card.number
        self._inbox = Inbox(
            slots=card.slots, elements=card.elements, number=card.number, turn=turn
        )
        self._datagrams = datagrams(self._udp, card.elements)

    @property
    def inbox(self) -> Inbox:
        assert self._inbox is not None, "nothing is known of the group before"
        return self._inbox

    def fileno(self) -> int:
        return self._udp.fileno()

    @property
    def finished(self) -> bool:
        return self.inbox.finished

    def read(self) -> None:
        coming = genuine(
            self._datagrams, self._seal, self._number, self.inbox.counts, self._lossy
        )
        for packets in coming:
            self.answer(self.inbox.take(packets))

    def answer(self, answers: Array) -> None:
        """Tell the group before."""
        if len(answers):
            self._seal.sign(answers)
            rows = np.arange(len(answers))
            if self._lossy is not None:
                rows = rows[self._lossy(len(rows))]
            self._datagrams.send(answers, rows, self._from, np.zeros_like(rows))

    def close(self) -> None:
        self._udp.close()


class AloneEnd(StreamEnd):
    """The stream of a worker alone: his own sums, to the next group's workers by turns."""

    def __init__(self, udp: socket.socket, seal: Seal, lossy: Lossy | None) -> None:
        super().__init__(udp, seal, where="the next group of the ring", lossy=lossy)

    def goes_to(self, agents: Sequence[Address], card: _Card) -> None:
        """The next group is known."""
        self.addresses = Addresses()
        for agent in agents:
            self.addresses.add(agent)
        self._has_stream(
            slots=card.slots, elements=card.elements, worker=0, number=card.number
        )

    def _places(self, packets: Array) -> Array:
        assert self.addresses is not None
        slots = packets["header"]["slot"].astype(np.int64)
        return np.asarray(slots % len(self.addresses.plain))

    def _due(self) -> Array:
        return sent_alone(super()._due())

    def _received(self) -> Any:
        return map(freed_alone, super()._received())


class RingEnd(JobEnd[_Card, AggregatorClient | AloneEnd]):
    """*rank*'s end of the *ring*. *aggregators*: where each rack's is. *job*: a name that no
    other job has; *token*: the aggregators'. *slots*: as many as are asked for. *watch* is called now
    and then while a sum is under way; what it raises calls it off.

    Collective. Raises, on all ranks alike, `UsageError` where an aggregator refuses or datagrams
    do not get through, and `PeerLostError` where there is no aggregator.
    """

    def __init__(
        self,
        ring: Sequence[Group],
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
        self._groups = len(ring)
        self._position = next(i for i, g in enumerate(ring) if rank in g.ranks)
        group, before = ring[self._position], ring[self._position - 1]
        behind = ring[(self._position + 1) % len(ring)]
        self._alone, self._alone_before = group.rack is None, before.rack is None
        self._inbox: SumsFromBefore | None = None
        self._seal, self._lossy = Seal(key_of(token, job)), lossy
        card = self._try(lambda: self._open(aggregators, mtu, slots))
        try:
            cards = self._tell(exchange, card)
            card = self._try(
                lambda: self._join(
                    card,
                    [cards[other].inbox for other in behind.ranks],
                    None if group.rack is None else aggregators[group.rack],
                    {
                        "job": job,
                        "worker": group.ranks.index(rank),
                        "workers": len(group.ranks),
                        "token": token,
                        "slots": slots,
                        "mtu": mtu,
                        "lossy": lossy,
                    },
                ),
            )
            cards = self._tell(exchange, card)
            first = cards[before.ranks[0]]
            back = first.sends if before.rack is None else aggregators[before.rack]
            turn = group.ranks.index(rank), len(group.ranks)
            if self._groups > 1 and self._inbox is not None:
                self._inbox.comes_from(first, back, turn)
                assert self._end is not None
                self._end.has_beside(self._inbox)
            most = max(len(one.ranks) for one in ring)
            card = self._try(lambda: self._try_ways(most))
            self.serve_while(lambda: self._tell(exchange, card))
        except BaseException:
            self.close(well=False)
            raise
        self.watch = watch

    # ---- how all find each other ----

    def _open(self, aggregators: Mapping[int, Address], mtu: int, slots: int) -> _Card:
        """The sockets that need nobody's answer."""
        family, host = towards(next(iter(aggregators.values())))
        ip_bytes = IP6_BYTES if family == socket.AF_INET6 else IP_BYTES
        card = _Card(elements=elements_for(mtu, ip_bytes=ip_bytes))
        if self._groups > 1:
            udp = open_socket(family)
            self._inbox = SumsFromBefore(udp, self._seal, self._lossy)
            card.inbox = _bound(udp, host)
        if self._alone:
            udp = open_socket(family)
            self._end = AloneEnd(udp, self._seal, self._lossy)
            card.sends = _bound(udp, host)
            card.number, card.slots = secrets.randbits(32), slots
        return card

    def _join(
        self,
        card: _Card,
        agents: Sequence[Address],
        aggregator: Address | None,
        wishes: dict[str, Any],
    ) -> _Card:
        if aggregator is None:
            assert isinstance(self._end, AloneEnd)
            self._end.goes_to(agents, card)
            return card
        if self._groups > 1 and wishes["worker"] == 0:
            wishes["next_agents"] = agents
        self._end = client = AggregatorClient(*aggregator, **wishes)
        card.number, card.slots = client.number, client.slots
        return card

    def _try_ways(self, most: int) -> _Card:
        """A sum of datagrams of the largest size goes around, to every agent. Raises
        `UsageError` where it does not."""
        over = time.monotonic() + timeouts.aggregator_probe

        def watch() -> None:
            if time.monotonic() > over:
                raise UsageError(
                    "datagrams do not get around the ring of racks: a firewall may hold UDP "
                    "up between an aggregator and the workers of the next rack, or a link "
                    "on the way has a smaller MTU than the workers' own"
                )

        self.watch = watch
        assert self._end is not None
        values = np.ones(2 * most * self._groups * self._end.elements, np.int32)
        self.sum_integers(values)
        return _Card()

    # ---- sums ----

    def sum_integers(self, values: Array) -> None:
        """*values*, int32, flat and contiguous, become their sums over all workers, exact modulo
        2^32. Collective. Raises `PeerLostError` where an aggregator or a worker is
        lost, and what the watch raises; *values* are then as they were."""
        end, inbox = self._end, self._inbox
        assert end is not None
        groups, at = self._groups, self._position
        count = datagrams_of(len(values), groups, end.elements)
        apart = STAGGER_BYTES // (4 * end.elements)
        stages = Stages(groups, at, count, self._alone, apart)
        before = Stages(groups, (at - 1) % groups, count, self._alone_before, apart)
        turns = np.zeros(before.chunks, np.bool_)
        if inbox is not None:
            turns = inbox.inbox.turns(before.chunks)
        operation = RingSum(values, end.elements, stages, before, turns)
        if inbox is not None:
            awaited = before.chunks, operation.arrive, before.leaving()
            inbox.answer(inbox.inbox.begin(*awaited))
        end.run(operation, mode=stages.modes())
        operation.finish()

    def close(self, *, well: bool = True) -> None:
        """Give back what was leased; not *well*: at once, and for all workers."""
        if self._end is not None:
            self._end.close(well=well)
        if self._inbox is not None:
            self._inbox.close()


def _bound(udp: socket.socket, host: str) -> Address:
    udp.bind((host, 0))
    return host, int(udp.getsockname()[1])
