"""Who is here: the workers of one job, as one server knows them by their connections.

Theory of operation
-------------------
1. A worker's first connection says `Hello`, and is given a one-time ticket.
2. The worker opens a plain TCP connection to the liveness port, and shows the ticket.
   From here on it is *present*: its requests are taken, and it may open more channels.
3. That connection stays idle. ZeroMQ does not say whose connection was lost, but this one
   does (see `lifelines`). Then the worker is *lost*.
4. A worker *departs*, which is no loss, with `Bye` on each channel, or with ``bye`` on the
   liveness connection. But if it has joined the training and has not left that, others wait
   for it: then it is lost all the same.

Whoever departs or is lost is forgotten at once, with all its connections: only its
incarnation is remembered. The worker may come back with a newer one, which replaces one
that is still here (that one is lost); an older one, or the same again, is refused.

What is kept for strangers is bounded: one presence of each worker that has yet to show its
ticket, a line of each liveness connection without one, and so many of those; the oldest is
closed for the next.

A method that may lose somebody is given whom to tell, and tells at once: before a newer
incarnation knows that it is let in. (Kept here, that callback would keep the whole shell,
and all that its server holds, until Python looks for cycles.)
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
from collections.abc import Callable

from paceline import lifelines
from paceline.interfaces import Sender
from paceline.messages import PROTOCOL
from paceline.server import payloads, wire
from paceline.server.shared_memory import ServerEnd
from paceline.server.sources import Sources
from paceline.server.wire import RefusalError

_LINE_BYTES = 64
_STRANGERS = 16
"""Liveness connections without a ticket, beyond one for each worker."""

Report = Callable[["Presence"], None]
"""Is told of a worker that is lost, once it is forgotten."""


class Connection:
    """One worker's channel. *limit*: bytes of one payload."""

    def __init__(
        self, identity: bytes, presence: Presence, channel: str, limit: int
    ) -> None:
        self.identity = identity
        self.presence = presence
        self.channel = channel
        self.inbox = payloads.Inbox(limit)


class Presence:
    """One incarnation of a worker."""

    def __init__(self, worker: int, incarnation: int) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.ticket = secrets.token_hex(16)
        self.liveness: socket.socket | None = None
        self.shared: ServerEnd | None = None
        self.connections: dict[str, Connection] = {}
        self.leaves_well = False
        self.takes_part = False
        """Whether it has joined the training, and has not left it."""

    @property
    def is_admitted(self) -> bool:
        """Whether it has shown its ticket."""
        return self.liveness is not None

    def stop_sharing(self) -> None:
        """No memory is shared with it any more."""
        if self.shared is not None:
            self.shared.close()
            self.shared = None


