"""Passes payloads between a server and the workers of its own machine in shared memory.

A payload that passes a socket is copied into the kernel and out of it. So a worker on the server's
machine offers memory for its requests in its `Hello`. The server's `Welcome` names memory for
replies, the same for all workers. Each memory is an anonymous file (``memfd``) of MEMORY_BYTES
whose size is sealed. The other process opens it through its owner's descriptor.

*Sending.* The sender copies a payload into the first sufficiently long run of free blocks. The
header names the place, and no frame follows. The receiver uses the payload in place, as it uses a
frame. The blocks are free again when the receiver's tensor and all its views are deleted. A reply
that several workers get at once is copied once. If too few blocks are free, or a payload is small,
it is sent as a frame: the sender never waits for blocks. Headers always travel over ZeroMQ, so
order and waiting are the same as for frames.

*Marks.* The worker's memory has a mark of one byte for each block of requests, and for each block
of replies. Blocks of replies are free when no worker has a mark there. The sender sets marks after
its copy, and before it sends the header. The receiver resets them after its last use. Both release
Python's lock while they copy, and take it again before they mark. This keeps copy and mark in order
on every processor.

*Clean-up.* The kernel frees the memory when the last process that has it ends. If memory cannot be
shared (another user, another container, a system without ``memfd``, SWITCH), payloads are frames,
which is no error.

*Limits.* A worker can make the server hold only a bounded amount. Its memory has a fixed size,
cannot shrink, and is opened only after the worker has shown the token. Blocks that a worker never
reads are freed when it leaves; until then other workers' replies may have to be frames. A new
incarnation has new memory.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import weakref
from typing import Self

import torch

from paceline.transport import protocol
from paceline.transport.protocol import Memory, Place, ProtocolError

SWITCH = "PACELINE_SHARED_MEMORY"
"""With the value ``0`` no memory is offered, and all payloads are frames."""

BLOCK_BYTES = protocol.SMALL_BYTES
BLOCKS = 512
MEMORY_BYTES = BLOCKS * BLOCK_BYTES
NONCE_BYTES = 16

# The first page has the nonce, a flag (the worker has opened the server's memory), and the marks.
_PAGE = 4096
_OPENED = 16
_OF_REQUESTS, _OF_REPLIES = 64, 64 + BLOCKS
_FREE, _SENT, _LENT = b"\0", b"\1", b"\2"


class _Region:
    """One shared memory: a page with marks, and blocks.

    *descriptor* is the maker's, open until `close`; None in the other process.
    """

    def __init__(self, whole: torch.Tensor, descriptor: int | None) -> None:
        self.page = whole[:_PAGE].numpy().data
        self.requests = self.page[_OF_REQUESTS:][:BLOCKS]
        self.replies = self.page[_OF_REPLIES:][:BLOCKS]
        self.blocks = whole[_PAGE:]
        self._descriptor = descriptor

    @classmethod
    def make(cls) -> Self | None:
        """Make a memory; None if the system has no ``memfd`` or does not permit it."""
        if os.environ.get(SWITCH) == "0" or not hasattr(os, "memfd_create"):
            return None
        try:
            flags = os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC
            descriptor = os.memfd_create("paceline", flags)
        except OSError:
            # A sandbox may forbid it.
            return None
        try:
            os.ftruncate(descriptor, _PAGE + MEMORY_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
            region = cls(_mapped(descriptor), descriptor)
        except (OSError, RuntimeError):
            # The process may have reached a limit.
            os.close(descriptor)
            return None
        region.page[:NONCE_BYTES] = secrets.token_bytes(NONCE_BYTES)
        return region

    @classmethod
    def open(cls, memory: Memory) -> Self | None:
        """Open another process's memory; None if that is impossible.

        That process may be on another machine, in another container or of another user, or have
        another file at that descriptor.
        """
        path = f"/proc/{memory.process}/fd/{memory.descriptor}"
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                # Opening a device could have effects.
                return None
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            return None
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() == _seals()
            if not sealed or os.fstat(descriptor).st_size != _PAGE + MEMORY_BYTES:
                return None
            region = cls(_mapped(descriptor), None)
        except (OSError, RuntimeError):
            return None
        finally:
            os.close(descriptor)
        return region if region.page[:NONCE_BYTES] == memory.nonce else None

    @property
    def memory(self) -> Memory:
        """The name by which other processes open it."""
        assert self._descriptor is not None
        nonce = bytes(self.page[:NONCE_BYTES])
        return Memory(os.getpid(), self._descriptor, nonce)

    def close(self) -> None:
        """Close the descriptor: from now on no other process can open the memory."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def put(self, payload: torch.Tensor, marks: memoryview) -> Place | None:
        """Copy a payload into the first blocks that are free by *marks*.

        Returns None if too few blocks are free, or a frame is cheaper.
        """
        size = protocol.size_of(payload)
        if not protocol.SMALL_BYTES <= size <= protocol.FRAME_BYTES:
            return None
        block = bytes(marks).find(_FREE * _blocks(size))
        if block < 0:
            return None
        start = block * BLOCK_BYTES
        place = self.blocks[start : start + size].view(payload.dtype)
        place.copy_(payload.detach())
        return block, size

    def lend(self, place: Place, marks: memoryview) -> memoryview:
        """Return the bytes at *place*.

        Their blocks are free when the last reference to the bytes is gone.

        Raises `ProtocolError` if the sender put no payload there, or it is lent already.
        """
        block, size = place
        if not 0 < size <= MEMORY_BYTES or not 0 <= block <= BLOCKS - _blocks(size):
            raise ProtocolError("payload", f"{size} bytes from shared block {block} on")
        if marks[block : block + _blocks(size)] != _SENT * _blocks(size):
            raise ProtocolError("payload", f"shared block {block} has no payload")
        _mark(marks, place, _LENT)
        start = block * BLOCK_BYTES
        lent = self.blocks[start : start + size].numpy()
        weakref.finalize(lent, _mark, marks, place, _FREE).atexit = False
        return lent.data


