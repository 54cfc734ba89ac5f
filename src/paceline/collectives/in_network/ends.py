"""A `Stream` behind a UDP socket: what workers' ends have in common. It blocks; one thread's."""

from __future__ import annotations

import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from paceline.collectives.in_network.datagrams import Addresses, Datagrams, OwnQueue
from paceline.collectives.in_network.operations import Operation
from paceline.collectives.in_network.packets import (
    LOCAL,
    Array,
    Flag,
    Seal,
    well_formed,
)
from paceline.collectives.in_network.registration import Registration
from paceline.collectives.in_network.stream import Stream
from paceline.collectives.in_network.udp_socket import datagrams
from paceline.errors import PeerLostError
from paceline.timeouts import timeouts

WATCH_SECONDS = 0.1
"""Between two looks of `StreamEnd.watch`."""

Lossy = Callable[[int], Array]
"""Tests: which of so many datagrams get through."""


class Beside(Protocol):
    """What comes to a worker from elsewhere while its own stream goes on."""

    def fileno(self) -> int: ...

    @property
    def finished(self) -> bool:
        """Whether all that the operation awaits is here."""
        ...

    def read(self) -> None:
        """Deal with what is there."""
        ...


class StreamEnd:
    """One worker's end. *where*: what answers it, in words."""

    stream_kind: type[Stream] = Stream
    beside: Beside | None = None
    """What operations wait for, too."""

    watch: Callable[[], None] | None = None
    """Called now and then while answers are awaited; what it raises ends `run`."""
    addresses: Addresses | None = None
    """Where datagrams go, a row for each of the places that `_places` gives; None: to the
    socket's peer."""

    def __init__(
        self,
        udp: socket.socket,
        seal: Seal,
        *,
        where: str,
        silent_seconds: float = timeouts.aggregator_silent,
        lossy: Lossy | None = None,
    ) -> None:
        self._udp, self._seal, self._where = udp, seal, where
        self._silent_seconds, self._lossy = silent_seconds, lossy
        self.dropped: Counter[str] = Counter()
        self._control: Registration | None = None
        self._poll = select.poll()
        self._poll.register(udp, select.POLLIN)
        self._awaits_room = False

    def _has_stream(
        self, *, slots: int, elements: int, worker: int, number: int
    ) -> None:
        """The terms are known: see `Stream`."""
        self.slots, self.elements, self.number = slots, elements, number
        self._datagrams: Datagrams = datagrams(self._udp, elements)
        self._own_queue = OwnQueue(self._udp, elements)
        self._stream = self.stream_kind(
            slots=slots, elements=elements, worker=worker, number=number
        )

    def _has_control(self, control: Registration) -> None:
        self._control = control
        self._poll.register(control.socket, select.POLLIN)

    @property
    def counts(self) -> Counter[str]:
        """What was sent and received, by word."""
        return self._stream.counts + self.dropped + self._datagrams.counts

    def has_beside(self, beside: Beside) -> None:
        """Look after *beside*, too, from now on."""
        self.beside = beside
        self._poll.register(beside, select.POLLIN)

    def run(self, operation: Operation, *, mode: Flag | Array = LOCAL) -> None:
        """Carry out one operation; see `Stream.begin`. Raises `PeerLostError` where the aggregator, or another
        worker, is lost; the buffers are then undefined."""
        stream, beside = self._stream, self.beside
        stream.begin(operation, time.monotonic(), mode=mode)
        while True:
            if beside is not None:
                beside.read()  # what came may be sent on at once
            if stream.finished and (beside is None or beside.finished):
                return
            self._send_due()
            now = time.monotonic()
            silent = stream.silent_seconds(now)
            if silent > self._silent_seconds:
                raise PeerLostError(
                    f"{self._where} has answered nothing for {silent:.0f} s, "
                    "though its connection stands: either datagrams do not get through "
                    "(a firewall for UDP?), or a worker stands still"
                )
            until = min(stream.deadline, now + self._silent_seconds)
            if self.watch is not None:
                self.watch()
                until = min(until, now + WATCH_SECONDS)
            self._await_room(stream.held)
            self._wait(max(until - time.monotonic(), 0.0))
            for packets in self._received():
                stream.take(packets, time.monotonic())
                self._send_due()  # before more is read: all have something to do

    def idle(self, seconds: float, wake: int) -> None:
        """Between operations: answer what still comes, for so long, or until *wake* can be
        read. Raises `PeerLostError` where the aggregator, or another worker, is lost."""
        over = time.monotonic() + seconds
        self._poll.register(wake, select.POLLIN)
        try:
            while (left := over - time.monotonic()) > 0:
                came = self._wait(left)
                if self.beside is not None:
                    self.beside.read()
                for _ in self._received():
                    pass  # of what is over
                if wake in came:
                    return
        finally:
            self._poll.unregister(wake)

    def close(self, *, well: bool = True) -> None:
        """Give back what was leased: with all workers' goodbyes; at once and for all of them,
        where one is lost (not *well*)."""
        self._udp.close()
        if self._control is not None:
            self._control.close(well=well)

    def _await_room(self, held: bool) -> None:
        """What is *held* back is to go on once the socket has room."""
        if held != self._awaits_room:
            self._awaits_room = held
            events = select.POLLIN | (select.POLLOUT if held else 0)
            self._poll.modify(self._udp, events)

    def _wait(self, seconds: float) -> set[int]:
        """Until something can be read, or so long: the descriptors of what can."""
        came = {end for end, _ in self._poll.poll(1000 * seconds + 1)}
        if self._control is not None and self._control.socket.fileno() in came:
            self._control.check()
        return came

    def _send_due(self) -> None:
        packets = self._due()
        if len(packets):
            self._seal.sign(packets)
            self._send(packets)

    def _due(self) -> Array:
        """What is to be sent now, without tag."""
        return self._stream.due(time.monotonic(), self._own_queue.room())

    def _places(self, packets: Array) -> Array:
        """To which of its addresses each goes."""
        return np.zeros(len(packets), np.int64)

    def _send(self, packets: Array) -> None:
        rows, places = np.arange(len(packets)), self._places(packets)
        if self._lossy is not None:
            rows = rows[self._lossy(len(rows))]
        self._datagrams.send(packets, rows, self.addresses, places[rows])

    def _received(self) -> Iterator[Array]:
        """Genuine datagrams that are there, in batches; each is valid until the next."""
        return genuine(
            self._datagrams, self._seal, self.number, self.dropped, self._lossy
        )


def genuine(
    end: Datagrams,
    seal: Seal,
    number: int,
    dropped: Counter[str],
    lossy: Lossy | None = None,
) -> Iterator[Array]:
    """Genuine datagrams of job *number* that are there, in batches; each is valid until the
    next. All others are counted."""
    while True:
        packets, lengths = end.receive()
        if not len(packets):
            return
        good = well_formed(packets, lengths, dropped)
        good &= packets["header"]["job"] == number
        if lossy is not None:
            good &= lossy(len(packets))
        if not good.all():
            packets = packets[good]
        ours = seal.genuine(packets)
        if not ours.all():
            dropped["forged"] += int(np.count_nonzero(~ours))
            packets = packets[ours]
        yield packets
