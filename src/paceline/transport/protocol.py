"""Defines the wire format between a worker and a server, and its limits.

A worker has one ZeroMQ connection per (server, channel), which keeps order. Each ZeroMQ message has
a header, which is msgpack of one of the types below. Only requests and replies also have a payload:

- worker: `Hello`, then for each request a `RequestHeader`, at the end a `Bye`;
- server: `Welcome`, then for each reply a `ReplyHeader`, and a `Farewell`.

*Payloads.* A payload is one frame of its message, or lies in shared memory (see `shared_memory`).
ZeroMQ sends it from the tensor's own memory. The server uses it where ZeroMQ received it
(`payload_from`). A worker copies it once, into the tensor of its request. Only a payload above
FRAME_BYTES has several frames, which a server joins in a copy. ZeroMQ applies its frame limit
(MAXMSGSIZE) to unauthenticated peers, too. So such a peer can make a server hold at most one such
frame.

*Flow control* is ZeroMQ's and TCP's: a server reads QUEUED_REQUESTS of a connection ahead. A worker
has at most MOST_UNANSWERED unanswered requests in a channel, and keeps further ones itself. So a
server can limit the replies that it queues for a worker, and drop a worker that does not read them.

Received data only ever becomes one of the types below; nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import zmq

from paceline.errors import UsageError
from paceline.interfaces.server_messages import DTYPES, ReplyMessage, Request
from paceline.transport import liveness

FRAME_BYTES = 64 << 20
"""The largest frame, which also bounds an unauthenticated peer's first one."""
LARGEST_ON_THE_WIRE = FRAME_BYTES + 256
"""The largest frame with the bytes that encryption adds."""
LARGEST_HEADER_BYTES = 4 << 20
"""The largest header; a header may describe a whole model."""
LARGEST_PAYLOAD_BYTES = 2 << 30
HEADER_BYTES = 128
"""Bytes that every runtime counts for a message beside its payload: its MessagePack header,
ZeroMQ's frames, and the headers of TCP and IP of one packet."""
SMALL_BYTES = 64 * 1024
"""The limit of a small payload, which is copied; no bucket is split into smaller parts."""
HELLO_BYTES = 1024
HAS_BEEN_HERE = "which has been here as"
"""Text in the refusal of a worker that has left: a later training may be about to begin."""
IS_HERE = "is here already, from"
"""Text in the refusal of a worker whose number is in use: the other process may be about to be
lost."""
TAKEN_FOR_LOST = "taken for lost: join with another incarnation"
"""The refusal of a request from an incarnation that is no longer present."""
BEFORE_IT_STOOD = "before the handshake ended"
"""Text in a worker's error if its connection was closed during the handshake."""
QUEUED_REQUESTS = 2
"""Requests of a connection that a server reads ahead; further ones wait in the network."""
MOST_UNANSWERED = 1024
"""Requests of a channel that a worker sends before it has their replies."""
CHANNELS = 16
CHANNEL_CHARACTERS = 64


