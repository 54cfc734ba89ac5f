"""One worker's host: cores, load of other programs, network interfaces."""

from __future__ import annotations

import ipaddress
import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.cluster.probe.tcp_counters import connections
from paceline.tools.doctor.evidence import Interface, Kind

_INTERFACES = Path("/sys/class/net")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_STATISTICS = Path("/proc/stat")
_UP, _LOOPBACK = 0x1, 0x8
_IPV4 = 2
_CONTAINERS = ("veth", "macvlan", "ipvlan")
_OVER_DEVICES = ("vlan", "bond", "ipoib")
"""Interfaces that inherit the properties of their devices."""


def cores() -> int:
    """Cores that this process may use: its affinity, limited by its container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text().split()
        if quota != "max":
            count = min(count, max(1, round(int(quota) / int(period))))
    return count


def busy_cores(seconds: float) -> float:
    """Mean number of the host's busy cores over *seconds*; 0 if the system does not count them."""
    before, start = _core_seconds(), time.perf_counter()
    time.sleep(seconds)
    return max(0.0, (_core_seconds() - before) / (time.perf_counter() - start))


def _core_seconds() -> float:
    try:
        fields = _STATISTICS.read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    ticks = [int(field) for field in fields]
    # User, nice, system and interrupts, without idle time and a hypervisor's.
    return (sum(ticks[:3]) + sum(ticks[5:7])) / os.sysconf("SC_CLK_TCK")


def interfaces() -> tuple[Interface | None, tuple[Interface, ...]]:
    """Interfaces of this process's network namespace that are up and have an address.

    Returns:
        The interface by which most of this process's bytes were sent (None if unknown), and the
        others.
    """
    found, owners = _described()
    sent: Counter[str] = Counter()
    for connection in connections():
        if connection.address in owners:
            sent[owners[connection.address]] += connection.acknowledged
    used = sent.most_common(1)[0][0] if sent.total() else None
    others = tuple(one for name, one in found.items() if name != used)
    return (found[used] if used else None), others


def _described() -> tuple[dict[str, Interface], dict[str, str]]:
    """Interfaces by name, and names by address; empty without netlink."""
    try:
        from pyroute2 import IPRoute  # type: ignore[import-untyped]

        with IPRoute() as netlink:
            links, addresses = list(netlink.get_links()), list(netlink.get_addr())
    except (ImportError, OSError):
        return {}, {}
    found: dict[str, Interface] = {}
    owners: dict[str, str] = {}
    for link in links:
        name = link.get_attr("IFLA_IFNAME")
        mine = [one for one in addresses if one["index"] == link["index"]]
        if not mine or not link["flags"] & _UP:
            continue
        for one in mine:
            owners[one.get_attr("IFA_LOCAL") or one.get_attr("IFA_ADDRESS")] = name
        networks = [
            f"{one.get_attr('IFA_LOCAL')}/{one['prefixlen']}"
            for one in mine
            if one["family"] == _IPV4
        ]
        found[name] = Interface(
            name=name,
            kind=_kind(link),
            rate=_rate(link),
            network=str(ipaddress.ip_network(networks[0], strict=False))
            if networks
            else "",
        )
    return found, owners


def _kind(link: Any) -> Kind:
    """Return the kind of a link in netlink's description."""
    if link["flags"] & _LOOPBACK:
        return "loopback"
    info = link.get_attr("IFLA_LINKINFO")
    driver = None if info is None else info.get_attr("IFLA_INFO_KIND")
    if driver in _CONTAINERS:
        return "container"
    files = _files(link)
    if driver is None and files is None:
        return "container"  # /sys shows another namespace than this process's.
    if driver is None and files is not None:
        if (files / "wireless").exists() or (files / "phy80211").exists():
            return "wireless"
        return "ethernet" if (files / "device").exists() else "virtual"
    return "ethernet" if driver in _OVER_DEVICES else "virtual"


def _rate(link: Any) -> float | None:
    """Return the bytes per second, as the driver reports them; most virtual interfaces do not."""
    files = _files(link)
    if files is None:
        return None
    try:
        megabits = int((files / "speed").read_text())
    except (OSError, ValueError):
        return None
    return None if megabits <= 0 else megabits * 125e3


def _files(link: Any) -> Path | None:
    """Return the link's folder in /sys; None where /sys shows another network namespace."""
    folder: Path = _INTERFACES / link.get_attr("IFLA_IFNAME")
    with suppress(OSError, ValueError):
        if int((folder / "ifindex").read_text()) == link["index"]:
            return folder
    return None
