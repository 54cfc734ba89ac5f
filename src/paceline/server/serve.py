"""The thin shell: any `Server` behind a ZeroMQ socket, in one thread.

Theory of operation
-------------------
One loop waits for: messages of workers (a ROUTER socket), ZeroMQ asking whether it may
let a connection in, the liveness listener and its connections, the server's own deadline,
and the end of the parent's pipe. It never waits for one peer: what is sent goes into
ZeroMQ's queues, whose length is bounded.

1. A worker's first connection says `Hello`, and is given a one-time ticket.
2. The worker opens a plain TCP connection to the liveness port, and shows the ticket.
   From here on it is *present*: its requests are taken, and it may open more channels.
3. That connection stays idle. ZeroMQ does not say whose connection was lost, but this one
   does: when a process ends in any way its kernel closes it at once; when a machine
   vanishes, keep-alive probes notice within seconds. Then `Server.on_lost` is called.
4. A worker leaves well with `Bye` on each channel, or ``bye`` on the liveness connection.

A connection that breaks is a lost peer at both ends; nothing is sent twice. The worker may
come back with a newer incarnation, which replaces the old one.

What is refused is counted in `Shell.refused`, answered where somebody waits for an answer,
and changes nothing. A worker that breaks the protocol itself (more requests than its
credits, answers never read) is dropped as if lost. So memory is bounded: per channel by
its credits and ZeroMQ's queues, per worker by its channels, and strangers are not let in.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import zmq

from paceline.errors import UsageError
from paceline.interfaces import Answer, Sender, Server
from paceline.messages import PROTOCOL, Refused
from paceline.server import payloads, wire
from paceline.server.security import JUDGE_ADDRESS, Security, choose
from paceline.server.shared_memory import ANSWERS, PUSHES, Answers, Region, ServerEnd
from paceline.server.wire import RefusalError

LINGER_SECONDS = 2.0
"""How long the last answers may take to leave, once the loop has ended."""
REFUSALS_SAID = 10
MESSAGES_A_TURN = 64
QUEUED_IN = 4
"""Messages that a connection may have waiting here: the rest waits in the network."""
_LINE_BYTES = 64
_STRANGERS = 16


class _Connection:
    """One worker's channel."""

    def __init__(
        self, identity: bytes, presence: _Presence, channel: str, limit: int
    ) -> None:
        self.identity = identity
        self.presence = presence
        self.channel = channel
        self.inbox = payloads.Inbox(limit)


class _Presence:
    """One incarnation of a worker."""

    def __init__(self, worker: int, incarnation: int) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.ticket = secrets.token_hex(16)
        self.liveness: socket.socket | None = None
        self.shared: ServerEnd | None = None
        self.connections: dict[str, _Connection] = {}
        self.leaves_well = False


