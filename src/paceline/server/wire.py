"""What goes over the wire between a worker and a server: framing, limits, validation.

Theory of operation
-------------------
A worker has one ZeroMQ connection per (server, channel), which keeps order. Each ZeroMQ
message is a header, msgpack of one of the types below, and at most one frame of payload:

- worker: `Hello`, then for each request a `Begin` with the first chunk of its payload and a
  `More` with each further one, at the end a `Bye`;
- server: `Welcome`, then for each answer an `Answered` and `More`, and a `Farewell`.

A payload is cut into chunks of CHUNK_BYTES, so that receiving, adding and sending overlap.
One message's chunks follow each other without others in between, so a receiver assembles
one message per connection at a time, each chunk copied once, to its place in one tensor.

Limits are part of the protocol: per channel, a worker has at most CREDITS requests since
the first that is unanswered, and at most CREDIT_BYTES of them (one alone may be larger,
up to LARGEST_PAYLOAD_BYTES unless the server was told otherwise). Whoever sends more is not one of ours. Only the
types below are ever built from what comes in; nothing is unpickled.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
import zmq

from paceline.errors import UsageError
from paceline.messages import DTYPES, Reply, Request

CHUNK_BYTES = 2 << 20
"""1 to 4 MiB were equally fast on loopback; smaller ones cost more processor time."""
FRAME_BYTES = 4 << 20
"""No frame is larger: neither a chunk nor a header, which may describe a whole model."""
HELLO_BYTES = 1024
HAS_BEEN_HERE = "which has been here as"
"""In the refusal of a worker that has left: a later training may be about to begin."""
CREDITS = 1024
CREDIT_BYTES = 256 << 20
CHANNELS = 16
CHANNEL_CHARACTERS = 64
LARGEST_PAYLOAD_BYTES = 2 << 30
KEEP_ALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""Seconds, seconds and probes after which a machine that vanished is given up."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


# ---- from a worker ----


class Hello(msgspec.Struct, tag="hello", array_like=True, forbid_unknown_fields=True):
    """The first message of a connection. *channel* ``""`` comes first, and alone, until
    it was welcomed and the liveness connection stands."""

    protocol: int
    token: str
    worker: int
    incarnation: int
    channel: str


class Begin(msgspec.Struct, tag="begin", array_like=True, forbid_unknown_fields=True):
    """A request. *number* counts a channel's requests from 0; *received*: the worker has
    the answers to all below; *dtype* is None without a payload."""

    number: int
    received: int
    message: Request
    dtype: str | None = None
    elements: int = 0


class More(msgspec.Struct, tag="more", array_like=True, forbid_unknown_fields=True):
    """The next chunk of message *number*."""

    number: int


class Bye(msgspec.Struct, tag="bye", array_like=True, forbid_unknown_fields=True):
    """Nothing more will come on this connection."""


FromWorker = Hello | Begin | More | Bye


# ---- from a server ----


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    """The connection is known. Channel ``""`` gets the *port* for the liveness connection,
    and the *ticket* that is to be its first line; the others get neither."""

    port: int = 0
    ticket: str = ""


class Answered(msgspec.Struct, tag="answered", array_like=True):
    """The answer to request *number*."""

    number: int
    message: Reply
    dtype: str | None = None
    elements: int = 0


class Farewell(msgspec.Struct, tag="farewell", array_like=True):
    """All that came before the `Bye` was dealt with."""


class Rejected(msgspec.Struct, tag="rejected", array_like=True):
    """What came is no request of a known worker. Nothing on this connection has a future."""

    reason: str


FromServer = Welcome | Answered | More | Farewell | Rejected


class RefusalError(Exception):
    """What a peer sent is not accepted. *kind* is what it is counted under; *fatal*: the
    peer broke the protocol itself, and is dropped."""

    def __init__(self, kind: str, reason: str, *, fatal: bool = False) -> None:
        super().__init__(reason)
        self.kind = kind
        self.fatal = fatal


encode = msgspec.msgpack.Encoder().encode
_hello = msgspec.msgpack.Decoder(Hello)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


def decode_hello(header: bytes) -> Hello:
    """The introduction of a stranger. Raises `RefusalError`."""
    if len(header) > HELLO_BYTES:
        raise RefusalError("stranger", f"{len(header)} bytes before a hello")
    try:
        return _hello.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RefusalError("stranger", f"expected a hello: {error}") from None


def decode_from_worker(header: bytes) -> FromWorker:
    """A known worker's header. Raises `RefusalError`."""
    try:
        return _from_worker.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RefusalError("undecodable", f"not a message: {error}") from None


