"""Memory that a server and the workers of its machine share, so that payloads pass no socket.

Theory of operation
-------------------
Between two processes of one machine a chunk that goes through a socket is copied four
times, and in and out of the kernel. So a worker whose connection has the same address at
both ends offers memory for what it sends, with `PUSHES` slots of a chunk each; the server
offers memory for its answers, `ANSWERS` slots, the same to all its workers: what several
are answered at once is copied there once. Memory is a nameless file (``memfd``) whose size
is sealed; the other process opens it through its owner's descriptor.

A sender copies a chunk into a free slot, and the chunk's header names the slot. Headers
travel over ZeroMQ as ever, so order, credits and waiting are the same as without. The
receiver copies the chunk to its place, and marks the slot as free. Where no slot is free
the chunk travels with its header: nobody ever waits for a slot.

A mark is one byte in the worker's memory, for each slot of its own and each of the server's:
set by the sender before the header leaves, reset by the receiver after its copy. Both copy
without Python's lock and take it again afterwards, which keeps copy and mark in order on
every processor. A slot of answers is free when no worker's mark is set.

Nothing is left behind: memory goes with the last process that has it. Whatever stands in
the way (another user's process, another container, a system without ``memfd``) is no
error: payloads then go over ZeroMQ. What the server takes is as bounded as the rest: one
memory of a fixed size per worker, which cannot shrink under it, and only from who knows the
token. A worker that never frees slots of answers leaves none, and all go over ZeroMQ.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from typing import Self

import torch

from paceline.transport.protocol import CHUNK_BYTES, Memory, RefusalError

SWITCH = "PACELINE_SHARED_MEMORY"
"""With the value ``0`` nothing is offered, and payloads go over ZeroMQ."""

PUSHES = 8
ANSWERS = 16
NONCE_BYTES = 16

_PAGE = 4096
"""The nonce, and marks: of all pushes, then of all answers."""
_FREE, _TAKEN = 0, 1


class Region:
    """A page, and *slots* of a chunk each, as a tensor of bytes. *descriptor*: of who made
    it, as long as others may open it."""

    def __init__(self, whole: torch.Tensor, slots: int, descriptor: int | None) -> None:
        self.marks = whole[NONCE_BYTES:_PAGE]
        self.slots = whole[_PAGE:].view(slots, CHUNK_BYTES)
        self._nonce = _nonce_of(whole)
        self._descriptor = descriptor

    @classmethod
    def make(cls, slots: int) -> Self | None:
        """None where there is none to be had."""
        if os.environ.get(SWITCH) == "0" or not hasattr(os, "memfd_create"):
            return None
        size = _size(slots)
        try:
            flags = os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC
            descriptor = os.memfd_create("paceline", flags)
        except OSError:  # a sandbox may forbid it
            return None
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
            memory = _mapped(descriptor, size)
        except (OSError, RuntimeError):  # a limit of this process
            os.close(descriptor)
            return None
        memory[:NONCE_BYTES].numpy().data[:] = secrets.token_bytes(NONCE_BYTES)
        return cls(memory, slots, descriptor)

    @classmethod
    def open(cls, place: Memory, slots: int) -> Self | None:
        """What another process has made. None if it is not to be had: that process is not of
        this machine, or container, or user, or has something else there."""
        path = f"/proc/{place.process}/fd/{place.descriptor}"
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                return None  # opening a device could do something
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            return None
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() == _seals()
            if not sealed or os.fstat(descriptor).st_size != _size(slots):
                return None
            memory = _mapped(descriptor, _size(slots))
        except (OSError, RuntimeError):
            return None
        finally:
            os.close(descriptor)
        found = _nonce_of(memory) == place.nonce
        return cls(memory, slots, None) if found else None

    @property
    def place(self) -> Memory:
        """Where others find it."""
        assert self._descriptor is not None
        return Memory(os.getpid(), self._descriptor, self._nonce)

    def close(self) -> None:
        """Nobody else is to open it any more."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _mapped(descriptor: int, size: int) -> torch.Tensor:
    """The memory behind it, which stays when the descriptor is closed. Python's mmap would keep
    a copy of the descriptor for as long: one for each worker. Raises `OSError`, or
    `RuntimeError` as torch does."""
    path = f"/proc/self/fd/{descriptor}"
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def _nonce_of(whole: torch.Tensor) -> bytes:
    return whole[:NONCE_BYTES].numpy().tobytes()


