"""The network itself: namespaces, bridges, veth pairs. Runs in the keeper only.

The keeper's own network namespace is the switchboard, which holds every bridge; each host
has a namespace of its own, held by a descriptor here.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute, NetlinkError  # type: ignore[import-untyped]

from paceline.runtimes.emulated import namespaces
from paceline.runtimes.emulated.control_messages import (
    INTERFACE,
    NETWORK,
    Build,
    HostPlan,
    LinkPlan,
)
from paceline.runtimes.emulated.errors import KernelLacksError
from paceline.runtimes.emulated.kernel_features import FEATURES
from paceline.runtimes.emulated.shaping import Bucket, Shaper, segment_bytes

_LOOPBACK = 1
_CORE = "core"
_CONGESTION_CONTROL = "cubic"
_PERMANENT = 0x80
_TCP_BYTES = 1460
"""Of a packet of TCP: as on an Ethernet, whatever other packets may have."""
ETHERNET_HEADER = 14


@contextlib.contextmanager
def needs(feature: str) -> Iterator[None]:
    """Turn the kernel's refusal into a `KernelLacksError` that names the feature."""
    try:
        yield
    except NetlinkError as error:
        raise KernelLacksError(
            f"expected a kernel with {feature}, but it answered: {error}. An emulated "
            f"cluster {FEATURES[feature].how_to_get()}"
        ) from error


class Switchboard:
    """All namespaces, links and rules of one emulated cluster."""

    def __init__(self) -> None:
        self._netlink = IPRoute()
        self._hosts: list[int] = []
        self._links: list[LinkPlan] = []
        self._mtu = 0
        self._shapers: list[Shaper] = []

    def build(self, request: Build) -> bool:
        """Make the network; false if the kernel cannot delay packets.

        Raises `KernelLacksError` or `NetlinkError`; what was made until then goes with
        the keeper.
        """
        delayed = "netem" not in self.probe(["netem"])
        self._links, self._mtu = request.links, request.mtu
        _without_ipv6()
        self._netlink.link("set", index=_LOOPBACK, state="up")
        self._bridge(_CORE)
        for rack in range(request.racks):
            self._bridge(f"rack{rack}")
            with needs("veth"):
                self._netlink.link(
                    "add", ifname=f"u{rack}", kind="veth", peer={"ifname": f"d{rack}"}
                )
            self._plug(f"u{rack}", f"rack{rack}")
            self._plug(f"d{rack}", _CORE)
        for number, host in enumerate(request.hosts):
            self._hosts.append(namespaces.new_network())
            self._wire(number, host)
        for number in range(len(request.hosts)):
            self._furnish(number, request)
        for link in request.links:
            with self._netlink_of(link) as netlink:
                index = self._index(netlink, link.device)
                delay = link.delay if delayed else 0.0
                shaper = Shaper(index, link.rate, delay, request.mtu + ETHERNET_HEADER)
                with needs("tbf"):
                    shaper.install(netlink)
                _limit_segments(netlink, index, link.rate)
                self._shapers.append(shaper)
        return delayed

    def set_rate(self, link: int, rate: float) -> None:
        """Shape a link to another wire rate."""
        with self._netlink_of(self._links[link]) as netlink:
            shaper = self._shapers[link]
            _limit_segments(netlink, shaper.index, rate)
            shaper.set_rate(netlink, rate)

    def cut(self, link: int) -> None:
        """Lose every packet on a link."""
        with self._netlink_of(self._links[link]) as netlink:
            self._shapers[link].cut(netlink)

    def repair(self, link: int) -> None:
        """Let packets flow again."""
        with self._netlink_of(self._links[link]) as netlink:
            self._shapers[link].repair(netlink)

    def namespace(self, host: int) -> int:
        """The descriptor that holds a host's network namespace."""
        return self._hosts[host]

    def open_socket(self, host: int) -> socket.socket:
        """A TCP socket in a host: it stays there, whoever uses it."""
        with namespaces.inside(self._hosts[host]):
            return socket.socket(socket.AF_INET, socket.SOCK_STREAM)

    def probe(self, features: list[str]) -> dict[str, str]:
        """Try features in a scratch namespace; what is missing, with the kernel's words."""
        scratch = namespaces.new_network()
        with namespaces.inside(scratch), IPRoute() as netlink:
            return {
                feature: text
                for feature in features
                if (text := _try_feature(netlink, feature)) is not None
            }

    def _bridge(self, name: str) -> None:
        with needs("bridge"):
            self._netlink.link(
                "add",
                ifname=name,
                kind="bridge",
                br_stp_state=0,
                br_forward_delay=0,
                br_mcast_snooping=0,
            )
        index = self._index(self._netlink, name)
        self._netlink.link("set", index=index, state="up")

    def _plug(self, name: str, bridge: str) -> None:
        self._netlink.link(
            "set",
            index=self._index(self._netlink, name),
            master=self._index(self._netlink, bridge),
            mtu=self._mtu,
            state="up",
        )

    def _wire(self, number: int, host: HostPlan) -> None:
        """A cable from a host to its rack's bridge."""
        with namespaces.inside(self._hosts[number]):
            _without_ipv6()
        with needs("veth"):
            self._netlink.link(
                "add",
                ifname=f"h{number}",
                kind="veth",
                peer={
                    "ifname": INTERFACE,
                    "address": host.hardware_address,
                    "net_ns_fd": self._hosts[number],
                },
            )
        self._plug(f"h{number}", f"rack{host.rack}")

    def _furnish(self, number: int, request: Build) -> None:
        """Addresses, and everybody else's: the kernel's table of learnt neighbours is
        one for all namespaces, and too small for every host to know every other."""
        with self._inside(number) as netlink:
            index = self._index(netlink, INTERFACE)
            netlink.link("set", index=_LOOPBACK, state="up")
            address = request.hosts[number].address
            netlink.addr("add", index=index, address=address, prefixlen=32)
            netlink.link("set", index=index, mtu=request.mtu, state="up")
            _route(netlink, index, address)
            for other, host in enumerate(request.hosts):
                if other != number:
                    netlink.neigh(
                        "add",
                        dst=host.address,
                        lladdr=host.hardware_address,
                        ifindex=index,
                        state=_PERMANENT,
                    )

    @contextlib.contextmanager
    def _inside(self, host: int) -> Iterator[Any]:
        with namespaces.inside(self._hosts[host]), IPRoute() as netlink:
            yield netlink

    @contextlib.contextmanager
    def _netlink_of(self, link: LinkPlan) -> Iterator[Any]:
        if link.host is None:
            yield self._netlink
        else:
            with self._inside(link.host) as netlink:
                yield netlink

    @staticmethod
    def _index(netlink: Any, name: str) -> int:
        index: int = netlink.link_lookup(ifname=name)[0]
        return index