def decode_from_server(header: bytes) -> FromServer:
    """A server's header. Raises `RefusalError`."""
    try:
        return _from_server.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RefusalError("undecodable", f"not an answer: {error}") from None


# ---- payloads ----


def check_flat(what: str, tensor: torch.Tensor) -> None:
    """Raises `UsageError` for a tensor that cannot travel."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise UsageError(
            f"{what}: expected a flat contiguous tensor, got one of shape "
            f"{tuple(tensor.shape)} and strides {tensor.stride()}; use "
            "tensor.contiguous().view(-1)"
        )
    if tensor.dtype not in _NAMES:
        raise UsageError(
            f"{what}: expected one of {', '.join(DTYPES)}, got {tensor.dtype}"
        )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a flat tensor on the host, which the view keeps alive."""
    return tensor.detach().view(torch.uint8).numpy().data


def size_of(tensor: torch.Tensor | None) -> int:
    """Bytes of payload."""
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def described(tensor: torch.Tensor | None) -> tuple[str | None, int]:
    """What a header says about a payload: dtype and elements."""
    return (None, 0) if tensor is None else (_NAMES[tensor.dtype], tensor.numel())


def payload_bytes(dtype: str | None, elements: int, limit: int) -> int:
    """The size of a payload that a header announces. Raises `RefusalError`."""
    if dtype is None:
        if elements:
            raise RefusalError("payload", f"{elements} elements of no dtype")
        return 0
    if dtype not in DTYPES:
        raise RefusalError("dtype", f"unknown dtype; known: {', '.join(DTYPES)}")
    if elements < 0:
        raise RefusalError("payload", "a negative number of elements")
    size = elements * DTYPES[dtype].itemsize
    if size > limit:
        raise RefusalError(
            "too large", f"a payload of {size} bytes; at most {limit} are taken"
        )
    return size


def messages(
    number: int, header: bytes, payload: torch.Tensor | None
) -> Iterator[tuple[bytes, memoryview | None]]:
    """The ZeroMQ messages of one request or answer: headers, each with its chunk."""
    size = size_of(payload)
    if payload is None or not size:
        yield header, None
        return
    memory = bytes_of(payload)
    more = encode(More(number)) if size > CHUNK_BYTES else b""
    for start in range(0, size, CHUNK_BYTES):
        yield header if not start else more, memory[start : start + CHUNK_BYTES]


def most_messages(payload_bytes_: int) -> int:
    """How many messages at most may wait for a worker that keeps to its credits."""
    return 2 * CREDITS + (CREDIT_BYTES + payload_bytes_) // CHUNK_BYTES