def _mapped(descriptor: int) -> torch.Tensor:
    """Map a descriptor's memory, which remains after the descriptor is closed.

    Python's mmap would keep a copy of the descriptor, one for each worker. Raises `OSError`, or
    torch's `RuntimeError`.
    """
    path = f"/proc/self/fd/{descriptor}"
    size = _PAGE + MEMORY_BYTES
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES)


def _mark(marks: memoryview, place: Place, mark: bytes) -> None:
    block, size = place
    marks[block : block + _blocks(size)] = mark * _blocks(size)


class WorkerEnd:
    """A worker's own memory for requests, and the server's memory for replies."""

    def __init__(self) -> None:
        self._own: _Region | None = None
        self._servers: _Region | None = None

    def offer(self) -> Memory | None:
        """Make memory for the `Hello` to offer; None if it cannot be shared."""
        self._own = _Region.make()
        return None if self._own is None else self._own.memory

    def open(self, memory: Memory | None) -> None:
        """Open the server's *memory*, from the `Welcome`.

        None: the server could not open this worker's memory.
        """
        if self._own is None:
            return
        self._own.close()
        if memory is None:
            self._own = None
        else:
            self._servers = _Region.open(memory)
            self._own.page[_OPENED] = self._servers is not None

    def close(self) -> None:
        """Release all memory; lent payloads keep theirs."""
        if self._own is not None:
            self._own.close()
        self._own = self._servers = None

    def put(self, payload: torch.Tensor | None) -> Place | None:
        """Copy a request's payload. None if there is no payload, or it must be a frame."""
        if payload is None or self._own is None:
            return None
        place = self._own.put(payload, self._own.requests)
        if place is not None:
            _mark(self._own.requests, place, _SENT)
        return place

    def lend(self, place: Place) -> memoryview:
        """Return a reply's payload, see `_Region.lend`."""
        if self._own is None or self._servers is None:
            raise ProtocolError("payload", "a place, and no memory is shared")
        return self._servers.lend(place, self._own.replies)


class ServerMemory:
    """A server's memory for replies, made for the first worker of its machine."""

    def __init__(self) -> None:
        self._own: _Region | None = None
        self._workers: list[_Region] = []
        self._sent: dict[int, tuple[torch.Tensor, Place]] = {}
        """The payloads that this batch has sent, by identity. A reference to each one keeps its
        identity from being reused."""

    def share(self, offer: Memory | None) -> ServerEnd:
        """Return the server's side for a worker whose `Hello` makes this *offer*."""
        worker = None if offer is None else _Region.open(offer)
        if worker is not None and self._own is None:
            self._own = _Region.make()
        if worker is None or self._own is None:
            return ServerEnd(self, None, None)
        self._workers.append(worker)
        return ServerEnd(self, worker, self._own.memory)

    def batch_ended(self) -> None:
        """Forget the sent payloads: from now on their tensors may change."""
        self._sent.clear()

    def close(self) -> None:
        """Close the descriptor: from now on no other process can open the memory."""
        if self._own is not None:
            self._own.close()
            self._own = None

    def put(self, payload: torch.Tensor, to: _Region) -> Place | None:
        """Copy a payload for one worker, unless this batch has copied it before.

        Returns None if it must be a frame.
        """
        if self._own is None or not to.page[_OPENED]:
            return None
        _, place = self._sent.get(id(payload), (None, None))
        if place is None or to.replies[place[0]] != _FREE[0]:
            place = self._own.put(payload, self._marks())
            if place is None:
                return None
            self._sent[id(payload)] = payload, place
        _mark(to.replies, place, _SENT)
        return place

    def leave(self, worker: _Region) -> None:
        """Free the blocks that this worker has not read."""
        self._workers = [one for one in self._workers if one is not worker]

    def _marks(self) -> memoryview:
        """Return marks of blocks that a worker still uses, or that this batch may send again."""
        set_by_any = 0
        for worker in self._workers:
            set_by_any |= int.from_bytes(worker.replies, "little")
        marks = memoryview(bytearray(set_by_any.to_bytes(BLOCKS, "little")))
        for _, place in self._sent.values():
            _mark(marks, place, _SENT)
        return marks


class ServerEnd:
    """The server's side of the memory shared with one worker.

    *memory* is the server's own, for the `Welcome`; None if none is shared.
    """

    def __init__(
        self, server: ServerMemory, worker: _Region | None, memory: Memory | None
    ) -> None:
        self._server = server
        self._worker = worker
        self.memory = memory

    def close(self) -> None:
        """Note that the worker has left. Lent payloads keep its memory."""
        if self._worker is not None:
            self._server.leave(self._worker)
            self._worker = None

    def put(self, payload: torch.Tensor | None) -> Place | None:
        """Copy a reply's payload. None if there is no payload, or it must be a frame."""
        if payload is None or self._worker is None:
            return None
        return self._server.put(payload, self._worker)

    def lend(self, place: Place) -> memoryview:
        """Return a request's payload, see `_Region.lend`."""
        if self._worker is None:
            raise ProtocolError("payload", "a place, and no memory is shared")
        return self._worker.lend(place, self._worker.requests)