def _without_ipv6() -> None:
    """No neighbour discovery in the background; where /proc/sys cannot be written to,
    the few packets of it do no harm."""
    with contextlib.suppress(OSError):
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")


def _route(netlink: Any, index: int, address: str) -> None:
    """Reach all hosts, with Linux's usual congestion control where the kernel has it:
    what this machine prefers for itself (bbr, say) is not what a cluster has; and with TCP's
    usual packets."""
    route = {"dst": NETWORK, "oif": index, "scope": "link", "prefsrc": address}
    metrics = {"advmss": _TCP_BYTES}
    try:
        wanted = metrics | {"cc_algo": _CONGESTION_CONTROL}
        netlink.route("add", **route, metrics=wanted)
    except NetlinkError:
        netlink.route("add", **route, metrics=metrics)


def _limit_segments(netlink: Any, index: int, rate: float) -> None:
    """Have senders hand over about a millisecond in one piece (see shaping)."""
    netlink.link("set", index=index, gso_max_size=segment_bytes(rate))


def _try_feature(netlink: Any, feature: str) -> str | None:
    """The kernel's words if it lacks a feature."""
    try:
        if feature == "bridge":
            netlink.link("add", ifname="scratch-bridge", kind="bridge")
            return None
        if not netlink.link_lookup(ifname="scratch"):
            netlink.link(
                "add", ifname="scratch", kind="veth", peer={"ifname": "scratch-peer"}
            )
        index = netlink.link_lookup(ifname="scratch")[0]
        if feature == "tbf":
            bucket = Bucket.of(1e6)
            netlink.tc(
                "replace",
                "tbf",
                index,
                rate=bucket.rate,
                burst=bucket.burst,
                limit=bucket.limit,
            )
        elif feature == "netem":
            netlink.tc("replace", "netem", index, delay=1000)
    except NetlinkError as error:
        return str(error)
    return None
