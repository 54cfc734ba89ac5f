"""The thin shell: any `Server`, or other service, behind a ZeroMQ socket, in one thread.

Theory of operation
-------------------
One loop waits for: messages of workers (a ROUTER socket), ZeroMQ asking whether it may
let a connection in, the liveness listener and its connections, answers of the services that
it asks (see `peers`), the server's own deadline, and the end of the parent's pipe. It never
waits for one peer: what is sent goes into
ZeroMQ's queues, whose length is bounded.

Who is here, and who is lost, is known by connections: see `sessions`. A connection that
breaks is a lost peer at both ends; nothing is sent twice. Each loss of a worker is told to
`Server.on_lost`.

What is refused is counted in `Shell.refused`, answered where somebody waits for an answer,
and changes nothing. A worker that breaks the protocol itself (more requests than its
credits, answers never read) is dropped as if lost. So memory is bounded: per channel by
its credits and ZeroMQ's queues, per worker by its channels, and strangers are not let in.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

import msgspec
import zmq

from paceline.errors import UsageError
from paceline.interfaces import Answer, AnyServer, Ask, AskingServer, Sender
from paceline.interfaces.server_messages import Join, Leave, Refused
from paceline.timeouts import timeouts
from paceline.transport import payloads, protocol
from paceline.transport.peers import PeerAddress, Peers
from paceline.transport.poll_loop import PollLoop
from paceline.transport.protocol import RefusalError
from paceline.transport.security import ZAP_ADDRESS, Security, choose
from paceline.transport.sessions import Connection, Session, Sessions
from paceline.transport.shared_memory import ServerMemory
from paceline.transport.traffic import Traffic

REFUSALS_SAID = 10
"""Of each kind: so one that comes again and again hides no other."""
MESSAGES_A_TURN = 64
QUEUED_IN = 4
"""Messages that a connection may have waiting here: the rest waits in the network."""


class Listener:
    """Listens for workers at *address*, on `port` (0: a free one), for one training or for several,
    one after the other: between two of them nobody else can take the port. What comes in meanwhile
    waits.

    *security*: as the environment says, see `security`. *workers*, *max_payload_bytes*: as for
    `Shell`. Raises `UsageError` if nothing protects the address, or it cannot be bound.
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        workers: int,
        security: Security | None = None,
        max_payload_bytes: int = protocol.LARGEST_PAYLOAD_BYTES,
    ) -> None:
        self.address = address
        self.security = choose(address) if security is None else security
        self._context = zmq.Context(io_threads=1)
        self.router = self._context.socket(zmq.ROUTER)
        self.zap = self._context.socket(zmq.REP)
        """Where ZeroMQ asks whether it may let a connection in."""
        try:
            self._bind(_resolved(address), port, workers, max_payload_bytes)
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise cannot_listen(address, port, error) from None

    def _bind(self, address: str, port: int, workers: int, max_payload: int) -> None:
        router = self.router
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.MAXMSGSIZE, protocol.FRAME_BYTES)
        router.setsockopt(zmq.RCVHWM, QUEUED_IN)
        # ZeroMQ opens a full queue again when it is half empty: hence twice.
        router.setsockopt(zmq.SNDHWM, 2 * payloads.most_messages(max_payload))
        router.setsockopt(zmq.LINGER, int(1000 * timeouts.last_replies))
        router.setsockopt(zmq.BACKLOG, max(100, workers))
        router.setsockopt(zmq.IPV6, ":" in address)
        protocol.keep_alive(router)
        self.security.protect_server(router)
        self.zap.setsockopt(zmq.LINGER, 0)
        self.zap.bind(ZAP_ADDRESS)
        router.bind(protocol.endpoint(address, port or "*"))
        bound = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(bound.rpartition(":")[2])

    def close(self) -> None:
        """Let go of the port; the last answers have `Timeouts.last_replies` to leave."""
        self.zap.close()
        self.router.close()
        self._context.term()


