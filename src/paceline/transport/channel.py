"""One connection of a worker to a server: a channel's requests, in order, and their answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import torch
import zmq

from paceline.errors import PeerLostError, UsageError
from paceline.interfaces.server_messages import Refused, Reply, Request
from paceline.transport import payloads, protocol
from paceline.transport.protocol import RefusalError
from paceline.transport.shared_memory import WorkerEnd

_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED  # it could not connect
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class Owner(Protocol):
    """The endpoint that a channel belongs to."""

    name: str
    shared: WorkerEnd | None

    def wait_for(self, reception: Reception) -> None:
        """Serve all channels until the answer is here, or never comes."""

    def give_up(
        self, sentence: str, kind: type[UsageError | PeerLostError] = PeerLostError
    ) -> None:
        """Nothing more is expected of the server."""


class Reception:
    """A `Reception` over one channel."""

    def __init__(
        self,
        channel: Channel,
        message: Request,
        payload: torch.Tensor | None,
        into: torch.Tensor | None,
        replied: Callable[[Reply], None] | None = None,
    ) -> None:
        """*replied* is called with the answer, once it is here."""
        self.channel = channel
        self._replied = replied
        self.message = message
        self.payload = payload
        self.into = into
        self.cost = max(payloads.size_of(payload), payloads.size_of(into))
        self.reply: Reply | None = None
        self.failure: str | None = None

    def wait(self) -> Reply:
        if self.reply is None:
            self.channel.server.wait_for(self)
        assert self.reply is not None
        if isinstance(self.reply, Refused):
            kind = (
                PeerLostError
                if self.reply.reason == protocol.TAKEN_FOR_LOST
                else UsageError
            )
            raise kind(f"{self.channel.server.name}: {self.reply.reason}")
        return self.reply

    def when_in(self, action: Callable[[], None]) -> None:
        raise NotImplementedError("only virtual time calls back")

    def take(self, reply: Reply) -> None:
        """The answer is here, payload and all."""
        self.reply = reply
        self.payload = self.into = None
        replied, self._replied = self._replied, None
        if replied is not None:
            replied(reply)


class Channel:
    """One connection: what was sent and is unanswered, and what is to be sent yet."""

    def __init__(self, server: Owner, name: str, socket: zmq.Socket[Any]) -> None:
        self.server = server
        self.name = name
        self.next = 0
        self.unanswered: dict[int, Reception] = {}  # in the order they were sent
        self.unanswered_bytes = 0
        self.queue: deque[Reception] = deque()
        self.welcome: protocol.Welcome | None = None
        self.farewell = False
        self.shared: protocol.Shared | None = None
        """What the server has said about memory, once it has."""
        self._begun: protocol.Answered | None = None
        self._assembly: payloads.Assembly | None = None
        self._host: torch.Tensor | None = None
        self.socket = socket
        self.monitor = socket.get_monitor_socket(_BROKEN)

    def say(self, words: msgspec.Struct) -> None:
        self.socket.send(protocol.encode(words), zmq.NOBLOCK)

    def submit(self, reception: Reception) -> None:
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
        return count <= protocol.CREDITS and total <= protocol.CREDIT_BYTES

    def _send_what_may_be_sent(self) -> None:
        while self._may_send():
            reception = self.queue.popleft()
            number, self.next = self.next, self.next + 1
            received = next(iter(self.unanswered), number)
            self.unanswered[number] = reception
            self.unanswered_bytes += reception.cost
            payload = reception.payload
            begin = protocol.Begin(
                number, received, reception.message, *payloads.described(payload)
            )
            shared = self.server.shared
            for header, chunk in payloads.messages(begin, payload, shared):
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
                self._hear(protocol.decode_from_server(header))
            finally:
                payloads.finish_message(self.socket)

    def _hear(self, words: protocol.FromServer) -> None:
        if isinstance(words, protocol.Answered | protocol.More):
            chunk = payloads.Chunk(self.socket, words.slot, self.server.shared)
            try:
                self._take(words, chunk)
            finally:
                chunk.let_go()
        elif isinstance(words, protocol.Shared):
            self.shared = words
        elif isinstance(words, protocol.Welcome):
            self.welcome = words
        elif isinstance(words, protocol.Farewell):
            self.farewell = True
        else:
            self.server.give_up(f"refused this worker: {words.reason}", UsageError)

    def _take(
        self, words: protocol.Answered | protocol.More, chunk: payloads.Chunk
    ) -> None:
        if isinstance(words, protocol.Answered):
            self._begin(words)
        elif self._begun is None or self._begun.number != words.number:
            return  # of an answer that did not fit
        if self._begun is not None:
            self._continue(self._begun, chunk)

    def _begin(self, words: protocol.Answered) -> None:
        reception = self.unanswered.get(words.number)
        if reception is None or self._begun is not None:
            raise RefusalError("order", f"an answer to {words.number}, out of order")
        self._begun = words
        if words.dtype is not None and reception.into is not None:
            into = reception.into
            dtype, room = payloads.described(into)
            if dtype != words.dtype or room < words.elements:
                size = f"{words.elements} elements of {words.dtype}"
                got = f"{into.numel()} of {into.dtype}"
                reason = f"the answer has {size}, the tensor handed over for it {got}"
                self._begun = None  # its chunks are thrown away
                self._finish(words.number, Refused(reason=reason))
                return
            into = into[: words.elements]
            self._host = into if into.device.type == "cpu" else into.cpu()
            self._assembly = payloads.Assembly(self._host)

    def _continue(self, begun: protocol.Answered, chunk: payloads.Chunk) -> None:
        assembly = self._assembly
        if assembly is not None:
            assembly.receive(chunk)
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
