"""Tracks which workers of each training are present, lost or departed, by their connections.

Other services of a training that send requests here have sessions too, with numbers after the
workers'. Their departures have no effect.

*Life of a session:*

1. A worker's first connection sends `Hello`, which names its service, and gets a one-time ticket.
2. The worker opens a plain TCP connection to the liveness port, and shows the ticket. From then on
   it
   is *present*: its requests are accepted, and it may open more channels.
3. That connection stays idle. ZeroMQ does not report whose connection was lost, but this one does
   (see `liveness`). Then the worker is *lost*.
4. A worker *departs*, which is no loss, with `Bye` on each channel, or with ``bye`` on the liveness
   connection. If it has joined the training and has not left it, other workers wait for it. Then it
   counts as lost, and the training has not ended well.

*Incarnations.* After a departure or a loss, the server remembers only the worker's incarnation. A
newer incarnation may come back. It replaces one that is still present, which then counts as lost.
An older or equal incarnation is refused.

If incarnations are not numbered elsewhere, the server numbers them. It refuses a second process of
a present worker, since two processes were probably started with one rank. But the first one's
machine may have vanished, which no connection shows for minutes. So the server sends a byte to the
present one, and its kernel acknowledges that at once, however busy the process is. Without an
acknowledgement within `Timeouts.worker_acknowledge` the worker is lost, and the next process of its
rank is accepted. The next process is also accepted after an eviction.

*Memory* for unauthenticated peers is bounded. There is one session for each worker that has not
shown its ticket, and one line of each liveness connection without a ticket. The number of these is
limited: the oldest is closed for the next.

Methods that may lose workers return the lost sessions, and the caller informs the service.
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
from paceline.transport import protocol
from paceline.transport.liveness import IdleConnections, unanswered
from paceline.transport.poll_loop import PollLoop
from paceline.transport.protocol import ProtocolError, ServiceKey
from paceline.transport.shared_memory import ServerEnd, ServerMemory

_LINE_BYTES = 64
_STRANGERS = 64
"""The most liveness connections without a ticket, in addition to one for each worker."""
MOST_SERVICES_AT_ONCE = 1024
"""The most services of a process: otherwise a holder of the token could exhaust its memory."""


class Connection:
    """One worker's channel."""

    def __init__(self, identity: bytes, session: Session, channel: str) -> None:
        self.identity = identity
        self.session = session
        self.channel = channel
        self.next = 0
        """The number of the next request."""


class Session:
    """One incarnation of a worker, at one service."""

    def __init__(
        self,
        service_sessions: ServiceSessions,
        worker: int,
        incarnation: int,
        shared: ServerEnd,
    ) -> None:
        self.service_sessions = service_sessions
        self.worker = worker
        self.incarnation = incarnation
        self.shared = shared
        self.since = time.monotonic()
        self.ticket = secrets.token_hex(16)
        self.liveness: socket.socket | None = None
        self.connections: dict[str, Connection] = {}
        self.evicted = False
        """Whether the server treats this worker as lost although its connection still exists."""
        self.asked: float | None = None
        """When the server last asked the worker's machine to acknowledge a byte; None: never."""
        self.leaves_well = False
        self.takes_part = False
        """Whether the worker has joined the training, and has not left it."""

    @property
    def is_admitted(self) -> bool:
        """Whether this session has shown its ticket."""
        return self.liveness is not None

    @property
    def is_present(self) -> bool:
        """Whether this is its worker's current session."""
        return self.service_sessions.present.get(self.worker) is self


