"""Detects that a process has ended: its idle TCP connections close.

A process that must learn of another one's end has an idle TCP connection to it. When a process ends
in any way, its kernel closes the connection at once. Silence is never taken for an end. Two
conditions could hide an end, or look like one:

*Networks.* A machine that vanishes closes nothing, so the kernel probes idle connections
(keep-alive). A network that is cut looks the same, and may come back. So a peer is given up only
after it has answered no probe for `PACELINE_UNREACHABLE_SECONDS` (300). Messages then call it
*unreachable*, not *dead*.

TCP_USER_TIMEOUT stays unset: it would overrule the number of probes, and count data sent during the
cut from its first attempt. The kernel resends data of other connections (gloo's, ZeroMQ's) at
growing intervals, 120 s at most. So after a cut of minutes a job continues up to two minutes after
its network. The kernel's own limit is about 15 minutes without an acknowledgement (tcp_retries2).

*Forked children.* A child has copies of all descriptors, and a connection closes with its last
copy. A helper process that outlives its parent would hide the parent's end. So a child closes its
copies when it begins. Programs started by ``exec`` inherit no descriptors.

A process of `multiprocessing` has such a connection to its parent, a pipe: see `end_with_parent`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import struct
import termios
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from paceline.run_options import seconds_from
from paceline.timeouts import timeouts

UNREACHABLE_VARIABLE = "PACELINE_UNREACHABLE_SECONDS"

_PROBES = 10
"""Keep-alive probes within the time that a peer may be unreachable."""
_UNREACHABLE = {
    *(errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN),
    *(errno.ENETUNREACH, errno.ENETDOWN),
}
"""Errors of a socket whose peer no longer answers; they do not mean that its process has ended."""


class KeepAlive(NamedTuple):
    """Settings of TCP keep-alive.

    *interval*: seconds between probes of an idle connection. *probes*: unanswered probes after
    which the kernel closes it.
    """

    interval: int
    probes: int


def keep_alive() -> KeepAlive:
    """Return the keep-alive settings from the environment. Raises `UsageError` for invalid values.

    Whenever the network is cut, the last unanswered probe is sent no earlier than the permitted
    seconds after the cut.
    """
    seconds = patience()
    interval = math.ceil(seconds / _PROBES)
    return KeepAlive(interval, math.ceil(seconds / interval) + 1)


def watch(connection: socket.socket) -> None:
    """Make *connection* close when the peer's machine vanishes, and in forked children.

    The kernel detects the vanished machine by keep-alive probes.
    """
    interval, probes = keep_alive()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", interval),
        ("TCP_KEEPINTVL", interval),
        ("TCP_KEEPCNT", probes),
    ):
        if hasattr(socket, option):
            number = getattr(socket, option)
            connection.setsockopt(socket.IPPROTO_TCP, number, value)
    close_in_children(connection)


def unanswered(connection: socket.socket) -> int:
    """Return the sent bytes that the peer's kernel has not acknowledged.

    0 if this system does not count them.

    A kernel acknowledges at once, whatever its process does.
    """
    if not hasattr(termios, "TIOCOUTQ"):
        return 0
    try:
        queued = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
    except OSError:
        return 0
    return int(struct.unpack("i", queued)[0])


def how_it_ended(error: OSError | None) -> str:
    """Return how the peer's process ended, as text for an error message.

    *error* is the connection's error; None: the connection was closed.
    """
    if error is not None and error.errno in _UNREACHABLE:
        return (
            f"was unreachable for {patience():g} s: its machine or the network is down "
            f"({UNREACHABLE_VARIABLE} sets this limit)"
        )
    return "died: its connection closed without a goodbye"


class ReceivedLines(NamedTuple):
    """Data read from a connection: complete *lines*, and whether it is *over*.

    A connection is over if it was closed, failed with *error*, or sent a line that is too long.
    """

    lines: Sequence[bytes] = ()
    over: bool = False
    error: OSError | None = None


class IdleConnections:
    """The accepted ends of idle connections.

    A peer is unauthenticated until `know`. Memory for unauthenticated peers is bounded:
    *line_bytes* for each, and at most *strangers* of them. The oldest is closed if one more
    arrives.
    """

    def __init__(self, strangers: int, line_bytes: int) -> None:
        self._strangers, self._line_bytes = strangers, line_bytes
        self._begun: dict[socket.socket, bytes] = {}
        """By connection: the start of a line that is not complete yet."""
        self._known: set[socket.socket] = set()

    def accept(
        self, listener: socket.socket, disconnect: Callable[[socket.socket], None]
    ) -> socket.socket | None:
        """Accept the next connection; None if it has closed again.

        If there are too many unauthenticated peers, *disconnect* must close the given one.
        """
        try:
            peer, _ = listener.accept()
            peer.setblocking(False)
            watch(peer)
        except OSError:
            return None
        strangers = [caller for caller in self._begun if caller not in self._known]
        if len(strangers) >= self._strangers:
            # The oldest one has had the most time to authenticate itself.
            disconnect(strangers[0])
        self._begun[peer] = b""
        return peer

    def know(self, peer: socket.socket) -> None:
        """Note that this peer has authenticated itself."""
        self._known.add(peer)

    def read(self, peer: socket.socket) -> ReceivedLines:
        """Read from a connection that has data."""
        try:
            data = peer.recv(self._line_bytes)
        except BlockingIOError:
            return ReceivedLines()
        except OSError as error:
            return ReceivedLines(over=True, error=error)
        *lines, begun = (self._begun[peer] + data).split(b"\n")
        self._begun[peer] = begun
        return ReceivedLines(lines, over=not data or len(begun) > self._line_bytes)

    def close(self, peer: socket.socket) -> None:
        """Close one connection."""
        self._known.discard(peer)
        del self._begun[peer]
        peer.close()

    def close_all(self) -> None:
        """Close all connections."""
        for peer in list(self):
            self.close(peer)

    def __contains__(self, peer: socket.socket) -> bool:
        """Whether this connection is open."""
        return peer in self._begun

    def __iter__(self) -> Iterator[socket.socket]:
        """Iterate over the open connections, the oldest first."""
        return iter(self._begun)


def end_with_parent() -> None:
    """Let this process of `multiprocessing` end when its parent ends, in any way.

    A pool's worker would not notice that: it holds both ends of the pipe that brings its tasks, so
    the pipe never closes.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        # No process needs the results any more.
        os._exit(1)

    threading.Thread(target=wait, name="paceline lifeline", daemon=True).start()


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Start processes in this context, on this thread, that never get Ctrl-C, even during imports.

    Their parent gets Ctrl-C, and ends them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def close_in_children(end: socket.socket | io.BufferedWriter) -> None:
    """Close *end*, of a connection or a pipe, in forked children: only this process uses it."""
    _ends.add(end)


_ends: weakref.WeakSet[socket.socket | io.BufferedWriter] = weakref.WeakSet()


def _forked() -> None:
    for end in list(_ends):
        with contextlib.suppress(OSError):
            if isinstance(end, io.BufferedWriter):
                # The parent writes the data that it has buffered, so the child must not.
                end.raw.close()
            elif end.fileno() >= 0:
                # Not close(): a file object made from the socket would keep it open.
                os.close(end.detach())
    _ends.clear()


os.register_at_fork(after_in_child=_forked)


def patience() -> float:
    """Return the seconds that a peer may be unreachable, from the environment."""
    return seconds_from(os.environ, UNREACHABLE_VARIABLE, timeouts.unreachable)
