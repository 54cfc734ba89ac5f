"""The protocol between workers and aggregators: frames over TCP, and mutual authentication.

A frame is a header of 16 bytes and a payload:

======= ===== =====================================================================
offset  bytes field
======= ===== =====================================================================
0       8     position of the chunk in the job's stream
8       4     bytes of the payload
12      2     members: how many workers' contributions are in it
14      1     kind (`Kind`)
15      1     mode (`Mode`): where the chunk's sum goes
======= ===== =====================================================================

Messages other than numbers are JSON in the payload; nothing is unpickled. The listening end sends
first:

============ =============== ===========================================================
from         kind            content
============ =============== ===========================================================
aggregator   CHALLENGE       a nonce
worker       HELLO           its job's terms (`Hello`), with an HMAC of them and the nonce
aggregator   GRANTED         window and chunk (`Granted`), with an HMAC; or REFUSED
worker       CONTRIBUTION    numbers of one chunk, to be added up
worker       MAXIMUM         numbers of one chunk, to find their maximum
aggregator   SUM, DONE       a chunk's result; or only that it is complete
either       GOODBYE         nothing more is needed
aggregator   LOST            the job is over, and why
============ =============== ===========================================================

*Authentication*: both ends prove that they have the aggregator's token, which is never sent.
*Loss*: a connection that ends without a goodbye is a lost peer. Its job can complete nothing more,
so every aggregator closes the job's other connections, and all workers know at once. Nothing is
inferred from silence.

Threat model. A connection without the token is refused, and none of its data is used. Frames are
neither encrypted nor signed: an attacker who alters a TCP stream alters the numbers, as with gloo.
Jobs that distrust each other need aggregators of their own.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import os
import socket
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.errors import PeerLostError, UsageError
from paceline.timeouts import timeouts
from paceline.transport import liveness
from paceline.transport.security import TRUSTED, derived, is_loopback

VERSION = 3
MOST_TEXT_BYTES = 1 << 18
"""The most bytes of a message in text: the terms of a tree name each of its servers."""
HEADER = struct.Struct("<QIHBB")

Integers = NDArray[np.int32]
IntegerOperation = Literal["sum", "max"]
Address = tuple[str, int]


class Kind(enum.IntEnum):
    """The kinds of frames."""

    CHALLENGE = 1
    HELLO = 2
    GRANTED = 3
    REFUSED = 4
    CONTRIBUTION = 5
    SUM = 6
    DONE = 7
    GOODBYE = 8
    LOST = 9
    MAXIMUM = 10


CONTRIBUTIONS = (Kind.CONTRIBUTION, Kind.MAXIMUM)
_LAST_KIND = max(Kind)


class Mode(enum.IntEnum):
    """Where a chunk's sum goes: to the job's own workers, to the next group of a ring, or to both."""

    LOCAL = 0
    FORWARD = 1
    ONWARD = 2


class Header(NamedTuple):
    """See the module's table."""

    position: int
    size: int
    members: int
    kind: int
    mode: int


class ProtocolError(ValueError):
    """The other end sends a frame that this protocol does not have."""


# ---- JSON messages ----


class Terms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job's terms at one aggregator or server, the same for all its members.

    A job's chunks belong to *parts* in turn: position modulo the number of parts.

    Attributes:
        expected: For each part, how many workers' contributions a chunk has here.
        parent_of: For each part, the number of the `Parent` that adds up further (-1: none, the sum is
            complete here).
        agents: How many connections take turns at receiving sums for the next group (`Mode`).
        window: Chunks that a worker has under way.
        chunk_bytes: The most bytes of one chunk.
        leased: Whether memory for a window is reserved for this job; else it competes for free memory.
    """

    job: str
    expected: tuple[int, ...]
    window: int
    chunk_bytes: int
    agents: int = 0
    leased: bool = True
    parent_of: tuple[int, ...] = (-1,)


class Parent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The address where sums of a part are added up further, and the job's terms there.

    *number*: the number that the connecting aggregator has there.
    """

    host: str
    port: int
    number: int
    terms: Terms


class Challenge(msgspec.Struct, kw_only=True):
    """A *nonce* that the other end's proof must contain."""

    version: int
    nonce: str