class Shell:
    """Runs *server* at *address*, on `port` (0: a free one), for *workers* workers that
    know the job's *token*.

    *security*: as the environment says, see `security`. *max_payload_bytes*: what one
    message may bring. *now* is the clock that the server is told.

    Raises `UsageError` if nothing protects the address, or it cannot be bound.
    """

    def __init__(
        self,
        server: Server,
        address: str = "127.0.0.1",
        port: int = 0,
        *,
        workers: int,
        token: str,
        security: Security | None = None,
        max_payload_bytes: int = wire.LARGEST_PAYLOAD_BYTES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._security = choose(address) if security is None else security
        if not token:
            raise UsageError("token: expected the job's secret token, got nothing")
        self._server = server
        self._workers = workers
        self._token = token
        self._max_payload = max_payload_bytes
        self._now = now
        self.refused: Counter[str] = Counter()
        self._said = 0
        self._connections: dict[bytes, _Connection] = {}
        self._pending: dict[int, _Presence] = {}  # said hello, to show their ticket yet
        self._present: dict[int, _Presence] = {}
        self._newest: dict[int, int] = {}  # by worker: incarnation
        self._departed: set[int] = set()
        self._visitors: dict[socket.socket, bytes] = {}  # what they have said so far
        self._owners: dict[socket.socket, _Presence] = {}
        self._outbox: deque[Answer] = deque()
        self._answers: Answers | None = None
        """Memory for answers, once a worker of this machine is here."""
        self._delivering = False
        self._stopped = False
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[], None]] = {}
        self._context = zmq.Context(io_threads=1)
        self._router = self._context.socket(zmq.ROUTER)
        self._judge = self._context.socket(zmq.REP)
        try:
            self._bind(_resolved(address), port)
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise UsageError(
                f"a parameter server cannot listen at {address}, port {port}: {error}; "
                "expected an address of this machine, and a port that is free (or 0)"
            ) from None

    def _bind(self, address: str, port: int) -> None:
        router = self._router
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.MAXMSGSIZE, wire.FRAME_BYTES)
        router.setsockopt(zmq.RCVHWM, QUEUED_IN)
        # ZeroMQ opens a full queue again when it is half empty: hence twice.
        most = payloads.most_messages(self._max_payload)
        router.setsockopt(zmq.SNDHWM, 2 * most)
        router.setsockopt(zmq.LINGER, int(1000 * LINGER_SECONDS))
        router.setsockopt(zmq.BACKLOG, max(100, self._workers))
        router.setsockopt(zmq.IPV6, ":" in address)
        wire.keep_alive(router)
        self._security.protect_server(router)
        self._judge.setsockopt(zmq.LINGER, 0)
        self._judge.bind(JUDGE_ADDRESS)
        router.bind(wire.endpoint(address, port or "*"))
        bound = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(bound.rpartition(":")[2])
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server(
            (address, 0), family=family, backlog=max(100, self._workers)
        )
        self._listener.setblocking(False)
        self._liveness_port = self._listener.getsockname()[1]
        self._watch(router, self._read_messages)
        self._watch(self._judge, self._read_questions)
        self._watch(self._listener, self._accept)

    # ---- the loop ----

    def run(self, stop: int | None = None) -> None:
        """Serve until *stop*, a descriptor, is at its end, or all workers have said
        goodbye. Raises what the server raises, and nothing that a peer could cause."""
        if stop is not None:
            self._watch(stop, lambda: self._read_stop(stop))
        try:
            while not self._stopped and len(self._departed) < self._workers:
                for ready, _ in self._poller.poll(self._patience()):
                    # Handled before, it may have closed this one.
                    handler = self._handlers.get(ready)
                    if handler is not None:
                        handler()
                deadline = self._server.next_deadline()
                if deadline is not None and self._now() >= deadline:
                    self._deliver(self._server.on_timer(self._now()))
        finally:
            self.close()

    def close(self) -> None:
        """Let go of all sockets and memory; the last answers have `LINGER_SECONDS` to leave."""
        for presence in list(self._present.values()):
            self._take_back_memory(presence)
        if self._answers is not None:
            self._answers.region.close()
            self._answers = None
        self._handlers.clear()
        for peer in self._visitors:
            peer.close()
        self._visitors.clear()
        if hasattr(self, "_listener"):
            self._listener.close()
        self._judge.close()
        self._router.close()
        self._context.term()

    def _patience(self) -> int | None:
        """Milliseconds until the server's deadline, rounded up: never early."""
        deadline = self._server.next_deadline()
        if deadline is None:
            return None
        return max(0, min(int(1000 * (deadline - self._now())) + 1, 2**31 - 1))

    def _watch(self, source: Any, handler: Callable[[], None]) -> None:
        self._poller.register(source, zmq.POLLIN)
        # The poller reports a plain socket by its descriptor.
        plain = isinstance(source, socket.socket)
        self._handlers[source.fileno() if plain else source] = handler

    def _read_stop(self, stop: int) -> None:
        self._stopped = not os.read(stop, 4096)

    def _read_questions(self) -> None:
        question = self._judge.recv_multipart()
        reply, admitted = self._security.judge(question, self._token)
        self._judge.send_multipart(reply)
        if not admitted:
            self._count("token", "a connection that does not know the job's token")

    # ---- messages ----

    def _read_messages(self) -> None:
        for _ in range(MESSAGES_A_TURN):
            try:
                identity = self._router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            connection = self._connections.get(identity)
            try:
                header = self._router.recv(zmq.NOBLOCK)
                if connection is None:
                    self._greet(identity, wire.decode_hello(header))
                else:
                    self._hear(connection, wire.decode_from_worker(header))
            except RefusalError as refusal:
                self._refuse(refusal, identity, connection)
            finally:
                payloads.finish_message(self._router)

    def _greet(self, identity: bytes, hello: wire.Hello) -> None:
        """A connection introduces itself."""
        if hello.protocol != PROTOCOL:
            reason = f"protocol {hello.protocol}; this server speaks {PROTOCOL}: install the same paceline everywhere"
            raise RefusalError("version", reason)
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            raise RefusalError("token", "not the token of this job")
        if not 0 <= hello.worker < self._workers:
            reason = f"worker {hello.worker} of {self._workers}"
            raise RefusalError("worker", reason)
        if hello.channel:
            self._greet_channel(identity, hello)
            return
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
        presence = _Presence(hello.worker, hello.incarnation)
        self._pending[hello.worker] = presence
        self._connect(identity, presence, "")
        self._say(identity, wire.Welcome(self._liveness_port, presence.ticket))

    def _greet_channel(self, identity: bytes, hello: wire.Hello) -> None:
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
        self._connect(identity, presence, hello.channel)
        self._say(identity, wire.Welcome())

    def _connect(self, identity: bytes, presence: _Presence, channel: str) -> None:
        connection = _Connection(identity, presence, channel, self._max_payload)
        presence.connections[channel] = connection
        self._connections[identity] = connection

    def _hear(self, connection: _Connection, words: wire.FromWorker) -> None:
        """A known worker says something."""
        if isinstance(words, wire.Begin | wire.More):
            self._deliver(self._take(connection, words))
        elif isinstance(words, wire.Share):
            self._share_memory(connection, words)
        elif isinstance(words, wire.Reads):
            if connection.presence.shared is not None:
                connection.presence.shared.reads = True
        elif isinstance(words, wire.Bye):
            self._say(connection.identity, wire.Farewell())
            self._connections.pop(connection.identity)
            presence = connection.presence
            presence.connections.pop(connection.channel)
            if not presence.connections:
                self._depart(presence)
        else:
            raise RefusalError("order", "a second hello", fatal=True)

    def _take(
        self, connection: _Connection, words: wire.Begin | wire.More
    ) -> list[Answer]:
        """A request, or a further part of it, has come in."""
        presence = connection.presence
        if presence.liveness is None:
            raise RefusalError("order", "a request before the ticket", fatal=True)
        chunk = payloads.Chunk(self._router, words.slot, presence.shared)
        try:
            complete = connection.inbox.take(words, chunk)
        finally:
            chunk.let_go()
        if complete is None:
            return []
        begun, payload = complete
        sender = Sender(
            presence.worker,
            presence.incarnation,
            connection.channel,
            begun.number,
            begun.received,
        )
        return self._server.on_message(sender, begun.message, payload, self._now())

    # ---- memory ----

    def _share_memory(self, connection: _Connection, offer: wire.Share) -> None:
        """A worker of this machine, as it seems, offers memory."""
        presence = connection.presence
        if presence.liveness is None or presence.shared is not None:
            reason = "memory before the ticket, or a second time"
            raise RefusalError("order", reason, fatal=True)
        own = Region.open(offer.memory, PUSHES)
        if own is not None and self._answers is None:
            region = Region.make(ANSWERS)
            self._answers = None if region is None else Answers(region)
        place = None
        if own is not None and self._answers is not None:
            presence.shared = ServerEnd(own, self._answers)
            self._answers.readers.append(presence.shared)
            place = self._answers.region.place
        self._say(connection.identity, wire.Shared(place))

    def _take_back_memory(self, presence: _Presence) -> None:
        if presence.shared is not None and self._answers is not None:
            self._answers.readers.remove(presence.shared)
        presence.shared = None

    # ---- refusals ----

    def _refuse(
        self, refusal: RefusalError, identity: bytes, connection: _Connection | None
    ) -> None:
        """Count, and answer where there is somebody to answer to."""
        self._count(refusal.kind, str(refusal))
        if connection is None or refusal.kind == "undecodable":
            self._say(identity, wire.Rejected(str(refusal)))
            return
        if refusal.fatal:
            self._say(identity, wire.Rejected(str(refusal)))
            self._lose(connection.presence)
            return
        number = connection.inbox.abandon()
        self._say(identity, wire.Answered(number, Refused(reason=str(refusal))))

    def _count(self, kind: str, reason: str) -> None:
        self.refused[kind] += 1
        self._said += 1
        if self._said <= REFUSALS_SAID:
            last = "; more are only counted" if self._said == REFUSALS_SAID else ""
            print(
                f"paceline server: refused ({kind}): {reason[:200]!r}{last}",
                file=sys.stderr,
                flush=True,
            )

    # ---- answers ----

    def _deliver(self, answers: Iterable[Answer]) -> None:
        """Send answers; whoever cannot be reached is lost, which may bring more answers."""
        self._outbox.extend(answers)
        if self._delivering:
            return
        self._delivering = True
        try:
            while self._outbox:
                self._send(self._outbox.popleft())
        finally:
            self._delivering = False
            if self._answers is not None:
                self._answers.batch_ended()

    def _send(self, answer: Answer) -> None:
        worker, incarnation, channel, number = answer.to[:4]
        presence = self._present.get(worker)
        if presence is None or presence.incarnation != incarnation:
            return  # lost or gone meanwhile
        connection = presence.connections.get(channel)
        if connection is None:
            return
        connection.inbox.answered(number)
        dtype, elements = payloads.described(answer.payload)
        first = wire.Answered(number, answer.message, dtype, elements)
        shared = presence.shared
        for words, chunk in payloads.messages(first, answer.payload, shared):
            if not self._put(connection.identity, words, chunk):
                self._count("unread", f"worker {worker} does not take its answers")
                self._lose(presence)
                return

    def _say(self, identity: bytes, words: msgspec.Struct) -> None:
        """Send a short message; whoever does not take it has his own trouble."""
        self._put(identity, wire.encode(words), None)

    def _put(self, identity: bytes, header: bytes, chunk: memoryview | None) -> bool:
        """Whether the message is on its way: the peer is there, and its queue not full."""
        more, router = zmq.SNDMORE | zmq.NOBLOCK, self._router
        try:
            router.send(identity, more)
            if chunk is None:
                router.send(header, zmq.NOBLOCK)
            else:
                router.send(header, more)
                router.send(chunk, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True

    # ---- coming and going ----

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            peer, _ = self._listener.accept()
            strangers = [p for p in self._visitors if p not in self._owners]
            if len(strangers) >= self._workers + _STRANGERS:
                self._close_visitor(strangers[0])  # the oldest has had its time
            peer.setblocking(False)
            wire.keep_alive(peer)
            self._visitors[peer] = b""
            self._watch(peer, lambda: self._read_visitor(peer))

    def _read_visitor(self, peer: socket.socket) -> None:
        try:
            data = peer.recv(_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        presence = self._owners.get(peer)
        *lines, rest = (self._visitors[peer] + data).split(b"\n")
        self._visitors[peer] = rest
        for line in lines:
            if presence is None:
                presence = self._admit(peer, line)
            elif line == b"bye":
                presence.leaves_well = True
        over = not data or len(rest) > _LINE_BYTES
        if presence is None and (over or lines):
            self._count("liveness", "a connection without a ticket")
            self._close_visitor(peer)
        elif presence is not None and presence.leaves_well:
            self._depart(presence)
        elif presence is not None and over:
            self._lose(presence)

    def _admit(self, peer: socket.socket, line: bytes) -> _Presence | None:
        """A liveness connection shows its ticket: from now on its worker is present."""
        for presence in self._pending.values():
            if hmac.compare_digest(presence.ticket.encode(), line):
                break
        else:
            return None
        worker = presence.worker
        del self._pending[worker]
        old = self._present.get(worker)
        if old is not None:
            self._lose(old)
        presence.liveness = peer
        self._owners[peer] = presence
        self._present[worker] = presence
        self._newest[worker] = presence.incarnation
        self._departed.discard(worker)
        with contextlib.suppress(OSError):
            peer.send(b"\n")
        return presence

    def _depart(self, presence: _Presence) -> None:
        """A worker has said goodbye."""
        if self._present.get(presence.worker) is presence:
            self._departed.add(presence.worker)
        self._forget(presence)

    def _lose(self, presence: _Presence) -> None:
        """A worker is gone, or is as good as gone."""
        here = self._present.get(presence.worker) is presence
        self._forget(presence)
        if here:
            worker, incarnation = presence.worker, presence.incarnation
            self._deliver(self._server.on_lost(worker, incarnation, self._now()))

    def _forget(self, presence: _Presence) -> None:
        for connection in presence.connections.values():
            self._connections.pop(connection.identity, None)
        presence.connections.clear()
        self._take_back_memory(presence)
        for among in (self._pending, self._present):
            if among.get(presence.worker) is presence:
                del among[presence.worker]
        if presence.liveness is not None:
            self._close_visitor(presence.liveness)

    def _close_visitor(self, peer: socket.socket) -> None:
        if self._visitors.pop(peer, None) is None:
            return
        self._owners.pop(peer, None)
        self._handlers.pop(peer.fileno(), None)
        self._poller.unregister(peer)
        peer.close()


def _resolved(address: str) -> str:
    """An address of numbers: ZeroMQ binds to nothing else."""
    return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
