"""What goes over the wire between a worker and a server: words, and their limits.

Theory of operation
-------------------
A worker has one ZeroMQ connection per (server, channel), which keeps order. Each ZeroMQ
message is a header, msgpack of one of the types below, and at most one frame of payload:

- worker: `Hello`, on one machine `Share` and `Reads`, then for each request a `Begin` with the first chunk
  of its payload and a `More` with each further one, at the end a `Bye`;
- server: `Welcome`, `Shared`, then for each answer an `Answered` and `More`, and a `Farewell`.

A payload is cut into chunks of CHUNK_BYTES, so that receiving, adding and sending overlap.
One message's chunks follow each other without others in between, so a receiver assembles
one message per connection at a time, each chunk copied once, to its place in one tensor
(see `payloads`). Between processes of one machine a chunk lies in shared memory instead, and its
header says in which slot (see `shared_memory`).

Limits are part of the protocol: per channel, a worker has at most CREDITS requests since
the first that is unanswered, and at most CREDIT_BYTES of them (one alone may be larger,
up to LARGEST_PAYLOAD_BYTES unless the server was told otherwise). Whoever sends more is not one of ours. Only the
types below are ever built from what comes in; nothing is unpickled.
"""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from paceline.interfaces.server_messages import Reply, Request
from paceline.transport import liveness

CHUNK_BYTES = 2 << 20
"""1 to 4 MiB were equally fast on loopback; smaller ones cost more processor time."""
FRAME_BYTES = 4 << 20
"""No frame is larger: neither a chunk nor a header, which may describe a whole model."""
HEADER_BYTES = 128
"""What every runtime counts for a message beside its payload: its MessagePack header, ZeroMQ's
frames, and the headers of TCP and IP of one packet."""
SMALL_BYTES = 64 * 1024
"""A part smaller than this is not worth a message of its own."""
HELLO_BYTES = 1024
HAS_BEEN_HERE = "which has been here as"
"""In the refusal of a worker that has left: a later training may be about to begin."""
IS_HERE = "is here already, from"
"""In the refusal of a worker whose number somebody has: that one may be about to be lost."""
TAKEN_FOR_LOST = "taken for lost: join with another life"
"""The refusal of what a life of a worker asks that is not here any more."""
BEFORE_IT_STOOD = "before it stood"
"""In the words of a worker whose connection was closed while it shook hands."""
CREDITS = 1024
CREDIT_BYTES = 256 << 20
CHANNELS = 16
CHANNEL_CHARACTERS = 64
LARGEST_PAYLOAD_BYTES = 2 << 30


# ---- from a worker ----


class Hello(msgspec.Struct, tag="hello", array_like=True, forbid_unknown_fields=True):
    """The first message of a connection. *channel* ``""`` comes first, and alone, until
    it was welcomed and the liveness connection stands. *incarnation*: None where the server is
    to number this life; *workers*: how many the worker takes the job to have, 0 where it does
    not say. Who only *asks* is told whether it may come, and how many workers there are: nobody
    is known by that."""

    protocol: int
    token: str
    worker: int
    incarnation: int | None
    channel: str
    workers: int = 0
    asks: bool = False


class Memory(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Memory of a process of this machine: its descriptor there, and what it begins with."""

    process: int
    descriptor: int
    nonce: bytes


class Share(msgspec.Struct, tag="share", array_like=True, forbid_unknown_fields=True):
    """A worker of this machine, as it seems, offers memory for what it sends."""

    memory: Memory


class Reads(msgspec.Struct, tag="reads", array_like=True, forbid_unknown_fields=True):
    """The worker has opened the server's memory: answers may be put there from now on."""


class Begin(msgspec.Struct, tag="begin", array_like=True, forbid_unknown_fields=True):
    """A request. *number* counts a channel's requests from 0; *received*: the worker has
    the answers to all below; *dtype* is None without a payload. *slot*: of shared memory,
    where its first chunk lies, if it does not follow as a frame."""

    number: int
    received: int
    message: Request
    dtype: str | None = None
    elements: int = 0
    slot: int | None = None


class More(msgspec.Struct, tag="more", array_like=True, forbid_unknown_fields=True):
    """The next chunk of message *number*: in a *slot* of shared memory, or a frame."""

    number: int
    slot: int | None = None


class Bye(msgspec.Struct, tag="bye", array_like=True, forbid_unknown_fields=True):
    """Nothing more will come on this connection."""


FromWorker = Hello | Share | Reads | Begin | More | Bye


# ---- from a server ----


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    """The connection is known. Channel ``""`` gets the *port* for the liveness connection,
    and the *ticket* that is to be its first line; the others get neither. *incarnation*: the
    number of this life. *workers*: how many the job has, for who asks."""

    port: int = 0
    ticket: str = ""
    incarnation: int = 0
    workers: int = 0


class Shared(msgspec.Struct, tag="shared", array_like=True):
    """The server has opened the worker's memory, and offers its own for answers; None: it
    could not."""

    memory: Memory | None


class Answered(msgspec.Struct, tag="answered", array_like=True):
    """The answer to request *number*. *slot*: as `Begin` has it."""

    number: int
    message: Reply
    dtype: str | None = None
    elements: int = 0
    slot: int | None = None


class Farewell(msgspec.Struct, tag="farewell", array_like=True):
    """All that came before the `Bye` was dealt with."""


class Rejected(msgspec.Struct, tag="rejected", array_like=True):
    """What came is no request of a known worker. Nothing on this connection has a future."""

    reason: str


FromServer = Welcome | Shared | Answered | More | Farewell | Rejected


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


def endpoint(host: str, port: int | str) -> str:
    """ZeroMQ's spelling of an address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def keep_alive(messages: zmq.Socket[Any]) -> None:
    """Let the kernel notice when the machine at the other end vanishes: a little later than
    on the liveness connection, which has the words for it."""
    interval, probes = liveness.keep_alive()
    messages.setsockopt(zmq.TCP_KEEPALIVE, 1)
    messages.setsockopt(zmq.TCP_KEEPALIVE_IDLE, interval)
    messages.setsockopt(zmq.TCP_KEEPALIVE_INTVL, interval)
    messages.setsockopt(zmq.TCP_KEEPALIVE_CNT, probes + 2)
