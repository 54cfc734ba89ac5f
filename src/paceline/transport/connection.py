"""Connects a worker to a server: an `Endpoint` over ZeroMQ. The server's side is `listener`.

*Channels.* There is one DEALER socket per channel, opened at first use. ZeroMQ's threads move the
bytes while this process computes.

*Requests.* `request` passes the message to ZeroMQ at once, and its payload from the tensor's own
memory. Requests beyond MOST_UNANSWERED (see `protocol`) stay in this process until replies arrive.
They move only inside calls of this endpoint. So a caller that waits for several servers should wait
in the order of its requests, as all workers do.

*Replies.* `wait` serves all channels of this endpoint until its own reply has arrived. It copies
each payload into the tensor of its request. A service that sends requests does not call `wait`: its
loop reads the connections, see `read_in`.

*Failures.* The liveness connection ends when the server's process ends, in any way. When it ends,
or a channel's connection breaks, every wait raises `PeerLostError`. This object never reconnects,
for two reasons: the server would not recognize the new connection, and another process may have
taken the port and would get the token. Nothing is sent twice. A worker returns as a new
incarnation.

This module starts no threads. Only connecting and closing have time-outs, since a living server may
take as long as it needs. Ctrl-C interrupts `wait`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from paceline.errors import PeerLostError, UsageError
from paceline.interfaces.server_messages import (
    PROTOCOL,
    Rejected,
    ReplyMessage,
    Request,
)
from paceline.records import StepRecorder
from paceline.timeouts import timeouts
from paceline.transport import liveness, protocol
from paceline.transport.poll_loop import PollLoop, Source
from paceline.transport.protocol import (
    ONLY_SERVICE,
    Memory,
    ProtocolError,
    ServiceKey,
)
from paceline.transport.security import SECRET, TOKEN, Security, choose
from paceline.transport.shared_memory import WorkerEnd

NEVER_MILLISECONDS = 1 << 30
"""ZeroMQ's interval for reconnecting: effectively never. With -1 (no reconnection) ZeroMQ would
discard received messages that have not been read."""


_BROKEN = (
    zmq.EVENT_DISCONNECTED
    # EVENT_CONNECT_RETRIED means that it could not connect.
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class ServerConnection:
    """An `Endpoint`: the connections of one incarnation of a worker to one server.

    Args:
        name: The server's name in messages.
        host: The server's host.
        port: The server's port for messages.
        worker: This worker's number.
        incarnation: This worker's incarnation; None: the server numbers it.
        workers: Number of the job's workers as this worker knows it; 0: unknown.
        asks: Only fetch ``workers`` from the server. Such a connection cannot send requests.
        token: The job's secret token.
        service: The service of that process to connect to.
        security: Protection of the connection; None: from the environment, see `security`.
        recorder: Counts bytes and waits; None: nothing is counted.

    Raises:
        PeerLostError: No server answers there within `Timeouts.server_connect`.
        UsageError: The server refuses this worker, or nothing protects the address.
    """

    _closed = True
    """False while sockets are open."""

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        *,
        worker: int,
        incarnation: int | None = 0,
        workers: int = 0,
        asks: bool = False,
        token: str,
        service: ServiceKey = ONLY_SERVICE,
        security: Security | None = None,
        recorder: StepRecorder | None = None,
    ) -> None:
        self.name = f"{name} at {host}:{port}"
        self._service = service
        self._host, self._port = host, port
        self._worker, self._incarnation, self._token = worker, incarnation, token
        self.workers, self._asks = workers, asks
        """Number of the job's workers."""
        self._security = choose(host) if security is None else security
        self._recorder = recorder
        self._failure: UsageError | PeerLostError | None = None
        self._channels: dict[str, Channel] = {}
        self.shared = WorkerEnd()
        self._liveness: socket.socket | None = None
        self._loop = PollLoop()
        self._watched: dict[Source, Callable[[], None]] = {}
        self._context = zmq.Context(io_threads=1)
        self._closed = False
        try:
            self._introduce(time.monotonic() + timeouts.server_connect)
        except BaseException:
            self._release(0.0)
            raise

    def __del__(self) -> None:
        """Release the sockets without a goodbye; otherwise ZeroMQ would wait for them forever."""
        if not self._closed:
            self._release(0.0)

    def request(
        self,
        message: Request,
        payload: torch.Tensor | None = None,
        into: torch.Tensor | None = None,
        channel: str = "",
    ) -> PendingReply:
        """Send a request and return at once; see `interfaces.Endpoint`.

        Raises `PeerLostError` if the server is known to be lost, and `UsageError` for a tensor that
        is not flat and contiguous.
        """
        return self.ask(message, payload, into, channel)

    def ask(
        self,
        message: Request,
        payload: torch.Tensor | None = None,
        into: torch.Tensor | None = None,
        channel: str = "",
        replied: Callable[[ReplyMessage], None] | None = None,
    ) -> PendingReply:
        """Send a request like `request`, and call *replied* with its reply when the reply is read."""
        for what, tensor in (("payload", payload), ("into", into)):
            if tensor is not None:
                protocol.check_flat(what, tensor)
        self._check()
        if self._recorder is not None:
            self._recorder.count_bytes(
                protocol.HEADER_BYTES + protocol.size_of(payload)
            )
        there = self._channels.get(channel) or self._open(channel)
        if payload is not None and payload.device.type != "cpu":
            payload = payload.cpu()
        pending_reply = PendingReply(there, message, payload, into, replied)
        try:
            there.submit(pending_reply)
        except ProtocolError as error:
            self._fail_on_invalid_reply(error)
        return pending_reply

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the server, as this worker reaches it."""
        return self._host, self._port

    def look(self) -> None:
        """Read messages that have arrived, without waiting.

        Raises `PeerLostError` if the server is lost.
        """
        self._loop.handle(0)
        self._check()

    @property
    def failure(self) -> UsageError | PeerLostError | None:
        """The error that ended this connection; None while the server may still reply."""
        return self._failure

    def read_in(self, loop: PollLoop) -> None:
        """Let *loop* read this connection from now on, on its own thread.

        Callers must not `wait` from then on: each reply goes to the *replied* function of `ask`.
        """
        for source in self._watched:
            self._loop.unwatch(source)
        self._loop = loop
        for source, handler in self._watched.items():
            loop.watch(source, handler)

    def part(self, well: bool) -> None:
        """Release the sockets at once; *well*: after a goodbye on the liveness connection.

        Unanswered requests and unread replies are lost.
        """
        if not self._closed:
            if well and self._liveness is not None:
                with contextlib.suppress(OSError):
                    self._liveness.send(b"bye\n")
            self._release(0.0)

    def close(self) -> None:
        """Say goodbye on all channels, then release the sockets.

        Requests without a `wait` may be lost. Returns within `Timeouts.server_goodbye`, or at worst
        twice that.
        """
        if self._closed:
            return
        linger = 0.0
        try:
            if self._failure is None and self._liveness is not None:
                for channel in self._channels.values():
                    channel.send(protocol.Bye())
                self._poll_until(
                    lambda: all(one.farewell for one in self._channels.values()),
                    time.monotonic() + timeouts.server_goodbye,
                )
                with contextlib.suppress(OSError):
                    self._liveness.send(b"bye\n")
                linger = 0.0 if self._failure else timeouts.server_goodbye
        except zmq.ZMQError:
            # The server is lost, so it needs no goodbye.
            pass
        finally:
            self._release(linger)

    # ---- connecting ----

    def _introduce(self, deadline: float) -> None:
        """Introduce this worker to the server, and open the liveness connection."""
        near = self._wait_for_listener(deadline)
        offer = self.shared.offer() if near and not self._asks else None
        main = self._open("", offer)
        self._await(lambda: main.welcome is not None, deadline)
        assert main.welcome is not None
        self.shared.open(main.welcome.memory)
        if self._asks:
            self.workers = main.welcome.workers
            return
        port, ticket = main.welcome.port, main.welcome.ticket
        self._incarnation = main.welcome.incarnation
        try:
            left = max(1.0, deadline - time.monotonic())
            self._liveness = socket.create_connection((self._host, port), left)
            liveness.watch(self._liveness)
            self._liveness.sendall(ticket.encode() + b"\n")
            if self._liveness.recv(1) != b"\n":
                raise OSError("it was closed")
        except OSError as error:
            raise PeerLostError(
                f"{self.name}: no liveness connection to its port {port}: {error}; the "
                "network must let both ports through"
            ) from None
        self._liveness.setblocking(False)
        self._watch(self._liveness, self._read_liveness)

    def _await(self, done: Callable[[], bool], deadline: float) -> None:
        """Serve connections until *done*. Raises `PeerLostError` at the deadline."""
        if self._poll_until(done, deadline):
            return
        self._check()
        raise self._unanswered()

    def _unanswered(self, how: str = "") -> PeerLostError:
        return PeerLostError(
            f"{self.name} did not answer within {timeouts.server_connect:.0f} s{how}: is it running "
            "there, and does a firewall let this machine through to it?"
        )

    def _wait_for_listener(self, deadline: float) -> bool:
        """Wait until the server listens, since ZeroMQ connects only once.

        Returns whether the server is on this machine: then both ends have the same address. A
        worker behind an emulated link has another address, so its payloads use that link. Raises
        `PeerLostError` at the deadline.
        """
        while True:
            left = max(0.01, deadline - time.monotonic())
            try:
                with socket.create_connection((self._host, self._port), left) as probe:
                    return bool(probe.getsockname()[0] == probe.getpeername()[0])
            except OSError as error:
                if time.monotonic() + timeouts.connect_retry >= deadline:
                    raise self._unanswered(f" ({error})") from None
            threading.Event().wait(timeouts.connect_retry)

    def _open(self, name: str, offer: Memory | None = None) -> Channel:
        if (
            len(name) > protocol.CHANNEL_CHARACTERS
            or len(self._channels) >= protocol.CHANNELS
        ):
            raise UsageError(
                f"channel {name!r}: expected at most {protocol.CHANNELS} channels, with "
                f"names of at most {protocol.CHANNEL_CHARACTERS} characters"
            )
        channel = self._channels[name] = Channel(self, name, self._socket())
        channel.socket.connect(protocol.endpoint(self._host, self._port))
        hello = protocol.Hello(
            PROTOCOL,
            self._token,
            self._worker,
            self._incarnation,
            name,
            self.workers,
            self._asks,
            self._service,
            offer,
        )
        # zmq.Again: the server has already refused this worker, and the monitor reports the reason.
        with contextlib.suppress(zmq.Again):
            channel.send(hello)
        self._watch(channel.socket, channel.read)
        self._watch(channel.monitor, lambda: self._read_monitor(channel))
        return channel

    def _watch(self, source: Source, handler: Callable[[], None]) -> None:
        def read() -> None:
            try:
                handler()
            except ProtocolError as error:
                self._fail_on_invalid_reply(error)

        self._watched[source] = read
        self._loop.watch(source, read)

    def _socket(self) -> zmq.Socket[Any]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, int(1000 * timeouts.server_goodbye))
        # MOST_UNANSWERED already limits requests, and so replies.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, protocol.LARGEST_ON_THE_WIRE)
        socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MILLISECONDS)
        socket.setsockopt(zmq.IPV6, ":" in self._host)
        protocol.keep_alive(socket)
        self._security.protect_worker(socket, self._token)
        return socket

    # ---- waiting ----

    def wait_for(self, pending_reply: PendingReply) -> None:
        start = time.perf_counter()
        poll = partial(self._poll_until, lambda: pending_reply.reply is not None, None)
        if self._recorder is None:
            poll()
        else:
            self._recorder.block("server", poll)
            self._recorder.waited("server", start, time.perf_counter())
        if pending_reply.reply is None:
            self._check()

    def _poll_until(self, done: Callable[[], bool], deadline: float | None) -> bool:
        """Serve all connections until *done*; False at the deadline or after the server's loss."""
        while not done():
            if self._failure is not None or self._closed:
                return False
            patience = None
            if deadline is not None:
                patience = int(1000 * (deadline - time.monotonic())) + 1
                if patience <= 0:
                    return False
            self._loop.handle(patience)
        return True

    def _read_monitor(self, channel: Channel) -> None:
        event = recv_monitor_message(channel.monitor, zmq.NOBLOCK)["event"]
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.give_up(
                f"does not know this worker: its token ({TOKEN}, of a server that is "
                f"named with HOST:PORT), or the value of {SECRET}, differs between the two; "
                "set the same values on both",
                UsageError,
            )
        elif event == zmq.EVENT_DISCONNECTED:
            # Its last messages may have arrived before it broke.
            channel.read()
            self.give_up(f"is lost: channel {channel.name!r} broke")
        else:
            mine = "encrypted" if self._security.encrypted else "plain"
            self.give_up(
                f"closed a connection (here {mine}) {protocol.BEFORE_IT_STOOD}: either it has just "
                f"ended, or {SECRET} differs between the two"
            )

    def _read_liveness(self) -> None:
        assert self._liveness is not None
        try:
            if self._liveness.recv(64):
                return
            how = liveness.how_it_ended(None)
        except BlockingIOError:
            return
        except OSError as error:
            how = liveness.how_it_ended(error)
        for channel in self._channels.values():
            # Its last messages may have arrived before the process ended.
            channel.read()
        self.give_up(f"is lost: its process {how}")

    def _fail_on_invalid_reply(self, error: ProtocolError) -> None:
        self.give_up(f"sent an invalid reply: {error}")

    def give_up(
        self, sentence: str, kind: type[UsageError | PeerLostError] = PeerLostError
    ) -> None:
        if self._failure is None:
            self._failure = kind(f"{self.name} {sentence}")

    def _check(self) -> None:
        if self._closed:
            raise UsageError(
                f"{self.name}: this connection is closed: close() was called before; open another one"
            )
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def _release(self, linger: float) -> None:
        self._closed = True
        for source in self._watched:
            self._loop.unwatch(source)
        self._watched.clear()
        for channel in self._channels.values():
            channel.close(linger)
        if self._liveness is not None:
            self._liveness.close()
        self.shared.close()
        self._context.term()


