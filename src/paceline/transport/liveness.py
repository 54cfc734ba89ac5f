"""Connections whose end shows that a process has ended.

Theory of operation
-------------------
A process that must learn of another one's end has an idle TCP connection to it. When a process ends in
any way, its kernel closes the connection at once. Nothing is inferred from silence. Two things could
hide an end, or look like one:

*Networks.* A machine that vanishes closes nothing, so the kernel probes idle connections (keep-alive).
A network that is cut looks the same, and comes back. So only a peer that has answered no probe for
`PACELINE_UNREACHABLE_SECONDS` (300) is given up, and is called *unreachable*, not *dead*.
TCP_USER_TIMEOUT stays unset: it would overrule the number of probes, and count data sent during the
cut from its first attempt. The kernel resends data of other connections (gloo's, ZeroMQ's) at growing
intervals, 120 s at most. So after a cut of minutes a job continues up to two minutes after its network.
The kernel's own limit is about 15 minutes without an acknowledgement (tcp_retries2).

*Forked children.* A child has copies of all descriptors, and a connection ends with the last copy: a
helper that outlives its parent would hide the end from all others. So a child closes its copies when
it begins. Programs started by ``exec`` inherit no descriptors.

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
"""In that time."""
_UNREACHABLE = {
    *(errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN),
    *(errno.ENETUNREACH, errno.ENETDOWN),
}
"""What a socket says whose peer answers no more; not that its process has ended."""


class KeepAlive(NamedTuple):
    """Seconds between probes of a connection that is idle, and how many may be lost."""

    interval: int
    probes: int


def keep_alive() -> KeepAlive:
    """As the environment says. Raises `UsageError` where that makes no sense.

    Whenever the network is cut, the last of the probes that are not answered leaves no sooner
    than the seconds after it that are allowed.
    """
    seconds = patience()
    interval = math.ceil(seconds / _PROBES)
    return KeepAlive(interval, math.ceil(seconds / interval) + 1)


def watch(connection: socket.socket) -> None:
    """Let the kernel notice when the machine at the other end vanishes, and no child keep
    the connection alive."""
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
    """How many bytes the other end's kernel has not acknowledged: it does so at once, whatever
    its process is doing. 0 where this system does not say."""
    if not hasattr(termios, "TIOCOUTQ"):
        return 0
    try:
        told = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
    except OSError:
        return 0
    return int(struct.unpack("i", told)[0])


def how_it_ended(error: OSError | None) -> str:
    """What happened to the process at the other end of a connection that was lost with this
    error, or that just closed."""
    if error is not None and error.errno in _UNREACHABLE:
        return (
            f"was unreachable for {patience():g} s: its machine or the network is down "
            f"({UNREACHABLE_VARIABLE} says how long that may be)"
        )
    return "died: its connection closed without a goodbye"


class Said(NamedTuple):
    """What was read from a connection: whole *lines*, and whether it is *over*: closed, lost
    with this *error*, or with a line that does not end."""

    lines: Sequence[bytes] = ()
    over: bool = False
    error: OSError | None = None


class Callers:
    """The other ends of idle connections, as the accepting process knows them.

    A caller is a stranger until `know`. Memory for strangers is bounded: at most *strangers* of them, the oldest
    of which is closed for the next, and *line_bytes* of each.
    """

    def __init__(self, strangers: int, line_bytes: int) -> None:
        self._strangers, self._line_bytes = strangers, line_bytes
        self._begun: dict[socket.socket, bytes] = {}
        """By connection: what it has said of a line that has not ended yet."""
        self._known: set[socket.socket] = set()

    def accept(
        self, listener: socket.socket, show_out: Callable[[socket.socket], None]
    ) -> socket.socket | None:
        """Take the next connection; None if it is gone again. In a crowd of strangers
        *show_out* is to close one first."""
        try:
            peer, _ = listener.accept()
            peer.setblocking(False)
            watch(peer)
        except OSError:
            return None
        strangers = [caller for caller in self._begun if caller not in self._known]
        if len(strangers) >= self._strangers:
            show_out(strangers[0])  # it has had its time
        self._begun[peer] = b""
        return peer

    def know(self, peer: socket.socket) -> None:
        """It has shown who it is."""
        self._known.add(peer)

    def read(self, peer: socket.socket) -> Said:
        """What a connection says, once something is there."""
        try:
            data = peer.recv(self._line_bytes)
        except BlockingIOError:
            return Said()
        except OSError as error:
            return Said(over=True, error=error)
        *lines, begun = (self._begun[peer] + data).split(b"\n")
        self._begun[peer] = begun
        return Said(lines, over=not data or len(begun) > self._line_bytes)

    def close(self, peer: socket.socket) -> None:
        """Close one connection."""
        self._known.discard(peer)
        del self._begun[peer]
        peer.close()

    def close_all(self) -> None:
        """Close what is open."""
        for peer in list(self):
            self.close(peer)

    def __contains__(self, peer: socket.socket) -> bool:
        """Whether it is open."""
        return peer in self._begun

    def __iter__(self) -> Iterator[socket.socket]:
        """Connections that are open, the oldest first."""
        return iter(self._begun)


def end_with_parent() -> None:
    """From now on this process of `multiprocessing` ends when its parent has, in whatever way. (What
    a pool's process waits for comes over a pipe that it can write to itself, so that pipe never
    ends.)"""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)  # whatever is under way is for nobody

    threading.Thread(target=wait, name="paceline lifeline", daemon=True).start()


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """A process that this thread starts within it never hears of Ctrl-C, not even while it imports what it
    needs: its parent does, and ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def close_in_children(end: socket.socket | io.BufferedWriter) -> None:
    """*end*, of a connection or of a pipe, is this process's only: a child that is forked
    off closes its copy."""
    _ends.add(end)


_ends: weakref.WeakSet[socket.socket | io.BufferedWriter] = weakref.WeakSet()


def _forked() -> None:
    for end in list(_ends):
        with contextlib.suppress(OSError):
            if isinstance(end, io.BufferedWriter):
                end.raw.close()  # what it may have buffered is the parent's to write
            elif end.fileno() >= 0:
                # Not close(): a file made of the socket would keep it open.
                os.close(end.detach())
    _ends.clear()


os.register_at_fork(after_in_child=_forked)


def patience() -> float:
    """Seconds that a peer may be unreachable, from the environment."""
    return seconds_from(os.environ, UNREACHABLE_VARIABLE, timeouts.unreachable)
