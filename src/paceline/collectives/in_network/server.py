"""The aggregator: a `ChunkPool` behind a TCP port, in one thread and one event loop.

It runs on a host beside a rack's switch (``paceline aggregate``). ATP's servers are the same, as a
thread in a worker's process or in ``paceline serve``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.collectives.in_network.aggregator import (
    Agent,
    ChunkPool,
    Job,
    ParentLink,
    Send,
)
from paceline.collectives.in_network.wire import (
    CONTRIBUTIONS,
    MOST_TEXT_BYTES,
    VERSION,
    Address,
    Challenge,
    Connection,
    Frame,
    Granted,
    Header,
    Hello,
    Integers,
    Kind,
    Parent,
    ProtocolError,
    Terms,
    bytes_of,
    check_may_be_read,
    decode_json,
    frame,
    is_proven,
    proof_of,
    text_frame,
)
from paceline.errors import UsageError
from paceline.timeouts import timeouts
from paceline.transport import liveness

MEMORY = 256 << 20
MOST_NAME = 64
STRANGERS = 64
"""The most connections that have not proved that they have the token."""
FRAMES = 8
"""Frames that are read from one connection before others have their turn."""
UP_FRAMES = 16
"""Frames that may wait for a parent; beyond, no more of the job is read."""


@dataclass(frozen=True)
class Child:
    """The connection of an aggregator whose sums are added up further here."""

    number: int


class _Link:
    """One connection; *key* names it within its *job*. No job: it has not registered."""

    def __init__(self, connection: Connection, nonce: str) -> None:
        self.connection = connection
        self.nonce = nonce
        self.job: _ServedJob | None = None
        self.key: Any = None
        self.name = "a stranger"
        self.most = MOST_TEXT_BYTES
        """Bytes of the largest frame that it may send."""
        self.scratch: Integers | bytearray | None = None
        self.waiting: list[Frame] | None = None
        """Frames for a parent that has not accepted the job yet; None: it has, or it is no parent."""
        self.is_connecting = False
        self.is_ending = False
        """It has been told why its job is over; what it still sends is ignored."""
        self.events = 0


class _ServedJob:
    """A job and its connections."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.links: dict[Any, _Link] = {}
        self.known_parents: tuple[Parent, ...] = ()
        self.is_held_back = False
        """A parent's queue is full, so contributions are not read."""

    @property
    def parents(self) -> list[_Link]:
        return [link for key, link in self.links.items() if isinstance(key, ParentLink)]

    @property
    def others(self) -> list[_Link]:
        """The connections that this server has accepted."""
        return [
            link for key, link in self.links.items() if not isinstance(key, ParentLink)
        ]

    @property
    def has_workers(self) -> bool:
        """Whether a worker or an agent is still connected."""
        return any(not isinstance(key, (ParentLink, Child)) for key in self.links)


