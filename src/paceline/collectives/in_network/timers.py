"""How long to wait before sending again: as long as answers take, and some more.

Jacobson's estimate (as in RFC 6298), of twice the mean: an answer takes as long as the slowest
worker lets it, and from one buffer to the next that changes at once. Sending again too early costs
more than a packet: the window is halved, and so is everybody's who sums with this worker. What
was sent again counts, too, from its first sending on. That may be too long, by a loss; but
without it (Karn's rule) a time that has grown is never learnt, as all is sent again too early.

Results clock what is sent, and slots bound it; but a link's queue may hold less than that. So
what is under way grows only while answers are prompt (a target of delay, as RFC 6817 has it), and
is halved when one is missing while others came (`Window`).
"""

from __future__ import annotations

import math

from paceline.collectives.in_network.packets import Array

SHORTEST = 0.005
"""Seconds. A user-space aggregator answers a burst within a few milliseconds."""
LONGEST = 1.0
FIRST = 0.1
"""Before anything is known."""


class RoundTrip:
    """The time that answers take, in seconds. *first* and *shortest*: bounds of the timeout."""

    def __init__(self, first: float = FIRST, shortest: float = SHORTEST) -> None:
        self._first, self._shortest = first, shortest
        self._mean: float | None = None
        self._deviation = 0.0

    def observe(self, seconds: Array) -> None:
        """Answers came after so long; those of a batch count as one."""
        if not len(seconds):
            return
        sample = float(seconds.max())
        if self._mean is None:
            self._mean, self._deviation = sample, sample / 2
        else:
            error = sample - self._mean
            self._deviation += (abs(error) - self._deviation) / 4
            self._mean += error / 8

    @property
    def timeout(self) -> float:
        """Seconds after which the first repeat is due."""
        if self._mean is None:
            return self._first
        wanted = 2 * self._mean + 4 * self._deviation
        return min(LONGEST, max(self._shortest, wanted))


FLOOR_BYTES = 96 << 10
"""Under way in any case: a link of 25 Mbit/s has that much in `PROMPT`, and queues hold it."""
FEWEST = 4
PROMPT = 0.03
"""Seconds. Answers that take longer wait in a queue, or for somebody."""


class Window:
    """How many datagrams of so many bytes may be under way: at *most* as many as there are
    slots. Beyond `FLOOR_BYTES` it grows only while answers are prompt."""

    def __init__(self, most: int, datagram_bytes: int) -> None:
        self._most = most
        self._floor = min(most, max(FEWEST, FLOOR_BYTES // datagram_bytes))
        self._fewest = min(most, FEWEST)
        self._size = float(self._floor)
        self._slow_from = float(most)
        self._cut_at = -math.inf

    @property
    def size(self) -> int:
        return int(self._size)

    def answered(self, count: int, seconds: float) -> None:
        """So many of a full window are no more under way; the slowest took *seconds*."""
        if seconds < PROMPT or self._size < self._floor:
            grown = count if self._size < self._slow_from else count / self._size
            self._size = min(self._size + grown, float(self._most))
        elif seconds > 1.5 * PROMPT:
            self._size = max(self._size - count / 8, float(self._floor))

    def missed(self, now: float, round_trip: float) -> None:
        """What others overtook has to be sent again. Counts once a round trip."""
        if now - self._cut_at < round_trip:
            return
        self._cut_at = now
        self._size = self._slow_from = max(self._size / 2, float(self._fewest))
