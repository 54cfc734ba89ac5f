"""Memory that a worker and a server of one machine share, so that payloads pass no socket.

Theory of operation
-------------------
Between two processes of one machine a chunk that goes through a socket is copied four
times, and in and out of the kernel. So a worker whose connection has the same address at
both ends offers memory: a nameless file (``memfd``) whose size is sealed, which the server
opens through the worker's own descriptor. It has `SLOTS` slots of a chunk for each direction.

A sender copies a chunk into a free slot, and the chunk's header names the slot. Headers
travel over ZeroMQ as ever, so order, credits and waiting are the same as without. The
receiver copies the chunk to its place, and marks the slot as free. Where no slot is free
the chunk travels with its header: nobody ever waits for a slot.

A mark is one byte: set by the sender before the header leaves, reset by the receiver after
its copy. Both copy without Python's lock and take it again afterwards, which keeps copy and mark in
order on every processor.

Nothing is left behind: the memory goes with the last process that has it. Whatever stands
in the way (another user's process, another container, a system without ``memfd``) is no
error: payloads then go over ZeroMQ. What the server takes is as bounded as the rest: one
memory of a fixed size per worker, which cannot shrink under it, and only from who knows the token.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Iterator

import torch

from paceline.server.wire import CHUNK_BYTES, RefusalError, Share

SWITCH = "PACELINE_SHARED_MEMORY"
"""With the value ``0`` nothing is offered, and payloads go over ZeroMQ."""

SLOTS = 8
NONCE_BYTES = 16

_MARKS = slice(NONCE_BYTES, NONCE_BYTES + 2 * SLOTS)
_PAGE = 4096
_BYTES = _PAGE + 2 * SLOTS * CHUNK_BYTES
_FREE, _TAKEN = 0, 1


class SharedMemory:
    """One end of it. *memory*: a nonce and the marks of all slots in the first page, then the
    worker's slots, then the server's; *mine*: 0 at the worker's end, 1 at the server's."""

    def __init__(self, memory: mmap.mmap, mine: int) -> None:
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        marks = whole[_MARKS].view(2, SLOTS)
        slots = whole[_PAGE:].view(2, SLOTS, CHUNK_BYTES)
        self._sent, self._outgoing = marks[mine].numpy().data, slots[mine]
        self._received, self._incoming = marks[1 - mine].numpy().data, slots[1 - mine]

    def put(self, chunk: torch.Tensor) -> int | None:
        """Copy a chunk, of bytes, into a free slot, which is returned; None if there is none."""
        for slot in range(SLOTS):  # low ones first: they are in the processor's cache
            if self._sent[slot] == _FREE:
                self._outgoing[slot, : len(chunk)].copy_(chunk)
                self._sent[slot] = _TAKEN
                return slot
        return None

    def take(self, slot: int, place: torch.Tensor) -> None:
        """Copy out what the other end has put into *slot*. Raises `RefusalError` if there is
        no such slot."""
        if not 0 <= slot < SLOTS:
            raise RefusalError("payload", f"slot {slot} of {SLOTS}")
        place.copy_(self._incoming[slot, : len(place)])

    def free(self, slot: int) -> None:
        """The other end may use *slot* again."""
        if 0 <= slot < SLOTS:
            self._received[slot] = _FREE


@contextlib.contextmanager
def offered() -> Iterator[tuple[Share, SharedMemory] | None]:
    """A worker's offer, and its end of the memory; None where there is none to be had. What
    the offer names is there until the context is left."""
    if os.environ.get(SWITCH) == "0" or not hasattr(os, "memfd_create"):
        yield None
        return
    try:
        flags = os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC
        descriptor = os.memfd_create("paceline", flags)
    except OSError:  # a sandbox may forbid it
        yield None
        return
    try:
        os.ftruncate(descriptor, _BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
        memory = mmap.mmap(descriptor, _BYTES)
        nonce = secrets.token_bytes(NONCE_BYTES)
        memory[:NONCE_BYTES] = nonce
        yield Share(os.getpid(), descriptor, nonce), SharedMemory(memory, mine=0)
    finally:
        os.close(descriptor)


def accepted(offer: Share) -> SharedMemory | None:
    """The server's end of what a worker has offered; None if it is not to be had here: the
    process is not of this machine, or container, or user, or has something else there."""
    path = f"/proc/{offer.process}/fd/{offer.descriptor}"
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None  # opening a device could do something
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() == _seals()
        if not sealed or os.fstat(descriptor).st_size != _BYTES:
            return None
        memory = mmap.mmap(descriptor, _BYTES)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    if memory[:NONCE_BYTES] != offer.nonce:
        return None
    return SharedMemory(memory, mine=1)


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
