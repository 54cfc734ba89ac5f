"""A worker's stream under best effort, where sending again too early costs much.

At a switch with slots a copy that was not needed is dropped. Where jobs compete for places it makes
the switch pass on what it has added up so far, and what comes later goes to the server one
by one: links get fuller, answers take longer, and more is sent again. So this stream waits
longer before it sends again. What is really lost it finds by the *gap*: its chunk is under way still, and one that is a window later has been summed
by the same server.
(ATP's workers go by results that are out of order, too.)
"""

from __future__ import annotations

import numpy as np

from paceline.collectives.in_network.packets import HEADER_BYTES, Array
from paceline.collectives.in_network.stream import Stream
from paceline.collectives.in_network.timers import FEWEST, RoundTrip, Window

FIRST, SHORTEST = 0.5, 0.03
"""Seconds: see `timers`."""


class PatientStream(Stream):
    """As `Stream`, but for its timers. `shares`: so many streams share the link to a server, whose
    queue holds all of their windows."""

    def __init__(
        self, *, slots: int, elements: int, worker: int, number: int = 0
    ) -> None:
        super().__init__(slots=slots, elements=elements, worker=worker, number=number)
        self.round_trip = RoundTrip(FIRST, SHORTEST)
        self._latest = np.full(1, -1)
        """Of the chunks that are summed, by server: one may be slower than others."""

    def shares(self, streams: float, servers: int) -> None:
        """Before the first operation. Slots go to *servers* in turn."""
        self._latest = np.full(servers, -1)
        datagram = HEADER_BYTES + 4 * self.elements
        self.window = Window(self.slots, round(datagram * max(streams, 1.0)))

    def take(self, packets: Array, now: float) -> None:
        under_way = self._chunk.copy()
        super().take(packets, now)
        done = np.flatnonzero((under_way >= 0) & (self._chunk < 0))
        if not len(done):
            return
        server = np.arange(self.slots) % len(self._latest)
        np.maximum.at(self._latest, server[done], under_way[done])
        gap = max(self.window.size, FEWEST)
        lost = (self._chunk >= 0) & (self._chunk + gap <= self._latest[server])
        lost &= self._times == 1
        if lost.any():
            self._due_at[lost] = now
            self.counts["gaps"] += int(np.count_nonzero(lost))
