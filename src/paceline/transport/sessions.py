"""Who is here: the workers of one job, as one server knows them by their connections.

Other services of the job that ask this one are here in the same way, with numbers behind those
of the workers: only their departures count for nothing.

Theory of operation
-------------------
1. A worker's first connection says `Hello`, and is given a one-time ticket.
2. The worker opens a plain TCP connection to the liveness port, and shows the ticket.
   From here on it is *present*: its requests are taken, and it may open more channels.
3. That connection stays idle. ZeroMQ does not say whose connection was lost, but this one
   does (see `liveness`). Then the worker is *lost*.
4. A worker *departs*, which is no loss, with `Bye` on each channel, or with ``bye`` on the
   liveness connection. But if it has joined the training and has not left that, others wait
   for it: then it is lost all the same, and the training has not ended well.

Whoever departs or is lost is forgotten at once, with all its connections: only its
incarnation is remembered. The worker may come back with a newer one, which replaces one
that is still here (that one is lost); an older one, or the same again, is refused.

Where nobody else *numbers* workers' lives, this does, and a second process of a worker that is here is
refused: two were started with one rank. But its machine may have vanished, which no
connection tells for minutes. So the one that is here is sent a byte then. Its kernel acknowledges
that at once, busy as its process may be; where it has not within `Timeouts.worker_acknowledge`,
the worker is lost, and the next to come in its place is let in. So is the next in place of one that was
evicted.

What is kept for strangers is bounded: one session of each worker that has yet to show its
ticket, a line of each liveness connection without one, and so many of those; the oldest is
closed for the next.

A method that may lose somebody is given whom to tell, and tells at once: before a newer
incarnation knows that it is let in. (Kept here, that callback would keep the whole shell,
and all that its server holds, until Python looks for cycles.)
"""

from __future__ import annotations

import contextlib
import hmac
import math
import secrets
import socket
import time
from collections.abc import Callable
from functools import partial

from paceline.interfaces import Sender
from paceline.interfaces.server_messages import PROTOCOL
from paceline.timeouts import timeouts
from paceline.transport import payloads, protocol
from paceline.transport.liveness import Callers, unanswered
from paceline.transport.poll_loop import PollLoop
from paceline.transport.protocol import RefusalError
from paceline.transport.shared_memory import ServerEnd

_LINE_BYTES = 64
_STRANGERS = 16
"""Liveness connections without a ticket, beyond one for each worker."""


Report = Callable[["Session"], None]
"""Is told of a worker that is lost, once it is forgotten."""


class Connection:
    """One worker's channel. *limit*: bytes of one payload."""

    def __init__(
        self, identity: bytes, session: Session, channel: str, limit: int
    ) -> None:
        self.identity = identity
        self.session = session
        self.channel = channel
        self.inbox = payloads.Inbox(limit)


class Session:
    """One incarnation of a worker."""

    def __init__(self, worker: int, incarnation: int) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.since = time.monotonic()
        self.ticket = secrets.token_hex(16)
        self.liveness: socket.socket | None = None
        self.shared: ServerEnd | None = None
        self.connections: dict[str, Connection] = {}
        self.evicted = False
        """Whether the server has taken it for lost though its connection stands."""
        self.asked: float | None = None
        """Since when its machine is to acknowledge a byte."""
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