class Hello(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request to take part.

    *role*: ``worker`` and ``aggregator`` contribute, an ``agent`` receives sums for the next group.
    *number*: which one of its role. *name*: its name in messages. *parents*: where sums go next,
    for aggregators.
    """

    role: str
    number: int
    name: str
    terms: Terms
    parents: tuple[Parent, ...] = ()
    nonce: str
    proof: str = ""


class Granted(msgspec.Struct, kw_only=True):
    """The number of chunks and their bytes that this job may have under way."""

    window: int
    chunk_bytes: int
    proof: str = ""


_Message = TypeVar("_Message", bound=msgspec.Struct)


def proof_of(token: str, nonce: str, message: Hello | Granted) -> str:
    """The HMAC of a message, for the other end's *nonce*; only holders of *token* can compute it."""
    text = msgspec.json.encode(msgspec.structs.replace(message, proof="")).decode()
    return derived(token.encode(), f"aggregator {nonce} {text}")


def is_proven(token: str, nonce: str, message: Hello | Granted) -> bool:
    """Whether the sender of the message has the token, and answers this nonce."""
    expected = proof_of(token, nonce, message).encode()
    return hmac.compare_digest(expected, message.proof.encode())


def decode_json(
    payload: bytes | bytearray | memoryview, kind: type[_Message]
) -> _Message:
    """Decode a JSON message. Raises `ProtocolError` for anything else."""
    try:
        return msgspec.json.decode(payload, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"expected {kind.__name__}: {error}") from None


def check_may_be_read(
    address: str, environment: Mapping[str, str] | None = None
) -> None:
    """Raise `UsageError` if *address* is on a network that the user has not declared as trusted.

    Frames are not encrypted, so that network can read them.
    """
    environment = os.environ if environment is None else environment
    if is_loopback(address) or environment.get(TRUSTED) == "1":
        return
    raise UsageError(
        f"an aggregator at {address} is reached over a network, and its frames are not "
        "encrypted, since it adds their numbers. If everyone on that network may read the "
        f"training's data, export {TRUSTED}=1"
    )


# ---- frames ----


def bytes_of(values: Integers | bytearray) -> memoryview:
    """The same memory, as bytes."""
    if isinstance(values, bytearray):
        return memoryview(values)
    return values.view(np.uint8).data


class Frame(NamedTuple):
    """One frame to send. *then*: frames that wait until the kernel has taken this one."""

    header: bytes
    payload: memoryview | None = None
    then: Sequence[Any] = ()


def frame(
    kind: Kind,
    position: int = 0,
    values: Integers | None = None,
    members: int = 0,
    mode: int = Mode.LOCAL,
    then: Sequence[Any] = (),
) -> Frame:
    """A frame of a chunk; *values* must not change until it is sent."""
    payload = None if values is None or not len(values) else bytes_of(values)
    size = 0 if payload is None else len(payload)
    return Frame(HEADER.pack(position, size, members, kind, mode), payload, then)


def text_frame(kind: Kind, message: msgspec.Struct | str) -> Frame:
    """Return a frame of a JSON message, or of a reason as plain text."""
    text = (
        message.encode() if isinstance(message, str) else msgspec.json.encode(message)
    )
    return Frame(HEADER.pack(0, len(text), 0, kind, 0), memoryview(text))


class Connection:
    """Frames over one TCP connection, which never blocks.

    The caller polls it for reading, and for writing while `is_sending`.
    """

    def __init__(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        liveness.watch(peer)
        self.socket = peer
        self.header: Header | None = None
        """The header of the frame that is being read."""
        self.filled = 0
        """Bytes of its payload that have been read."""
        self._begun = memoryview(bytearray(HEADER.size))
        self._begun_bytes = 0
        self._queue: deque[Frame] = deque()
        self._sent = 0
        """Bytes of the queue's first frame that are sent."""
        self.queued = 0
        """Frames that the kernel has not taken."""

    def fileno(self) -> int:
        return self.socket.fileno()

    # ---- sending ----

    @property
    def is_sending(self) -> bool:
        """Whether frames wait for the kernel."""
        return self.queued > 0

    def put(self, one: Frame) -> None:
        """Queue a frame; `flush` sends it."""
        self._queue.append(one)
        self.queued += 1

    def flush(self) -> list[Any]:
        """Send as much as the kernel takes; return the `Frame.then` of the frames sent. Raises
        `OSError`."""
        freed: list[Any] = []
        while self._queue:
            header, payload, then = self._queue[0]
            if self._sent < len(header):
                rest = memoryview(header)[self._sent :]
                parts = [rest] if payload is None else [rest, payload]
            else:
                assert payload is not None
                parts = [payload[self._sent - len(header) :]]
            try:
                self._sent += self.socket.sendmsg(parts)
            except BlockingIOError:
                break
            if self._sent == len(header) + (0 if payload is None else len(payload)):
                self._queue.popleft()
                self.queued -= 1
                self._sent = 0
                freed += then
        return freed

    # ---- reading ----

    def read_header(self, most: int) -> Header | None:
        """The next frame's header; None if it has not arrived yet.

        It stays in `header` until its payload has been read. Raises `EOFError` at the end of the
        stream, `OSError`, and `ProtocolError` if the payload has more than *most* bytes.
        """
        if self.header is not None:
            return self.header
        try:
            got = self.socket.recv_into(self._begun[self._begun_bytes :])
        except BlockingIOError:
            return None
        if not got:
            raise EOFError
        self._begun_bytes += got
        return self._take_header(most)

    def read_payload(self, into: memoryview, most: int) -> bool:
        """Read the payload of `header` into *into*; return whether all of it has arrived.

        The same call also reads the start of the next frame. Raises like `read_header`.
        """
        size = len(into)
        if self.filled == size:
            self.header = None
            self.filled = 0
            return True
        try:
            got = self.socket.recvmsg_into([into[self.filled :], self._begun])[0]
        except BlockingIOError:
            return False
        if not got:
            raise EOFError
        wanted = size - self.filled
        if got < wanted:
            self.filled += got
            return False
        self.header = None
        self.filled = 0
        self._begun_bytes = got - wanted
        self._take_header(most)
        return True

    def _take_header(self, most: int) -> Header | None:
        if self._begun_bytes < HEADER.size:
            return None
        self._begun_bytes = 0
        self.header = header = Header(*HEADER.unpack(self._begun))
        if header.size > most or header.kind > _LAST_KIND:
            raise ProtocolError(
                f"a frame of kind {header.kind} and {header.size} bytes: expected one of "
                f"{most} bytes at most"
            )
        return header

    def close(self) -> None:
        """Close the connection; frames that the kernel has not taken are not sent."""
        with contextlib.suppress(OSError):
            self.socket.close()


# ---- registration: a worker's blocking connection ----


class Registration:
    """A worker's blocking connection to an aggregator, or to a worker that listens for it.

    *nonce*: the other end's challenge, if it is known already. The other end then sends nothing
    until it answers. Raises `PeerLostError` if *address* cannot be reached.
    """

    def __init__(
        self, address: Address, token: str, name: str, nonce: str | None = None
    ) -> None:
        self.name, self._token = f"{name} at {address[0]}:{address[1]}", token
        self._challenge = nonce
        self._nonce = os.urandom(16).hex()
        try:
            self._socket = socket.create_connection(
                address, timeouts.aggregator_connect
            )
        except OSError as error:
            raise PeerLostError(f"{self.name} cannot be reached: {error}") from None

    def send_hello(
        self,
        role: str,
        number: int,
        name: str,
        terms: Terms,
        parents: tuple[Parent, ...] = (),
    ) -> None:
        """Ask to take part. Raises `UsageError` if the other end is no aggregator."""
        if self._challenge is None:
            kind, payload = self._receive_message()
            try:
                challenge = decode_json(payload, Challenge)
            except ProtocolError:
                challenge = Challenge(version=0, nonce="")
            if kind != Kind.CHALLENGE or challenge.version != VERSION:
                raise self._not_one()
            self._challenge = challenge.nonce
        hello = Hello(
            role=role,
            number=number,
            name=name,
            terms=terms,
            parents=parents,
            nonce=self._nonce,
        )
        hello.proof = proof_of(self._token, self._challenge, hello)
        one = text_frame(Kind.HELLO, hello)
        try:
            self._socket.sendall(one.header + bytes(one.payload or b""))
        except OSError as error:
            raise self._lost(error) from None

    def granted(self) -> tuple[Connection, Granted]:
        """Wait for the answer. Raises `UsageError` with the reason of a refusal, or
        `PeerLostError`."""
        kind, payload = self._receive_message()
        if kind == Kind.REFUSED:
            self.close()
            raise UsageError(f"{self.name} refuses: {payload.decode(errors='replace')}")
        if kind != Kind.GRANTED:
            raise self._not_one()
        try:
            granted = decode_json(payload, Granted)
        except ProtocolError:
            raise self._not_one() from None
        if not is_proven(self._token, self._nonce, granted):
            self.close()
            raise UsageError(f"{self.name} has not shown that it has the token")
        return Connection(self._socket), granted

    def close(self) -> None:
        """Close the connection without taking part."""
        self._socket.close()

    def _receive_message(self) -> tuple[int, bytes]:
        header = Header(*HEADER.unpack(self._exactly(HEADER.size)))
        if header.size > MOST_TEXT_BYTES:
            raise self._not_one()
        return header.kind, self._exactly(header.size)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                got = self._socket.recv(size - len(data))
            except OSError as error:
                raise self._lost(error) from None
            if not got:
                raise self._lost(None)
            data += got
        return data

    def _not_one(self) -> UsageError:
        self.close()
        return UsageError(
            f"{self.name} does not speak version {VERSION} of this protocol. Check that it is "
            "an aggregator of the same version of paceline"
        )

    def _lost(self, error: OSError | None) -> PeerLostError:
        self.close()
        return PeerLostError(f"{self.name} {liveness.how_it_ended(error)}")
