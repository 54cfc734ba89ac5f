"""How long to wait before sending again: as long as answers take, and some more.

Jacobson's estimate (as in RFC 6298) and Karn's rule: only what was sent once tells how long
an answer takes. Here that includes waiting for the slowest worker, so a long time is no
sign of congestion, and changes no window: results alone clock what is sent. Sending again too
early costs a packet, no more.
"""

from __future__ import annotations

from paceline.aggregator.packets import Array

SHORTEST = 0.005
"""Seconds. A user-space aggregator answers a burst within a few milliseconds."""
LONGEST = 1.0
FIRST = 0.1
"""Before anything is known."""


class RoundTrip:
    """The time that answers take, in seconds."""

    def __init__(self) -> None:
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
            return FIRST
        return min(LONGEST, max(SHORTEST, self._mean + 4 * self._deviation))
