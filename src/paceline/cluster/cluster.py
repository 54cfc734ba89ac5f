"""Describes a cluster: racks of hosts, their links, their speeds, and events during a run.

Topology: host -- link -- rack switch -- uplink -- core switch. A path inside a rack has the rack's
latency. A path between two racks has half of each rack's latency plus each rack's
``uplink_latency``.

A `Rule` is one event: a link slows down, breaks or comes back, or a worker dies. The same objects
work in the simulated runtime and, except for paths, in the emulated runtime.

::

    [[rule]]
    step = 20                  # after worker 0's 20th step; or: at = "5 s"
    throttle = "worker 3"      # both directions; "worker 3 out" is one
    rate = "25 Mbit/s"

    [[rule]]
    at = "10 s"                # from the start of training on worker 0
    cut = "rack 1 up"          # packets are lost without an error

    [[rule]]
    at = "15 s"
    repair = "rack 1 up"       # flows again, at the rate that the cluster gives it

    [[rule]]
    at = "0 s"
    throttle = "worker 1 to worker 2"  # only this path, such as a bad route; simulated
    rate = "25 Mbit/s"                 # runtime only

    [[rule]]
    step = 30
    kill = 2                   # a worker
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from paceline import units
from paceline.errors import ClusterError

MAX_WORKERS = 100_000
"""No runtime supports more workers: a larger number is a typing mistake."""

PACKET_BYTES = 1432
"""Bytes of gradient in an aggregator's packet on an Ethernet (MTU 1500)."""


EMULATED_BURST = 2e-3
"""The burst of an emulated link, in seconds at its rate: `paceline.runtimes.emulated.shaping` says
why."""


