"""Reads the kernel's counters of this process's TCP connections."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")
_INFO_BYTES = 220
"""The length up to the last field that is read. Older kernels return less, and then no counter is
known."""
_RETRANSMITTED = struct.Struct("=I"), 100
_ACKNOWLEDGED = struct.Struct("=Q"), 120
_SEGMENTS = struct.Struct("=I"), 156
_TAKEN_TWICE = struct.Struct("=I"), 216
"""Segments that were sent again although they had arrived: a busy machine acknowledged late."""


@dataclass(frozen=True)
class Connection:
    """The counters of one TCP connection.

    Attributes:
        address: Its own address.
        acknowledged: Bytes that the peer's kernel has acknowledged.
        segments: Data segments sent.
        lost: Segments that were sent again, without having arrived already.
    """

    address: str
    acknowledged: int
    segments: int
    lost: int


def connections() -> list[Connection]:
    """Return the connections of this process, whichever code made them.

    Empty if the system does not count.
    """
    return list(_connections())


def segments() -> tuple[int, int]:
    """Return the data segments that this process has sent, and how many of them were lost."""
    every = connections()
    return sum(c.segments for c in every), sum(c.lost for c in every)


def _connections() -> Iterator[Connection]:
    if not hasattr(socket, "TCP_INFO") or not _DESCRIPTORS.is_dir():
        return
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):
            if os.readlink(_DESCRIPTORS / name).startswith("socket:"):
                # This is a copy of the descriptor: closing it leaves the connection open.
                with socket.socket(fileno=os.dup(int(name))) as end:
                    found = _read(end)
                if found is not None:
                    yield found


def _read(end: socket.socket) -> Connection | None:
    if end.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES:
        return None
    address = str(end.getsockname()[0]).removeprefix("::ffff:")
    acknowledged, segments, again, twice = (
        kind.unpack_from(info, at)[0]
        for kind, at in (_ACKNOWLEDGED, _SEGMENTS, _RETRANSMITTED, _TAKEN_TWICE)
    )
    return Connection(address, acknowledged, segments, max(0, again - twice))
