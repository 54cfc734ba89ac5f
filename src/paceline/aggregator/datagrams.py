"""Many datagrams per system call: recvmmsg and sendmmsg, where the system has them.

The C structures that describe a batch lie in arrays of ours, as columns, so that filling them
in and reading them takes a few operations for all datagrams (64-bit Linux, whose layout this
is). Elsewhere each datagram is a call. Both ways are tried by the same tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import socket
import sys
from collections import Counter
from typing import Any, Protocol

import numpy as np

from paceline.aggregator.packets import Array, packet_type, sizes
from paceline.errors import UsageError

BATCH = 256
"""Datagrams a call."""
BUFFER_BYTES = 8 << 20
"""Asked for, each way; the system may allow less."""
_PIECE = np.dtype([("base", "<u8"), ("bytes", "<u8")])
_MESSAGE = np.dtype(
    {
        "names": ["name", "name_bytes", "pieces", "count", "flags", "bytes"],
        "formats": ["<u8", "<u4", "<u8", "<u8", "<i4", "<u4"],
        "offsets": [0, 8, 16, 24, 48, 56],
        "itemsize": 64,
    }
)
"""struct iovec, and struct mmsghdr without ancillary data."""
_LATER = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR, errno.ENOBUFS}
_IP_MTU_DISCOVER, _IP_PMTUDISC_DO, _IP_MTU = 10, 2, 14
_IPV6_MTU_DISCOVER, _IPV6_MTU = 23, 24
_SO_RCVBUFFORCE, _SO_SNDBUFFORCE = 33, 32
_PATIENCE_SECONDS = 0.2
"""How long a full buffer is waited for; what does not fit then is lost, as on a network."""


class Addresses:
    """Where datagrams go: row i of a table is an address as the kernel writes it."""

    def __init__(self) -> None:
        self.rows = np.zeros((0, 28), np.uint8)
        self.lengths = np.zeros(0, np.uint32)
        self.plain: list[tuple[Any, ...]] = []

    def add(self, address: tuple[Any, ...]) -> int:
        """The row of one more address, ``(host, port)`` in numbers."""
        host, port = str(address[0]), int(address[1])
        wide = ":" in host
        family = socket.AF_INET6 if wide else socket.AF_INET
        row = np.zeros(28, np.uint8)
        row[:2] = np.frombuffer(np.uint16(family).tobytes(), np.uint8)
        row[2:4] = np.frombuffer(port.to_bytes(2, "big"), np.uint8)
        packed = np.frombuffer(socket.inet_pton(family, host.split("%")[0]), np.uint8)
        start = 8 if wide else 4
        row[start : start + len(packed)] = packed
        self.rows = np.ascontiguousarray(np.vstack((self.rows, row)))
        self.lengths = np.append(self.lengths, np.uint32(28 if wide else 16))
        self.plain.append(address)
        return len(self.plain) - 1


class Datagrams(Protocol):
    """A socket that moves batches; it waits for nothing but room to send."""

    counts: Counter[str]

    def receive(self) -> tuple[Array, Array]:
        """What is there, `BATCH` at most: rows, valid until the next call, and how many
        bytes came of each (-1: more than a row holds)."""
        ...

    def send(
        self, packets: Array, rows: Array, addresses: Addresses | None, to: Array
    ) -> None:
        """Send of *packets* the *rows*, each to that row of *addresses* (None: to the
        socket's peer). What cannot be sent is counted."""
        ...


class Single:
    """A call for each datagram: for any system."""

    def __init__(self, end: socket.socket, elements: int) -> None:
        self._socket = end
        self._packets = np.zeros(BATCH, packet_type(elements))
        self._row_bytes = self._packets.dtype.itemsize
        self._room = bytearray(self._row_bytes + 1)
        self.counts: Counter[str] = Counter()

    def receive(self) -> tuple[Array, Array]:
        lengths = np.zeros(BATCH, np.int64)
        data = self._packets.view(np.uint8).reshape(BATCH, self._row_bytes)
        count = 0
        while count < BATCH:
            try:
                got = self._socket.recv_into(self._room)
            except OSError as error:
                if error.errno in _LATER:
                    break
                self.counts[_word(error.errno)] += 1
                continue
            kept = min(got, self._row_bytes)
            data[count, :kept] = np.frombuffer(self._room, np.uint8, kept)
            lengths[count] = got if got <= self._row_bytes else -1
            count += 1
        return self._packets[:count], lengths[:count]

    def send(
        self, packets: Array, rows: Array, addresses: Addresses | None, to: Array
    ) -> None:
        data = np.ascontiguousarray(packets).view(np.uint8).reshape(-1).data
        lengths, width = sizes(packets), packets.dtype.itemsize
        for row, place in zip(rows.tolist(), to.tolist(), strict=True):
            datagram = data[row * width : row * width + int(lengths[row])]
            for attempt in (1, 2):
                try:
                    if addresses is None:
                        self._socket.send(datagram)
                    else:
                        self._socket.sendto(datagram, addresses.plain[place])
                    break
                except OSError as error:
                    if error.errno in _LATER and attempt == 1:
                        _wait_for_room(self._socket)
                        continue
                    if _is_old_news(error.errno) and attempt == 1:
                        continue
                    self.counts[_word(error.errno)] += 1
                    break


class Batched:
    """A call for each batch: 64-bit Linux."""

    def __init__(self, end: socket.socket, elements: int) -> None:
        self._socket = end
        libc = ctypes.CDLL(None, use_errno=True)
        self._recvmmsg, self._sendmmsg = libc.recvmmsg, libc.sendmmsg
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        self._recvmmsg.argtypes = [ctypes.c_int, pointer, number, ctypes.c_int, pointer]
        self._sendmmsg.argtypes = [ctypes.c_int, pointer, number, ctypes.c_int]
        self._packets = np.zeros(BATCH, packet_type(elements))
        self._into, self._into_pieces = _described(BATCH)
        width = self._packets.dtype.itemsize
        self._into_pieces["bytes"] = width
        self._into_pieces["base"] = self._packets.ctypes.data + width * np.arange(BATCH)
        self._from, self._from_pieces = _described(BATCH)
        self.counts: Counter[str] = Counter()

    def receive(self) -> tuple[Array, Array]:
        self._into["flags"] = 0
        for _ in range(3):
            count = self._recvmmsg(
                self._socket.fileno(),
                self._into.ctypes.data,
                BATCH,
                socket.MSG_DONTWAIT,
                None,
            )
            if count >= 0:
                break
            error = ctypes.get_errno()
            if error in _LATER:
                break
            self.counts[_word(error)] += 1  # of a datagram that was sent before
        count = max(count, 0)
        described = self._into[:count]
        lengths = described["bytes"].astype(np.int64)
        lengths[described["flags"] & socket.MSG_TRUNC != 0] = -1
        return self._packets[:count], lengths

    def send(
        self, packets: Array, rows: Array, addresses: Addresses | None, to: Array
    ) -> None:
        lengths, width = sizes(packets), packets.dtype.itemsize
        base = packets.ctypes.data
        for start in range(0, len(rows), BATCH):
            part, places = rows[start : start + BATCH], to[start : start + BATCH]
            described, pieces = self._from[: len(part)], self._from_pieces[: len(part)]
            pieces["base"] = base + width * part
            pieces["bytes"] = lengths[part]
            if addresses is not None:
                described["name"] = addresses.rows.ctypes.data + 28 * places
                described["name_bytes"] = addresses.lengths[places]
            self._send(len(part))

    def _send(self, count: int) -> None:
        sent, tries = 0, 0
        while sent < count:
            number = self._sendmmsg(
                self._socket.fileno(),
                self._from.ctypes.data + sent * _MESSAGE.itemsize,
                count - sent,
                socket.MSG_DONTWAIT,
            )
            if number > 0:
                sent, tries = sent + number, 0
                continue
            error, tries = ctypes.get_errno(), tries + 1
            if tries == 1 and error in _LATER:
                _wait_for_room(self._socket)
            elif tries > 1 or not _is_old_news(error):
                self.counts[_word(error)] += 1
                sent, tries = sent + 1, 0  # the others may go elsewhere


def _described(count: int) -> tuple[Array, Array]:
    """Messages of one piece each."""
    messages, pieces = np.zeros(count, _MESSAGE), np.zeros(count, _PIECE)
    messages["pieces"] = pieces.ctypes.data + _PIECE.itemsize * np.arange(count)
    messages["count"] = 1
    return messages, pieces


def datagrams(end: socket.socket, elements: int) -> Datagrams:
    """The faster way that this system has. *end* must not block."""
    if sys.platform == "linux" and sys.maxsize > 2**32 and sys.byteorder == "little":
        with contextlib.suppress(AttributeError, OSError):
            return Batched(end, elements)
    return Single(end, elements)


def open_socket(family: socket.AddressFamily) -> socket.socket:
    """A UDP socket with large buffers, whose datagrams are never cut to pieces on the way."""
    end = socket.socket(family, socket.SOCK_DGRAM)
    end.setblocking(False)
    for force, plain in (
        (_SO_RCVBUFFORCE, socket.SO_RCVBUF),
        (_SO_SNDBUFFORCE, socket.SO_SNDBUF),
    ):
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, plain, BUFFER_BYTES)
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # the administrator may have more
                end.setsockopt(socket.SOL_SOCKET, force, BUFFER_BYTES)
    if sys.platform == "linux":
        level, option = socket.IPPROTO_IP, _IP_MTU_DISCOVER
        if family == socket.AF_INET6:
            level, option = socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER
        with contextlib.suppress(OSError):
            end.setsockopt(level, option, _IP_PMTUDISC_DO)
    return end


def held_datagrams(end: socket.socket, elements: int) -> int:
    """About how many datagrams the socket's receive buffer holds, as the kernel counts."""
    room = end.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    datagram = 1 << max(packet_type(elements).itemsize + 320, 512).bit_length()
    return max(1, room // (datagram + 256))


def check_way(end: socket.socket, needed: int) -> None:
    """Raise `UsageError` where the way to the peer of a connected socket is known to have a
    smaller MTU than is *needed*."""
    if sys.platform != "linux":
        return
    if end.family == socket.AF_INET6:
        mtu = end.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU)
    else:
        mtu = end.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    if mtu < needed:
        raise UsageError(
            f"the way to {end.getpeername()[0]} has an MTU of {mtu} bytes, and datagrams need "
            f"{needed}: start the aggregator with --mtu {mtu}, or less"
        )


def _wait_for_room(end: socket.socket) -> None:
    select.select([], [end], [], _PATIENCE_SECONDS)


def _is_old_news(error: int | None) -> bool:
    """Whether an error tells of what was sent before: nobody listened there."""
    return error in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH)


def _word(error: int | None) -> str:
    return f"not sent: {os.strerror(error or 0).lower()}"
