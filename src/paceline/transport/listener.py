"""Receives workers' messages in a server process, and sends replies: sockets in, events out.

`ServerListener.poll` waits for

- messages of workers (a ROUTER socket),
- ZeroMQ's authentication requests,
- liveness connections,
- connections to other services (see `peers`),
- lines of the parent process.

It returns events, and calls no service: `parameter_server.process.host` calls the services, and
sends their replies.

It never waits for a single peer: messages go into ZeroMQ's queues, whose length is bounded.
Connections show which workers are present or lost: see `sessions`. A broken connection means a lost
peer on both sides, and nothing is sent twice.

A refused message changes no state. It is counted in `ServerListener.refused`, and answered if its
sender waits for an answer. A worker that breaks the protocol itself (requests out of order, replies
never read) is treated as lost. So memory is bounded: per channel by ZeroMQ's queues, per worker by
the number of its channels. Unauthenticated peers are not admitted.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import torch
import zmq

from paceline.errors import UsageError
from paceline.interfaces import Reply, Sender
from paceline.interfaces.server_messages import Join, Leave, Rejected, Request
from paceline.timeouts import timeouts
from paceline.transport import protocol
from paceline.transport.poll_loop import PollLoop
from paceline.transport.protocol import ProtocolError, ServiceKey
from paceline.transport.security import ZAP_ADDRESS, Security, choose
from paceline.transport.sessions import Connection, ServiceSessions, Session, Sessions

log = logging.getLogger(__name__)

REFUSALS_LOGGED = 10
"""Log lines for each kind of refusal, so that a frequent kind does not hide the others."""
MESSAGES_A_TURN = 64
"""Messages that one turn reads before services handle them; fewer if payloads are large."""


class RequestArrived(NamedTuple):
    """A worker or another service has sent a request to service *key*."""

    key: ServiceKey
    sender: Sender
    message: Request
    payload: torch.Tensor | None


class WorkerLost(NamedTuple):
    """This incarnation of a worker, or of another service, ended without a goodbye."""

    key: ServiceKey
    worker: int
    incarnation: int


class ControlLine(NamedTuple):
    """A line from the process that started this one."""

    line: bytes


class ControlEnded(NamedTuple):
    """The process that started this one has closed its pipe, so this process must end."""


ListenerEvent = RequestArrived | WorkerLost | ControlLine | ControlEnded


@dataclass
class Traffic:
    """Bytes as all runtimes count them, and the number of requests by type."""

    received_bytes: int = 0
    sent_bytes: int = 0
    requests: Counter[str] = field(default_factory=Counter)


class ServerListener:
    """Listens at *address* and *port* for workers that know *token*.

    It serves all trainings of its process, in turn or at the same time. So the port stays in use
    between trainings, and messages that arrive meanwhile wait.

    Args:
        address: An address of this machine.
        port: The port for workers' messages; 0: a free port.
        workers: Number of workers of each training.
        token: The job's secret token.
        services: Number of other services that may send requests. Their numbers follow the
            workers'.
        numbers: Whether this process numbers workers' incarnations (see `sessions`).
        welcomes_any: Whether the first worker that connects to a service opens it. If not, `open`
            opens it.
        liveness_port: The port for liveness connections; 0: a free port.
        security: Protection of the connections; None: from the environment, see `security`.
        max_payload_bytes: The largest payload of a message, in bytes.

    Raises:
        UsageError: Nothing protects the address, or it cannot be bound.
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        port: int = 0,
        *,
        workers: int,
        token: str,
        services: int = 0,
        numbers: bool = False,
        welcomes_any: bool = False,
        liveness_port: int = 0,
        security: Security | None = None,
        max_payload_bytes: int = protocol.LARGEST_PAYLOAD_BYTES,
    ) -> None:
        if not token:
            raise UsageError("token: expected the job's secret token, got nothing")
        self.address = address
        self.workers = workers
        self.welcomes_any = welcomes_any
        self.refused: Counter[str] = Counter()
        self.traffic = Traffic()
        self.loop = PollLoop()
        """The loop that also reads connections to other services."""
        self._token = token
        self._security = choose(address) if security is None else security
        self._max_payload_bytes = max_payload_bytes
        self._events: list[ListenerEvent] = []
        self._unhandled_bytes = 0
        self._farewells: list[bytes] = []
        """Connections that have said goodbye. They get a farewell once their earlier messages are
        handled."""
        self._begun_line = b""
        self._context = zmq.Context(io_threads=1)
        self._router = self._context.socket(zmq.ROUTER)
        self._zap = self._context.socket(zmq.REP)
        """The socket on which ZeroMQ asks whether to admit a connection."""
        self._control: int | None = None
        try:
            self._bind(port)
            self._liveness = self._bind_liveness(liveness_port)
        except UsageError:
            self._close_sockets()
            raise
        self._sessions = Sessions(
            workers,
            token,
            self.loop,
            self._liveness,
            services=services,
            numbers=numbers,
        )
        self.loop.watch(self._router, self._read_messages)
        self.loop.watch(self._zap, self._read_questions)
        self.loop.watch(self._liveness, self._accept)

    def _bind(self, port: int) -> None:
        """Bind the sockets for messages. Raises `UsageError`."""
        router = self._router
        try:
            address = _resolved(self.address)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            router.setsockopt(zmq.MAXMSGSIZE, protocol.LARGEST_ON_THE_WIRE)
            router.setsockopt(zmq.RCVHWM, protocol.QUEUED_REQUESTS)
            # ZeroMQ reopens a full queue when it is half empty: hence twice.
            router.setsockopt(zmq.SNDHWM, 2 * protocol.MOST_UNANSWERED)
            router.setsockopt(zmq.LINGER, int(1000 * timeouts.last_replies))
            router.setsockopt(zmq.BACKLOG, max(100, self.workers))
            router.setsockopt(zmq.IPV6, ":" in address)
            protocol.keep_alive(router)
            self._security.protect_server(router)
            self._zap.setsockopt(zmq.LINGER, 0)
            self._zap.bind(ZAP_ADDRESS)
            router.bind(protocol.endpoint(address, port or "*"))
            bound = router.getsockopt_string(zmq.LAST_ENDPOINT)
            self.port = int(bound.rpartition(":")[2])
        except (zmq.ZMQError, OSError) as error:
            raise UsageError(
                f"a parameter server cannot listen at {self.address}, port {port}: {error}; "
                "expected an address of this machine, and a port that is free (or 0)"
            ) from None

    def _bind_liveness(self, port: int) -> socket.socket:
        """Bind the socket for liveness connections. Raises `UsageError`."""
        try:
            address = _resolved(self.address)
            if port > 65535:
                raise OSError("there is no such port")
            listener = socket.create_server(
                (address, port),
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                backlog=max(100, self.workers),
            )
        except OSError as error:
            raise UsageError(
                f"a parameter server cannot listen at {self.address}, port {port}, for "
                f"liveness connections: {error}; name a port that is "
                "free with --liveness-port"
            ) from None
        listener.setblocking(False)
        return listener

    def close(self) -> None:
        """Close all sockets. The last replies have `Timeouts.last_replies` to leave."""
        self._send_farewells()
        self._sessions.close()
        self._liveness.close()
        self.loop.clear()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._zap.close()
        self._router.close()
        self._context.term()

    # ---- services ----

    def open(self, key: ServiceKey) -> ServiceSessions:
        """Admit workers to a service; return its `ServiceSessions`."""
        return self._sessions.open(key)

    @property
    def sessions_by_service(self) -> Mapping[ServiceKey, ServiceSessions]:
        """The `ServiceSessions` of each service that has not ended."""
        return self._sessions.sessions_by_service

    def end(self, key: ServiceKey) -> None:
        """End a service, and send a farewell to workers that are still connected."""
        self._send_farewells()
        self._sessions.end(key)

    # ---- events ----

    def watch_control(self, control: int | None) -> None:
        """Return lines from this descriptor, and its end, as events, too.

        None: watch no descriptor.
        """
        if self._control is not None:
            self.loop.unwatch(self._control)
        self._control, self._begun_line = control, b""
        if control is not None:
            self.loop.watch(control, lambda: self._read_control(control))

    def poll(self, seconds: float = math.inf) -> Sequence[ListenerEvent]:
        """Wait for events for at most *seconds*; return them in order."""
        self._unhandled_bytes = 0
        self._send_farewells()
        # Round up, so that this never returns early.
        wait = None
        if self._events:
            wait = 0
        elif seconds < math.inf:
            wait = max(0, min(int(1000 * seconds) + 1, 2**31 - 1))
        self.loop.handle(wait)
        events, self._events = self._events, []
        return events

    def send(self, key: ServiceKey, replies: Iterable[Reply]) -> None:
        """Queue the replies that service *key* made in one batch.

        Workers that have left get none. A worker that does not read its replies is lost.
        """
        for reply in replies:
            self._send(key, reply)
        self._sessions.memory.batch_ended()

    def _send(self, key: ServiceKey, reply: Reply) -> None:
        connection = self._sessions.connection_to(key, reply.to)
        if connection is None:
            return
        place = connection.session.shared.put(reply.payload)
        header = protocol.ReplyHeader(
            reply.to.number, reply.message, *protocol.describe(reply.payload), place
        )
        frame = reply.payload if place is None else None
        if self._send_message(connection.identity, header, frame):
            size = protocol.size_of(reply.payload)
            self.traffic.sent_bytes += protocol.HEADER_BYTES + size
        else:
            self._count("unread", f"worker {reply.to.worker} does not read its replies")
            self._note_lost(self._sessions.lose(connection.session))

    def _send_farewells(self) -> None:
        farewells, self._farewells = self._farewells, []
        for identity in farewells:
            self._send_message(identity, protocol.Farewell())

    def _note_lost(self, sessions: Sequence[Session]) -> None:
        for session in sessions:
            self._events.append(
                WorkerLost(
                    session.service_sessions.key, session.worker, session.incarnation
                )
            )

    def _read_control(self, control: int) -> None:
        data = os.read(control, 65536)
        *lines, self._begun_line = (self._begun_line + data).split(b"\n")
        self._events += map(ControlLine, lines)
        if not data:
            self.watch_control(None)
            self._events.append(ControlEnded())

    def _read_questions(self) -> None:
        question = self._zap.recv_multipart()
        reply, admitted = self._security.zap_reply(question, self._token)
        self._zap.send_multipart(reply)
        if not admitted:
            self._count("token", "a connection that does not know the job's token")

    # ---- messages ----

    def _read_messages(self) -> None:
        router = self._router
        for _ in range(MESSAGES_A_TURN):
            # Messages stay in memory until the services have handled them.
            if self._unhandled_bytes > protocol.SMALL_BYTES:
                return
            try:
                identity = router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            header = router.recv(zmq.NOBLOCK)
            frames = []
            while router.getsockopt(zmq.RCVMORE):
                frames.append(router.recv(zmq.NOBLOCK, copy=False).buffer)
            connection = self._sessions.connection_of(identity)
            try:
                if connection is None:
                    hello = protocol.decode_hello(header)
                    welcome = self._sessions.greet(identity, hello, self.welcomes_any)
                    self._send_message(identity, welcome)
                else:
                    message = protocol.decode_from_worker(header)
                    self._handle_message(connection, message, frames)
            except ProtocolError as refusal:
                self._refuse(refusal, identity, connection)

    def _handle_message(
        self,
        connection: Connection,
        message: protocol.FromWorker,
        frames: Sequence[memoryview],
    ) -> None:
        """Handle a message of a known worker."""
        if isinstance(message, protocol.RequestHeader):
            self._take(connection, message, frames)
        elif isinstance(message, protocol.Bye):
            self._farewells.append(connection.identity)
            self._note_lost(self._sessions.leave(connection))
        else:
            raise ProtocolError("order", "a second hello", fatal=True)

    def _take(
        self,
        connection: Connection,
        header: protocol.RequestHeader,
        frames: Sequence[memoryview],
    ) -> None:
        """Check a request, and return it as an event."""
        session = connection.session
        if not session.is_admitted:
            raise ProtocolError("order", "a request before the ticket", fatal=True)
        number = header.number
        if number != connection.next:
            reason = f"request {number} for {connection.next}"
            raise ProtocolError("order", reason, fatal=True)
        connection.next += 1
        if header.place is not None:
            frames = [*frames, session.shared.lend(header.place)]
        payload = protocol.payload_from(
            header.dtype, header.elements, frames, self._max_payload_bytes
        )
        size = protocol.size_of(payload)
        self._unhandled_bytes += size
        self.traffic.requests[type(header.message).__name__.lower()] += 1
        self.traffic.received_bytes += protocol.HEADER_BYTES + size
        if isinstance(header.message, Join | Leave):
            session.takes_part = isinstance(header.message, Join)
        sender = Sender(session.worker, session.incarnation, connection.channel, number)
        key = session.service_sessions.key
        self._events.append(RequestArrived(key, sender, header.message, payload))

    # ---- refusals ----

    def _refuse(
        self, refusal: ProtocolError, identity: bytes, connection: Connection | None
    ) -> None:
        """Count a refusal, and answer if its sender is known."""
        self._count(refusal.kind, str(refusal))
        if connection is None or refusal.kind == "undecodable":
            self._send_message(identity, protocol.Rejected(str(refusal)))
            return
        if refusal.fatal:
            self._send_message(identity, protocol.Rejected(str(refusal)))
            self._note_lost(self._sessions.lose(connection.session))
            return
        # Only a request with a wrong payload reaches this line; its number has been counted.
        rejected = Rejected(reason=str(refusal))
        self._send_message(
            identity, protocol.ReplyHeader(connection.next - 1, rejected)
        )

    def _count(self, kind: str, reason: str) -> None:
        self.refused[kind] += 1
        if self.refused[kind] <= REFUSALS_LOGGED:
            last = "; more of these are only counted"
            last = last if self.refused[kind] == REFUSALS_LOGGED else ""
            log.warning("server refused (%s): %r%s", kind, reason[:200], last)

    def _send_message(
        self,
        identity: bytes,
        header: msgspec.Struct,
        payload: torch.Tensor | None = None,
    ) -> bool:
        """Send a message. Returns False if the peer has left or its queue is full."""
        try:
            self._router.send(identity, zmq.SNDMORE | zmq.NOBLOCK)
            protocol.send(self._router, header, payload)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True

    # ---- liveness ----

    def _accept(self) -> None:
        self._sessions.accept(self._read_liveness)

    def _read_liveness(self, peer: socket.socket) -> None:
        try:
            self._note_lost(self._sessions.read(peer))
        except ProtocolError as refusal:
            # Count first, so that the count is correct when the peer sees its connection end.
            self._count(refusal.kind, str(refusal))
            self._sessions.disconnect(peer)


def _resolved(address: str) -> str:
    """Return a numeric address: ZeroMQ binds to no other kind."""
    return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
