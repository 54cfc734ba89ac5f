"""One transfer, or one collective, that uses links: what is left of it, and how fast it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol


class Rates(Protocol):
    """Rates of many activities at once, each in a slot: see `paceline.cluster.flow_table`."""

    def rate_of(self, slot: int) -> float: ...

    def set_rate(self, slot: int, rate: float, now: float) -> None: ...


class Activity:
    """A transfer in progress: *size* bytes still to go on each of its connections.

    *demand* maps a directed link to this activity's number of connections on it; the
    driver calls *done* with the instant at which the last byte has left.
    """

    __slots__ = (
        *("crowd", "demand", "done", "end"),
        *("number", "own_rate", "remaining", "slot"),
    )

    def __init__(
        self, demand: Mapping[int, float], size: float, done: Callable[[float], None]
    ) -> None:
        self.demand = demand
        self.remaining = float(size)
        self.done = done
        self.own_rate = 0.0
        self.end = math.inf
        self.crowd: Rates | None = None
        self.slot = 0
        self.number = 0
        """Its place among all that have started."""

    @property
    def rate(self) -> float:
        """Of each of its connections."""
        crowd = self.crowd
        return self.own_rate if crowd is None else crowd.rate_of(self.slot)
