"""One rank's connections to aggregators for one communicator, and its part of each sum.

A worker without an aggregator sends its chunks to the next group's workers in turn. `joining` makes
the connections.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.collectives.in_network.server import ServerThread
from paceline.collectives.in_network.stages import RingSum, Stages, chunk_elements
from paceline.collectives.in_network.wire import (
    MOST_TEXT_BYTES,
    Connection,
    Header,
    IntegerOperation,
    Integers,
    Kind,
    ProtocolError,
    bytes_of,
    frame,
)
from paceline.errors import PeerLostError, UsageError
from paceline.transport import liveness

WINDOW = 8
"""Chunks that a worker has under way. More would wait in queues behind each other, although a stage
that is nearer to the end could have gone first."""
CHUNK_BYTES = 64 << 10
QUEUED = 2
"""Frames that a worker without an aggregator queues for one agent."""

_ENDED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


@dataclass(frozen=True)
class Place:
    """This rank's place in a ring of *groups*.

    *alone* and *alone_before*: whether this rank and the previous group have no aggregator.
    *agent*: this rank's turn, and the number of workers of its group.
    """

    groups: int = 1
    position: int = 0
    alone: bool = False
    alone_before: bool = False
    agent: tuple[int, int] = (0, 1)


@dataclass(eq=False)
class Peer:
    """A connection; *name* is the other end's name in messages."""

    connection: Connection
    name: str
    scratch: bytearray = field(default_factory=bytearray)
    events: int = 0


