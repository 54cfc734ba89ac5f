"""Sockets of datagrams, and the ways to move batches through them.

On 64-bit Linux a batch is a system call (`paceline.collectives.in_network.udp_socket`), elsewhere each datagram
is one (`Single`). Both ways are tried by the same tests.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import sys
from collections import Counter
from typing import Any, Protocol

import numpy as np

from paceline.collectives.in_network.packets import Array, packet_type, sizes
from paceline.errors import UsageError
from paceline.timeouts import timeouts

BATCH = 256
"""Datagrams taken at a time, where each is taken by itself."""
BUFFER_BYTES = 8 << 20
"""Asked for, each way; the system may allow less."""
LATER = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR, errno.ENOBUFS}
"""What a socket says that has no room, or nothing to read."""
_IP_MTU_DISCOVER, _IP_PMTUDISC_DO, _IP_MTU = 10, 2, 14
_IPV6_MTU_DISCOVER, _IPV6_MTU = 23, 24
_SO_RCVBUFFORCE, _SO_SNDBUFFORCE = 33, 32
_SIOCOUTQ = 0x5411
QUEUED_BYTES = 32 << 10
"""That may wait to leave this host: 10 ms at 25 Mbit/s."""
FEWEST_QUEUED = 2


class OwnQueue:
    """What a socket has sent and what has not left this host: short, where the link from here is
    the slow one.

    Answers to others wait in the same queue of the link; so each stream that fills it slows those
    down that come the other way, by as much as it has there (TCP has its "small queues" for this).
    Where nothing waits, or the system does not say, there is always room.
    """

    def __init__(self, end: socket.socket, elements: int) -> None:
        """*end* can be written to once half of what may wait has left."""
        self._end, self._waiting = end, bytearray(4)
        self._each = _kernel_bytes(elements)
        self._most = max(FEWEST_QUEUED, QUEUED_BYTES // packet_type(elements).itemsize)
        if sys.platform == "linux":
            half = self._most // 2 * self._each  # the kernel doubles what it is told
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, half)

    def room(self) -> int:
        """How many datagrams may be added."""
        if sys.platform != "linux":
            return self._most
        try:
            fcntl.ioctl(self._end, _SIOCOUTQ, self._waiting)
        except OSError:
            return self._most
        waiting = int.from_bytes(self._waiting, sys.byteorder)
        return max(0, self._most - -(-waiting // self._each))


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
        """Some of what is there: rows, valid until the next call, and how many bytes came
        of each (-1: more than a row holds). Nothing only where nothing is there."""
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
                if error.errno in LATER:
                    break
                self.counts[word_for(error.errno)] += 1
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
                    if error.errno in LATER and attempt == 1:
                        wait_for_room(self._socket)
                        continue
                    if is_old_news(error.errno) and attempt == 1:
                        continue
                    self.counts[word_for(error.errno)] += 1
                    break


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
    return max(1, room // _kernel_bytes(elements))


def _kernel_bytes(elements: int) -> int:
    """What a datagram takes of a buffer, as the kernel counts: no less."""
    return (1 << max(packet_type(elements).itemsize + 320, 512).bit_length()) + 256


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


def wait_for_room(end: socket.socket) -> None:
    """Wait a little until the socket can send."""
    select.select([], [end], [], timeouts.full_buffer)


def is_old_news(error: int | None) -> bool:
    """Whether an error tells of what was sent before: nobody listened there."""
    return error in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH)


def word_for(error: int | None) -> str:
    """What a datagram that was not sent is counted under."""
    return f"not sent: {os.strerror(error or 0).lower()}"
