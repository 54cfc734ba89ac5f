"""A worker's end of an aggregator: a `Stream` behind a UDP socket. It blocks; one thread's.

A collective that runs beside backward gives it a thread of its own, which sums one buffer
after the other in the order of issue.
"""

from __future__ import annotations

import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from paceline.aggregator.control import Register, Registration
from paceline.aggregator.datagrams import check_way, datagrams, open_socket
from paceline.aggregator.fixed_point import FixedPoint
from paceline.aggregator.jobs import Rules, key_of
from paceline.aggregator.operations import (
    IntegerSum,
    NumberSum,
    Operation,
    Spread,
)
from paceline.aggregator.packets import (
    IP6_BYTES,
    IP_BYTES,
    LOCAL,
    Array,
    Flag,
    Kind,
    Seal,
    blank,
    elements_for,
    mtu_for,
    well_formed,
)
from paceline.aggregator.protocol import all_bits
from paceline.aggregator.timers import FIRST
from paceline.aggregator.worker import Stream
from paceline.errors import PeerLostError, UsageError

SLOTS = 128
"""Asked for: what a link of 1 Gbit/s has under way in 1.4 ms."""
SILENT_SECONDS = 1800.0
"""With nothing back of all that was sent again: as long as gloo waits for a slow worker.
Whether datagrams get through at all is tried before the first sum."""
PROBE_SECONDS = 5.0

Lossy = Callable[[int], Array]
"""Tests: which of so many datagrams get through."""


