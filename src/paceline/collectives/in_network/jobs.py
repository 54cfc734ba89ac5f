"""Several jobs at one aggregator: who may speak for which, and whose the slots are. No I/O.

A job is there from its first worker's registration until its last worker has said goodbye, or
one is lost. It has a number, which its datagrams carry and which is never used again, a key of
its own that they are signed with, and a lease: slots that nobody else can name (datagrams count
slots from the lease's first one). When it ends, its slots are free at once; what still comes for it
is for a job that nobody knows.

Which rules a job's datagrams follow it says itself: `protocol.Slots`, with a lease, or
`best_effort.BestEffort`, with none. Those of the latter pass from one aggregator to the next, so
its number is the same everywhere: made of the token and of its name, which no other job has had.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from paceline.collectives.in_network.best_effort import BestEffort
from paceline.collectives.in_network.packets import Array, Kind, Seal, well_formed
from paceline.collectives.in_network.slots import (
    Memory,
    Outgoing,
    Slots,
    all_bits,
    joined,
)
from paceline.errors import UsageError
from paceline.transport.security import derived

Rules = Literal["slots", "best-effort"]
MOST_JOBS = 256
MOST_TURNS = 64
"""Servers of one best-effort job."""


@dataclass(frozen=True)
class Terms:
    """What a job asks for, the same for all of its workers.

    *slots*: as many as it would like; *fewest*: it cannot do with fewer. *elements*: values in a
    datagram. With best effort *here* are the bits of those workers that register at this
    aggregator (0: all do), and *expected* of those whose contributions come through it, for
    slots in turn (none: all do): see `best_effort`.
    """

    name: str
    workers: int
    slots: int
    elements: int
    fewest: int = 1
    rules: Rules = "slots"
    here: int = 0
    expected: tuple[int, ...] = ()

    def check(self) -> None:
        """Raise `UsageError` for terms that do not fit together."""
        everyone = int(all_bits(self.workers))
        bits = (self.here, *self.expected)
        if len(bits) > 1 + MOST_TURNS or not all(0 <= b <= everyone for b in bits):
            raise UsageError(
                f"who registers here: {self.here:#x}, who comes through here: {self.expected}: "
                f"expected bits of {self.workers} workers, for up to {MOST_TURNS} slots in turn"
            )

    @property
    def everybody_here(self) -> int:
        """The bits of those who register at this aggregator."""
        return self.here or int(all_bits(self.workers))


@dataclass
class Job:
    """A job that is there."""

    terms: Terms
    number: int
    seal: Seal
    lease: range
    slots: Slots | None
    expected: Array
    """Of best-effort slots in turn: see `Terms`."""
    present: set[int] = field(default_factory=set)
    departed: set[int] = field(default_factory=set)


def key_of(token: str, name: str) -> bytes:
    """The key of job *name*'s datagrams, for whoever has the aggregator's *token*: the same at
    every aggregator with that token, and never sent."""
    return derived(token.encode(), f"datagrams of job {name}").encode()


def number_of(token: str, name: str) -> int:
    """The number of best-effort job *name*, at every aggregator with that *token*."""
    return max(1, int(derived(token.encode(), f"number of job {name}")[:8], 16))


class Jobs:
    """The machine: *slots* that jobs lease, and so many *places* that they compete for."""

    def __init__(
        self,
        slots: int,
        places: int,
        elements: int,
        token: str,
        most_slots: int = 0,
    ) -> None:
        """*elements*: the most that a datagram may have; *most_slots*: that one worker may
        have under way, times workers (0: no bound)."""
        self.elements = elements
        self._memory = Memory.of(slots, elements)
        self._memory.values[:] = 0  # its pages are there from now on
        self._total = slots
        self._token = token
        self._most = most_slots
        self.best_effort = BestEffort(places, elements)
        self._jobs: dict[int, Job] = {}
        self.counts: Counter[str] = Counter()
        """What has happened, by word."""
        self.dropped: Counter[str] = Counter()
        """Datagrams that were dropped, by word; those of jobs that are there are in
        `all_dropped`."""

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    @property
    def free_slots(self) -> int:
        """How many slots nobody has leased."""
        return self._total - sum(len(job.lease) for job in self)

    def all_dropped(self) -> Counter[str]:
        """Datagrams that were dropped, by word: a count of all."""
        total = self.dropped + self.best_effort.dropped
        for job in self:
            if job.slots is not None:
                total += job.slots.dropped
        return total

    # ---- who is here ----

    def register(self, terms: Terms, worker: int) -> Job:
        """A worker takes part in a job, which begins with the first. Raises `UsageError` in
        words for the worker."""
        if not 0 <= worker < terms.workers:
            raise UsageError(
                f"worker {worker} of {terms.workers}: expected 0 to {terms.workers - 1}"
            )
        terms.check()
        if not terms.everybody_here >> worker & 1:
            raise UsageError(
                f"worker {worker} registers where workers {terms.here:#b} (bits) are expected"
            )
        job = next((job for job in self if job.terms.name == terms.name), None)
        if job is None:
            job = self._begin(terms)
        elif job.terms != terms:
            raise UsageError(
                f"job {terms.name}: this worker asks for {terms}, and those before it for "
                f"{job.terms}: expected the same of all workers of a job"
            )
        elif worker in job.present | job.departed:
            raise UsageError(f"job {terms.name}: worker {worker} has registered before")
        job.present.add(worker)
        return job

    def depart(self, job: Job, worker: int) -> bool:
        """The worker needs nothing more; whether it was the job's last, so that the job has
        ended."""
        job.present.discard(worker)
        job.departed.add(worker)
        if len(job.departed) == job.terms.everybody_here.bit_count():
            self.end(job)
            return True
        return False

    def end(self, job: Job) -> None:
        """The job is no more, well or not: its slots are free."""
        if self._jobs.pop(job.number, None) is None:
            return
        if job.slots is not None:
            self.dropped += job.slots.dropped
        self.best_effort.forget(job.number)
        self.counts["jobs ended"] += 1

    def _begin(self, terms: Terms) -> Job:
        all_bits(terms.workers)
        if len(self._jobs) >= MOST_JOBS:
            raise UsageError(
                f"{MOST_JOBS} jobs are here already: wait for one to end, or start another "
                "aggregator"
            )
        if not 1 <= terms.elements <= self.elements:
            raise UsageError(
                f"{terms.elements} values in a datagram: this aggregator takes 1 to "
                f"{self.elements}; start it with a larger --mtu, or ask for fewer"
            )
        lease, slots = range(0), None
        if terms.rules == "slots":
            lease = self._lease(terms)
            memory = self._memory.part(lease.start, lease.stop)
            slots = Slots(memory, terms.workers)
        number = self._number_for(terms)
        seal = Seal(key_of(self._token, terms.name))
        through = terms.expected or (int(all_bits(terms.workers)),)
        expected = np.array(through, np.uint64)
        job = self._jobs[number] = Job(terms, number, seal, lease, slots, expected)
        self.counts["jobs"] += 1
        return job

    def _number_for(self, terms: Terms) -> int:
        if terms.rules == "best-effort":
            number = number_of(self._token, terms.name)
            if number in self._jobs:
                raise UsageError(
                    f"job {terms.name}: another one has its number {number}: begin it anew "
                    "under another name"
                )
            return number
        number = 0
        while number == 0 or number in self._jobs:
            number = secrets.randbits(32)
        return number

    def _lease(self, terms: Terms) -> range:
        """The largest part of what is asked for that is free in one piece."""
        if not 1 <= terms.fewest <= terms.slots:
            raise UsageError(
                f"{terms.slots} slots and no fewer than {terms.fewest}: expected 1 or more, "
                "and no more needed than asked for"
            )
        wanted, start, holes = terms.slots, 0, []
        if self._most:
            wanted = min(wanted, max(self._most // terms.workers, 1))
        for lease in sorted((job.lease for job in self if job.lease), key=min):
            holes.append(range(start, lease.start))
            start = lease.stop
        holes.append(range(start, self._total))
        fitting = [hole for hole in holes if len(hole) >= wanted]
        hole = min(fitting, key=len) if fitting else max(holes, key=len)
        if min(len(hole), wanted) < terms.fewest:
            raise UsageError(
                f"job {terms.name} needs {terms.fewest} slots, and there are "
                f"{min(len(hole), wanted)} for it, of {self._total}: ask for fewer, wait for "
                "another job to end, or start the aggregator with more --slots"
            )
        return hole[:wanted]

    # ---- datagrams ----

    def take(self, packets: Array, lengths: Array) -> list[tuple[Job, Outgoing]]:
        """Deal with datagrams as they came; what is to be sent, signed, by job. *lengths*:
        see `well_formed`."""
        good = well_formed(packets, lengths, self.dropped)
        numbers = packets["header"]["job"].copy()
        answers = []
        for job in self:
            rows = np.flatnonzero(good & (numbers == job.number))
            if len(rows):
                good[rows] = False
                everything = len(rows) == len(packets)
                mine = packets if everything else packets[rows]
                answers.append((job, self._take_from(job, mine)))
        strangers = int(np.count_nonzero(good))
        if strangers:
            self.dropped["of an unknown job"] += strangers
        return answers

    def _take_from(self, job: Job, packets: Array) -> Outgoing:
        genuine = job.seal.genuine(packets)
        forged = len(packets) - int(np.count_nonzero(genuine))
        too_long = genuine & (packets["header"]["elements"] > job.terms.elements)
        if forged or too_long.any():
            self.dropped["forged"] += forged
            self.dropped["too long for its job"] += int(np.count_nonzero(too_long))
            packets = packets[genuine & ~too_long]
        probes = packets["header"]["kind"] == Kind.PROBE
        if probes.any():
            back = Outgoing(
                packets[probes], packets["header"]["worker"][probes].astype(np.int64)
            )
            rest = self._by_rules(job, packets[~probes])
            out = joined([back, rest], packets.dtype)
        else:
            out = self._by_rules(job, packets)
        out.packets["header"]["job"] = job.number
        job.seal.sign(out.packets)
        return out

    def _by_rules(self, job: Job, packets: Array) -> Outgoing:
        self.counts["contributions"] += len(packets)
        if job.slots is not None:
            return job.slots.take(packets)
        return self.best_effort.take(job.number, job.expected, packets)
