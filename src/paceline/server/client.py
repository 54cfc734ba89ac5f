"""A worker's end of a server: an `Endpoint` over ZeroMQ. The other end is in `serve`.

Theory of operation
-------------------
One DEALER socket per channel, opened when it is first used; ZeroMQ's own threads move the
bytes while this process computes. `request` hands everything to them at once, from the
tensor's own memory; what exceeds the credits (see `wire`) is kept here, and sent as answers
come in. `wait` serves all channels of this endpoint until its own answer is there, and
copies each chunk straight into the tensor that was handed over. What is kept here moves
only inside calls of this endpoint: whoever waits on several servers should wait in the
order in which he asked, as all workers do.

The liveness connection ends when the server's process ends, in any way: then, or when a
channel's connection breaks, everything that waits raises `PeerLostError`. Nothing is sent a
second time; a worker that comes back does so as a new incarnation. A forked child closes
its copy of that connection, so a worker's data loaders do not keep it alive.

No threads of our own, no time-outs but those of connecting and closing: a server that is
alive may take all the time it needs. `wait` can be interrupted by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from paceline.errors import PeerLostError, UsageError
from paceline.instruments import Journal
from paceline.messages import PROTOCOL, Refused, Reply, Request
from paceline.server import wire
from paceline.server.security import SECRET, Security, choose
from paceline.server.wire import RefusalError

CONNECT_SECONDS = 30.0
"""How long a server may take to answer the first time."""
CLOSE_SECONDS = 5.0
"""How long a goodbye may take."""

_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class _Reception:
    """A `Reception` over one channel."""

    def __init__(
        self,
        channel: _Channel,
        message: Request,
        payload: torch.Tensor | None,
        into: torch.Tensor | None,
    ) -> None:
        self.channel = channel
        self.message = message
        self.payload = payload
        self.into = into
        self.cost = max(wire.size_of(payload), wire.size_of(into))
        self.reply: Reply | None = None
        self.failure: str | None = None

    def wait(self) -> Reply:
        if self.reply is None:
            self.channel.server._wait_for(self)
        assert self.reply is not None
        if isinstance(self.reply, Refused):
            raise UsageError(f"{self.channel.server.name}: {self.reply.reason}")
        return self.reply

    def take(self, reply: Reply) -> None:
        """The answer is here, payload and all."""
        self.reply = reply
        self.payload = self.into = None


class _Channel:
    """One connection: what was sent and is unanswered, and what is to be sent yet."""

    def __init__(self, server: RemoteServer, name: str) -> None:
        self.server = server
        self.name = name
        self.next = 0
        self.unanswered: dict[int, _Reception] = {}  # in the order they were sent
        self.unanswered_bytes = 0
        self.queue: deque[_Reception] = deque()
        self.welcome: wire.Welcome | None = None
        self.farewell = False
        self._begun: wire.Answered | None = None
        self._assembly: wire.Assembly | None = None
        self._host: torch.Tensor | None = None
        self.socket = server._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, int(1000 * CLOSE_SECONDS))
        self.socket.setsockopt(
            zmq.SNDHWM, 0
        )  # credits are the limit, in both directions
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, wire.FRAME_BYTES)
        self.socket.setsockopt(zmq.IPV6, ":" in server._host)
        wire.keep_alive(self.socket)
        server._security.protect_worker(self.socket, server._token)
        self.monitor = self.socket.get_monitor_socket(_BROKEN)
        self.socket.connect(wire.endpoint(server._host, server._port))
        self.say(
            wire.Hello(
                PROTOCOL, server._token, server._worker, server._incarnation, name
            )
        )

    def say(self, words: msgspec.Struct) -> None:
        self.socket.send(wire.encode(words), zmq.NOBLOCK)

    def submit(self, reception: _Reception) -> None:
        """Send at once, or as soon as credits allow."""
        self.queue.append(reception)
        if not self._may_send():
            self.read()  # there may be answers already
        self._send_what_may_be_sent()

    def _may_send(self) -> bool:
        if not self.queue:
            return False
        if not self.unanswered:
            return True
        count = self.next - next(iter(self.unanswered)) + 1
        total = self.unanswered_bytes + self.queue[0].cost
        return count <= wire.CREDITS and total <= wire.CREDIT_BYTES

    def _send_what_may_be_sent(self) -> None:
        while self._may_send():
            reception = self.queue.popleft()
            number, self.next = self.next, self.next + 1
            received = next(iter(self.unanswered), number)
            self.unanswered[number] = reception
            self.unanswered_bytes += reception.cost
            payload = reception.payload
            begin = wire.Begin(
                number, received, reception.message, *wire.described(payload)
            )
            for header, chunk in wire.messages(number, wire.encode(begin), payload):
                if chunk is None:
                    self.socket.send(header, zmq.NOBLOCK)
                else:
                    self.socket.send(header, zmq.NOBLOCK | zmq.SNDMORE)
                    self.socket.send(chunk, zmq.NOBLOCK, copy=False)

    def read(self) -> None:
        """Take all that has come in. Raises `RefusalError` for what no server says."""
        while True:
            try:
                header = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._hear(wire.decode_from_server(header))
            finally:
                wire.finish_message(self.socket)

    def _hear(self, words: wire.FromServer) -> None:
        if isinstance(words, wire.Answered):
            self._begin(words)
        elif isinstance(words, wire.More):
            if self._begun is not None and self._begun.number == words.number:
                self._continue()
        elif isinstance(words, wire.Welcome):
            self.welcome = words
        elif isinstance(words, wire.Farewell):
            self.farewell = True
        else:
            self.server._give_up(f"refused this worker: {words.reason}", UsageError)

    def _begin(self, words: wire.Answered) -> None:
        reception = self.unanswered.get(words.number)
        if reception is None or self._begun is not None:
            raise RefusalError("order", f"an answer to {words.number}, out of order")
        self._begun = words
        if words.dtype is not None and reception.into is not None:
            into = reception.into
            dtype, room = wire.described(into)
            if dtype != words.dtype or room < words.elements:
                size = f"{words.elements} elements of {words.dtype}"
                got = f"{into.numel()} of {into.dtype}"
                reason = f"the answer has {size}, the tensor handed over for it {got}"
                self._begun = None  # its chunks are thrown away
                self._finish(words.number, Refused(reason=reason))
                return
            into = into[: words.elements]
            self._host = into if into.device.type == "cpu" else into.cpu()
            self._assembly = wire.Assembly(self._host)
        self._continue()

    def _continue(self) -> None:
        begun, assembly = self._begun, self._assembly
        assert begun is not None
        if assembly is not None:
            assembly.receive(self.socket)
            if not assembly.complete:
                return
            into = self.unanswered[begun.number].into
            assert into is not None
            if into.device.type != "cpu":
                into[: begun.elements].copy_(assembly.tensor)
        self._begun = self._assembly = self._host = None
        self._finish(begun.number, begun.message)

    def _finish(self, number: int, reply: Reply) -> None:
        reception = self.unanswered.pop(number)
        self.unanswered_bytes -= reception.cost
        reception.take(reply)
        self._send_what_may_be_sent()

    def close(self, linger: float) -> None:
        self.unanswered.clear()
        self.queue.clear()
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(int(1000 * linger))


_endpoints: weakref.WeakSet[RemoteServer] = weakref.WeakSet()


def _forked() -> None:
    for endpoint in list(_endpoints):
        if endpoint._liveness is not None:
            endpoint._liveness.close()


os.register_at_fork(after_in_child=_forked)


class RemoteServer:
    """An `Endpoint`: the server *name* at *host*, *port*, as *incarnation* of *worker*.

    *token* is the job's; *security*: as the environment says, see `security`. Bytes and
    waits are counted in *journal*.

    Raises `PeerLostError` if nobody answers there within `CONNECT_SECONDS`, `UsageError`
    if the server does not want this worker, or if nothing protects the address.
    """

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        *,
        worker: int,
        incarnation: int = 0,
        token: str,
        security: Security | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.name = f"{name} at {host}:{port}"
        self._host, self._port = host, port
        self._worker, self._incarnation, self._token = worker, incarnation, token
        self._security = choose(host) if security is None else security
        self._journal = journal
        self._failure: UsageError | PeerLostError | None = None
        self._closed = False
        self._channels: dict[str, _Channel] = {}
        self._liveness: socket.socket | None = None
        self._poller = zmq.Poller()
        self._handlers: dict[Any, Callable[[], None]] = {}
        self._context = zmq.Context(io_threads=1)
        _endpoints.add(self)
        try:
            self._introduce(time.monotonic() + CONNECT_SECONDS)
        except BaseException:
            self._let_go(0.0)
            raise

    def request(
        self,
        message: Request,
        payload: torch.Tensor | None = None,
        into: torch.Tensor | None = None,
        channel: str = "",
    ) -> _Reception:
        """Send a request, and return at once; see `interfaces.Endpoint`.

        Raises `PeerLostError` if the server is known to be gone, `UsageError` for a tensor
        that is not flat and contiguous.
        """
        for what, tensor in (("payload", payload), ("into", into)):
            if tensor is not None:
                wire.check_flat(what, tensor)
        self._check()
        if payload is not None and self._journal is not None:
            self._journal.sent(wire.size_of(payload))
        there = self._channels.get(channel) or self._open(channel)
        if payload is not None and payload.device.type != "cpu":
            payload = payload.cpu()
        reception = _Reception(there, message, payload, into)
        with self._faults_of_the_server():
            there.submit(reception)
        return reception

    def close(self) -> None:
        """Say goodbye on all channels, and let the sockets go. Requests that were not
        waited for may get lost. Returns within `CLOSE_SECONDS`, twice at the worst."""
        if self._closed:
            return
        linger = 0.0
        try:
            if self._failure is None and self._liveness is not None:
                for channel in self._channels.values():
                    channel.say(wire.Bye())
                self._poll_until(
                    lambda: all(one.farewell for one in self._channels.values()),
                    time.monotonic() + CLOSE_SECONDS,
                )
                with contextlib.suppress(OSError):
                    self._liveness.send(b"bye\n")
                linger = 0.0 if self._failure else CLOSE_SECONDS
        except zmq.ZMQError:
            pass  # it is gone: nobody is left to say goodbye to
        finally:
            self._let_go(linger)

    # ---- connecting ----

    def _introduce(self, deadline: float) -> None:
        """Get known to the server, and open the liveness connection."""
        main = self._open("")
        if not self._poll_until(lambda: main.welcome is not None, deadline):
            self._check()
            raise PeerLostError(
                f"{self.name} did not answer within {CONNECT_SECONDS:.0f} s: is it running "
                "there, and does a firewall let this machine through to it?"
            )
        assert main.welcome is not None
        port, ticket = main.welcome.port, main.welcome.ticket
        try:
            left = max(1.0, deadline - time.monotonic())
            self._liveness = socket.create_connection((self._host, port), left)
            wire.keep_alive(self._liveness)
            self._liveness.sendall(ticket.encode() + b"\n")
            if self._liveness.recv(1) != b"\n":
                raise OSError("it was closed")
        except OSError as error:
            raise PeerLostError(
                f"{self.name}: no liveness connection to its port {port}: {error}; the "
                "network must let both ports through"
            ) from None
        self._liveness.setblocking(False)
        self._poller.register(self._liveness, zmq.POLLIN)
        self._handlers[self._liveness.fileno()] = self._read_liveness

    def _open(self, name: str) -> _Channel:
        if len(name) > wire.CHANNEL_CHARACTERS or len(self._channels) >= wire.CHANNELS:
            raise UsageError(
                f"channel {name!r}: expected at most {wire.CHANNELS} channels, with "
                f"names of at most {wire.CHANNEL_CHARACTERS} characters"
            )
        channel = self._channels[name] = _Channel(self, name)
        self._poller.register(channel.socket, zmq.POLLIN)
        self._handlers[channel.socket] = channel.read
        self._poller.register(channel.monitor, zmq.POLLIN)
        self._handlers[channel.monitor] = lambda: self._read_monitor(channel)
        return channel

    # ---- waiting ----

    def _wait_for(self, reception: _Reception) -> None:
        start = time.perf_counter()
        self._poll_until(lambda: reception.reply is not None, None)
        if self._journal is not None:
            tag = str(reception.message.__struct_config__.tag)
            self._journal.waited(tag, start, time.perf_counter())
        if reception.reply is None:
            self._check()

    def _poll_until(self, done: Callable[[], bool], deadline: float | None) -> bool:
        """Serve all connections until *done*; False if the server is lost before, or at
        the deadline."""
        while not done():
            if self._failure is not None or self._closed:
                return False
            patience = None
            if deadline is not None:
                patience = int(1000 * (deadline - time.monotonic())) + 1
                if patience <= 0:
                    return False
            with self._faults_of_the_server():
                for ready, _ in self._poller.poll(patience):
                    self._handlers[ready]()
        return True

    def _read_monitor(self, channel: _Channel) -> None:
        event = recv_monitor_message(channel.monitor, zmq.NOBLOCK)["event"]
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._give_up(
                "does not know this worker: the job's token, or the value of "
                f"{SECRET}, differs between the two",
                UsageError,
            )
        elif event == zmq.EVENT_DISCONNECTED:
            self._give_up(f"is lost: channel {channel.name!r} broke")
        else:
            mine = "encrypted" if self._security.encrypted else "plain"
            self._give_up(
                f"closed a connection (here {mine}) before it stood: either it has just "
                f"ended, or {SECRET} differs between the two"
            )

    def _read_liveness(self) -> None:
        assert self._liveness is not None
        try:
            if self._liveness.recv(64):
                return
            reason = "its process ended"
        except BlockingIOError:
            return
        except OSError as error:
            reason = str(error)
        for channel in self._channels.values():
            channel.read()  # what it said last
        self._give_up(f"is lost: {reason}")

    @contextlib.contextmanager
    def _faults_of_the_server(self) -> Any:
        try:
            yield
        except RefusalError as error:
            self._give_up(f"sent what is no answer: {error}")

    def _give_up(
        self, sentence: str, kind: type[UsageError | PeerLostError] = PeerLostError
    ) -> None:
        if self._failure is None:
            self._failure = kind(f"{self.name} {sentence}")

    def _check(self) -> None:
        if self._closed:
            raise UsageError(f"{self.name}: close() was called on this end")
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def _let_go(self, linger: float) -> None:
        self._closed = True
        self._handlers.clear()
        for channel in self._channels.values():
            channel.close(linger)
        if self._liveness is not None:
            self._liveness.close()
        self._context.term()