class Memory(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Name of a process's shared memory on this machine: its descriptor there, and its first bytes."""

    process: int
    descriptor: int
    nonce: bytes


Place = tuple[int, int]
"""A payload's place in shared memory: its first block, and its bytes."""


# ---- messages of workers ----


class ServiceKey(NamedTuple):
    """Identifies the service that a connection is for.

    A process serves many: a script may train several times (*training*), and a training may have
    several services, each with its own *number*.
    """

    training: int = 0
    number: int = 0


ONLY_SERVICE = ServiceKey()
"""The key in a process with one service."""


class Hello(msgspec.Struct, tag="hello", array_like=True, forbid_unknown_fields=True):
    """The first message of a connection.

    Attributes:
        channel: ``""`` is the first channel. Others follow after its welcome and the liveness
            connection.
        incarnation: None: the server numbers it.
        workers: Number of the job's workers as this worker knows it; 0: unknown.
        asks: Only ask whether the server would admit this worker, and for the number of workers.
            The server's state does not change.
        memory: Shared memory for payloads of requests, if the server is on this machine.
    """

    protocol: int
    token: str
    worker: int
    incarnation: int | None
    channel: str
    workers: int = 0
    asks: bool = False
    service: ServiceKey = ONLY_SERVICE
    memory: Memory | None = None


class RequestHeader(
    msgspec.Struct, tag="request", array_like=True, forbid_unknown_fields=True
):
    """A request; *number* counts a channel's requests from 0.

    *dtype* is None without a payload. *place* is the payload's place in shared memory, if it has no
    frame.
    """

    number: int
    message: Request
    dtype: str | None = None
    elements: int = 0
    place: Place | None = None


class Bye(msgspec.Struct, tag="bye", array_like=True, forbid_unknown_fields=True):
    """The last message on this connection."""


FromWorker = Hello | RequestHeader | Bye


# ---- messages of servers ----


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    """The connection is accepted.

    Attributes:
        port: The port for the liveness connection; only on channel ``""``.
        ticket: The first line of that connection.
        incarnation: The number of this incarnation.
        workers: The number of the job's workers, for a `Hello` that asks.
        memory: Shared memory for payloads of replies, if the server has opened the worker's.
    """

    port: int = 0
    ticket: str = ""
    incarnation: int = 0
    workers: int = 0
    memory: Memory | None = None


class ReplyHeader(msgspec.Struct, tag="reply", array_like=True):
    """The reply to request *number*; the other fields are those of `RequestHeader`."""

    number: int
    message: ReplyMessage
    dtype: str | None = None
    elements: int = 0
    place: Place | None = None


class Farewell(msgspec.Struct, tag="farewell", array_like=True):
    """The server has handled all messages before the `Bye`."""


class Rejected(msgspec.Struct, tag="rejected", array_like=True):
    """The message was no request of a known worker. The worker must not use this connection again."""

    reason: str


FromServer = Welcome | ReplyHeader | Farewell | Rejected


class ProtocolError(Exception):
    """A message that this end does not accept.

    *kind* is the name under which it is counted. *fatal*: the peer broke the protocol itself, and
    is dropped.
    """

    def __init__(self, kind: str, reason: str, *, fatal: bool = False) -> None:
        super().__init__(reason)
        self.kind = kind
        self.fatal = fatal


encode = msgspec.msgpack.Encoder().encode
_hello = msgspec.msgpack.Decoder(Hello)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


def decode_hello(header: bytes) -> Hello:
    """Decode the first message of an unknown peer. Raises `ProtocolError`."""
    if len(header) > HELLO_BYTES:
        raise ProtocolError("stranger", f"{len(header)} bytes before a hello")
    try:
        return _hello.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError("stranger", f"expected a hello: {error}") from None


def decode_from_worker(header: bytes) -> FromWorker:
    """Decode a known worker's header. Raises `ProtocolError`."""
    if len(header) > LARGEST_HEADER_BYTES:
        reason = (
            f"a header of {len(header)} bytes; at most {LARGEST_HEADER_BYTES} are read"
        )
        raise ProtocolError("undecodable", reason)
    try:
        return _from_worker.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(
            "undecodable", f"not a message of a worker: {error}"
        ) from None


def decode_from_server(header: bytes) -> FromServer:
    """Decode a server's header. Raises `ProtocolError`."""
    try:
        return _from_server.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(
            "undecodable", f"not a message of a server: {error}"
        ) from None


# ---- payloads ----


_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def check_flat(what: str, tensor: torch.Tensor) -> None:
    """Raise `UsageError` for a tensor that cannot be sent."""
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


def size_of(tensor: torch.Tensor | None) -> int:
    """Return the bytes of a payload."""
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def describe(tensor: torch.Tensor | None) -> tuple[str | None, int]:
    """Return a payload's dtype and number of elements, for its header."""
    return (None, 0) if tensor is None else (_NAMES[tensor.dtype], tensor.numel())


def payload_bytes(dtype: str | None, elements: int, limit: int) -> int:
    """Return the bytes of the payload that a header announces. Raises `ProtocolError`."""
    if dtype is None:
        if elements:
            raise ProtocolError("payload", f"{elements} elements of no dtype")
        return 0
    if dtype not in DTYPES:
        raise ProtocolError("dtype", f"unknown dtype; known: {', '.join(DTYPES)}")
    if elements < 0:
        raise ProtocolError("payload", "a negative number of elements")
    size = elements * DTYPES[dtype].itemsize
    if size > limit:
        raise ProtocolError(
            "too large", f"a payload of {size} bytes; at most {limit} are taken"
        )
    return size


def frames_of(payload: torch.Tensor | None) -> list[memoryview]:
    """Return the host memory of a payload, in frames.

    It must not change until ZeroMQ has sent them.
    """
    if payload is None or not payload.numel():
        return []
    memory = payload.detach().view(torch.uint8).numpy().data
    return [memory[at : at + FRAME_BYTES] for at in range(0, len(memory), FRAME_BYTES)]


def payload_from(
    dtype: str | None, elements: int, frames: Sequence[memoryview], limit: int
) -> torch.Tensor | None:
    """Return the payload that a header announces, as a tensor in the memory of its frame.

    The tensor keeps the frame alive; a payload in shared memory is a frame, too. A payload that is
    small, not aligned or in several frames is copied. ZeroMQ stores a small one together with other
    messages, which would stay in memory as long.

    Raises `ProtocolError` if the frames are not the payload that the header announces.
    """
    size = payload_bytes(dtype, elements, limit)
    sizes = [len(frame) for frame in frames]
    if sum(sizes) < size:
        raise ProtocolError(
            "payload", f"{size - sum(sizes)} bytes of payload are missing"
        )
    if sizes != frame_sizes(size):
        raise ProtocolError("payload", "more payload than the header says")
    if dtype is None:
        return None
    kind = DTYPES[dtype]
    if len(frames) == 1 and size >= SMALL_BYTES:
        payload = torch.frombuffer(frames[0], dtype=kind)
        if payload.data_ptr() % kind.itemsize == 0:
            return payload
    try:
        payload = torch.empty(elements, dtype=kind)
    except RuntimeError as error:
        # torch raises RuntimeError if there is no memory.
        raise ProtocolError("too large", f"no memory for it: {error}") from None
    for place, frame in zip(frames_of(payload), frames, strict=True):
        place[:] = frame
    return payload


def frame_sizes(size: int) -> list[int]:
    """Return the frames' bytes of a payload of *size* bytes: one, or several above FRAME_BYTES."""
    return [min(FRAME_BYTES, size - at) for at in range(0, size, FRAME_BYTES)]


def receive_into(socket: zmq.Socket[Any], payload: torch.Tensor) -> None:
    """Copy the further frames of the message being received from *socket* into *payload*.

    Raises `ProtocolError` if their size differs.
    """
    for place in frames_of(payload):
        if not socket.getsockopt(zmq.RCVMORE):
            raise ProtocolError("payload", f"{len(place)} bytes of payload are missing")
        count = socket.recv_into(place, flags=zmq.NOBLOCK)
        if count != len(place):
            reason = f"a frame of {count} bytes instead of {len(place)}"
            raise ProtocolError("payload", reason)


def send(
    socket: zmq.Socket[Any], header: msgspec.Struct, payload: torch.Tensor | None = None
) -> None:
    """Queue a message, or on a ROUTER the parts after the identity.

    Raises `zmq.ZMQError` if the queue is full.
    """
    frames = frames_of(payload)
    socket.send(encode(header), zmq.NOBLOCK | (zmq.SNDMORE if frames else 0))
    for i, frame in enumerate(frames, 1):
        more = zmq.SNDMORE if i < len(frames) else 0
        socket.send(frame, zmq.NOBLOCK | more, copy=False)


def discard_message(socket: zmq.Socket[Any]) -> None:
    """Discard the rest of the message being received."""
    while socket.getsockopt(zmq.RCVMORE):
        socket.recv_into(bytearray(), flags=zmq.NOBLOCK)


# ---- addresses and sockets ----


def endpoint(host: str, port: int | str) -> str:
    """Return an address as ZeroMQ writes it."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def keep_alive(messages: zmq.Socket[Any]) -> None:
    """Let the kernel detect a vanished machine at the other end.

    It does so slightly later than on the liveness connection, whose error message explains the
    loss.
    """
    interval, probes = liveness.keep_alive()
    messages.setsockopt(zmq.TCP_KEEPALIVE, 1)
    messages.setsockopt(zmq.TCP_KEEPALIVE_IDLE, interval)
    messages.setsockopt(zmq.TCP_KEEPALIVE_INTVL, interval)
    messages.setsockopt(zmq.TCP_KEEPALIVE_CNT, probes + 2)