@dataclass(frozen=True, kw_only=True)
class Rack:
    """The hosts behind one switch.

    Attributes:
        workers: Number of workers.
        link: Goodput in bytes per second, each direction: one for all hosts, or one each.
        latency: One-way seconds between two hosts of the rack.
        uplink: Goodput in bytes per second, each direction (None: never the limit).
        uplink_latency: One-way seconds between the rack and the core.
        speed: A factor for each worker: 1 is normal, 0.5 is half as fast.
        cores: Cores of each host.
        workers_per_host: Number of workers that share a host and its link.
        names: Host names, by which a real job recognizes its own hosts.
        group: The group of all workers, or of each, for methods with groups.
        burst: Seconds at a link's rate that the link lets through at once after a pause, as a token
            bucket does. It applies to uplinks, too.
        aggregates: Whether the switch has an aggregator.
        aggregation_rate: Bytes per second that the aggregator receives, all workers' contributions
            together (None: no limit).
        slots: Number of packets whose sums the aggregator holds at a time (None: enough).
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
    burst: float = 0.0
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
        for key in ("latency", "uplink_latency", "burst"):
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
        """The name of each worker's group; empty names if there are no groups."""
        if isinstance(self.group, tuple):
            return self.group
        return (self.group,) * self.workers


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The processor time that communication costs.

    Attributes:
        message: Core-seconds of one message, for its sender and its receiver together.
        byte: Core-seconds of one byte of it.
        message_while_computing: *message* while computing keeps all cores busy (None: the same).
        cores: Cores that all hosts share, as in an emulated cluster (None: each rack has its own
            ``cores``).
    """

    message: float = 0.0
    byte: float = 0.0
    cores: int | None = None
    message_while_computing: float | None = None

    def __post_init__(self) -> None:
        for key in ("message", "byte", "message_while_computing"):
            value = getattr(self, key)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ClusterError(
                    f"key {key!r}: expected a time of zero or more, got {value:g} s"
                )
        if self.cores is not None and self.cores < 1:
            raise ClusterError(f"key 'cores': expected 1 or more, got {self.cores}")

    def describe(self) -> str:
        """Return one line for the user."""
        text = f"{units.show_seconds(self.message)} of a processor a message"
        if self.message_while_computing is not None:
            while_computing = units.show_seconds(self.message_while_computing)
            text += f" ({while_computing} while all cores compute)"
        if self.byte:
            text += f" and {units.show_seconds(1e6 * self.byte)} a megabyte"
        if self.cores is not None:
            text += f", {self.cores} cores for all hosts"
        return text


@dataclass(frozen=True, kw_only=True)
class ServerHost:
    """A dedicated host for a parameter server, in rack number *rack*.

    *link* is its goodput in bytes per second, each direction (None: as that rack's first host).
    """

    rack: int = 0
    link: float | None = None

    def __post_init__(self) -> None:
        if self.link is not None and not (self.link > 0 and math.isfinite(self.link)):
            raise ClusterError(
                f"key 'link': expected a rate above zero, got {self.link:g} bytes/s"
            )


@dataclass(frozen=True)
class Cluster:
    """A network of racks: its directed links with their capacities, and events during a run.

    Workers and hosts are numbered rack by rack. The servers' hosts follow, then each rack's switch,
    where services may run, too, then each rack's aggregator. ``capacities[i]`` is the goodput of
    directed link *i* in bytes per second.

    *rules* are events during a run. *processor* is the processor time of messages (None: no time).
    *servers* are dedicated hosts. If a rule names a path between two hosts, that path has a link of
    its own, which no other path shares. It is numbered after all others, and is no limit until the
    rule sets one.
    """

    racks: tuple[Rack, ...]
    rules: tuple[Rule, ...] = ()
    processor: Processor | None = None
    servers: tuple[ServerHost, ...] = ()
    capacities: tuple[float, ...] = field(init=False, repr=False)
    _host_of: tuple[int, ...] = field(init=False, repr=False)
    _rack_of: tuple[int, ...] = field(init=False, repr=False)
    _paths: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False)
    """The number of each path's own link, by hosts (from, to)."""

    def __post_init__(self) -> None:
        if not self.racks:
            raise ClusterError(
                "expected at least one [[rack]] table, got none: a cluster needs workers"
            )
        rack_of = [i for i, rack in enumerate(self.racks) for _ in range(rack.hosts)]
        hosts = itertools.count()
        host_of = [
            host
            for rack in self.racks
            for host in itertools.islice(hosts, rack.hosts)
            for _ in range(rack.workers_per_host)
        ]
        # Directed links: 2h and 2h+1 are host h's out and in, then each rack's uplink
        # and downlink.
        capacities: list[float] = []
        for rack in self.racks:
            capacities += [rate for link in rack.links for rate in (link, link)]
        for rack in self.racks:
            capacities += [math.inf if rack.uplink is None else rack.uplink] * 2
        for number, server in enumerate(self.servers):
            if not 0 <= server.rack < len(self.racks):
                raise ClusterError(
                    f"server {number}: key 'rack': expected 0 to {len(self.racks) - 1}, "
                    f"got {server.rack}"
                )
            rack_of.append(server.rack)
            link = server.link or self.racks[server.rack].links[0]
            capacities += [link, link]
        object.__setattr__(self, "_rack_of", tuple(rack_of))
        object.__setattr__(self, "_host_of", tuple(host_of))
        object.__setattr__(self, "capacities", tuple(capacities))
        object.__setattr__(self, "_paths", {})
        self._check_groups()
        for number, rule in enumerate(self.rules):
            try:
                if isinstance(rule.target, str):
                    self._add_path(rule.target)
                    self.links_named(rule.target)
                elif not 0 <= rule.target < self.workers:
                    raise ClusterError(
                        f"key 'kill': expected a worker, 0 to {self.workers - 1}, got "
                        f"{rule.target}"
                    )
            except ClusterError as error:
                raise ClusterError(f"rule {number}: {error}") from None

    def _add_path(self, name: str) -> None:
        """If *name* is a path between two hosts, give the path a link of its own."""
        pair = self._pair_named(name)
        if pair is not None and pair not in self._paths:
            self._paths[pair] = len(self.capacities)
            object.__setattr__(self, "capacities", (*self.capacities, math.inf))

    def _pair_named(self, name: str) -> tuple[int, int] | None:
        """Return the hosts of ``"worker 1 to worker 3"`` or ``"host 0 to server 0"``.

        None for other names. Raises `ClusterError` if there is no such host.
        """
        words = re.fullmatch(r"(\w+) (\d+) to (\w+) (\d+)", name)
        if words is None:
            return None
        one, other = (
            self._host_named(words[i], int(words[i + 1]), name) for i in (1, 3)
        )
        if one == other:
            raise ClusterError(f"{name!r}: expected two hosts")
        return one, other

    def _host_named(self, kind: str, number: int, name: str) -> int:
        if kind == "server" and number < len(self.servers):
            return self.host_of_server(number)
        kinds = ("worker", "host") if self.hosts == self.workers else ("host",)
        if kind in kinds and number < self.hosts:
            return number
        raise ClusterError(
            f"{name!r}: there is no {kind} {number} with a link: expected '{kinds[0]} N' (N: 0 to "
            f"{self.hosts - 1}) or, of hosts for servers, 'server N'"
        )

    @property
    def paths(self) -> tuple[tuple[int, int], ...]:
        """The paths that rules name, as pairs of hosts (from, to)."""
        return tuple(self._paths)

    def _check_groups(self) -> None:
        """Raise `ClusterError` if only some workers are in groups."""
        grouped = [number for number, rack in enumerate(self.racks) if any(rack.groups)]
        for number in range(len(self.racks)):
            if grouped and number not in grouped:
                raise ClusterError(
                    f"rack {number}: key 'group' is missing, but workers of rack {grouped[0]} are in "
                    "groups: give every rack a group, or none"
                )

    @property
    def groups(self) -> tuple[int, ...]:
        """By worker, the number of its group, in order of first appearance; empty without groups."""
        names = [name for rack in self.racks for name in rack.groups if name]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return tuple(numbers[name] for name in names)

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self._host_of)

    @property
    def hosts(self) -> int:
        """Number of hosts that workers run on."""
        return len(self._rack_of) - len(self.servers)

    def name_of(self, host: int) -> str:
        """A host's own name; empty if it is unknown."""
        for rack in self.racks:
            if host < rack.hosts:
                return rack.names[host] if rack.names else ""
            host -= rack.hosts
        return ""

    def host_of_server(self, server: int) -> int:
        """The host of a dedicated server."""
        return self.hosts + server

    def host_of(self, worker: int) -> int:
        """The host that a worker runs on."""
        return self._host_of[worker]

    def switch_of(self, rack: int) -> int:
        """The number of a rack's switch, among the hosts.

        A switch has no link of its own: traffic from a host of the rack to it crosses only that
        host's link.
        """
        return len(self._rack_of) + rack

    def aggregator_of(self, rack: int) -> int:
        """The number of a rack's aggregator, among the hosts.

        It is at the switch, and receives at most at the rate in `aggregation`.
        """
        return len(self._rack_of) + len(self.racks) + rack

    def is_switch(self, host: int) -> bool:
        """Whether *host* is a rack's switch or aggregator."""
        return host >= len(self._rack_of)

    def is_aggregator(self, host: int) -> bool:
        """Whether *host* is a rack's aggregator."""
        return host >= len(self._rack_of) + len(self.racks)

    def rack_of(self, worker: int) -> int:
        """The rack of a worker's host."""
        return self._rack_of[self._host_of[worker]]

    @cached_property
    def racks_of_workers(self) -> tuple[int, ...]:
        """The rack of each worker."""
        return tuple(self.rack_of(worker) for worker in range(self.workers))

    def rack_of_host(self, host: int) -> int:
        """The rack of a host or a switch."""
        beyond = host - len(self._rack_of)
        return self._rack_of[host] if beyond < 0 else beyond % len(self.racks)

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """Relative compute speed of each worker."""
        return tuple(s for rack in self.racks for s in rack.speed)

    @property
    def bursts(self) -> dict[int, float]:
        """The burst of each directed link that has one, in seconds at the link's rate."""
        places = range(self.hosts + len(self.servers))
        links = [(self.link_out_of(h), self.rack_of_host(h)) for h in places]
        links += [(2 * (self.hosts + rack), rack) for rack in range(len(self.racks))]
        return {
            link: self.racks[rack].burst
            for out, rack in links
            for link in (out, out + 1)
            if self.racks[rack].burst
        }

    def path(self, source: int, destination: int) -> tuple[int, ...]:
        """The directed links from one worker's host to another's, as indices; empty within a host."""
        return self.host_path(self._host_of[source], self._host_of[destination])

    def host_path(self, source: int, destination: int) -> tuple[int, ...]:
        """The directed links from one host, or switch, to another, as indices."""
        if source == destination:
            return ()
        from_rack, to_rack = self.rack_of_host(source), self.rack_of_host(destination)
        base = 2 * self.hosts
        links: tuple[int, ...] = ()
        if not self.is_switch(source):
            links += (self.link_out_of(source),)
        if from_rack != to_rack:
            links += (base + 2 * from_rack, base + 2 * to_rack + 1)
        if self.is_aggregator(destination):
            links += (len(self.capacities) + to_rack,)
        elif not self.is_switch(destination):
            links += (self.link_out_of(destination) + 1,)
        own = self._paths.get((source, destination))
        return links if own is None else (*links, own)

    @property
    def aggregation(self) -> tuple[float, ...]:
        """By rack, the rate at which its aggregator receives, in bytes per second.

        All contributions count together. In a path the aggregator counts as a link, numbered after
        all links.

        Slots limit the rate, too. A sum holds its slot from the moment when its packets leave the
        rack's hosts until all receiving hosts have confirmed it. So each of the rack's workers
        sends at most *slots* packets in that time.
        """
        return tuple(
            min(rack.aggregation_rate or math.inf, self._rate_of_slots(number))
            for number, rack in enumerate(self.racks)
        )

    def _rate_of_slots(self, number: int) -> float:
        rack, switch = self.racks[number], self.switch_of(number)
        if rack.slots is None:
            return math.inf
        furthest = max(self.host_latency(switch, host) for host in range(self.hosts))
        held = rack.latency + 2 * furthest
        most = rack.workers * rack.slots * PACKET_BYTES
        return most / held if held else math.inf

    def link_out_of(self, host: int) -> int:
        """The link out of a host; the link into it has the next number."""
        beyond = host - self.hosts
        return 2 * host if beyond < 0 else 2 * (self.hosts + len(self.racks) + beyond)

    def latency(self, source: int, destination: int) -> float:
        """One-way seconds from one worker's host to another's."""
        return self.host_latency(self._host_of[source], self._host_of[destination])

    def host_latency(self, source: int, destination: int) -> float:
        """One-way seconds from one host or switch to another.

        Half of a rack's latency is on either side of its switch.
        """
        if source == destination:
            return 0.0
        from_rack, to_rack = self.rack_of_host(source), self.rack_of_host(destination)
        a, b = self.racks[from_rack], self.racks[to_rack]
        out = 0.0 if self.is_switch(source) else a.latency / 2
        into = 0.0 if self.is_switch(destination) else b.latency / 2
        if from_rack == to_rack:
            return out + into
        return out + into + a.uplink_latency + b.uplink_latency

    def link_name(self, index: int) -> str:
        """Return a directed link's name for the user: ``"worker 3 out"`` or ``"rack 0 up"``.

        A path's link is called ``"worker 1 to worker 3"``. If hosts have several workers, a host's
        link is called ``"host 3 out"``.
        """
        base = 2 * self.hosts
        beyond = index - base - 2 * len(self.racks)
        own = beyond - 2 * len(self.servers)
        what = "worker" if self.hosts == self.workers else "host"
        if own >= 0:
            ends = [
                f"{what} {host}" if host < self.hosts else f"server {host - self.hosts}"
                for host in self.paths[own]
            ]
            return " to ".join(ends)
        if beyond >= 0:
            return f"server {beyond // 2} {'in' if beyond % 2 else 'out'}"
        if index < base:
            return f"{what} {index // 2} {'in' if index % 2 else 'out'}"
        return f"rack {(index - base) // 2} {'down' if index % 2 else 'up'}"

    def links_named(self, name: str) -> tuple[int, ...]:
        """Return the directed links called *name*; both if it has no direction.

        ``"host 3 out"`` is always valid, ``"worker 3 out"`` if each host has one worker. Raises
        `ClusterError` with the valid names.
        """
        pair = self._pair_named(name)
        if pair in self._paths:
            return (self._paths[pair],)
        found = []
        for index in range(len(self.capacities)):
            full = self.link_name(index)
            names = {full, f"host{full.removeprefix('worker')}"}
            if any(name in (text, text.rsplit(" ", 1)[0]) for text in names):
                found.append(index)
        if not found:
            what = self.link_name(0).split(" ", 1)[0]
            raise ClusterError(
                f"there is no link {name!r}: expected '{what} N', '{what} N out', "
                f"'{what} N in' (N: 0 to {self.hosts - 1}), or 'rack N', 'rack N up', "
                f"'rack N down' (0 to {len(self.racks) - 1}), or '{what} N to {what} M'"
            )
        return tuple(found)

    def describe(self) -> str:
        """Return one line for the user."""
        parts = []
        for rack in self.racks:
            rates = sorted(set(rack.links))
            rate = units.show_rate(rates[-1])
            if len(rates) > 1:
                rate = f"{units.show_rate(rates[0])} to {rate}"
            workers = units.show_count(rack.workers, "worker")
            text = f"{workers}, {rate}, {units.show_seconds(rack.latency)} latency"
            if rack.workers_per_host > 1:
                text += f", {rack.workers_per_host} a host"
            if rack.uplink is not None:
                text += f", uplink {units.show_rate(rack.uplink)}"
            if rack.burst:
                text += f", {units.show_seconds(rack.burst)} at once after a pause"
            if set(rack.speed) != {1.0}:
                text += ", speeds " + " ".join(f"{s:g}" for s in rack.speed)
            if rack.aggregates:
                text += ", its switch adds up"
            if any(rack.groups):
                text += ", in " + " and ".join(dict.fromkeys(rack.groups))
            parts.append(text)
        if self.servers:
            count = len(self.servers)
            parts.append(f"{count} host{'s' if count != 1 else ''} for servers")
        if self.processor is not None:
            parts.append(self.processor.describe())
        return "; ".join(parts)


