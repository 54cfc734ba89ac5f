"""A worker's end of an aggregator: a `Stream` behind a UDP socket. It blocks; one thread's.

A collective that runs beside backward gives it a thread of its own, which sums one buffer
after the other in the order of issue.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import numpy as np

from paceline.collectives.in_network.datagrams import check_way, open_socket
from paceline.collectives.in_network.ends import Lossy, StreamEnd
from paceline.collectives.in_network.fixed_point import FixedPoint
from paceline.collectives.in_network.jobs import Rules, key_of
from paceline.collectives.in_network.operations import IntegerSum, NumberSum, Spread
from paceline.collectives.in_network.packets import (
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
)
from paceline.collectives.in_network.registration import Register, Registration
from paceline.collectives.in_network.slots import all_bits
from paceline.collectives.in_network.timers import FIRST
from paceline.errors import UsageError
from paceline.timeouts import timeouts

SLOTS = 128
"""Asked for: what a link of 1 Gbit/s has under way in 1.4 ms."""


class AggregatorClient(StreamEnd):
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
        silent_seconds: float = timeouts.aggregator_silent,
        lossy: Lossy | None = None,
    ) -> None:
        """Raises `UsageError` where the aggregator refuses or the MTU is too small, and
        `PeerLostError` where there is none."""
        all_bits(workers)  # refuses too many
        control = Registration(host, port, token)
        super().__init__(
            open_socket(control.socket.family),
            Seal(key_of(token, job)),
            where=f"the aggregator at {host}:{port}",
            silent_seconds=silent_seconds,
            lossy=lossy,
        )
        self._has_control(control)
        self.fixed = FixedPoint(headroom or workers)
        try:
            elements = self._lead_to(control.socket, port, mtu)
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
            granted = control.register(wish)
            self._has_stream(
                slots=granted.slots,
                elements=elements,
                worker=worker,
                number=granted.number,
            )
            self._probe(worker)
        except BaseException:
            self.close(well=False)
            raise

    def _lead_to(self, control: socket.socket, port: int, mtu: int) -> int:
        """Connect the datagrams' socket; the elements of a datagram."""
        ip_bytes = IP6_BYTES if control.family == socket.AF_INET6 else IP_BYTES
        elements = elements_for(mtu, ip_bytes=ip_bytes)
        self._udp.bind((control.getsockname()[0], 0))
        self._udp.connect((control.getpeername()[0], port))
        check_way(self._udp, mtu_for(elements, ip_bytes=ip_bytes))
        return elements

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

    def _probe(self, worker: int) -> None:
        """Let one datagram of the largest size go there and come back."""
        packets = blank(1, self.elements)
        packets["values"] = 0
        header = packets["header"]
        header["kind"], header["worker"] = Kind.PROBE, worker
        header["job"], header["elements"] = self.number, self.elements
        self._seal.sign(packets)
        over = time.monotonic() + timeouts.aggregator_probe
        while time.monotonic() < over:
            self._send(packets)
            self._wait(FIRST)
            if any(
                (batch["header"]["kind"] == Kind.PROBE).any()
                for batch in self._received()
            ):
                return
        raise UsageError(
            f"datagrams of {mtu_for(self.elements)} bytes do not come back from "
            f"{self._where}: a firewall may hold UDP up there, or a link on the "
            "way has a smaller MTU; try a smaller one"
        )


def _check(values: Array, dtype: type[np.generic]) -> None:
    if values.dtype != dtype or values.ndim != 1 or not values.flags.c_contiguous:
        raise UsageError(
            f"expected a flat, contiguous array of {np.dtype(dtype)}, got {values.dtype} of "
            f"shape {values.shape}"
        )
