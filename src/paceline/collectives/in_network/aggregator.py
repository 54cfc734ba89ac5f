"""Sums of chunks at one aggregator: several jobs that share its memory. No I/O.

A job is there from its first hello until its last connection is gone. Chunks are known by their
*position* in the job's stream, which all workers number alike. A chunk is complete here when as
many workers have contributed as `Terms.expected` says; contributions come over TCP, so none is
lost, doubled or late.

*Leased* (SwitchML, Rina): memory for a window of chunks is kept for the job. A worker sends a
chunk only while it is less than a window behind its lowest unfinished one, so there is always
room for what comes.

*Best effort* (ATP): a contribution that finds no free memory is passed on to the job's parent as
it is. What was passed on counts: the chunk's partial sum follows when all others are here.

*Why there is no deadlock.* Workers' windows are about positions, in one order for all. The
lowest unfinished chunk of a job is in every worker's window. So every worker sends its
contribution as soon as it has it, and there is room for it. In another group of a ring it waits for a
chunk of an earlier stage, which is lower still in that group's order.
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
"""Of a chunk."""
MOST_BYTES = 1 << 20
_WORKERS = 1 << 16


@dataclass(frozen=True)
class Agent:
    """The connection that takes turn *number* at sums that go on."""

    number: int


@dataclass(frozen=True)
class ParentLink:
    """The connection to parent *number*."""

    number: int


@dataclass(frozen=True)
class Send:
    """A frame of a chunk, *to* a source of contributions, an `Agent` or a `ParentLink`. *then*: what follows
    when that one's kernel has taken it."""

    to: Hashable
    kind: Kind
    position: int
    values: Integers | None = None
    members: int = 0
    then: tuple[Send, ...] = ()


@dataclass
class _Chunk:
    """*members* have contributed; *merged* of them are in *values*. *kind*: of all
    contributions."""

    mode: int
    kind: Kind
    members: int = 0
    merged: int = 0
    values: Integers | None = None
    sources: dict[Hashable, None] = field(default_factory=dict)


class ChunkPool:
    """Jobs that share so many bytes of *memory*."""

    def __init__(self, memory: int) -> None:
        self.memory = self.free = memory
        self.jobs: dict[str, Job] = {}
        self.passed_on = 0
        """Contributions that found no room."""

    def job_for(self, terms: Terms) -> Job:
        """The job of these terms, which begins with the first who asks. Raises `UsageError` in words
        for whom it refuses."""
        check(terms)
        job = self.jobs.get(terms.job)
        if job is None:
            if len(self.jobs) >= MOST_JOBS:
                raise UsageError(
                    f"{MOST_JOBS} jobs are here already: wait for one to end, or start another "
                    "aggregator"
                )
            job = self.jobs[terms.job] = Job(self, terms)
        elif job.terms != terms:
            raise UsageError(
                f"job {terms.job}: somebody asks for {terms}, and those before for "
                f"{job.terms}: expected the same of all"
            )
        return job

    def end(self, job: Job) -> None:
        """The job is no more: its memory is free."""
        if self.jobs.get(job.terms.job) is job:
            del self.jobs[job.terms.job]
            self.free += job.held
            job.held = 0


class Job:
    """One job's chunks at this aggregator. *window* and *chunk_bytes* are what it was granted."""

    def __init__(self, pool: ChunkPool, terms: Terms) -> None:
        self._pool = pool
        self.terms = terms
        self.window, self.chunk_bytes = terms.window, terms.chunk_bytes
        self.held = 0
        self._most_open = 2 * terms.window
        """Sums may come back to a worker by another way first, up to a window before others."""
        if terms.leased:
            self._lease()
            self._most_open = self.window
        self._open: dict[int, _Chunk] = {}
        self.workers: list[Hashable] = []
        """Of a ring: who hears of all of its group's sums, also where one worker brings a chunk for all."""

    def _lease(self) -> None:
        """A window of sums, and as much that waits to be sent."""
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
        """Chunks whose sums are not known here."""
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
        """*source* contributes *members* workers' sum or, of the *kind* MAXIMUM, their largest
        numbers (None: they have nothing to add); *values* are given away. Returns what is to be
        sent. Raises `UsageError` where the terms are broken."""
        terms = self.terms
        part = position % len(terms.expected)
        chunk = self._open.get(position)
        if chunk is None:
            if len(self._open) >= self._most_open:
                raise UsageError(
                    f"chunk {position} is beyond the window of {self.window}: expected no more "
                    "under way"
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
                        f"{len(chunk.values)}, as others have"
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
        """A parent has formed the whole sum. Raises `UsageError` where nobody waits for it."""
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
        # The next group's agent first: who has not read what came before holds this group's
        # window, and no queue here grows.
        known = values if chunk.mode == Mode.ONWARD else None
        then = self._to_all(chunk, position, known)
        agent = Agent(position % self.terms.agents)
        return [Send(agent, Kind.SUM, position, values, then=tuple(then))]

    def _to_all(
        self, chunk: _Chunk, position: int, values: Integers | None
    ) -> list[Send]:
        """The sum, or that it is complete, to all who have contributed."""
        kind = Kind.DONE if values is None else Kind.SUM
        whom = self.workers if self.terms.agents else chunk.sources
        return [Send(to, kind, position, values) for to in whom]


def check(terms: Terms) -> None:
    """Raise `UsageError` for terms that do not fit together."""
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