# ---- rules: events of a run ----

Action = Literal["throttle", "cut", "repair", "kill"]
ACTIONS: tuple[Action, ...] = ("throttle", "cut", "repair", "kill")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One event of a run, which happens once.

    Attributes:
        target: For `throttle`, `cut` and `repair` the name of a link or a path; a name without a
            direction means both directions. For `kill` a worker's number.
        at: Seconds from the start of training on worker 0. Either this or *step* is given.
        step: A step of worker 0.
        rate: Goodput in bytes per second, for `throttle` alone.
    """

    action: Action
    target: str | int
    at: float | None = None
    step: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.at is None) == (self.step is None):
            raise ClusterError("a rule: expected one of 'at' and 'step'")
        if self.at is not None and not (self.at >= 0 and math.isfinite(self.at)):
            raise ClusterError(
                f"key 'at': expected a time of zero or more, got {self.at}"
            )
        if self.step is not None and self.step < 1:
            raise ClusterError(f"key 'step': expected 1 or more, got {self.step}")
        if (self.action == "throttle") != (self.rate is not None):
            raise ClusterError("key 'rate': expected with 'throttle', and only there")
        if self.rate is not None and not (self.rate > 0 and math.isfinite(self.rate)):
            raise ClusterError(
                f"key 'rate': expected a rate above zero, got {self.rate:g} bytes/s; to "
                "let nothing through, write cut"
            )
        if (self.action == "kill") != isinstance(self.target, int):
            raise ClusterError(
                f"key {self.action!r}: expected "
                + ("a worker's number" if self.action == "kill" else "a link's name")
                + f", got {self.target!r}"
            )

    def describe(self) -> str:
        """Return one line for the user."""
        when = f"step {self.step}" if self.at is None else units.show_seconds(self.at)
        if self.action == "kill":
            return f"{when}: kill worker {self.target}"
        rate = "" if self.rate is None else f" to {units.show_rate(self.rate)}"
        return f"{when}: {self.action} {self.target}{rate}"


def throttle(
    link: str, rate: float, *, at: float | None = None, step: int | None = None
) -> Rule:
    """Give a link another goodput, in bytes per second."""
    return Rule(action="throttle", target=link, rate=rate, at=at, step=step)


def cut(link: str, *, at: float | None = None, step: int | None = None) -> Rule:
    """Drop all packets on a link, without an error at either end."""
    return Rule(action="cut", target=link, at=at, step=step)


def repair(link: str, *, at: float | None = None, step: int | None = None) -> Rule:
    """Restore the goodput that the cluster gives a link."""
    return Rule(action="repair", target=link, at=at, step=step)


def kill(worker: int, *, at: float | None = None, step: int | None = None) -> Rule:
    """Kill a worker without notice."""
    return Rule(action="kill", target=worker, at=at, step=step)