class ServiceSessions:
    """The sessions of one service: tracks which of its workers are present, lost or departed.

    Args:
        key: The service.
        workers: Number of workers of the job.

    Attributes:
        pending: For each worker, a session that has sent `Hello`, but has not shown its ticket yet.
        present: For each worker, its current session; also those of other services, by their number.
        newest: The latest incarnation of each worker.
        next_training_begun: Whether a departed worker has come again in the same incarnation. Then its
            script has begun another training.
    """

    def __init__(self, key: ServiceKey, workers: int) -> None:
        self.key = key
        self._workers = workers
        self._made = time.monotonic()
        self.pending: dict[int, Session] = {}
        self.present: dict[int, Session] = {}
        self.newest: dict[int, int] = {}
        self._departed: set[int] = set()
        # These departed in the middle of their training.
        self._left_early: set[int] = set()
        self._some_are_lost = False
        self._last_goodbye = 0.0
        self.next_training_begun = False

    @property
    def workers_present(self) -> int:
        """Number of workers that are present. Any thread may read it."""
        return sum(worker < self._workers for worker in list(self.present))

    @property
    def all_have_departed(self) -> bool:
        """Whether all workers have said goodbye."""
        return len(self._departed) >= self._workers

    @property
    def all_have_ended_well(self) -> bool:
        """Whether all workers have departed, none of them in the middle of its training."""
        return self.all_have_departed and not self._left_early

    @property
    def some_have_departed(self) -> bool:
        """Whether a worker has said goodbye: the others may do so soon."""
        return bool(self._departed)

    @property
    def deserted_from(self) -> float:
        """Time of `time.monotonic` from which the training is over, as its workers have left.

        It is infinite while a worker is present. Otherwise:

        - If a worker was lost, the training is over at once. But a worker that has said hello has
          time to arrive.
        - If none was lost, other workers have time to arrive after the last goodbye, or after the
          service was opened.
        """
        if self.workers_present:
            return math.inf
        moments = [session.since for session in self.pending.values()]
        if not self._some_are_lost:
            moments.append(self._last_goodbye if self._departed else self._made)
        return max((moment + timeouts.worker_arrive for moment in moments), default=0.0)

    def evict(self, worker: int, incarnation: int) -> None:
        """Treat this incarnation as lost from now on: another process may take its place."""
        session = self.present.get(worker)
        if session is not None and session.incarnation == incarnation:
            session.evicted = True

    def has_departed(self, worker: int) -> bool:
        """Whether a worker has said goodbye and has not come back."""
        return worker in self._departed

    def came(self, session: Session) -> None:
        """Note that a worker has shown its ticket."""
        worker = session.worker
        self.present[worker], self.newest[worker] = session, session.incarnation
        self._departed.discard(worker)
        self._left_early.discard(worker)

    def lost(self, session: Session) -> None:
        """Note that a present worker or service has gone without a goodbye."""
        self._some_are_lost |= session.worker < self._workers

    def departed(self, session: Session) -> bool:
        """Note that a present worker has said goodbye.

        Returns whether it counts as lost, because its training continues without it.
        """
        if session.worker < self._workers:
            self._departed.add(session.worker)
            self._last_goodbye = time.monotonic()
        if session.takes_part:
            self._left_early.add(session.worker)
            self._some_are_lost = True
        return session.takes_part