class Session:
    """Sums over the workers of one job.

    Chunk c of the job's stream goes to the connections *ways* in turn. *before* is the connection
    to the previous group. *window* and *chunk_bytes* are what was granted. *server*: this worker's
    own server, which ends with the session.
    """

    def __init__(
        self,
        place: Place,
        ways: Sequence[Peer],
        before: Peer | None,
        window: int,
        chunk_bytes: int,
        server: ServerThread | None = None,
    ) -> None:
        self._place = place
        self._ways, self._before, self._server = list(ways), before, server
        self._peers = list(dict.fromkeys([*ways, *([before] if before else [])]))
        self._by_descriptor = {one.connection.fileno(): one for one in self._peers}
        self._window, self._chunk_bytes = window, chunk_bytes
        self._position = self._position_before = 0
        """The first chunk of the next sum, in this group's stream and in the previous group's."""
        self._poll = select.poll()

    # ---- a sum ----

    def all_reduce(
        self,
        values: Integers,
        operation: IntegerOperation = "sum",
        seconds: float | None = None,
    ) -> None:
        """Replace *values* by their sums over all workers, or by the maxima (*operation* "max").
        Collective.

        *values* are int32, flat and contiguous; sums are exact modulo 2^32. Raises `PeerLostError`
        if an aggregator or a worker is lost, and `UsageError` after *seconds*. *values* are
        undefined then.
        """
        self._operation = operation
        over = None if seconds is None else time.monotonic() + seconds
        place, count = self._place, len(values)
        elements = chunk_elements(count, place.groups, self._chunk_bytes)
        chunks = max(1, -(-count // (place.groups * elements)))
        behind = None
        if self._before is not None:
            at = (place.position - 1) % place.groups
            behind = Stages(place.groups, at, chunks, place.alone_before)
        self._work = work = RingSum(
            values,
            elements,
            Stages(place.groups, place.position, chunks, place.alone),
            behind,
            place.agent,
            self._position_before,
        )
        self._is_done = bytearray(work.chunks)
        self._lowest = self._next = 0
        self._held: list[int] = []
        if self._before is not None:
            self._read_before(self._before)  # what has arrived early
        while self._lowest < work.chunks or work.awaited:
            self._send_ready()
            self._wait(over)
        self._position += work.chunks
        self._position_before += work.chunks_before

    def _send_ready(self) -> None:
        """Send all chunks of the window that this worker has."""
        work = self._work
        over = min(work.chunks, self._lowest + self._window)
        while self._next < over:
            self._held.append(self._next)
            self._next += 1
        held = []
        for chunk in self._held:
            if work.is_silent(chunk):
                continue
            way = self._ways[(self._position + chunk) % len(self._ways)]
            full = self._place.alone and way.connection.queued >= QUEUED
            if full or not work.is_ready(chunk):
                held.append(chunk)
                continue
            self._put(way, chunk)
        self._held = held

    def _put(self, way: Peer, chunk: int) -> None:
        mode, values, members = self._work.outgoing(chunk)
        position = self._position + chunk
        if self._place.alone:
            one = frame(Kind.SUM, position, values, members, mode, then=(chunk,))
        else:
            kind = Kind.MAXIMUM if self._operation == "max" else Kind.CONTRIBUTION
            one = frame(kind, position, values, members, mode)
        way.connection.put(one)
        self._flush(way)

    def _flush(self, peer: Peer) -> None:
        try:
            for chunk in peer.connection.flush():
                self._complete(chunk)
        except OSError as error:
            raise self._lost(peer, error) from None

    def _complete(self, chunk: int) -> None:
        self._is_done[chunk] = True
        while self._lowest < len(self._is_done) and self._is_done[self._lowest]:
            self._lowest += 1

    def _wait(self, over: float | None) -> None:
        """Wait until a connection can be read or written, and do so."""
        work = self._work
        if self._lowest == work.chunks and not work.awaited:
            return
        for peer in self._peers:
            events = select.POLLOUT if peer.connection.is_sending else 0
            if peer is not self._before or not self._is_early(peer):
                events |= select.POLLIN
            if events != peer.events:
                self._poll.register(peer.connection.fileno(), events)
                peer.events = events
        ready = self._poll.poll(
            None if over is None else max(0.0, 1000 * (over - time.monotonic()))
        )
        if not ready and over is not None:
            raise UsageError(
                "the first sum does not complete: a firewall may block connections between "
                "an aggregator and the next one"
            )
        for descriptor, events in ready:
            peer = self._by_descriptor[descriptor]
            if events & select.POLLOUT:
                self._flush(peer)
            if events & ~select.POLLOUT:
                if peer is self._before:
                    self._read_before(peer)
                else:
                    self._read_sums(peer)

    def _is_early(self, peer: Peer) -> bool:
        """Whether the next frame from the previous group belongs to a later sum."""
        header = peer.connection.header
        if header is None or header.kind != Kind.SUM:
            return False
        return header.position - self._position_before >= self._work.chunks_before

    def _read_sums(self, peer: Peer) -> None:
        """Read the sums of this group's aggregator."""
        while (header := self._header(peer)) is not None:
            chunk = header.position - self._position
            known = 0 <= chunk < self._work.chunks and not self._is_done[chunk]
            if header.kind not in (Kind.SUM, Kind.DONE) or not known:
                raise self._unexpected(peer, header)
            into = self._work.sums(chunk)
            if header.kind == Kind.DONE:
                into = into[:0]
            if not self._payload(peer, header, into):
                return
            self._complete(chunk)

    def _read_before(self, peer: Peer) -> None:
        """Read the sums of the previous group."""
        while (header := self._header(peer)) is not None:
            if self._is_early(peer):
                return
            chunk = header.position - self._position_before
            if header.kind != Kind.SUM or chunk < 0:
                raise self._unexpected(peer, header)
            belongs, adds = self._work.coming(chunk)
            into = belongs
            if adds:
                if len(peer.scratch) < belongs.nbytes:
                    peer.scratch = bytearray(belongs.nbytes)
                into = np.frombuffer(peer.scratch, np.int32, len(belongs))
            if not self._payload(peer, header, into):
                return
            if adds:
                merge = np.maximum if self._operation == "max" else np.add
                merge(belongs, into, out=belongs)
            self._work.arrived(chunk)

    def _header(self, peer: Peer) -> Header | None:
        try:
            header = peer.connection.read_header(MOST_TEXT_BYTES)
            if header is not None and header.kind == Kind.LOST:
                raise self._reported_loss(peer, header)
            return header
        except (OSError, EOFError) as error:
            raise self._lost(peer, error) from None
        except ProtocolError as error:
            raise PeerLostError(f"{peer.name}: {error}") from None

    def _payload(self, peer: Peer, header: Header, into: Integers) -> bool:
        if header.size != into.nbytes:
            raise self._unexpected(peer, header)
        try:
            return peer.connection.read_payload(bytes_of(into), MOST_TEXT_BYTES)
        except (OSError, EOFError) as error:
            raise self._lost(peer, error) from None

    def _unexpected(self, peer: Peer, header: Header) -> PeerLostError:
        return PeerLostError(
            f"{peer.name} sends the unexpected frame {header}. Use one version of paceline for "
            "all aggregators and workers"
        )

    def _lost(self, peer: Peer, error: Exception) -> PeerLostError:
        """The error for an ended connection: the other end's LOST message, or else how it ended."""
        with contextlib.suppress(OSError, EOFError, ProtocolError):
            header = peer.connection.read_header(MOST_TEXT_BYTES)
            if header is not None and header.kind == Kind.LOST:
                return self._reported_loss(peer, header)
        fault = error if isinstance(error, OSError) else None
        return PeerLostError(f"{peer.name} {liveness.how_it_ended(fault)}")

    def _reported_loss(self, peer: Peer, header: Header) -> PeerLostError:
        """Read the reason of a LOST message, and return the error with it."""
        reason = bytearray(header.size)
        with contextlib.suppress(OSError, EOFError, ProtocolError):
            peer.connection.read_payload(memoryview(reason), MOST_TEXT_BYTES)
        return PeerLostError(f"{peer.name}: {reason.decode(errors='replace')}")

    # ---- between sums ----

    def idle(self, seconds: float, wake: int) -> None:
        """Wait for *seconds*, or until *wake* can be read.

        Raises `PeerLostError` if an aggregator or a worker is lost.
        """
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        for descriptor in self._by_descriptor:
            poll.register(descriptor, _ENDED)
        for descriptor, _ in poll.poll(1000 * seconds):
            if descriptor != wake:
                raise self._lost(self._by_descriptor[descriptor], EOFError())

    def close(self, *, well: bool) -> None:
        """Close all connections; not *well*: without a goodbye, which all workers see as a loss."""
        for peer in self._peers:
            if well:
                peer.connection.put(frame(Kind.GOODBYE))
                with contextlib.suppress(OSError):  # the other end was first
                    peer.connection.flush()
            peer.connection.close()
        if self._server is not None:
            self._server.close(well=well)
            self._server = None