class Attendance:
    """Which of *workers* workers that know the job's *token* are here.

    Their liveness connections are watched in *sources*, a loop's. *max_payload*: bytes that
    one message may bring.
    """

    def __init__(
        self, workers: int, token: str, max_payload: int, sources: Sources
    ) -> None:
        self._workers = workers
        self._token = token
        self._max_payload = max_payload
        self._sources = sources
        self._connections: dict[bytes, Connection] = {}
        self._pending: dict[int, Presence] = {}  # said hello, to show their ticket yet
        self._present: dict[int, Presence] = {}
        self._newest: dict[int, int] = {}  # by worker: incarnation
        self._departed: set[int] = set()
        self._visitors: dict[socket.socket, bytes] = {}  # what they have said so far
        self._owners: dict[socket.socket, Presence] = {}
        self._listener: socket.socket | None = None
        self.port = 0
        """Where liveness connections are accepted."""

    def listen(self, address: str) -> socket.socket:
        """Open the port for liveness connections: call `accept` when one is there. Raises
        `OSError`."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server(
            (address, 0), family=family, backlog=max(100, self._workers)
        )
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        return self._listener

    def close(self) -> None:
        """Let go of the liveness connections, and of the memory that workers share."""
        for presence in self._present.values():
            presence.stop_sharing()
        for peer in self._visitors:
            peer.close()
        self._visitors.clear()
        if self._listener is not None:
            self._listener.close()

    # ---- who is here ----

    @property
    def all_have_departed(self) -> bool:
        return len(self._departed) >= self._workers

    def connection_of(self, identity: bytes) -> Connection | None:
        """The connection that ZeroMQ knows as *identity*, if it was greeted."""
        return self._connections.get(identity)

    def connection_to(self, sender: Sender) -> Connection | None:
        """Where *sender* waits for an answer; None if it is lost or gone meanwhile."""
        presence = self._present.get(sender.worker)
        if presence is None or presence.incarnation != sender.incarnation:
            return None
        return presence.connections.get(sender.channel)

    # ---- coming ----

    def greet(self, identity: bytes, hello: wire.Hello) -> wire.Welcome:
        """A connection introduces itself. Raises `RefusalError`."""
        if hello.protocol != PROTOCOL:
            reason = f"protocol {hello.protocol}; this server speaks {PROTOCOL}: install the same paceline everywhere"
            raise RefusalError("version", reason)
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            raise RefusalError("token", "not the token of this job")
        if not 0 <= hello.worker < self._workers:
            reason = f"worker {hello.worker} of {self._workers}"
            raise RefusalError("worker", reason)
        if hello.channel:
            presence = self._check_channel(hello)
            welcome = wire.Welcome()
        else:
            presence = self._expect(hello)
            welcome = wire.Welcome(self.port, presence.ticket)
        connection = Connection(identity, presence, hello.channel, self._max_payload)
        presence.connections[hello.channel] = connection
        self._connections[identity] = connection
        return welcome

    def _expect(self, hello: wire.Hello) -> Presence:
        """A worker's first connection: the worker is to show a ticket now."""
        newest = self._newest.get(hello.worker, -1)
        if hello.incarnation <= newest:
            reason = (
                f"incarnation {hello.incarnation} of worker {hello.worker}, "
                f"{wire.HAS_BEEN_HERE} {newest}; come back with a larger one"
            )
            raise RefusalError("incarnation", reason)
        before = self._pending.pop(hello.worker, None)
        if before is not None:
            self._forget(before)
        presence = Presence(hello.worker, hello.incarnation)
        self._pending[hello.worker] = presence
        return presence

    def _check_channel(self, hello: wire.Hello) -> Presence:
        """A further connection: the worker that it belongs to is here."""
        presence = self._present.get(hello.worker)
        if presence is None or presence.incarnation != hello.incarnation:
            raise RefusalError("incarnation", "a channel of a worker that is not here")
        if hello.channel in presence.connections:
            raise RefusalError("channel", "this channel has a connection already")
        if len(presence.connections) >= wire.CHANNELS:
            raise RefusalError("channel", f"more than {wire.CHANNELS} channels")
        if len(hello.channel) > wire.CHANNEL_CHARACTERS:
            reason = f"a name of more than {wire.CHANNEL_CHARACTERS} characters"
            raise RefusalError("channel", reason)
        return presence

    # ---- liveness connections ----

    def accept(self, reader: Callable[[socket.socket], None]) -> None:
        """Take the next liveness connection: *reader* is called, to `read` it, whenever
        something is there."""
        assert self._listener is not None
        with contextlib.suppress(OSError):
            peer, _ = self._listener.accept()
            strangers = [p for p in self._visitors if p not in self._owners]
            if len(strangers) >= self._workers + _STRANGERS:
                self.show_out(strangers[0])  # the oldest has had its time
            peer.setblocking(False)
            lifelines.watch(peer)
            self._visitors[peer] = b""
            self._sources.watch(peer, lambda: reader(peer))

    def read(self, peer: socket.socket, report: Report) -> None:
        """What a liveness connection says, or its end. Raises `RefusalError` for one without
        a ticket, which is to be shown out."""
        try:
            data = peer.recv(_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, rest = (self._visitors[peer] + data).split(b"\n")
        self._visitors[peer] = rest
        for line in lines:
            self._hear(peer, line, report)
        over = not data or len(rest) > _LINE_BYTES
        presence = self._owners.get(peer)
        if presence is None:
            if over or lines:
                raise RefusalError("liveness", "a connection without a ticket")
        elif presence.leaves_well:
            self._depart(presence, report)
        elif over:
            self.lose(presence, report)

    def show_out(self, peer: socket.socket) -> None:
        """Close a liveness connection, if it is not closed yet."""
        if self._visitors.pop(peer, None) is None:
            return
        self._owners.pop(peer, None)
        self._sources.unwatch(peer)
        peer.close()

    def _hear(self, peer: socket.socket, line: bytes, report: Report) -> None:
        presence = self._owners.get(peer)
        if presence is not None:
            presence.leaves_well |= line == b"bye"
            return
        for presence in self._pending.values():
            if hmac.compare_digest(presence.ticket.encode(), line):
                self._admit(peer, presence, report)
                return

    def _admit(self, peer: socket.socket, presence: Presence, report: Report) -> None:
        """A liveness connection has shown its ticket: its worker is present from now on."""
        worker = presence.worker
        del self._pending[worker]
        old = self._present.get(worker)
        if old is not None:
            self.lose(old, report)
        presence.liveness = peer
        self._owners[peer] = presence
        self._present[worker] = presence
        self._newest[worker] = presence.incarnation
        self._departed.discard(worker)
        with contextlib.suppress(OSError):
            peer.send(b"\n")

    # ---- going ----

    def leave(self, connection: Connection, report: Report) -> None:
        """A channel has said goodbye; with the last one its worker departs."""
        del self._connections[connection.identity]
        presence = connection.presence
        del presence.connections[connection.channel]
        if not presence.connections:
            self._depart(presence, report)

    def lose(self, presence: Presence, report: Report) -> None:
        """A worker is gone, or is as good as gone: told to *report* if it was present."""
        here = self._present.get(presence.worker) is presence
        self._forget(presence)
        if here:
            report(presence)

    def _depart(self, presence: Presence, report: Report) -> None:
        """A worker has said goodbye: to *report*, if its training goes on without it."""
        here = self._present.get(presence.worker) is presence
        if here:
            self._departed.add(presence.worker)
        self._forget(presence)
        if here and presence.takes_part:
            report(presence)

    def _forget(self, presence: Presence) -> None:
        for connection in presence.connections.values():
            self._connections.pop(connection.identity, None)
        presence.connections.clear()
        presence.stop_sharing()
        for among in (self._pending, self._present):
            if among.get(presence.worker) is presence:
                del among[presence.worker]
        if presence.liveness is not None:
            self.show_out(presence.liveness)
