"""Maps a cluster to hosts, addresses and devices; no I/O.

The switchboard holds a bridge per rack and one for the core. Each directed link of the cluster is
the egress of exactly one device::

    host i                     switchboard
    eth0 --------------- h<i> [rack bridge] u<r> --------------- d<r> [core bridge]
    host i out: eth0     in: h<i>           rack r up: u<r>      down: d<r>

Hosts beyond the cluster's own (servers) are in rack 0 and have the first rack's link. Their links
are numbered after all links of the cluster: out, in, out, in.

The hosts of aggregators follow, one for each rack that aggregates. They are at the rack's switch:
on no link of the cluster, and as fast as the machine permits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.cluster.cluster import Cluster, ServerHost
from paceline.errors import UsageError
from paceline.runtimes.emulated.control_messages import (
    INTERFACE,
    Build,
    HostPlan,
    LinkPlan,
)
from paceline.runtimes.emulated.shaping import wire_rate

__all__ = ["INTERFACE", "MAX_HOSTS", "Host", "Plan"]

MAX_HOSTS = 1000
"""A bridge has 1023 ports, and one leads to the core."""


@dataclass(frozen=True)
class Host:
    """One host: its name, its address, its rack."""

    number: int
    name: str
    address: str
    rack: int


class Plan:
    """The links of a cluster and its extra hosts, which ``cluster`` includes as servers."""

    def __init__(self, cluster: Cluster, extra_hosts: int) -> None:
        """Number hosts and links.

        Raises `UsageError` for a number of hosts that no bridge can take, and for rules of paths.
        """
        if extra_hosts < 0:
            raise UsageError(f"extra_hosts: expected 0 or more, got {extra_hosts}")
        if cluster.paths:
            one = cluster.link_name(len(cluster.capacities) - 1)
            raise UsageError(
                f"the path {one!r} is a rule's: the emulated runtime shapes links, and no paths: "
                "name a link, or use the simulated runtime (paceline simulate, or --runtime simulated)"
            )
        aggregating = [i for i, rack in enumerate(cluster.racks) if rack.aggregates]
        servers = len(cluster.servers) + extra_hosts
        wanted = cluster.hosts + servers + len(aggregating)
        if wanted > MAX_HOSTS:
            raise UsageError(
                f"expected at most {MAX_HOSTS} hosts in an emulated cluster, got "
                f"{wanted}: use the simulated runtime for more"
            )
        beside = (ServerHost(),) * extra_hosts
        self.cluster = cluster = replace(cluster, servers=cluster.servers + beside)
        self.capacities = cluster.capacities
        count = cluster.hosts + len(cluster.servers)
        racks = [cluster.rack_of_host(host) for host in range(count)]
        self.hosts = tuple(
            Host(
                number=i,
                name=cluster.link_name(cluster.link_out_of(i)).removesuffix(" out"),
                address=_address(i),
                rack=rack,
            )
            for i, rack in enumerate(racks)
        )
        self.aggregators = tuple(
            Host(
                number=count + i,
                name=f"the aggregator of rack {rack}",
                address=_address(count + i),
                rack=rack,
            )
            for i, rack in enumerate(aggregating)
        )

    def host_link(self, host: int, *, inwards: bool) -> int:
        """Return the directed link from or to a host."""
        return self.cluster.link_out_of(host) + inwards

    def check_link(self, link: int) -> None:
        """Raise `UsageError`, with the valid range, for a link that does not exist."""
        if not 0 <= link < len(self.capacities):
            raise UsageError(
                f"unknown link {link}: expected 0 ({self.cluster.link_name(0)}) to "
                f"{len(self.capacities) - 1} ({self.cluster.link_name(len(self.capacities) - 1)})"
            )

    def check_host(self, host: int) -> None:
        """Raise `UsageError`, with the valid range, for a host that does not exist."""
        count = len(self.hosts) + len(self.aggregators)
        if not 0 <= host < count:
            raise UsageError(f"unknown host {host}: expected 0 to {count - 1}")

    def build(self) -> Build:
        """Return the request by which the keeper makes this network."""
        hosts = [
            HostPlan(
                rack=host.rack,
                address=host.address,
                hardware_address="02:00:0a:4d:"
                f"{(host.number + 1) // 256:02x}:{(host.number + 1) % 256:02x}",
            )
            for host in (*self.hosts, *self.aggregators)
        ]
        links: list[LinkPlan | None] = [None] * len(self.capacities)
        for host in self.hosts:
            # Half of the rack's latency is on either side of its switch. So a path within the rack
            # has all of it, and a path between racks has half of each rack's.
            delay = self.cluster.racks[host.rack].latency / 2
            for inwards in (False, True):
                link = self.host_link(host.number, inwards=inwards)
                links[link] = LinkPlan(
                    name=self.cluster.link_name(link),
                    host=None if inwards else host.number,
                    device=f"h{host.number}" if inwards else INTERFACE,
                    rate=wire_rate(self.capacities[link]),
                    delay=delay,
                )
        for number, rack in enumerate(self.cluster.racks):
            for downwards in (False, True):
                link = 2 * self.cluster.hosts + 2 * number + downwards
                links[link] = LinkPlan(
                    name=self.cluster.link_name(link),
                    host=None,
                    device=f"{'d' if downwards else 'u'}{number}",
                    rate=wire_rate(self.capacities[link]),
                    delay=rack.uplink_latency,
                )
        return Build(
            racks=len(self.cluster.racks),
            hosts=hosts,
            links=[link for link in links if link is not None],
        )


def _address(number: int) -> str:
    return f"10.77.{(number + 1) // 256}.{(number + 1) % 256}"