class PendingReply:
    """A reply that one channel waits for; implements `interfaces.PendingReply`."""

    def __init__(
        self,
        channel: Channel,
        message: Request,
        payload: torch.Tensor | None,
        into: torch.Tensor | None,
        replied: Callable[[ReplyMessage], None] | None = None,
    ) -> None:
        """*replied* is called with the reply when it has arrived."""
        self.channel = channel
        self._replied = replied
        self.message = message
        self.payload = payload
        self.into = into
        self.reply: ReplyMessage | None = None
        self.failure: str | None = None

    def wait(self) -> ReplyMessage:
        if self.reply is None:
            self.channel.server.wait_for(self)
        assert self.reply is not None
        if isinstance(self.reply, Rejected):
            kind = (
                PeerLostError
                if self.reply.reason == protocol.TAKEN_FOR_LOST
                else UsageError
            )
            raise kind(f"{self.channel.server.name}: {self.reply.reason}")
        return self.reply

    def on_completion(self, action: Callable[[], None]) -> None:
        raise NotImplementedError("only virtual time calls back")

    def take(self, reply: ReplyMessage) -> None:
        """Store the reply, whose payload has been copied."""
        self.reply = reply
        self.payload = self.into = None
        replied, self._replied = self._replied, None
        if replied is not None:
            replied(reply)