class Sessions:
    """The connections of workers that know *token*, to all services of a process.

    Args:
        workers: Number of workers of each training.
        token: The job's secret token.
        loop: Watches the liveness connections.
        listener: Accepts the liveness connections.
        services: Number of other services that may send requests; their numbers follow the
            workers'.
        numbers: Whether this process numbers incarnations.
    """

    def __init__(
        self,
        workers: int,
        token: str,
        loop: PollLoop,
        listener: socket.socket,
        *,
        services: int = 0,
        numbers: bool = False,
    ) -> None:
        self._workers, self._services = workers, services
        self._numbers = numbers
        self._token = token
        self._loop, self._listener = loop, listener
        self.sessions_by_service: dict[ServiceKey, ServiceSessions] = {}
        self._over: set[ServiceKey] = set()
        self._connections: dict[bytes, Connection] = {}
        self.memory = ServerMemory()
        self._idle_connections = IdleConnections(
            workers + services + _STRANGERS, _LINE_BYTES
        )
        self._owners: dict[socket.socket, Session] = {}

    def open(self, key: ServiceKey) -> ServiceSessions:
        """Admit workers to a service."""
        self._over.discard(key)
        service_sessions = self.sessions_by_service[key] = ServiceSessions(
            key, self._workers
        )
        return service_sessions

    def end(self, key: ServiceKey) -> None:
        """End a service: workers that are still connected, or connect later, get a farewell."""
        service_sessions = self.sessions_by_service.pop(key)
        self._over.add(key)
        for session in [
            *service_sessions.pending.values(),
            *service_sessions.present.values(),
        ]:
            self._forget(session)

    def close(self) -> None:
        """Release the liveness connections and shared memory."""
        self._idle_connections.close_all()
        self.memory.close()

    def connection_of(self, identity: bytes) -> Connection | None:
        """Return the connection with ZeroMQ's *identity*; None if it has not sent a valid hello."""
        return self._connections.get(identity)

    def connection_to(self, key: ServiceKey, sender: Sender) -> Connection | None:
        """Return the connection on which *sender* waits for a reply.

        None if *sender* is lost or has left.
        """
        service_sessions = self.sessions_by_service.get(key)
        if service_sessions is None:
            return None
        session = service_sessions.present.get(sender.worker)
        if session is None or session.incarnation != sender.incarnation:
            return None
        return session.connections.get(sender.channel)

    # ---- arrival ----

    def greet(
        self, identity: bytes, hello: protocol.Hello, welcomes_any: bool
    ) -> protocol.Welcome:
        """Answer a connection's `Hello`. Raises `ProtocolError`.

        *welcomes_any*: whether this connection may open a service.
        """
        if hello.protocol != PROTOCOL:
            reason = f"protocol {hello.protocol}; this server speaks {PROTOCOL}: install the same paceline everywhere"
            raise ProtocolError("version", reason)
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            raise ProtocolError("token", "not the token of this job")
        if not 0 <= hello.worker < self._workers + self._services:
            reason = (
                f"there is no worker {hello.worker} in this server's job of {self._workers} "
                f"workers: expected 0 to {self._workers - 1}"
            )
            raise ProtocolError("worker", reason)
        if hello.workers not in (0, self._workers):
            reason = (
                f"worker {hello.worker} of a job of {hello.workers} workers, and this server's "
                f"has {self._workers}: give both the same number (--workers, or "
                "WORLD_SIZE)"
            )
            raise ProtocolError("worker", reason)
        if hello.asks:
            return protocol.Welcome(workers=self._workers)
        service_sessions = self._sessions_for(hello, welcomes_any)
        if hello.channel:
            session = self._check_channel(service_sessions, hello)
            welcome = protocol.Welcome()
        else:
            session = self._expect(service_sessions, hello)
            port = self._listener.getsockname()[1]
            welcome = protocol.Welcome(
                port,
                session.ticket,
                session.incarnation,
                memory=session.shared.memory,
            )
        connection = Connection(identity, session, hello.channel)
        session.connections[hello.channel] = connection
        self._connections[identity] = connection
        return welcome

    def _sessions_for(
        self, hello: protocol.Hello, welcomes_any: bool
    ) -> ServiceSessions:
        key = hello.service
        service_sessions = self.sessions_by_service.get(key)
        if service_sessions is not None:
            return service_sessions
        if key in self._over:
            reason = "the training is over here: its other workers are lost, or have said goodbye long ago"
            raise ProtocolError("training", reason)
        if not welcomes_any or len(self.sessions_by_service) >= MOST_SERVICES_AT_ONCE:
            reason = (
                f"this server has {len(self.sessions_by_service)} services, and not the one that worker "
                f"{hello.worker} is for: give the same options on every worker"
            )
            raise ProtocolError("training", reason)
        return self.open(key)

    def _expect(
        self, service_sessions: ServiceSessions, hello: protocol.Hello
    ) -> Session:
        """Handle a worker's first connection: make a session with a ticket."""
        newest = service_sessions.newest.get(hello.worker, -1)
        incarnation = hello.incarnation
        if incarnation is None:
            self._check_free(service_sessions, hello.worker)
            incarnation = newest + 1
        if incarnation <= newest:
            if incarnation == newest and service_sessions.has_departed(hello.worker):
                service_sessions.next_training_begun = True
            reason = (
                f"incarnation {incarnation} of worker {hello.worker}, "
                f"{protocol.HAS_BEEN_HERE} {newest}; come back with a larger one"
            )
            raise ProtocolError("incarnation", reason)
        before = service_sessions.pending.get(hello.worker)
        if before is not None:
            self._forget(before)
        shared = self.memory.share(hello.memory)
        session = Session(service_sessions, hello.worker, incarnation, shared)
        service_sessions.pending[hello.worker] = session
        return session

    def _check_free(self, service_sessions: ServiceSessions, worker: int) -> None:
        """Raise `ProtocolError` unless a process without an incarnation number may be this worker."""
        if not self._numbers:
            reason = (
                f"worker {worker} is of a job that survives deaths, and this server's ends with "
                "its first worker that dies: start the server with --survive, too"
            )
            raise ProtocolError("incarnation", reason)
        here = service_sessions.present.get(worker)
        if here is None or here.evicted or here.liveness is None:
            return
        now, place = time.monotonic(), _place_of(here.liveness)
        if here.asked is None or not unanswered(here.liveness):
            here.asked = now
            with contextlib.suppress(OSError):
                here.liveness.send(b"\n")
        elif now > here.asked + timeouts.worker_acknowledge:
            # Its machine has not acknowledged the byte, so the worker is lost.
            return
        reason = (
            f"worker {worker} {protocol.IS_HERE} {place}: two processes were started with this rank, "
            "or the other one hangs; start each rank once"
        )
        raise ProtocolError("rank", reason)

    def _check_channel(
        self, service_sessions: ServiceSessions, hello: protocol.Hello
    ) -> Session:
        """Handle a further connection: return the session of its worker."""
        session = service_sessions.present.get(hello.worker)
        if session is None or session.incarnation != hello.incarnation:
            raise ProtocolError("incarnation", "a channel of a worker that is not here")
        if hello.channel in session.connections:
            raise ProtocolError("channel", "this channel has a connection already")
        if len(session.connections) >= protocol.CHANNELS:
            raise ProtocolError("channel", f"more than {protocol.CHANNELS} channels")
        if len(hello.channel) > protocol.CHANNEL_CHARACTERS:
            reason = f"a name of more than {protocol.CHANNEL_CHARACTERS} characters"
            raise ProtocolError("channel", reason)
        return session

    # ---- liveness connections ----

    def accept(self, reader: Callable[[socket.socket], None]) -> None:
        """Accept the next liveness connection.

        *reader* is called whenever it has data, and calls `read`.
        """
        peer = self._idle_connections.accept(self._listener, self.disconnect)
        if peer is not None:
            self._loop.watch(peer, partial(reader, peer))

    def read(self, peer: socket.socket) -> list[Session]:
        """Read from a liveness connection; return the sessions that are lost by it.

        Raises `ProtocolError` for a connection without a ticket; the caller closes it with
        `disconnect`.
        """
        received = self._idle_connections.read(peer)
        lost: list[Session] = []
        for line in received.lines:
            lost += self._handle_line(peer, line)
        session = self._owners.get(peer)
        if session is None:
            if received.over or received.lines:
                raise ProtocolError("liveness", "a connection without a ticket")
        elif session.leaves_well:
            lost += self._depart(session)
        elif received.over:
            lost += self.lose(session)
        return lost

    def disconnect(self, peer: socket.socket) -> None:
        """Close a liveness connection unless it is closed already."""
        if peer in self._idle_connections:
            self._owners.pop(peer, None)
            self._loop.unwatch(peer)
            self._idle_connections.close(peer)

    def _handle_line(self, peer: socket.socket, line: bytes) -> list[Session]:
        session = self._owners.get(peer)
        if session is not None:
            session.leaves_well |= line == b"bye"
            return []
        for service_sessions in self.sessions_by_service.values():
            for session in service_sessions.pending.values():
                if hmac.compare_digest(session.ticket.encode(), line):
                    return self._admit(peer, session)
        return []

    def _admit(self, peer: socket.socket, session: Session) -> list[Session]:
        """Accept a liveness connection's ticket: its worker is present from now on."""
        service_sessions = session.service_sessions
        del service_sessions.pending[session.worker]
        before = service_sessions.present.get(session.worker)
        lost = [] if before is None else self.lose(before)
        session.liveness = peer
        self._idle_connections.know(peer)
        self._owners[peer] = session
        service_sessions.came(session)
        with contextlib.suppress(OSError):
            peer.send(b"\n")
        return lost

    # ---- departure and loss ----

    def leave(self, connection: Connection) -> list[Session]:
        """Handle a channel's goodbye; return the lost sessions.

        The worker departs with its last channel.
        """
        del self._connections[connection.identity]
        session = connection.session
        del session.connections[connection.channel]
        return [] if session.connections else self._depart(session)

    def lose(self, session: Session) -> list[Session]:
        """Remove a lost worker. Returns its session if it was present."""
        here = session.is_present
        self._forget(session)
        if not here:
            return []
        session.service_sessions.lost(session)
        return [session]

    def _depart(self, session: Session) -> list[Session]:
        """Remove a worker that said goodbye.

        Returns its session if it counts as lost, because its training continues without it.
        """
        here = session.is_present
        self._forget(session)
        return [session] if here and session.service_sessions.departed(session) else []

    def _forget(self, session: Session) -> None:
        for connection in session.connections.values():
            self._connections.pop(connection.identity, None)
        session.connections.clear()
        for among in (
            session.service_sessions.pending,
            session.service_sessions.present,
        ):
            if among.get(session.worker) is session:
                del among[session.worker]
        session.shared.close()
        if session.liveness is not None:
            self.disconnect(session.liveness)


def _place_of(peer: socket.socket) -> str:
    try:
        host, port = peer.getpeername()[:2]
    except OSError:
        return "a closed connection"
    return f"{host}:{port}"