class Assembly:
    """A payload coming in, chunk by chunk, into *tensor*."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._memory = bytes_of(tensor)
        self._got = 0

    @property
    def complete(self) -> bool:
        return self._got == len(self._memory)

    def receive(self, socket: zmq.Socket[Any]) -> None:
        """Take one chunk: the next frame of the message that is being received. Raises
        `RefusalError` if it is missing, or not of the size that it must have."""
        place = self._memory[self._got : self._got + CHUNK_BYTES]
        if not place:
            return
        if not socket.getsockopt(zmq.RCVMORE):
            raise RefusalError("payload", f"{len(place)} bytes of payload are missing")
        # The only copy: from ZeroMQ's buffer, which is not aligned, to its place.
        count = socket.recv_into(place, flags=zmq.NOBLOCK)
        if count != len(place):
            raise RefusalError(
                "payload", f"a chunk of {count} bytes instead of {len(place)}"
            )
        self._got += count


class Inbox:
    """What one channel sends to a server: its requests in order, whole, within credits.

    *limit*: bytes of one payload. Memory that this takes: one payload under way.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._next = 0
        self._unanswered: dict[int, int] = {}  # by number: bytes
        self._bytes = 0
        self._begun: Begin | None = None
        self._assembly: Assembly | None = None

    def take(
        self, words: Begin | More, socket: zmq.Socket[Any]
    ) -> tuple[Begin, torch.Tensor | None] | None:
        """Take a header and, from *socket*, the chunk that follows it; returns the request
        that is whole now. Raises `RefusalError`."""
        if isinstance(words, Begin):
            self._begin(words)
        elif self._begun is None or self._begun.number != words.number:
            if self._begun is None and words.number == self._next - 1:
                return None  # of a request that was refused
            raise RefusalError("order", "a chunk of no request", fatal=True)
        begun, assembly = self._begun, self._assembly
        assert begun is not None
        if assembly is not None:
            assembly.receive(socket)
        if socket.getsockopt(zmq.RCVMORE):
            raise RefusalError("payload", "more payload than the header says")
        if assembly is not None and not assembly.complete:
            return None
        self._begun = self._assembly = None
        return begun, None if assembly is None else assembly.tensor

    def _begin(self, words: Begin) -> None:
        number = words.number
        in_order = number == self._next and 0 <= words.received <= number
        if self._begun is not None or not in_order:
            reason = f"request {number} for {self._next}, or amid its payload"
            raise RefusalError("order", reason, fatal=True)
        self._next = number + 1
        size = payload_bytes(words.dtype, words.elements, self._limit)
        ahead = self._unanswered
        count, total = 1 + max(len(ahead), number - words.received), self._bytes + size
        if count > CREDITS or (ahead and total > CREDIT_BYTES):
            reason = f"{count} requests, of {total} bytes, without an answer"
            raise RefusalError("credits", reason, fatal=True)
        if words.dtype is not None:
            self._assembly = Assembly(_room_for(words.elements, DTYPES[words.dtype]))
        self._begun = words
        ahead[number] = size
        self._bytes += size

    def answered(self, number: int) -> None:
        """Request *number* is not waited for any more."""
        self._bytes -= self._unanswered.pop(number, 0)

    def abandon(self) -> int:
        """Forget the request under way, whose number is returned; what is still to come of
        it will be thrown away."""
        self._begun = self._assembly = None
        self.answered(self._next - 1)
        return self._next - 1


def _room_for(elements: int, dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.empty(elements, dtype=dtype)
    except RuntimeError as error:  # how torch says that there is no memory
        raise RefusalError("too large", f"no memory for it: {error}") from None


def finish_message(socket: zmq.Socket[Any]) -> int:
    """Throw away what is left of the message that is being received; returns how many
    frames that were."""
    count = 0
    while socket.getsockopt(zmq.RCVMORE):
        socket.recv_into(bytearray(), flags=zmq.NOBLOCK)
        count += 1
    return count


def endpoint(host: str, port: int | str) -> str:
    """ZeroMQ's spelling of an address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def keep_alive(connection: socket.socket | zmq.Socket[Any]) -> None:
    """Let the kernel notice when the machine at the other end vanishes."""
    if isinstance(connection, zmq.Socket):
        connection.setsockopt(zmq.TCP_KEEPALIVE, 1)
        connection.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEP_ALIVE["TCP_KEEPIDLE"])
        connection.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEP_ALIVE["TCP_KEEPINTVL"])
        connection.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEP_ALIVE["TCP_KEEPCNT"])
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE.items():
        if hasattr(socket, option):
            number = getattr(socket, option)
            connection.setsockopt(socket.IPPROTO_TCP, number, value)