class Channel:
    """One connection, with its unanswered requests and its queue of unsent ones."""

    def __init__(
        self, server: ServerConnection, name: str, socket: zmq.Socket[Any]
    ) -> None:
        self.server = server
        self.name = name
        self.next = 0
        # Requests are in the order in which they were sent.
        self.unanswered: dict[int, PendingReply] = {}
        self.queue: deque[PendingReply] = deque()
        self.welcome: protocol.Welcome | None = None
        self.farewell = False
        self.socket = socket
        self.monitor = socket.get_monitor_socket(_BROKEN)

    def send(self, message: msgspec.Struct) -> None:
        self.socket.send(protocol.encode(message), zmq.NOBLOCK)

    def submit(self, pending_reply: PendingReply) -> None:
        """Send the request once fewer than MOST_UNANSWERED requests are unanswered."""
        self.queue.append(pending_reply)
        if len(self.unanswered) >= protocol.MOST_UNANSWERED:
            # Replies may have arrived already.
            self.read()
        self._send_what_may_be_sent()

    def _send_what_may_be_sent(self) -> None:
        while self.queue and len(self.unanswered) < protocol.MOST_UNANSWERED:
            pending_reply = self.queue.popleft()
            number, self.next = self.next, self.next + 1
            self.unanswered[number] = pending_reply
            payload = pending_reply.payload
            place = self.server.shared.put(payload)
            header = protocol.RequestHeader(
                number, pending_reply.message, *protocol.describe(payload), place
            )
            protocol.send(self.socket, header, payload if place is None else None)

    def read(self) -> None:
        """Read all that has arrived. Raises `ProtocolError` for messages that no server sends."""
        while True:
            try:
                header = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle_message(protocol.decode_from_server(header))
            finally:
                protocol.discard_message(self.socket)

    def _handle_message(self, message: protocol.FromServer) -> None:
        if isinstance(message, protocol.ReplyHeader):
            self._take(message)
        elif isinstance(message, protocol.Welcome):
            self.welcome = message
        elif isinstance(message, protocol.Farewell):
            self.farewell = True
        else:
            self.server.give_up(f"refused this worker: {message.reason}", UsageError)

    def _take(self, header: protocol.ReplyHeader) -> None:
        """Handle a reply: copy its payload into the tensor of its request."""
        pending_reply = self.unanswered.get(header.number)
        if pending_reply is None:
            raise ProtocolError("order", f"a reply to {header.number}, out of order")
        reply = header.message
        into = pending_reply.into
        lent = None
        if header.place is not None:
            lent = self.server.shared.lend(header.place)
        if header.dtype is not None and into is not None:
            dtype, room = protocol.describe(into)
            if dtype == header.dtype and header.elements <= room:
                self._receive(into[: header.elements], lent)
            else:
                size = f"{header.elements} elements of {header.dtype}"
                got = f"{into.numel()} of {into.dtype}"
                reason = (
                    f"the reply has {size}, and the tensor handed over for it {got}; "
                    "hand over one of the reply's dtype that is large enough"
                )
                reply = Rejected(reason=reason)
        del self.unanswered[header.number]
        pending_reply.take(reply)
        self._send_what_may_be_sent()

    def _receive(self, into: torch.Tensor, lent: memoryview | None) -> None:
        """Copy the payload: *lent* shared memory, or the message's further frames."""
        if lent is not None:
            if len(lent) != protocol.size_of(into):
                raise ProtocolError("payload", f"{len(lent)} bytes in shared memory")
            into.copy_(torch.frombuffer(lent, dtype=into.dtype))
            return
        if into.device.type == "cpu":
            protocol.receive_into(self.socket, into)
            return
        host = torch.empty_like(into, device="cpu")
        protocol.receive_into(self.socket, host)
        into.copy_(host)

    def close(self, linger: float) -> None:
        self.unanswered.clear()
        self.queue.clear()
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(int(1000 * linger))


def check_listens(name: str, host: str, port: int) -> None:
    """Raise `PeerLostError` at once if no process listens there.

    ZeroMQ would retry forever without an error.
    """
    try:
        socket.create_connection((host, port), timeouts.server_connect).close()
    except OSError as error:
        raise PeerLostError(f"{name} at {host}:{port} is lost: {error}") from None