class AggregatorServer:
    """Sums what workers send to *address* and *port* (0: any free port), in *memory* bytes.

    Raises `UsageError` if it cannot listen there, or must not.
    """

    def __init__(
        self, address: str, port: int, *, token: str, memory: int = MEMORY
    ) -> None:
        check_may_be_read(address)
        if not token:
            raise UsageError(
                "token: expected the aggregator's secret token, got nothing"
            )
        if memory < 1:
            raise UsageError(f"memory: expected some bytes, got {memory}")
        self._listener = _listen(address, port)
        self.address: Address = address, int(self._listener.getsockname()[1])
        self.pool = ChunkPool(memory)
        self.counts: Counter[str] = Counter()
        self._token = token
        self._jobs: dict[str, _ServedJob] = {}
        self._links: dict[_Link, None] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._stopped = False
        liveness.close_in_children(self._listener)

    # ---- the loop ----

    def run(
        self,
        stop: socket.socket | int,
        every: float | None = None,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve until *stop* can be read; call *tell* about once in *every* seconds."""
        self._selector.register(stop, selectors.EVENT_READ, self._stop)
        while not self._stopped:
            self._handle(every)
            tell()
        self._selector.unregister(stop)

    def finish(self, seconds: float) -> None:
        """After `run`: serve until all jobs have ended, at most for *seconds*."""
        over = time.monotonic() + seconds
        while self._jobs and time.monotonic() < over:
            self._handle(max(0.0, over - time.monotonic()))

    def _handle(self, seconds: float | None) -> None:
        for key, events in self._selector.select(seconds):
            if not isinstance(key.data, _Link):
                key.data()
            elif key.data in self._links:  # an earlier event may have closed it
                self._serve(key.data, events)

    def close(self) -> None:
        """Close all connections, which tells the jobs' workers."""
        for link in self._links:
            link.connection.close()
        self._links.clear()
        self._selector.close()
        self._listener.close()

    def _stop(self) -> None:
        self._stopped = True

    def summary(self) -> dict[str, int]:
        """All counts by name."""
        return {**self.counts, "passed on": self.pool.passed_on}

    def _serve(self, link: _Link, events: int) -> None:
        job = link.job
        try:
            if link.is_connecting:
                _check_connected(link.connection.socket)
                link.is_connecting = False
            if events & selectors.EVENT_WRITE and link in self._links:
                self._flush(link)
            if events & selectors.EVENT_READ and link in self._links:
                self._read(link)
        except (OSError, EOFError) as error:
            fault = error if isinstance(error, OSError) else None
            self._lose(link, liveness.how_it_ended(fault))
        except (ProtocolError, UsageError) as error:
            self.counts["refused: frames"] += 1
            self._lose(link, f"broke the protocol: {error}")
        if job is not None:
            self._hold_back(job)
        if link in self._links:
            self._watch(link)

    def _watch(self, link: _Link) -> None:
        """Register the events that this connection waits for."""
        events = 0
        job = link.job
        # Aggregators are always read. Two that are each other's parents would otherwise wait
        # for each other.
        held = job is not None and job.is_held_back and isinstance(link.key, int)
        if not held:
            events |= selectors.EVENT_READ
        if link.connection.is_sending or link.is_connecting:
            events |= selectors.EVENT_WRITE
        if events == link.events:
            return
        peer = link.connection.socket
        if not link.events:
            self._selector.register(peer, events, link)
        elif events:
            self._selector.modify(peer, events, link)
        else:
            self._selector.unregister(peer)
        link.events = events

    def _hold_back(self, job: _ServedJob) -> None:
        """Stop reading the job's contributions while a parent's queue is full."""
        if not job.known_parents:
            return
        full = any(link.connection.queued > UP_FRAMES for link in job.parents)
        if full != job.is_held_back:
            job.is_held_back = full
            for link in job.others:
                self._watch(link)

    # ---- chunks ----

    def _read(self, link: _Link) -> None:
        connection = link.connection
        if link.is_ending:
            if not connection.socket.recv(MOST_TEXT_BYTES):
                raise EOFError
            return
        frames = 0
        # A header without payload that has already been read wakes no poll, so it is handled
        # now.
        while frames < FRAMES or (connection.header and not connection.header.size):
            header = connection.read_header(link.most)
            if header is None:
                return
            if link.scratch is None:
                link.scratch = _room_for(header)
            if not connection.read_payload(bytes_of(link.scratch), link.most):
                return
            payload, link.scratch = link.scratch, None
            self._take(link, header, payload)
            if link not in self._links or link.is_ending:
                return
            frames += 1

    def _take(self, link: _Link, header: Header, payload: Integers | bytearray) -> None:
        job = link.job
        if isinstance(payload, bytearray) or job is None:
            self._handle_message(link, header, bytes(payload))
        elif header.kind in CONTRIBUTIONS and not isinstance(link.key, Agent):
            self.counts["contributions"] += 1
            self.counts["bytes in"] += header.size
            self._send_all(
                job,
                job.job.contribute(
                    link.key,
                    header.position,
                    header.members,
                    payload if len(payload) else None,
                    header.mode,
                    Kind(header.kind),
                ),
            )
        elif header.kind == Kind.SUM and isinstance(link.key, ParentLink):
            self._send_all(job, job.job.result(header.position, payload))
        else:
            raise ProtocolError(f"a frame of kind {header.kind} from {link.name}")

    def _send_all(self, job: _ServedJob, sends: Sequence[Send]) -> None:
        for one in sends:
            link = job.links.get(one.to)
            if link is None:
                raise UsageError(
                    f"chunk {one.position} is for {one.to}, which is not connected"
                )
            self.counts["sums out"] += one.kind == Kind.SUM
            self._put(
                link,
                frame(one.kind, one.position, one.values, one.members, then=one.then),
            )

    def _put(self, link: _Link, one: Frame) -> None:
        if link.waiting is not None:
            link.waiting.append(one)
            return
        link.connection.put(one)
        self._flush(link)
        if link in self._links:
            self._watch(link)

    def _flush(self, link: _Link) -> None:
        job = link.job
        try:
            freed = link.connection.flush()
        except OSError as error:
            self._lose(link, liveness.how_it_ended(error))
            return
        if freed and job is not None:
            self._send_all(job, freed)

    # ---- registration and departure ----

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
            connection = Connection(peer)
        except OSError:
            return  # the peer has gone again
        strangers = [link for link in self._links if link.job is None]
        if len(strangers) >= STRANGERS:
            self._drop(strangers[0])  # the oldest one has had its time
        link = _Link(connection, secrets.token_hex(16))
        self._links[link] = None
        self._put(
            link,
            text_frame(Kind.CHALLENGE, Challenge(version=VERSION, nonce=link.nonce)),
        )

    def _handle_message(self, link: _Link, header: Header, payload: bytes) -> None:
        if isinstance(link.key, ParentLink) and link.waiting is not None:
            self._handle_parent_message(link, header, payload)
        elif header.kind == Kind.HELLO and link.job is None:
            self._welcome(link, decode_json(payload, Hello))
        elif header.kind == Kind.GOODBYE and link.job is not None:
            self._depart(link)
        elif header.kind == Kind.LOST and isinstance(link.key, ParentLink):
            self._end_job(link, payload.decode(errors="replace"))
        else:
            raise ProtocolError(f"a frame of kind {header.kind} from {link.name}")

    def _welcome(self, link: _Link, hello: Hello) -> None:
        if not is_proven(self._token, link.nonce, hello):
            self._refuse(link, "it expects another token than the worker's")
            return
        try:
            # Before the job: a job of refused members would hold its memory for ever.
            link.key = _key_of(hello)
            job = self._job_for(hello.terms)
            if link.key in job.links:
                raise UsageError(
                    f"job {hello.terms.job}: {hello.role} {hello.number} is already connected"
                )
        except UsageError as error:
            self._refuse(link, str(error))
            return
        link.job, link.name = job, hello.name[:MOST_NAME]
        if hello.parents and not job.known_parents:
            job.known_parents = hello.parents
            for number, parent in enumerate(hello.parents):
                self._join(job, number, parent)
        link.most = job.job.chunk_bytes
        job.links[link.key] = link
        if isinstance(link.key, int):
            job.job.workers.append(link.key)
        granted = Granted(window=job.job.window, chunk_bytes=job.job.chunk_bytes)
        granted.proof = proof_of(self._token, hello.nonce, granted)
        self._put(link, text_frame(Kind.GRANTED, granted))

    def _job_for(self, terms: Terms) -> _ServedJob:
        job = self.pool.job_for(terms)
        served = self._jobs.get(terms.job)
        if served is None:
            served = self._jobs[terms.job] = _ServedJob(job)
            self.counts["jobs"] += 1
        return served

    def _refuse(self, link: _Link, reason: str) -> None:
        self.counts["refused: hellos"] += 1
        self._put(link, text_frame(Kind.REFUSED, reason))
        self._end_after_message(link)

    def _depart(self, link: _Link) -> None:
        """Handle a goodbye: the connection needs nothing more.

        Workers leave together, when all have all sums. So an aggregator leaves its parents when its
        last worker has left. A job ends when all its connections have.
        """
        job = link.job
        assert job is not None
        self._drop(link)
        if not job.has_workers:
            for parent in job.parents:
                self._put(parent, frame(Kind.GOODBYE))
                self._drop(parent)
        if not job.others:
            self._forget(job)

    def _lose(self, link: _Link, why: str) -> None:
        """Handle a connection that ended without a goodbye: its job is over for all."""
        if link.job is None or link.is_ending:
            self._drop(link)
            return
        self._end_job(link, f"{link.name} {why}, so its job is over")

    def _end_job(self, link: _Link, reason: str) -> None:
        job = link.job
        assert job is not None
        self._drop(link)
        links = list(job.links.values())
        job.links.clear()
        self._forget(job)
        self.counts["jobs lost"] += 1
        name = job.job.terms.job
        print(f"paceline: job {name!r}: {reason}", file=sys.stderr, flush=True)
        for other in links:
            other.job = None
            if isinstance(other.key, ParentLink):
                self._drop(other)
            else:
                self._put(other, text_frame(Kind.LOST, reason))
                self._end_after_message(other)

    def _forget(self, job: _ServedJob) -> None:
        self._jobs.pop(job.job.terms.job, None)
        self.pool.end(job.job)
        self.counts["jobs ended"] += 1

    def _end_after_message(self, link: _Link) -> None:
        """Send nothing more, and discard what still arrives.

        Closing a connection with unread data would lose the message that is on its way.
        """
        if link not in self._links:
            return
        link.is_ending, link.job = True, None
        with contextlib.suppress(OSError):
            link.connection.socket.shutdown(socket.SHUT_WR)

    def _drop(self, link: _Link) -> None:
        self._links.pop(link, None)
        if link.job is not None and link.job.links.get(link.key) is link:
            del link.job.links[link.key]
        if link.events:
            self._selector.unregister(link.connection.socket)
            link.events = 0
        link.connection.close()

    # ---- parents ----

    def _join(self, job: _ServedJob, number: int, parent: Parent) -> None:
        """Connect to a parent and register. Frames wait until it has accepted."""
        try:
            family, _, _, _, address = socket.getaddrinfo(
                parent.host,
                parent.port,
                type=socket.SOCK_STREAM,
                flags=socket.AI_NUMERICHOST,
            )[0]
        except (OSError, UnicodeError, OverflowError) as error:
            raise UsageError(
                f"a parent at {parent.host!r}, port {parent.port}: {error}; expected a "
                "numeric address"
            ) from None
        peer = socket.socket(family, socket.SOCK_STREAM)
        link = _Link(Connection(peer), secrets.token_hex(16))
        link.job, link.key, link.waiting = job, ParentLink(number), []
        link.name = f"the next aggregator at {parent.host}:{parent.port}"
        link.is_connecting = True
        self._links[link] = None
        job.links[link.key] = link
        peer.connect_ex(address)  # an error shows once the socket is writable
        self._watch(link)

    def _handle_parent_message(
        self, link: _Link, header: Header, payload: bytes
    ) -> None:
        job = link.job
        assert job is not None
        assert isinstance(link.key, ParentLink)
        parent = job.known_parents[link.key.number]
        if header.kind == Kind.CHALLENGE:
            challenge = decode_json(payload, Challenge)
            hello = Hello(
                role="aggregator",
                number=parent.number,
                name=f"the aggregator of rack {parent.number}",
                terms=parent.terms,
                nonce=link.nonce,
            )
            hello.proof = proof_of(self._token, challenge.nonce, hello)
            link.connection.put(text_frame(Kind.HELLO, hello))
            self._flush(link)
        elif header.kind == Kind.GRANTED:
            granted = decode_json(payload, Granted)
            if not is_proven(self._token, link.nonce, granted):
                raise ProtocolError("has not shown that it has the token")
            waiting, link.waiting = link.waiting or [], None
            link.most = job.job.chunk_bytes
            for one in waiting:
                self._put(link, one)
        elif header.kind == Kind.REFUSED:
            self._end_job(
                link, f"{link.name} refuses: {payload.decode(errors='replace')}"
            )
        else:
            raise ProtocolError(f"a frame of kind {header.kind}")


def _key_of(hello: Hello) -> Hashable:
    """The key of a connection within its job. Raises `UsageError`."""
    if hello.role == "agent" and 0 <= hello.number < hello.terms.agents:
        return Agent(hello.number)
    if hello.role == "aggregator":
        return Child(hello.number)
    if hello.role == "worker":
        return hello.number
    raise UsageError(
        f"{hello.role} {hello.number}: expected a worker, an aggregator, or one of "
        f"{hello.terms.agents} agents"
    )


def _room_for(header: Header) -> Integers | bytearray:
    """A buffer for a payload: an array for numbers, bytes for messages."""
    if header.kind != Kind.SUM and header.kind not in CONTRIBUTIONS:
        return bytearray(header.size)
    if header.size % 4:
        raise ProtocolError(f"{header.size} bytes: expected numbers of 4 bytes")
    return np.empty(header.size // 4, np.int32)


def _check_connected(peer: socket.socket) -> None:
    """Raise `OSError` if the connection failed."""
    fault = peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if fault:
        raise OSError(fault, os.strerror(fault))


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        if not 0 <= port < 1 << 16:
            raise OSError(f"there are ports 0 to {(1 << 16) - 1}")
        listener = socket.create_server((address, port), family=family, backlog=1024)
    except OSError as error:
        raise UsageError(
            f"an aggregator cannot listen at {address}, port {port}: {error}; expected an "
            "address of this machine, and a port that is free (or 0)"
        ) from None
    listener.setblocking(False)
    return listener


class ServerThread:
    """An `AggregatorServer` in a thread of this process, until `close`."""

    def __init__(self, server: AggregatorServer) -> None:
        self.server = server
        self._patience = 0.0
        self._stop, self._stopper = os.pipe()
        self._thread = threading.Thread(
            target=self._run, name="paceline aggregator", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        try:
            self.server.run(self._stop)
            self.server.finish(self._patience)
        except BaseException:
            # Its jobs learn of it from their connections, and continue without it.
            traceback.print_exc()
        finally:
            self.server.close()
            os.close(self._stop)

    def close(self, *, well: bool = False) -> None:
        """Close all connections; call it once. *well*: first let others say goodbye."""
        self._patience = timeouts.sum_queue_close if well else 0.0
        os.close(self._stopper)
        self._thread.join()
