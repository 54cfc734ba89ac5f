"""What the kernel counts of this process's TCP connections."""

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
"""As far as what is read; older kernels have less, and nothing is known there."""
_RETRANSMITTED = struct.Struct("=I"), 100
_ACKNOWLEDGED = struct.Struct("=Q"), 120
_SEGMENTS = struct.Struct("=I"), 156
_TAKEN_TWICE = struct.Struct("=I"), 216
"""So many were sent again, and were there already: a busy machine was late to say so."""


@dataclass(frozen=True)
class Connection:
    """One TCP connection: its own *address*, bytes that were *acknowledged*, data *segments* sent, and
    of these the ones that were *lost*: sent again, and not found to be there already."""

    address: str
    acknowledged: int
    segments: int
    lost: int


def connections() -> list[Connection]:
    """Those of this process, whoever made them; none where the system does not tell."""
    return list(_connections())


def segments() -> tuple[int, int]:
    """Data segments that this process has sent, and how many of them were lost."""
    every = connections()
    return sum(c.segments for c in every), sum(c.lost for c in every)


def _connections() -> Iterator[Connection]:
    if not hasattr(socket, "TCP_INFO") or not _DESCRIPTORS.is_dir():
        return
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):
            if os.readlink(_DESCRIPTORS / name).startswith("socket:"):
                # A copy: closing it leaves the connection as it is.
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