def _size(slots: int) -> int:
    return _PAGE + slots * CHUNK_BYTES


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class _End:
    """One end of what a worker and the server share. *own*: the worker's region; *incoming*:
    slots from which this end takes chunks."""

    def __init__(self, own: Region, incoming: Region, incoming_marks: slice) -> None:
        self._incoming = incoming.slots
        self._received = own.marks[incoming_marks].numpy().data

    def take(self, slot: int, place: torch.Tensor) -> None:
        """Copy out what the other end has put into *slot*. Raises `RefusalError` if there is
        no such slot."""
        if not 0 <= slot < len(self._incoming):
            raise RefusalError("payload", f"slot {slot} of {len(self._incoming)}")
        place.copy_(self._incoming[slot, : len(place)])

    def free(self, slot: int) -> None:
        """The other end may use *slot* again."""
        if 0 <= slot < len(self._received):
            self._received[slot] = _FREE


_OF_PUSHES, _OF_ANSWERS = slice(PUSHES), slice(PUSHES, PUSHES + ANSWERS)


class WorkerEnd(_End):
    """*own*: what this worker has offered; *answers*: what the server has."""

    def __init__(self, own: Region, answers: Region) -> None:
        super().__init__(own, answers, _OF_ANSWERS)
        self._pushes, self._sent = own.slots, own.marks[_OF_PUSHES].numpy().data

    def put(self, payload: torch.Tensor, start: int, chunk: torch.Tensor) -> int | None:
        """Copy a *chunk*, what of the *payload* begins at byte *start*, into a free slot,
        which is returned; None if there is none."""
        for slot in range(PUSHES):  # low ones first: they are in the processor's cache
            if self._sent[slot] == _FREE:
                self._pushes[slot, : len(chunk)].copy_(chunk)
                self._sent[slot] = _TAKEN
                return slot
        return None


class ServerEnd(_End):
    """*own*: what the worker has offered. The worker *reads* answers once it has said that
    it could open them; until `close` its marks keep slots of answers from others."""

    def __init__(self, own: Region, answers: Answers) -> None:
        super().__init__(own, own, _OF_PUSHES)
        self._answers = answers
        self.unread = own.marks[_OF_ANSWERS].numpy().data
        self.reads = False
        answers.readers.append(self)

    @property
    def place(self) -> Memory:
        """Where the worker finds the answers."""
        return self._answers.region.place

    def close(self) -> None:
        """The worker has left: whatever it has not read is nobody's."""
        self._answers.readers.remove(self)

    def put(self, payload: torch.Tensor, start: int, chunk: torch.Tensor) -> int | None:
        """As a worker's, into the memory for answers."""
        return self._answers.put(payload, start, chunk, self) if self.reads else None


class Answers:
    """A server's memory for its answers, the same for all workers of its machine."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.readers: list[ServerEnd] = []
        self._batch: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}
        """Answers that go out together: the slot of each chunk, and its payload."""

    def put(
        self, payload: torch.Tensor, start: int, chunk: torch.Tensor, reader: ServerEnd
    ) -> int | None:
        """A slot that has the chunk, for *reader*; None if none is free."""
        _, slot = self._batch.get((id(payload), start), (None, None))
        if slot is None or reader.unread[slot] == _TAKEN:
            slot = self._free_slot()
            if slot is None:
                return None
            self.region.slots[slot, : len(chunk)].copy_(chunk)
            # The payload is kept, so that no other takes its identity.
            self._batch[id(payload), start] = payload, slot
        reader.unread[slot] = _TAKEN
        return slot

    def batch_ended(self) -> None:
        """What has gone out may change from now on."""
        self._batch.clear()

    def _free_slot(self) -> int | None:
        """One that no worker has to read yet; rather one that has nothing of this batch."""
        marks = [reader.unread for reader in self.readers]
        free = [
            slot
            for slot in range(ANSWERS)
            if all(unread[slot] == _FREE for unread in marks)
        ]
        if not free:
            return None
        of_batch = {slot: key for key, (_, slot) in self._batch.items()}
        slot = min(free, key=lambda slot: (slot in of_batch, slot))
        if slot in of_batch:
            del self._batch[of_batch[slot]]
        return slot


class ServerMemory:
    """What a server shares with the workers of its machine. Memory for answers is made once
    the first of them is here."""

    def __init__(self) -> None:
        self._answers: Answers | None = None

    def share(self, offer: Memory) -> ServerEnd | None:
        """A worker of this machine, as it seems, offers memory. None if there is none to be
        had, at either end."""
        own = Region.open(offer, PUSHES)
        if own is None:
            return None
        if self._answers is None:
            region = Region.make(ANSWERS)
            if region is None:
                return None
            self._answers = Answers(region)
        return ServerEnd(own, self._answers)

    def batch_ended(self) -> None:
        """As `Answers.batch_ended`."""
        if self._answers is not None:
            self._answers.batch_ended()

    def close(self) -> None:
        """Nobody else is to open it any more."""
        if self._answers is not None:
            self._answers.region.close()
            self._answers = None
