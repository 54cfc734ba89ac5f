"""A rack: hosts behind one switch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import ClusterError

MAX_WORKERS = 100_000
"""More workers than any runtime here can hold: a typing mistake, not a cluster."""

PACKET_BYTES = 1432
"""Of numbers, in a packet of an aggregator on an Ethernet (MTU 1500)."""


@dataclass(frozen=True, kw_only=True)
class Rack:
    """Hosts behind one switch.

    *link* (one for all hosts, or one each) and *uplink* are goodput in bytes per second, each direction (*uplink* None:
    never the limit); *latency* and *uplink_latency* are one-way seconds; *speed* holds a
    factor per worker, 1 for normal and 0.5 for half as fast; *cores* is the number of
    cores of each host, *workers_per_host* how many workers share a host and its link;
    *names*, what the hosts call themselves, tells a real job whether these are its own;
    *group* (one for all workers, or one each) names the group that a worker is in, for methods
    with groups. *aggregates*: at its switch stands what adds up workers' numbers;
    *aggregation_rate* is what that takes in, all workers' contributions together, in bytes per second
    (None: as much as comes), and *slots* how many packets' sums it has under way (None: enough).
    """

    workers: int
    link: float | tuple[float, ...]
    latency: float
    uplink: float | None = None
    uplink_latency: float = 0.0
    speed: tuple[float, ...] = ()
    cores: int = 1
    workers_per_host: int = 1
    names: tuple[str, ...] = ()
    group: str | tuple[str, ...] = ""
    aggregates: bool = False
    aggregation_rate: float | None = None
    slots: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ClusterError(
                f"key 'workers': expected 1 to {MAX_WORKERS}, got {self.workers}"
            )
        if self.workers_per_host < 1 or self.workers % self.workers_per_host:
            raise ClusterError(
                f"key 'workers_per_host': expected a divisor of the {self.workers} "
                f"workers, got {self.workers_per_host}"
            )
        for key, rates in (
            ("link", self.links),
            ("uplink", (self.uplink,)),
            ("aggregation_rate", (self.aggregation_rate,)),
        ):
            for rate in rates:
                if rate is not None and not (rate > 0 and math.isfinite(rate)):
                    raise ClusterError(
                        f"key {key!r}: expected a rate above zero, got {rate:g} bytes/s"
                    )
        for key in ("latency", "uplink_latency"):
            value = getattr(self, key)
            if not (value >= 0 and math.isfinite(value)):
                raise ClusterError(
                    f"key {key!r}: expected a time of zero or more, got {value:g} s"
                )
        if not self.speed:
            object.__setattr__(self, "speed", (1.0,) * self.workers)
        if len(self.speed) != self.workers:
            raise ClusterError(
                f"key 'speed': expected {self.workers} factors, one per worker, "
                f"got {len(self.speed)}"
            )
        for factor in self.speed:
            if not (factor > 0 and math.isfinite(factor)):
                raise ClusterError(
                    f"key 'speed': expected factors above zero, got {factor:g}"
                )
        if self.cores < 1:
            raise ClusterError(f"key 'cores': expected 1 or more, got {self.cores}")
        if self.slots is not None and self.slots < 1:
            raise ClusterError(f"key 'slots': expected 1 or more, got {self.slots}")
        for key in ("aggregation_rate", "slots"):
            if getattr(self, key) is not None and not self.aggregates:
                raise ClusterError(
                    f"key {key!r}: of a switch that adds nothing up; set aggregates = true, "
                    "or leave it out"
                )

        if len(self.links) != self.hosts:
            raise ClusterError(
                f"key 'link': expected one rate, or {self.hosts}, one per host, got "
                f"{len(self.links)}"
            )

        if len(self.names) not in (0, self.hosts):
            raise ClusterError(
                f"key 'names': expected {self.hosts} names, one per host, got "
                f"{len(self.names)}"
            )

        if len(self.groups) != self.workers or not (
            all(self.groups) or not any(self.groups)
        ):
            raise ClusterError(
                f"key 'group': expected a name, or {self.workers}, one per worker, got "
                f"{self.group!r}"
            )

    @property
    def hosts(self) -> int:
        """Number of hosts in the rack."""
        return self.workers // self.workers_per_host

    @property
    def links(self) -> tuple[float, ...]:
        """Goodput of each host's link, bytes per second."""
        if isinstance(self.link, tuple):
            return self.link
        return (self.link,) * self.hosts

    @property
    def groups(self) -> tuple[str, ...]:
        """The name of each worker's group; empty ones where nobody has said it."""
        if isinstance(self.group, tuple):
            return self.group
        return (self.group,) * self.workers