class Sessions:
    """Which of *workers* workers that know the job's *token* are here, and of so many
    *services*. *numbers*: workers' lives are numbered here.

    Their liveness connections are watched in *loop*. *max_payload*: bytes that one message
    may bring.
    """

    def __init__(
        self,
        workers: int,
        token: str,
        max_payload: int,
        loop: PollLoop,
        services: int = 0,
        numbers: bool = False,
    ) -> None:
        self._workers, self._services = workers, services
        self._numbers = numbers
        self._token = token
        self._max_payload = max_payload
        self._loop = loop
        self._connections: dict[bytes, Connection] = {}
        self._pending: dict[int, Session] = {}  # said hello, to show their ticket yet
        self._present: dict[int, Session] = {}
        self._newest: dict[int, int] = {}  # by worker: incarnation
        self._departed: set[int] = set()
        self._broke_off: set[int] = set()  # of these: in the middle of their training
        self._some_are_lost = False
        self._last_goodbye = 0.0
        self.another_is_wanted = False
        """Whether a worker that has departed was here again, in the same life: its script has begun
        another training."""
        self._callers = Callers(workers + services + _STRANGERS, _LINE_BYTES)
        self._owners: dict[socket.socket, Session] = {}
        self._listener: socket.socket | None = None
        self.port = 0
        """Where liveness connections are accepted."""

    def listen(self, address: str) -> socket.socket:
        """Open the port for liveness connections: call `accept` when one is there. Raises
        `OSError`."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server(
            (address, 0),
            family=family,
            backlog=max(100, self._workers + self._services),
        )
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        return self._listener

    def close(self) -> None:
        """Let go of the liveness connections, and of the memory that workers share."""
        for session in self._present.values():
            session.stop_sharing()
        self._callers.close_all()
        if self._listener is not None:
            self._listener.close()

    # ---- who is here ----

    @property
    def all_have_departed(self) -> bool:
        return len(self._departed) >= self._workers

    @property
    def all_have_ended_well(self) -> bool:
        """Whether all have departed, none of them in the middle of its training."""
        return self.all_have_departed and not self._broke_off

    @property
    def some_have_departed(self) -> bool:
        return bool(self._departed)

    @property
    def deserted_from(self) -> float:
        """The moment, of `time.monotonic`, from which on the training is over because those who
        came are gone: at once where one was lost, but who has said hello may still come, and where
        all have said goodbye before others came, those may. Infinite while somebody is here."""
        if self.present or not (self._some_are_lost or self._departed):
            return math.inf
        moments = [session.since for session in self._pending.values()]
        if not self._some_are_lost:
            moments.append(self._last_goodbye)
        return max((moment + timeouts.worker_arrive for moment in moments), default=0.0)

    @property
    def present(self) -> int:
        """How many workers are here; from any thread."""
        return sum(worker < self._workers for worker in list(self._present))

    def evict(self, worker: int, incarnation: int) -> None:
        """The server has taken this life for lost: another may come in its place."""
        session = self._present.get(worker)
        if session is not None and session.incarnation == incarnation:
            session.evicted = True

    def connection_of(self, identity: bytes) -> Connection | None:
        """The connection that ZeroMQ knows as *identity*, if it was greeted."""
        return self._connections.get(identity)

    def connection_to(self, sender: Sender) -> Connection | None:
        """Where *sender* waits for an answer; None if it is lost or gone meanwhile."""
        session = self._present.get(sender.worker)
        if session is None or session.incarnation != sender.incarnation:
            return None
        return session.connections.get(sender.channel)

    # ---- coming ----

    def greet(self, identity: bytes, hello: protocol.Hello) -> protocol.Welcome:
        """A connection introduces itself. Raises `RefusalError`."""
        if hello.protocol != PROTOCOL:
            reason = f"protocol {hello.protocol}; this server speaks {PROTOCOL}: install the same paceline everywhere"
            raise RefusalError("version", reason)
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            raise RefusalError("token", "not the token of this job")
        if not 0 <= hello.worker < self._workers + self._services:
            reason = (
                f"there is no worker {hello.worker} in this server's job of {self._workers} "
                f"workers: expected 0 to {self._workers - 1}"
            )
            raise RefusalError("worker", reason)
        if hello.workers not in (0, self._workers):
            reason = (
                f"worker {hello.worker} of a job of {hello.workers} workers, and this server's "
                f"has {self._workers}: give both the same number (--workers, or "
                "WORLD_SIZE)"
            )
            raise RefusalError("worker", reason)
        if hello.asks:
            return protocol.Welcome(workers=self._workers)
        if hello.channel:
            session = self._check_channel(hello)
            welcome = protocol.Welcome()
        else:
            session = self._expect(hello)
            welcome = protocol.Welcome(self.port, session.ticket, session.incarnation)
        connection = Connection(identity, session, hello.channel, self._max_payload)
        session.connections[hello.channel] = connection
        self._connections[identity] = connection
        return welcome

    def _expect(self, hello: protocol.Hello) -> Session:
        """A worker's first connection: the worker is to show a ticket now."""
        newest = self._newest.get(hello.worker, -1)
        incarnation = hello.incarnation
        if incarnation is None:
            self._check_free(hello.worker)
            incarnation = newest + 1
        if incarnation <= newest:
            departed = hello.worker in self._departed and incarnation == newest
            self.another_is_wanted = self.another_is_wanted or departed
            reason = (
                f"incarnation {incarnation} of worker {hello.worker}, "
                f"{protocol.HAS_BEEN_HERE} {newest}; come back with a larger one"
            )
            raise RefusalError("incarnation", reason)
        before = self._pending.pop(hello.worker, None)
        if before is not None:
            self._forget(before)
        session = Session(hello.worker, incarnation)
        self._pending[hello.worker] = session
        return session

    def _check_free(self, worker: int) -> None:
        """Raise `RefusalError` unless a process without a number may be this worker."""
        if not self._numbers:
            reason = (
                f"worker {worker} is of a job that survives deaths, and this server's ends with "
                "its first worker that dies: start the server with --survive, too"
            )
            raise RefusalError("incarnation", reason)
        here = self._present.get(worker)
        if here is None or here.evicted or here.liveness is None:
            return
        now, place = time.monotonic(), _place_of(here.liveness)
        if here.asked is None or not unanswered(here.liveness):
            here.asked = now
            with contextlib.suppress(OSError):
                here.liveness.send(b"\n")
        elif now > here.asked + timeouts.worker_acknowledge:
            return  # its machine is gone
        reason = (
            f"worker {worker} {protocol.IS_HERE} {place}: two processes were started with this rank, "
            "or the other one hangs; start each rank once"
        )
        raise RefusalError("rank", reason)

    def _check_channel(self, hello: protocol.Hello) -> Session:
        """A further connection: the worker that it belongs to is here."""
        session = self._present.get(hello.worker)
        if session is None or session.incarnation != hello.incarnation:
            raise RefusalError("incarnation", "a channel of a worker that is not here")
        if hello.channel in session.connections:
            raise RefusalError("channel", "this channel has a connection already")
        if len(session.connections) >= protocol.CHANNELS:
            raise RefusalError("channel", f"more than {protocol.CHANNELS} channels")
        if len(hello.channel) > protocol.CHANNEL_CHARACTERS:
            reason = f"a name of more than {protocol.CHANNEL_CHARACTERS} characters"
            raise RefusalError("channel", reason)
        return session

    # ---- liveness connections ----

    def accept(self, reader: Callable[[socket.socket], None]) -> None:
        """Take the next liveness connection: *reader* is called, to `read` it, whenever
        something is there."""
        assert self._listener is not None
        peer = self._callers.accept(self._listener, self.show_out)
        if peer is not None:
            self._loop.watch(peer, partial(reader, peer))

    def read(self, peer: socket.socket, report: Report) -> None:
        """What a liveness connection says, or its end. Raises `RefusalError` for one without
        a ticket, which is to be shown out."""
        said = self._callers.read(peer)
        for line in said.lines:
            self._hear(peer, line, report)
        session = self._owners.get(peer)
        if session is None:
            if said.over or said.lines:
                raise RefusalError("liveness", "a connection without a ticket")
        elif session.leaves_well:
            self._depart(session, report)
        elif said.over:
            self.lose(session, report)

    def show_out(self, peer: socket.socket) -> None:
        """Close a liveness connection, if it is not closed yet."""
        if peer in self._callers:
            self._owners.pop(peer, None)
            self._loop.unwatch(peer)
            self._callers.close(peer)

    def _hear(self, peer: socket.socket, line: bytes, report: Report) -> None:
        session = self._owners.get(peer)
        if session is not None:
            session.leaves_well |= line == b"bye"
            return
        for session in self._pending.values():
            if hmac.compare_digest(session.ticket.encode(), line):
                self._admit(peer, session, report)
                return

    def _admit(self, peer: socket.socket, session: Session, report: Report) -> None:
        """A liveness connection has shown its ticket: its worker is present from now on."""
        worker = session.worker
        del self._pending[worker]
        old = self._present.get(worker)
        if old is not None:
            self.lose(old, report)
        session.liveness = peer
        self._callers.know(peer)
        self._owners[peer] = session
        self._present[worker] = session
        self._newest[worker] = session.incarnation
        self._departed.discard(worker)
        self._broke_off.discard(worker)
        with contextlib.suppress(OSError):
            peer.send(b"\n")

    # ---- going ----

    def leave(self, connection: Connection, report: Report) -> None:
        """A channel has said goodbye; with the last one its worker departs."""
        del self._connections[connection.identity]
        session = connection.session
        del session.connections[connection.channel]
        if not session.connections:
            self._depart(session, report)

    def lose(self, session: Session, report: Report) -> None:
        """A worker is gone, or is as good as gone: told to *report* if it was present."""
        here = self._present.get(session.worker) is session
        self._forget(session)
        if here:
            self._some_are_lost = True
            report(session)

    def _depart(self, session: Session, report: Report) -> None:
        """A worker has said goodbye: to *report*, if its training goes on without it."""
        here = self._present.get(session.worker) is session
        if here and session.worker < self._workers:
            self._departed.add(session.worker)
            self._last_goodbye = time.monotonic()
        self._forget(session)
        if here and session.takes_part:
            self._broke_off.add(session.worker)
            self._some_are_lost = True
            report(session)

    def _forget(self, session: Session) -> None:
        for connection in session.connections.values():
            self._connections.pop(connection.identity, None)
        session.connections.clear()
        session.stop_sharing()
        for among in (self._pending, self._present):
            if among.get(session.worker) is session:
                del among[session.worker]
        if session.liveness is not None:
            self.show_out(session.liveness)


def _place_of(peer: socket.socket) -> str:
    try:
        host, port = peer.getpeername()[:2]
    except OSError:
        return "a place that is gone"
    return f"{host}:{port}"