class AggregatorClient:
    """One of the *workers* of *job*, at the aggregator at (*host*, *port*).

    *job*: a name that no other job has, such as 16 random bytes in hex. *slots*: how many are
    wanted; fewer may be granted, no fewer than *fewest*. *next_agents*: where sums go that
    leave the rack, which one worker tells: those of slot j to the one at j modulo their number. *headroom*: how many workers' numbers meet in
    one sum, where these are more than the aggregator's own. *silent_seconds*: after so long without any answer the aggregator is given up.
    *lossy*: of each batch that is sent or received, which datagrams survive.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        job: str,
        worker: int,
        workers: int,
        token: str,
        slots: int = SLOTS,
        fewest: int = 1,
        mtu: int = 1500,
        rules: Rules = "slots",
        next_agents: Sequence[tuple[str, int]] = (),
        headroom: int | None = None,
        silent_seconds: float = SILENT_SECONDS,
        lossy: Lossy | None = None,
    ) -> None:
        """Raises `UsageError` where the aggregator refuses or the MTU is too small, and
        `PeerLostError` where there is none."""
        all_bits(workers)  # refuses too many
        self._where = f"{host}:{port}"
        self._control = Registration(host, port, token)
        self._udp = open_socket(self._control.socket.family)
        self.dropped: Counter[str] = Counter()
        self._silent_seconds, self._lossy = silent_seconds, lossy
        self._seal = Seal(key_of(token, job))
        self.fixed = FixedPoint(headroom or workers)
        try:
            self.elements = elements = self._lead_to(port, mtu)
            wish = Register(
                job=job,
                worker=worker,
                workers=workers,
                port=self._udp.getsockname()[1],
                nonce="",  # the connection's to fill in, as the proof
                next=list(next_agents),
                slots=slots,
                fewest=fewest,
                elements=elements,
                rules=rules,
            )
            granted = self._control.register(wish)
            self.number, self.slots = granted.number, granted.slots
            self._datagrams = datagrams(self._udp, elements)
            self._stream = Stream(
                slots=self.slots, elements=elements, worker=worker, number=self.number
            )
            self._poll = select.poll()
            for end in (self._udp, self._control.socket):
                self._poll.register(end, select.POLLIN)
            self._probe(worker)
        except BaseException:
            self.close(well=False)
            raise

    def _lead_to(self, port: int, mtu: int) -> int:
        """Connect the datagrams' socket; the elements of a datagram."""
        control = self._control.socket
        ip_bytes = IP6_BYTES if control.family == socket.AF_INET6 else IP_BYTES
        elements = elements_for(mtu, ip_bytes=ip_bytes)
        self._udp.bind((control.getsockname()[0], 0))
        self._udp.connect((control.getpeername()[0], port))
        check_way(self._udp, mtu_for(elements, ip_bytes=ip_bytes))
        return elements

    @property
    def counts(self) -> Counter[str]:
        """What was sent and received, by word."""
        return self._stream.counts + self.dropped + self._datagrams.counts

    def sum_integers(self, values: Array, *, mode: Flag = LOCAL) -> None:
        """*values*, int32, flat and contiguous, become their sums over workers, exact modulo
        2^32. With *mode* FORWARD they stay, and the sums go to the next agent; with ONWARD
        they go there, too."""
        _check(values, np.int32)
        self.run(IntegerSum(values, self.elements), mode=mode)

    def spread(self, values: Array, *, brings: bool, mode: Flag = LOCAL) -> None:
        """*values*, int32, flat and contiguous, become those of the one worker that
        *brings* them."""
        _check(values, np.int32)
        self.run(Spread(values, self.elements, brings), mode=mode)

    def sum_numbers(self, numbers: Array) -> float:
        """*numbers*, float32, flat and contiguous, become their sums over workers: the same
        bits on all. Returns by how much an element may be off (see `fixed_point`). A block
        in which somebody has a NaN or an infinity is NaN for all."""
        _check(numbers, np.float32)
        operation = NumberSum(numbers, self.elements, self.fixed, self.slots)
        self.run(operation)
        return operation.error

    def run(self, operation: Operation, *, mode: Flag = LOCAL) -> None:
        """Carry out one operation. Raises `PeerLostError` where the aggregator, or another
        worker, is lost; the buffers are then undefined."""
        stream = self._stream
        stream.begin(operation, time.monotonic(), mode=mode)
        while not stream.finished:
            self._send_due()
            now = time.monotonic()
            silent = stream.silent_seconds(now)
            if silent > self._silent_seconds:
                raise PeerLostError(
                    f"the aggregator at {self._where} has answered nothing for {silent:.0f} s, "
                    "though its connection stands: either datagrams do not get through "
                    "(a firewall for UDP?), or a worker stands still"
                )
            wait = min(stream.deadline, now + self._silent_seconds) - time.monotonic()
            self._wait(max(wait, 0.0))
            for packets in self._received():
                stream.take(packets, time.monotonic())
                self._send_due()  # before more is read: all have something to do

    def close(self, *, well: bool = True) -> None:
        """Give back what was leased: with all workers' goodbyes; at once and for all of them,
        where one is lost (not *well*)."""
        self._udp.close()
        self._control.close(well=well)

    def _probe(self, worker: int) -> None:
        """Let one datagram of the largest size go there and come back."""
        packets = blank(1, self.elements)
        packets["values"] = 0
        header = packets["header"]
        header["kind"], header["worker"] = Kind.PROBE, worker
        header["job"], header["elements"] = self.number, self.elements
        self._seal.sign(packets)
        over = time.monotonic() + PROBE_SECONDS
        while time.monotonic() < over:
            self._send(packets)
            self._wait(FIRST)
            if any(
                (batch["header"]["kind"] == Kind.PROBE).any()
                for batch in self._received()
            ):
                return
        raise UsageError(
            f"datagrams of {mtu_for(self.elements)} bytes do not come back from the "
            f"aggregator at {self._where}: a firewall may hold UDP up there, or a link on the "
            "way has a smaller MTU; try a smaller one"
        )

    def _wait(self, seconds: float) -> None:
        for end, _ in self._poll.poll(1000 * seconds + 1):
            if end == self._control.socket.fileno():
                self._control.check()

    def _send_due(self) -> None:
        packets = self._stream.due(time.monotonic())
        if len(packets):
            self._seal.sign(packets)
            self._send(packets)

    def _send(self, packets: Array) -> None:
        rows = np.arange(len(packets))
        if self._lossy is not None:
            rows = rows[self._lossy(len(rows))]
        self._datagrams.send(packets, rows, None, np.zeros_like(rows))

    def _received(self) -> Iterator[Array]:
        """Genuine datagrams that are there, in batches; each is valid until the next."""
        while True:
            packets, lengths = self._datagrams.receive()
            if not len(packets):
                return
            good = well_formed(packets, lengths, self.dropped)
            good &= packets["header"]["job"] == self.number
            if self._lossy is not None:
                good &= self._lossy(len(packets))
            if not good.all():
                packets = packets[good]
            genuine = self._seal.genuine(packets)
            if not genuine.all():
                self.dropped["forged"] += int(np.count_nonzero(~genuine))
                packets = packets[genuine]
            yield packets


def _check(values: Array, dtype: type[np.generic]) -> None:
    if values.dtype != dtype or values.ndim != 1 or not values.flags.c_contiguous:
        raise UsageError(
            f"expected a flat, contiguous array of {np.dtype(dtype)}, got {values.dtype} of "
            f"shape {values.shape}"
        )
