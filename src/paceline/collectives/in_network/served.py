"""A worker's end of a best-effort job: its contributions go to its rack's aggregator, or straight
to what is behind: slots in turn to the servers of the job's parts, or to the aggregators before
them. It blocks; one thread's.

In this order: everybody opens an end; all addresses are told to all; servers are led
(`fallback.UdpFallbackServer.lead`); workers register where there is an aggregator (`register`) and
are led; once all have done that, each probes its ways, and sums.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence

import numpy as np

from paceline.collectives.in_network.atp_server import Route
from paceline.collectives.in_network.datagrams import Addresses, check_way, open_socket
from paceline.collectives.in_network.ends import Lossy, StreamEnd
from paceline.collectives.in_network.jobs import key_of, number_of
from paceline.collectives.in_network.operations import IntegerSum
from paceline.collectives.in_network.packets import (
    IP6_BYTES,
    IP_BYTES,
    Array,
    Kind,
    Seal,
    blank,
    mtu_for,
)
from paceline.collectives.in_network.patient_stream import PatientStream
from paceline.collectives.in_network.registration import Register, Registration
from paceline.collectives.in_network.slots import all_bits
from paceline.collectives.in_network.timers import FIRST
from paceline.errors import UsageError
from paceline.timeouts import timeouts


class ServedClient(StreamEnd):
    """One of the *workers* of best-effort *job*, at *host*, a numeric address of this machine.

    All have the same *slots*, a multiple of the number of *servers*, and *elements* in a datagram.
    *sharing*: how many workers' streams share the link to a server, parts of them added up.
    The others: see `AggregatorClient`.
    """

    stream_kind = PatientStream

    def __init__(
        self,
        host: str,
        *,
        job: str,
        worker: int,
        workers: int,
        token: str,
        slots: int,
        elements: int,
        servers: int = 1,
        sharing: float = 1.0,
        silent_seconds: float = timeouts.aggregator_silent,
        lossy: Lossy | None = None,
    ) -> None:
        """Raises `UsageError` for too many workers, `OSError` where it cannot listen."""
        all_bits(workers)
        udp = open_socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        super().__init__(
            udp,
            Seal(key_of(token, job)),
            where=f"what adds up job {job}",
            silent_seconds=silent_seconds,
            lossy=lossy,
        )
        try:
            self._udp.bind((host, 0))
        except BaseException:
            self._udp.close()
            raise
        self.address: tuple[str, int] = self._udp.getsockname()[:2]
        """Where its datagrams are to come."""
        self._job, self._token = job, token
        self._worker, self._workers = worker, workers
        self._turns = np.zeros(1, np.int64)
        self._has_stream(
            slots=slots, elements=elements, worker=worker, number=number_of(token, job)
        )
        assert isinstance(self._stream, PatientStream)
        self._stream.shares(sharing, servers)

    def register(
        self,
        aggregator: tuple[str, int],
        *,
        here: int,
        expected: Sequence[int],
        behind: Sequence[tuple[str, int]],
        routes: Sequence[Route],
    ) -> None:
        """Take part at the rack's *aggregator*: see `control.Register`; *behind* is its ``next``.
        Raises `UsageError` where it refuses, and `PeerLostError` where there is none."""
        control = Registration(*aggregator, self._token)
        self._has_control(control)
        control.register(
            Register(
                job=self._job,
                worker=self._worker,
                workers=self._workers,
                host=self.address[0],
                port=self.address[1],
                nonce="",  # the connection's to fill in, as the proof
                next=list(behind),
                slots=self.slots,
                elements=self.elements,
                rules="best-effort",
                here=here,
                expected=list(expected),
                routes=list(routes),
            )
        )

    def lead(self, targets: Sequence[tuple[str, int]]) -> None:
        """Where contributions go, slots in turn. Raises `UsageError` where a way there is
        known to have too small an MTU."""
        assert self.slots % len(targets) == 0, "slots are dealt out evenly"
        self.addresses = Addresses()
        ways = {one: self.addresses.add(one) for one in dict.fromkeys(targets)}
        self._turns = np.array([ways[target] for target in targets])
        ip_bytes = IP6_BYTES if self._udp.family == socket.AF_INET6 else IP_BYTES
        for way in ways:
            with contextlib.closing(open_socket(self._udp.family)) as trial:
                trial.connect(way)
                check_way(trial, mtu_for(self.elements, ip_bytes=ip_bytes))

    def sum_integers(self, values: Array) -> None:
        """*values*, int32, flat and contiguous, become their sums over workers, exact modulo
        2^32. Raises `PeerLostError`; the values are then undefined."""
        self.run(IntegerSum(values, self.elements))

    def probe(self) -> None:
        """Let one datagram of the largest size go each way and come back. Raises `UsageError`
        where one does not."""
        assert self.addresses is not None, "it was led"
        count = len(self.addresses.plain)
        packets = blank(count, self.elements)
        packets["values"] = 0
        header = packets["header"]
        header["kind"], header["worker"] = Kind.PROBE, self._worker
        header["job"], header["elements"] = self.number, self.elements
        header["slot"] = [int(np.argmax(self._turns == way)) for way in range(count)]
        self._seal.sign(packets)
        left = dict.fromkeys(header["slot"].tolist())
        over = time.monotonic() + timeouts.aggregator_probe
        while left and time.monotonic() < over:
            self._send(packets)
            self._wait(FIRST)
            for batch in self._received():
                probes = batch["header"]["kind"] == Kind.PROBE
                for slot in batch["header"]["slot"][probes].tolist():
                    left.pop(slot, None)
        if left:
            missing = self.addresses.plain[self._turns[next(iter(left))]]
            raise UsageError(
                f"datagrams of {mtu_for(self.elements)} bytes do not come back from "
                f"{missing[0]}:{missing[1]}: a firewall may hold UDP up there, or a link on "
                "the way has a smaller MTU; try a smaller one"
            )

    def _places(self, packets: Array) -> Array:
        return np.asarray(
            self._turns[packets["header"]["slot"].astype(np.int64) % len(self._turns)]
        )
