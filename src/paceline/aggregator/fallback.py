"""The server that a job's contributions fall back to, behind a UDP socket: one thread's.

It stands beside a worker, or on a host of its own, and registers nowhere: a worker of the job
tells the aggregator its address (`AggregatorClient(next_agents=...)`). Its answers go to the
aggregator, which passes them on.
"""

from __future__ import annotations

import os
import select
import socket
from collections import Counter

import numpy as np

from paceline.aggregator.best_effort import FallbackServer
from paceline.aggregator.datagrams import datagrams, open_socket
from paceline.aggregator.jobs import key_of
from paceline.aggregator.packets import Seal, well_formed


class UdpFallbackServer:
    """For one *job* of *workers* at the *aggregator* (host, port): *slots* and *elements* as its
    workers have them."""

    def __init__(
        self,
        aggregator: tuple[str, int],
        *,
        job: str,
        workers: int,
        slots: int,
        elements: int,
        token: str,
    ) -> None:
        """Raises `OSError` where nothing leads to the aggregator."""
        family = socket.AF_INET6 if ":" in aggregator[0] else socket.AF_INET
        self._udp = open_socket(family)
        self._udp.connect(aggregator)  # from elsewhere nothing is taken
        self.address: tuple[str, int] = self._udp.getsockname()[:2]
        """Where it listens, as the aggregator is to be told."""
        self._seal = Seal(key_of(token, job))
        self._machine = FallbackServer(slots, elements, workers)
        self._datagrams = datagrams(self._udp, elements)
        self._dropped: Counter[str] = Counter()
        self._stop, self._stopper = os.pipe()

    @property
    def counts(self) -> Counter[str]:
        """What was dropped, by word."""
        return self._dropped + self._machine.dropped + self._datagrams.counts

    def run(self) -> None:
        """Serve until `stop`."""
        poll = select.poll()
        poll.register(self._udp, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        while all(descriptor != self._stop for descriptor, _ in poll.poll()):
            while self._answer():
                pass
        self._udp.close()
        os.close(self._stop)

    def stop(self) -> None:
        """End `run`, from any thread; once."""
        os.close(self._stopper)

    def _answer(self) -> bool:
        """Deal with one batch; whether there was one."""
        packets, lengths = self._datagrams.receive()
        if not len(packets):
            return False
        good = well_formed(packets, lengths, self._dropped)
        packets = packets if good.all() else packets[good]
        genuine = self._seal.genuine(packets)
        if not genuine.all():
            self._dropped["forged"] += int(np.count_nonzero(~genuine))
            packets = packets[genuine]
        if len(packets):
            answers = self._machine.take(packets)
            answers["header"]["job"] = packets["header"]["job"][0]  # the only one there
            self._seal.sign(answers)
            rows = np.arange(len(answers))
            self._datagrams.send(answers, rows, None, np.zeros_like(rows))
        return True
