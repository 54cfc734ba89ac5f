"""A cluster: racks of hosts, their links, their speeds; from a TOML file or in short.

::

    [[rack]]
    workers = 4
    link = "1 Gbit/s"       # goodput of each host's link, each direction
    latency = "50 us"       # one way, host to host in the rack
    uplink = "400 Mbit/s"   # rack to core, each direction; left out: never the limit
    speed = [1, 1, 1, 0.5]  # relative compute speed of each worker; left out: all 1

Topology: host -- link -- rack switch -- uplink -- core switch. A path inside a rack has
the rack's latency; a path between two racks has half of each rack's latency plus each
rack's ``uplink_latency``.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import units
from paceline.errors import ClusterError, UsageError, unknown

MAX_WORKERS = 100_000
"""More workers than any world here can hold: a typing mistake, not a cluster."""


@dataclass(frozen=True, kw_only=True)
class Rack:
    """Hosts behind one switch, one worker a host.

    *link* and *uplink* are goodput in bytes per second, each direction (*uplink* None:
    never the limit); *latency* and *uplink_latency* are one-way seconds; *speed* holds a
    factor per worker, 1 for normal and 0.5 for half as fast; *cores* is the number of
    cores of each host.
    """

    workers: int
    link: float
    latency: float
    uplink: float | None = None
    uplink_latency: float = 0.0
    speed: tuple[float, ...] = ()
    cores: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ClusterError(
                f"key 'workers': expected 1 to {MAX_WORKERS}, got {self.workers}"
            )
        for key in ("link", "uplink"):
            rate = getattr(self, key)
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


@dataclass(frozen=True)
class Cluster:
    """Racks, and from them every directed link with its capacity.

    Workers are numbered rack by rack. ``capacities[i]`` is the goodput of directed link
    *i* in bytes per second.
    """

    racks: tuple[Rack, ...]
    capacities: tuple[float, ...] = field(init=False, repr=False)
    _rack_of: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.racks:
            raise ClusterError(
                "expected at least one [[rack]] table, got none: a cluster needs workers"
            )
        rack_of = [i for i, rack in enumerate(self.racks) for _ in range(rack.workers)]
        # Directed links: 2w and 2w+1 are worker w's out and in, then each rack's
        # uplink and downlink.
        capacities: list[float] = []
        for rack in self.racks:
            capacities += [rack.link, rack.link] * rack.workers
        for rack in self.racks:
            capacities += [math.inf if rack.uplink is None else rack.uplink] * 2
        object.__setattr__(self, "_rack_of", tuple(rack_of))
        object.__setattr__(self, "capacities", tuple(capacities))

    @property
    def workers(self) -> int:
        """Number of workers, one a host."""
        return len(self._rack_of)

    @property
    def speeds(self) -> tuple[float, ...]:
        """Relative compute speed of each worker."""
        return tuple(s for rack in self.racks for s in rack.speed)

    def path(self, source: int, destination: int) -> tuple[int, ...]:
        """The directed links from one worker's host to another's, as indices."""
        if source == destination:
            return ()
        from_rack, to_rack = self._rack_of[source], self._rack_of[destination]
        if from_rack == to_rack:
            return (2 * source, 2 * destination + 1)
        base = 2 * self.workers
        return (
            2 * source,
            base + 2 * from_rack,
            base + 2 * to_rack + 1,
            2 * destination + 1,
        )

    def latency(self, source: int, destination: int) -> float:
        """One-way seconds from one worker's host to another's."""
        if source == destination:
            return 0.0
        from_rack, to_rack = self._rack_of[source], self._rack_of[destination]
        a, b = self.racks[from_rack], self.racks[to_rack]
        if from_rack == to_rack:
            return a.latency
        return a.latency / 2 + b.latency / 2 + a.uplink_latency + b.uplink_latency

    def link_name(self, index: int) -> str:
        """What people call a directed link: ``"worker 3 out"``, ``"rack 0 up"``."""
        base = 2 * self.workers
        if index < base:
            return f"worker {index // 2} {'in' if index % 2 else 'out'}"
        return f"rack {(index - base) // 2} {'down' if index % 2 else 'up'}"

    def describe(self) -> str:
        """One line for people."""
        parts = []
        for rack in self.racks:
            text = (
                f"{rack.workers} workers, {units.show_rate(rack.link)}, "
                f"{units.show_seconds(rack.latency)}"
            )
            if rack.uplink is not None:
                text += f", uplink {units.show_rate(rack.uplink)}"
            if set(rack.speed) != {1.0}:
                text += ", speeds " + " ".join(f"{s:g}" for s in rack.speed)
            parts.append(text)
        return "; ".join(parts)


def uniform_cluster(workers: int, link: str, latency: str) -> Cluster:
    """The short form: one rack of equal hosts. *link* and *latency* carry units."""
    table = {"workers": workers, "link": link, "latency": latency}
    return Cluster((_rack(table, "the short form"),))


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster from a TOML file.

    Raises `ClusterError`, naming the file, the key, the value and what is allowed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"cannot read the cluster file {path}: {error}") from error
    try:
        return parse_cluster(text)
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from None


def parse_cluster(text: str) -> Cluster:
    """Read a cluster from TOML text; raises `ClusterError` as `load_cluster` does."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"not TOML: {error}") from error
    for key in data:
        if key != "rack":
            raise ClusterError(unknown("top-level key", key, ["rack"]))
    racks = data.get("rack", [])
    if not isinstance(racks, list) or not all(isinstance(r, dict) for r in racks):
        raise ClusterError(
            "key 'rack': expected [[rack]] tables (two brackets), "
            f"got {type(racks).__name__}"
        )
    return Cluster(tuple(_rack(r, f"rack {i}") for i, r in enumerate(racks)))


def _rack(table: Mapping[str, Any], where: str) -> Rack:
    readers: dict[str, Callable[[str, object], Any]] = {
        "workers": _whole,
        "link": _rate,
        "latency": _time,
        "uplink": _rate,
        "uplink_latency": _time,
        "speed": _factors,
        "cores": _whole,
    }
    try:
        for key in table:
            if key not in readers:
                raise ClusterError(unknown("key", key, readers))
        for key in ("workers", "link", "latency"):
            if key not in table:
                raise ClusterError(f"key {key!r} is missing")
        return Rack(**{key: readers[key](key, value) for key, value in table.items()})
    except ClusterError as error:
        raise ClusterError(f"{where}: {error}") from None


def _whole(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ClusterError(f"key {key!r}: expected a whole number, got {value!r}")
    return value


def _rate(key: str, value: object) -> float:
    return _quantity(key, value, units.bytes_per_second, "a rate", "1 Gbit/s")


def _time(key: str, value: object) -> float:
    return _quantity(key, value, units.seconds, "a time", "50 us")


def _quantity(key: str, value: object, parse: Any, what: str, example: str) -> float:
    if not isinstance(value, str):
        raise ClusterError(
            f"key {key!r}: expected {what} with its unit in quotes, such as "
            f'"{example}", got {value!r}'
        )
    try:
        number: float = parse(value)
    except UsageError as error:
        raise ClusterError(f"key {key!r}: {error}") from None
    return number


def _factors(key: str, value: object) -> tuple[float, ...]:
    if not (isinstance(value, list) and value) or not all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in value
    ):
        raise ClusterError(
            f"key {key!r}: expected a list of numbers, one per worker, got {value!r}"
        )
    return tuple(float(v) for v in value)
