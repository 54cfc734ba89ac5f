"""What one worker runs on: cores, who else uses them, and the interface that its collectives take."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from paceline.cluster.probe.tcp_counters import connections
from paceline.tools.doctor.evidence import Interface, Kind

_INTERFACES = Path("/sys/class/net")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_STATISTICS = Path("/proc/stat")
_GET_FLAGS, _GET_ADDRESS, _GET_MASK = 0x8913, 0x8915, 0x891B
_ETHTOOL, _ETHTOOL_DRIVER = 0x8946, 3
_UP, _LOOPBACK = 0x1, 0x8
_CONTAINERS = ("veth", "macvlan", "ipvlan")
_MADE_OF_OTHERS = (
    *("bridge", "tun", "dummy", "wireguard", "vxlan", "geneve", "openvswitch"),
    *("ip_gre", "ipip", "team"),
)


def cores() -> int:
    """Cores that this process may use: those of its affinity, or as many as a container's quota is worth."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text().split()
        if quota != "max":
            count = min(count, max(1, round(int(quota) / int(period))))
    return count


def busy_cores(seconds: float) -> float:
    """How many cores of the machine are busy, by its own count, for so long; 0 where it does not count."""
    before, start = _core_seconds(), time.perf_counter()
    time.sleep(seconds)
    return max(0.0, (_core_seconds() - before) / (time.perf_counter() - start))


def _core_seconds() -> float:
    try:
        fields = _STATISTICS.read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    ticks = [int(field) for field in fields]
    # User, nice, system, interrupts: all but idle ones, and those that a hypervisor took.
    return (sum(ticks[:3]) + sum(ticks[5:7])) / os.sysconf("SC_CLK_TCK")


def interfaces() -> tuple[Interface | None, tuple[Interface, ...]]:
    """The one that most of this process's bytes left by (None: nobody can tell), and all others that are up
    and have an address."""
    addresses: dict[str, str] = {}
    found: dict[str, Interface] = {}
    for _, name in socket.if_nameindex():
        flags, own = _flags(name), _addresses_of(name)
        if flags & _UP and own:
            addresses |= dict.fromkeys(own, name)
            found[name] = Interface(
                name=name,
                kind=_kind(name, flags),
                rate=_rate(name),
                network=_network_of(name),
            )
    sent: Counter[str] = Counter()
    for connection in connections():
        if connection.address in addresses:
            sent[addresses[connection.address]] += connection.acknowledged
    used = sent.most_common(1)[0][0] if sent.total() else None
    others = tuple(one for name, one in found.items() if name != used)
    return (found[used] if used else None), others


def _flags(name: str) -> int:
    answer = _ask(name, _GET_FLAGS)
    return 0 if answer is None else int(struct.unpack_from("=H", answer, 16)[0])


def _addresses_of(name: str) -> list[str]:
    found = []
    answer = _ask(name, _GET_ADDRESS)
    if answer is not None:
        found.append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            words = line.split()
            if words[-1] == name:
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0])))
    return found


def _network_of(name: str) -> str:
    """Of its first address of version 4; else nothing."""
    address, mask = _ask(name, _GET_ADDRESS), _ask(name, _GET_MASK)
    if address is None or mask is None:
        return ""
    words = f"{socket.inet_ntoa(address[20:24])}/{socket.inet_ntoa(mask[20:24])}"
    return str(ipaddress.ip_network(words, strict=False))


def _driver(name: str) -> str:
    """What an interface is made by, as the kernel calls it; nothing where it does not say."""
    told = ctypes.create_string_buffer(struct.pack("=I192x", _ETHTOOL_DRIVER))
    question = struct.pack("16sP", name.encode()[:15], ctypes.addressof(told))
    if _asked(question, _ETHTOOL) is None:
        return ""
    return told.raw[4:36].split(b"\0", 1)[0].decode(errors="replace")


def _ask(name: str, question: int) -> bytes | None:
    """An interface's own answer, in this process's network; None where it has none."""
    return _asked(struct.pack("256s", name.encode()[:15]), question)


def _asked(what: bytes, question: int) -> bytes | None:
    try:
        import fcntl
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        try:
            return fcntl.ioctl(end, question, what)
        except OSError:
            return None


def _kind(name: str, flags: int) -> Kind:
    if flags & _LOOPBACK:
        return "loopback"
    driver = _driver(name)
    if driver in _CONTAINERS or driver in _MADE_OF_OTHERS:
        return "container" if driver in _CONTAINERS else "virtual"
    place = _INTERFACES / name
    if not _is_ours(name):
        return "container"  # of a network that this process sees no files of
    if (place / "wireless").exists() or (place / "phy80211").exists():
        return "wireless"
    if (place / "device").exists():
        return "ethernet"
    if "DEVTYPE=vlan" in _text(place / "uevent") or (place / "bonding").exists():
        return "ethernet"  # by one, or several, that have a device
    inside = _text(place / "iflink"), _text(place / "ifindex")
    if inside[0] != inside[1] and not list(place.glob("lower_*")):
        return "container"  # its other end is in another network
    return "virtual"


def _rate(name: str) -> float | None:
    """Bytes a second, as the driver says; none that most virtual ones say means anything."""
    if not _is_ours(name):
        return None
    try:
        megabits = int(_text(_INTERFACES / name / "speed"))
    except ValueError:
        return None
    return None if megabits <= 0 else megabits * 125e3


def _is_ours(name: str) -> bool:
    """Whether the system's files tell of this process's network, and not of another one."""
    text = _text(_INTERFACES / name / "ifindex")
    return bool(text) and int(text) == socket.if_nametoindex(name)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