class Shell:
    """Runs *server* at *address*, on `port` (0: a free one), for *workers* workers that
    know the job's *token*, and for so many *services*, which ask it with numbers behind those.
    *listener*: listens there already, and goes on when this has ended; None: one of its own.
    *peers*: names of those that it may ask itself, once it has met them. *numbers*: workers' lives
    are numbered here (see `sessions`).

    *security*: as the environment says, see `security`. *max_payload_bytes*: what one
    message may bring. *now* is the clock that the server is told.

    Raises `UsageError` if nothing protects the address, or it cannot be bound.
    """

    def __init__(
        self,
        server: AnyServer,
        address: str = "127.0.0.1",
        port: int = 0,
        *,
        workers: int,
        services: int = 0,
        peers: Iterable[str] = (),
        numbers: bool = False,
        token: str,
        listener: Listener | None = None,
        security: Security | None = None,
        max_payload_bytes: int = protocol.LARGEST_PAYLOAD_BYTES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if not token:
            raise UsageError("token: expected the job's secret token, got nothing")
        self._keeps_listening = listener is not None
        self._listener = listener or Listener(
            address,
            port,
            workers=workers,
            security=security,
            max_payload_bytes=max_payload_bytes,
        )
        self._router, self._zap = self._listener.router, self._listener.zap
        self.port = self._listener.port
        self._server = server
        self._workers = workers
        self._token = token
        self._now = now
        self.refused: Counter[str] = Counter()
        self.traffic = Traffic()
        self._outbox: deque[Answer | Ask] = deque()
        self._delivering = False
        self._stopped = False
        self._ended = False
        """Whether all workers have said goodbye."""
        self._begun_line = b""
        """Of what is read to the end; see `run`."""
        self._loop = PollLoop()
        self._peers: Peers | None = None
        if isinstance(server, AskingServer):
            self._peers = Peers(server, peers, self._loop, now)
        self._sessions = Sessions(
            workers, token, max_payload_bytes, self._loop, services, numbers
        )
        self._memory = ServerMemory()
        try:
            lives = self._sessions.listen(_resolved(address))
        except OSError as error:
            self.close()
            raise cannot_listen(address, 0, error) from None
        self._loop.watch(self._router, self._read_messages)
        self._loop.watch(self._zap, self._read_questions)
        self._loop.watch(lives, self._accept)

    def meet(
        self, sender: int, peers: Mapping[str, PeerAddress], life: int = 0
    ) -> None:
        """Let the service ask its *peers*, as number *sender*, which was started *life* times
        before; from any thread. Raises `UsageError` for a service that asks nobody."""
        if self._peers is None:
            raise UsageError(
                f"peers {', '.join(peers)}: this service asks nobody; one that does has "
                "on_reply and on_peer_lost (paceline.interfaces.AskingServer)"
            )
        self._peers.meet(sender, peers, life)

    def evict(self, worker: int, incarnation: int) -> None:
        """See `Sessions.evict`."""
        self._sessions.evict(worker, incarnation)

    @property
    def server(self) -> AnyServer:
        """The state machine behind it."""
        return self._server

    @property
    def workers(self) -> int:
        """How many there are to be."""
        return self._workers

    @property
    def present(self) -> int:
        """How many workers are connected."""
        return self._sessions.present

    @property
    def all_have_departed(self) -> bool:
        """Whether all workers have said goodbye."""
        return self._sessions.all_have_departed

    @property
    def all_have_ended_well(self) -> bool:
        """Whether all have, none of them in the middle of its training."""
        return self._sessions.all_have_ended_well

    @property
    def some_have_departed(self) -> bool:
        """Whether a worker has said goodbye: the others may be about to."""
        return self._sessions.some_have_departed

    # ---- the loop ----

    def run(
        self,
        stop: int | None = None,
        on_line: Callable[[bytes], Iterable[Answer | Ask]] = lambda line: (),
        *,
        lasts: bool = True,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """Serve until *stop*, a descriptor, is at its end, or all workers have said
        goodbye; unless it *lasts*, also until those that came are all gone, some of them without
        one. With *on_end*, which is called each time that all have said goodbye, only until one of them
        begins another training: another life of a worker may still come for what was trained. *on_line* is told each line of *stop*, and says what is to leave. Raises what
        *on_line* and the server raise, and nothing that a peer could cause."""
        if stop is not None:
            self._loop.watch(stop, lambda: self._read_stop(stop, on_line))
        try:
            while not self._stopped and not self._is_over(lasts, on_end):
                self._hear_peers()
                self._loop.handle(self._patience(lasts))
                deadline = self._server.next_deadline()
                if deadline is not None and self._now() >= deadline:
                    self._deliver(self._server.on_timer(self._now()))
            if self._peers is not None:
                self._peers.close(well=self._sessions.all_have_departed)
        finally:
            self.close()

    def close(self) -> None:
        """Let go of all sockets and memory; the last answers have `Timeouts.last_replies` to leave. A
        listener that others were given goes on."""
        if self._peers is not None:
            self._peers.close(well=False)
        self._memory.close()
        self._sessions.close()
        self._loop.let_go()
        if not self._keeps_listening:
            self._listener.close()

    def _is_over(self, lasts: bool, on_end: Callable[[], None] | None) -> bool:
        if on_end is not None:
            ended, self._ended = self._ended, self._sessions.all_have_departed
            if self._ended and not ended:
                on_end()
            return self._ended and self._sessions.another_is_wanted
        return self._sessions.all_have_departed or (
            not lasts and time.monotonic() >= self._sessions.deserted_from
        )

    def _patience(self, lasts: bool) -> int | None:
        """Milliseconds until the server's deadline, or until nobody is awaited any more, rounded
        up: never early."""
        deadline = self._server.next_deadline()
        waits = [] if deadline is None else [deadline - self._now()]
        if not lasts:
            waits.append(self._sessions.deserted_from - time.monotonic())
        wait = min(waits, default=math.inf)
        return (
            None if wait == math.inf else max(0, min(int(1000 * wait) + 1, 2**31 - 1))
        )

    def _read_stop(
        self, stop: int, on_line: Callable[[bytes], Iterable[Answer | Ask]]
    ) -> None:
        words = os.read(stop, 65536)
        self._stopped = not words
        *lines, self._begun_line = (self._begun_line + words).split(b"\n")
        for line in lines:
            self._deliver(on_line(line))

    def _read_questions(self) -> None:
        question = self._zap.recv_multipart()
        reply, admitted = self._listener.security.zap_reply(question, self._token)
        self._zap.send_multipart(reply)
        if not admitted:
            self._count("token", "a connection that does not know the job's token")

    def _hear_peers(self) -> None:
        """Until nothing is left that was not waited for."""
        while self._peers is not None and (said := self._peers.collect()):
            self._deliver(said)

    # ---- messages ----

    def _read_messages(self) -> None:
        for _ in range(MESSAGES_A_TURN):
            try:
                identity = self._router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            connection = self._sessions.connection_of(identity)
            try:
                header = self._router.recv(zmq.NOBLOCK)
                if connection is None:
                    hello = protocol.decode_hello(header)
                    self._say(identity, self._sessions.greet(identity, hello))
                else:
                    self._hear(connection, protocol.decode_from_worker(header))
            except RefusalError as refusal:
                self._refuse(refusal, identity, connection)
            finally:
                payloads.finish_message(self._router)

    def _hear(self, connection: Connection, words: protocol.FromWorker) -> None:
        """A known worker says something."""
        if isinstance(words, protocol.Begin | protocol.More):
            self._take(connection, words)
        elif isinstance(words, protocol.Share):
            self._share_memory(connection, words)
        elif isinstance(words, protocol.Reads):
            if connection.session.shared is not None:
                connection.session.shared.reads = True
        elif isinstance(words, protocol.Bye):
            self._say(connection.identity, protocol.Farewell())
            self._sessions.leave(connection, self._report)
        else:
            raise RefusalError("order", "a second hello", fatal=True)

    def _take(
        self, connection: Connection, words: protocol.Begin | protocol.More
    ) -> None:
        """A request, or a further part of it, has come in."""
        session = connection.session
        if not session.is_admitted:
            raise RefusalError("order", "a request before the ticket", fatal=True)
        chunk = payloads.Chunk(self._router, words.slot, session.shared)
        try:
            complete = connection.inbox.take(words, chunk)
        finally:
            chunk.let_go()
        if complete is None:
            return
        begun, payload = complete
        self.traffic.came(begun.message, payload)
        if isinstance(begun.message, Join | Leave):
            session.takes_part = isinstance(begun.message, Join)
        sender = Sender(
            session.worker,
            session.incarnation,
            connection.channel,
            begun.number,
            begun.received,
        )
        self._deliver(
            self._server.on_message(sender, begun.message, payload, self._now())
        )

    def _share_memory(self, connection: Connection, offer: protocol.Share) -> None:
        """A worker of this machine, as it seems, offers memory."""
        session = connection.session
        if not session.is_admitted or session.shared is not None:
            reason = "memory before the ticket, or a second time"
            raise RefusalError("order", reason, fatal=True)
        session.shared = self._memory.share(offer.memory)
        place = None if session.shared is None else session.shared.place
        self._say(connection.identity, protocol.Shared(place))

    # ---- refusals ----

    def _refuse(
        self, refusal: RefusalError, identity: bytes, connection: Connection | None
    ) -> None:
        """Count, and answer where there is somebody to answer to."""
        self._count(refusal.kind, str(refusal))
        if connection is None or refusal.kind == "undecodable":
            self._say(identity, protocol.Rejected(str(refusal)))
            return
        if refusal.fatal:
            self._say(identity, protocol.Rejected(str(refusal)))
            self._sessions.lose(connection.session, self._report)
            return
        number = connection.inbox.abandon()
        self._say(identity, protocol.Answered(number, Refused(reason=str(refusal))))

    def _count(self, kind: str, reason: str) -> None:
        self.refused[kind] += 1
        if self.refused[kind] <= REFUSALS_SAID:
            last = "; more of these are only counted"
            last = last if self.refused[kind] == REFUSALS_SAID else ""
            print(
                f"paceline server: refused ({kind}): {reason[:200]!r}{last}",
                file=sys.stderr,
                flush=True,
            )

    # ---- answers ----

    def _deliver(self, outgoing: Iterable[Answer | Ask]) -> None:
        """Send answers, and what is asked of peers; whoever cannot be reached is lost, which
        may bring more of both."""
        self._outbox.extend(outgoing)
        if self._delivering:
            return
        self._delivering = True
        try:
            while self._outbox:
                one = self._outbox.popleft()
                if isinstance(one, Ask):
                    assert self._peers is not None
                    self._outbox.extend(self._peers.ask(one))
                else:
                    self._send(one)
        finally:
            self._delivering = False
            self._memory.batch_ended()

    def _send(self, answer: Answer) -> None:
        connection = self._sessions.connection_to(answer.to)
        if connection is None:
            return  # lost or gone meanwhile
        session = connection.session
        worker, number = answer.to.worker, answer.to.number
        connection.inbox.answered(number)
        dtype, elements = payloads.described(answer.payload)
        first = protocol.Answered(number, answer.message, dtype, elements)
        shared = session.shared
        for words, chunk in payloads.messages(first, answer.payload, shared):
            if not self._put(connection.identity, words, chunk):
                self._count("unread", f"worker {worker} does not take its answers")
                self._sessions.lose(session, self._report)
                return
        self.traffic.left(answer.payload)

    def _say(self, identity: bytes, words: msgspec.Struct) -> None:
        """Send a short message; whoever does not take it has his own trouble."""
        self._put(identity, protocol.encode(words), None)

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

    # ---- liveness ----

    def _accept(self) -> None:
        self._sessions.accept(self._read_liveness)

    def _read_liveness(self, peer: socket.socket) -> None:
        try:
            self._sessions.read(peer, self._report)
        except RefusalError as refusal:
            # Counted first: whoever sees the connection end finds it counted.
            self._count(refusal.kind, str(refusal))
            self._sessions.show_out(peer)

    def _report(self, lost: Session) -> None:
        """The server is told, which may bring answers to others."""
        worker, incarnation = lost.worker, lost.incarnation
        self._deliver(self._server.on_lost(worker, incarnation, self._now()))


def cannot_listen(address: str, port: int, error: Exception) -> UsageError:
    """What a server says that finds no place."""
    return UsageError(
        f"a parameter server cannot listen at {address}, port {port}: {error}; "
        "expected an address of this machine, and a port that is free (or 0)"
    )


def _resolved(address: str) -> str:
    """An address of numbers: ZeroMQ binds to nothing else."""
    return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
