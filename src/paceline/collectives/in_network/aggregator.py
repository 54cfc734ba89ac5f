"""Sums chunks at one aggregator, for several jobs that share its memory. No I/O.

A job exists from its first hello until its last connection has ended. A chunk is identified by its
*position* in the job's stream, which all workers number alike. A chunk is complete here when as
many workers have contributed as `Terms.expected` says. Contributions come over TCP, so none is
lost, duplicated or reordered.

*Leased* (SwitchML, Rina): the job reserves memory for a window of chunks. A worker sends a chunk
only while it is less than a window ahead of the worker's lowest unfinished chunk. So there is
always room.

*Best effort* (ATP): if there is no free memory, a contribution is forwarded to the job's parent
unchanged. It still counts: the chunk's partial sum follows when all other contributions have
arrived.

*Why there is no deadlock.* Workers' windows are about positions, which have one order for all. The
lowest unfinished chunk of a job is in every worker's window. So every worker sends its contribution
to it as soon as it has the numbers, and there is room for it. In a ring, a worker may first wait
for a chunk of the previous group. That chunk belongs to an earlier stage, which is lower still in
that group's order.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from paceline.collectives.in_network.wire import Integers, Kind, Mode, Terms
from paceline.errors import UsageError

MOST_JOBS = 256
MOST_WINDOW = 1 << 12
MOST_PARENTS = 1 << 10
FEWEST_BYTES = 1 << 10
"""Bytes of a chunk, at least."""
MOST_BYTES = 1 << 20
_WORKERS = 1 << 16


@dataclass(frozen=True)
class Agent:
    """The connection of agent *number*: agents take turns at receiving sums that go to the next
    group."""

    number: int


@dataclass(frozen=True)
class ParentLink:
    """The connection to parent *number*."""

    number: int


@dataclass(frozen=True)
class Send:
    """A frame of a chunk, *to* a contributing connection, an `Agent` or a `ParentLink`.

    *then*: frames to send once the kernel has taken this one.
    """

    to: Hashable
    kind: Kind
    position: int
    values: Integers | None = None
    members: int = 0
    then: tuple[Send, ...] = ()


@dataclass
class _Chunk:
    """A chunk under way: *members* workers have contributed, and *values* has the sum of *merged*
    of them.

    *kind* is the same in all contributions.
    """

    mode: int
    kind: Kind
    members: int = 0
    merged: int = 0
    values: Integers | None = None
    sources: dict[Hashable, None] = field(default_factory=dict)


class ChunkPool:
    """Jobs that share *memory* bytes."""

    def __init__(self, memory: int) -> None:
        self.memory = self.free = memory
        self.jobs: dict[str, Job] = {}
        self.passed_on = 0
        """Contributions that were forwarded for lack of memory."""

    def job_for(self, terms: Terms) -> Job:
        """The job with these terms; the first hello creates it.

        Raises `UsageError` with a message for the refused worker.
        """
        check(terms)
        job = self.jobs.get(terms.job)
        if job is None:
            if len(self.jobs) >= MOST_JOBS:
                raise UsageError(
                    f"this aggregator already serves {MOST_JOBS} jobs: wait for one to end, or "
                    "start another aggregator"
                )
            job = self.jobs[terms.job] = Job(self, terms)
        elif job.terms != terms:
            raise UsageError(
                f"job {terms.job}: a member asks for {terms}, and earlier members for "
                f"{job.terms}: expected the same terms of all"
            )
        return job

    def end(self, job: Job) -> None:
        """Remove the job and free its memory."""
        if self.jobs.get(job.terms.job) is job:
            del self.jobs[job.terms.job]
            self.free += job.held
            job.held = 0


class Job:
    """One job's chunks at this aggregator. *window* and *chunk_bytes* are what the job was granted."""

    def __init__(self, pool: ChunkPool, terms: Terms) -> None:
        self._pool = pool
        self.terms = terms
        self.window, self.chunk_bytes = terms.window, terms.chunk_bytes
        self.held = 0
        self._most_open = 2 * terms.window
        """Twice the window: sums may reach one worker on another way up to a window before they
        reach others."""
        if terms.leased:
            self._lease()
            self._most_open = self.window
        self._open: dict[int, _Chunk] = {}
        self.workers: list[Hashable] = []
        """In a ring: the group's workers. All of them get all of the group's sums, although a
        single worker sends a chunk for all when sums are only distributed."""

    def _lease(self) -> None:
        """Reserve a window of sums, and as much again for sums that wait to be sent."""
        free = self._pool.free
        self.window = min(self.window, max(1, free // (2 * self.chunk_bytes)))
        room = free // (2 * self.window) // FEWEST_BYTES * FEWEST_BYTES
        self.chunk_bytes = min(self.chunk_bytes, room)
        if self.chunk_bytes < FEWEST_BYTES:
            raise UsageError(
                f"job {self.terms.job} needs {2 * FEWEST_BYTES} bytes, and {free} of "
                f"{self._pool.memory} are free: wait for another job to end, or start the "
                "aggregator with more --memory"
            )
        self.held = 2 * self.window * self.chunk_bytes
        self._pool.free -= self.held

    @property
    def under_way(self) -> int:
        """Chunks whose sums are not known here yet."""
        return len(self._open)

    def contribute(
        self,
        source: Hashable,
        position: int,
        members: int,
        values: Integers | None,
        mode: int = Mode.LOCAL,
        kind: Kind = Kind.CONTRIBUTION,
    ) -> list[Send]:
        """Add a contribution of *source*; return the frames to send.

        *values* are the sum over *members* workers, or their maximum for the *kind* MAXIMUM. None:
        these workers have nothing to add. The caller must not use *values* afterwards. Raises
        `UsageError` if the terms are broken.
        """
        terms = self.terms
        part = position % len(terms.expected)
        chunk = self._open.get(position)
        if chunk is None:
            if len(self._open) >= self._most_open:
                raise UsageError(
                    f"chunk {position} is beyond the window of {self.window}: expected no more "
                    "chunks in flight"
                )
            chunk = self._open[position] = _Chunk(mode, kind)
        chunk.members += members
        fits = (mode, kind) == (chunk.mode, chunk.kind)
        fits = fits and (mode == Mode.LOCAL or terms.agents > 0)
        if members < 1 or chunk.members > terms.expected[part] or not fits:
            raise UsageError(
                f"chunk {position}: {chunk.members} contributions of kind {kind} and mode "
                f"{mode}: expected {terms.expected[part]} of kind {chunk.kind} and mode "
                f"{chunk.mode}"
            )
        chunk.sources[source] = None
        sends = []
        if values is not None:
            if chunk.values is not None:
                if len(values) != len(chunk.values):
                    raise UsageError(
                        f"chunk {position}: {len(values)} numbers: expected "
                        f"{len(chunk.values)}, as from other workers"
                    )
                merge = np.maximum if kind == Kind.MAXIMUM else np.add
                merge(chunk.values, values, out=chunk.values)
                chunk.merged += members
            elif terms.leased or self._take(values.nbytes):
                chunk.values, chunk.merged = values, members
            else:
                self._pool.passed_on += 1
                sends.append(self._up(position, kind, members, values))
        if chunk.members == terms.expected[part]:
            sends += self._complete(position, chunk)
        return sends

    def result(self, position: int, values: Integers) -> list[Send]:
        """Deliver the whole sum that a parent has formed. Raises `UsageError` if the chunk does not
        wait for it."""
        chunk = self._open.pop(position, None)
        if chunk is None or chunk.members != self._expected(position):
            raise UsageError(f"a sum of chunk {position}, which nobody waits for")
        return self._to_all(chunk, position, values)

    # ---- inside ----

    def _expected(self, position: int) -> int:
        return self.terms.expected[position % len(self.terms.expected)]

    def _parent(self, position: int) -> int:
        return self.terms.parent_of[position % len(self.terms.parent_of)]

    def _take(self, size: int) -> bool:
        if self._pool.free < size:
            return False
        self._pool.free -= size
        self.held += size
        return True

    def _up(self, position: int, kind: Kind, members: int, values: Integers) -> Send:
        to = ParentLink(self._parent(position))
        return Send(to, kind, position, values, members)

    def _complete(self, position: int, chunk: _Chunk) -> list[Send]:
        values = chunk.values
        if self._parent(position) >= 0:
            if values is None:
                return []
            chunk.values = None
            self._pool.free += values.nbytes
            self.held -= values.nbytes
            return [self._up(position, chunk.kind, chunk.merged, values)]
        del self._open[position]
        if not self.terms.leased and values is not None:
            self._pool.free += values.nbytes
            self.held -= values.nbytes
        if chunk.mode == Mode.LOCAL:
            return self._to_all(chunk, position, values)
        # Send to the next group's agent first, and to this group's workers when the kernel has
        # taken that frame. So a slow agent holds up this group's window, and no queue here
        # grows.
        known = values if chunk.mode == Mode.ONWARD else None
        then = self._to_all(chunk, position, known)
        agent = Agent(position % self.terms.agents)
        return [Send(agent, Kind.SUM, position, values, then=tuple(then))]

    def _to_all(
        self, chunk: _Chunk, position: int, values: Integers | None
    ) -> list[Send]:
        """Send the sum, or DONE without values, to all contributors (in a ring: to all workers of
        the group)."""
        kind = Kind.DONE if values is None else Kind.SUM
        whom = self.workers if self.terms.agents else chunk.sources
        return [Send(to, kind, position, values) for to in whom]


def check(terms: Terms) -> None:
    """Raise `UsageError` for inconsistent terms."""
    parts = len(terms.expected)
    good = bool(
        1 <= parts == len(terms.parent_of)
        and all(0 <= one < _WORKERS for one in terms.expected)
        and all(-1 <= one < MOST_PARENTS for one in terms.parent_of)
        and 0 <= terms.agents < _WORKERS
        and 1 <= terms.window <= MOST_WINDOW
        and FEWEST_BYTES <= terms.chunk_bytes <= MOST_BYTES
        and terms.chunk_bytes % 4 == 0
        and terms.leased == (max(terms.parent_of) < 0)
    )
    if not good:
        raise UsageError(
            f"job {terms.job}: terms that do not fit together: expected a parent or -1 for each of "
            f"{parts} parts, 1 to {MOST_WINDOW} chunks of {FEWEST_BYTES} to {MOST_BYTES} bytes"
        )
