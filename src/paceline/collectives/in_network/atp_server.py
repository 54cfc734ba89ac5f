"""The server that a job's contributions fall back to, behind a UDP socket: one thread's.

It stands beside a worker, or on a host of its own, and registers nowhere: workers tell
aggregators its address (`control.Register.next`), and it is told the ways to workers. Its
answers go by these: to an aggregator, which passes them on, or to a worker itself.
"""

from __future__ import annotations

import os
import select
import socket
from collections import Counter
from collections.abc import Sequence

import numpy as np

from paceline.collectives.in_network.best_effort import FallbackServer
from paceline.collectives.in_network.datagrams import Addresses, open_socket
from paceline.collectives.in_network.ends import Lossy
from paceline.collectives.in_network.packets import (
    NOBODY,
    Array,
    Kind,
    Seal,
    well_formed,
)
from paceline.collectives.in_network.udp_socket import datagrams

Route = tuple[int, str, int]
"""Bits of workers, and the host and port of the way to them."""


class UdpFallbackServer:
    """For one best-effort job of *workers*, by its *number* and the *key* of its datagrams
    (`jobs.number_of`, `jobs.key_of`): *slots* and *elements* as its workers have them. It
    listens at *host*, a numeric address of this machine. *lossy*: as `StreamEnd` has it."""

    def __init__(
        self,
        host: str,
        *,
        number: int,
        key: bytes,
        workers: int,
        slots: int,
        elements: int,
        lossy: Lossy | None = None,
    ) -> None:
        """Raises `OSError` where it cannot listen, `UsageError` for too many workers."""
        self._number, self._seal = number, Seal(key)
        self._machine = FallbackServer(slots, elements, workers)
        self._udp = open_socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            self._udp.bind((host, 0))
        except BaseException:
            self._udp.close()
            raise
        self.address: tuple[str, int] = self._udp.getsockname()[:2]
        """Where it listens."""
        self._datagrams = datagrams(self._udp, elements)
        self._lossy = lossy
        self._addresses = Addresses()
        self._way_to = np.full(workers, -1)
        """By worker: a row of the addresses."""
        self._dropped: Counter[str] = Counter()
        self.taken = 0
        """Datagrams."""
        self._stop, self._stopper = os.pipe()
        self.fault: BaseException | None = None
        """The error that ended `run`; None while there was none."""

    def lead(self, routes: Sequence[Route]) -> None:
        """The ways to workers, before `run`."""
        for bits, host, port in routes:
            way = self._addresses.add((host, port))
            for worker in range(len(self._way_to)):
                if bits >> worker & 1:
                    self._way_to[worker] = way

    @property
    def counts(self) -> Counter[str]:
        """What was dropped, by word."""
        return self._dropped + self._machine.dropped + self._datagrams.counts

    def run(self) -> None:
        """Serve until `stop`. An error ends it, and is the `fault` that its owner asks for:
        workers wait for answers, and would wait for ever."""
        try:
            self._serve()
        except BaseException as error:
            self.fault = error
        finally:
            self._udp.close()
            os.close(self._stop)

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._udp, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        while all(descriptor != self._stop for descriptor, _ in poll.poll()):
            while self._answer():
                pass

    def stop(self) -> None:
        """End `run`, from any thread; once."""
        os.close(self._stopper)

    def close(self) -> None:
        """It was never run."""
        self.stop()
        self._udp.close()
        os.close(self._stop)

    def _answer(self) -> bool:
        """Deal with one batch; whether there was one."""
        packets, lengths = self._datagrams.receive()
        if not len(packets):
            return False
        good = well_formed(packets, lengths, self._dropped)
        good &= packets["header"]["job"] == self._number
        if self._lossy is not None:
            good &= self._lossy(len(packets))
        packets = packets if good.all() else packets[good]
        genuine = self._seal.genuine(packets)
        if not genuine.all():
            self._dropped["forged"] += int(np.count_nonzero(~genuine))
            packets = packets[genuine]
        probes = packets["header"]["kind"] == Kind.PROBE
        if probes.any():
            self._send(packets[probes])
            packets = packets[~probes]
        if len(packets):
            self.taken += len(packets)
            self._send(self._machine.take(packets))
        return True

    def _send(self, answers: Array) -> None:
        answers["header"]["job"] = self._number
        self._seal.sign(answers)
        worker = answers["header"]["worker"]
        rows, places = [], []
        shared = np.flatnonzero(worker == NOBODY)
        for way in range(len(self._addresses.plain)):
            rows.append(shared)
            places.append(np.full(len(shared), way))
        single = np.flatnonzero(worker < len(self._way_to))
        rows.append(single)
        places.append(self._way_to[worker[single]])
        row, place = np.concatenate(rows), np.concatenate(places)
        known = place >= 0
        if self._lossy is not None:
            known &= self._lossy(len(known))
        self._datagrams.send(answers, row[known], self._addresses, place[known])
