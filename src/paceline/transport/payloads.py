"""Payloads on their way: cut into chunks here, put together there, within limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import zmq

from paceline.errors import UsageError
from paceline.interfaces.server_messages import DTYPES
from paceline.transport import protocol
from paceline.transport.protocol import Answered, Begin, More, RefusalError, encode
from paceline.transport.shared_memory import ServerEnd, WorkerEnd

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a flat tensor on the host."""
    return tensor.detach().view(torch.uint8)


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
    first: Begin | Answered,
    payload: torch.Tensor | None,
    shared: ServerEnd | WorkerEnd | None,
) -> Iterator[tuple[bytes, memoryview | None]]:
    """The ZeroMQ messages of one request or answer: headers, and each one's chunk, unless it
    was put into memory that is *shared*."""
    if payload is None or not payload.numel():
        yield encode(first), None
        return
    memory = as_bytes(payload)
    for start in range(0, len(memory), protocol.CHUNK_BYTES):
        chunk = memory[start : start + protocol.CHUNK_BYTES]
        words = More(first.number) if start else first
        words.slot = None if shared is None else shared.put(payload, start, chunk)
        yield encode(words), chunk.numpy().data if words.slot is None else None


def most_messages(payload_bytes_: int) -> int:
    """How many messages at most may wait for a worker that keeps to its credits."""
    return (
        2 * protocol.CREDITS
        + (protocol.CREDIT_BYTES + payload_bytes_) // protocol.CHUNK_BYTES
    )


@dataclass(frozen=True)
class Chunk:
    """What the header just received from *socket* announces: the message's next frame, or
    what lies in a *slot* of *shared* memory, where the header names one."""

    socket: zmq.Socket[Any]
    slot: int | None = None
    shared: ServerEnd | WorkerEnd | None = None

    def copy_to(self, place: torch.Tensor) -> None:
        """The only copy: from ZeroMQ's buffer, which is not aligned, or from the slot, to
        its place. Raises `RefusalError` if there is no chunk, or another size of one."""
        if self.slot is not None:
            if self.shared is None:
                raise RefusalError("payload", "a slot, and no memory is shared")
            self.shared.take(self.slot, place)
            return
        if not self.socket.getsockopt(zmq.RCVMORE):
            raise RefusalError("payload", f"{len(place)} bytes of payload are missing")
        count = self.socket.recv_into(place.numpy().data, flags=zmq.NOBLOCK)
        if count != len(place):
            raise RefusalError(
                "payload", f"a chunk of {count} bytes instead of {len(place)}"
            )

    def let_go(self) -> None:
        """It was copied, or is not wanted: its slot, if it has one, is free again."""
        if self.slot is not None and self.shared is not None:
            self.shared.free(self.slot)


class Assembly:
    """A payload coming in, chunk by chunk, into *tensor*."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._memory = as_bytes(tensor)
        self._got = 0

    @property
    def complete(self) -> bool:
        return self._got == len(self._memory)

    def receive(self, chunk: Chunk) -> None:
        """Take what comes next. Raises `RefusalError` if it is missing, or not of the size that
        it must have."""
        place = self._memory[self._got : self._got + protocol.CHUNK_BYTES]
        if len(place):
            chunk.copy_to(place)
            self._got += len(place)


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
        self, words: Begin | More, chunk: Chunk
    ) -> tuple[Begin, torch.Tensor | None] | None:
        """Take a header and the chunk that it announces; returns the request that is whole
        now. Raises `RefusalError`."""
        if isinstance(words, Begin):
            self._begin(words)
        elif self._begun is None or self._begun.number != words.number:
            if self._begun is None and words.number == self._next - 1:
                return None  # of a request that was refused
            raise RefusalError("order", "a chunk of no request", fatal=True)
        begun, assembly = self._begun, self._assembly
        assert begun is not None
        if assembly is not None:
            assembly.receive(chunk)
        if chunk.socket.getsockopt(zmq.RCVMORE):
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
        if count > protocol.CREDITS or (ahead and total > protocol.CREDIT_BYTES):
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
