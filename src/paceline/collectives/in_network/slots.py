"""The slots of one job, as a state machine: no I/O, no clock, no sockets.

After SwitchML (Sapio et al., NSDI 2021; rules from its public code), with two additions for
rings of racks (Rina, ICNP 2024: the idea; the packet rules are this project's own).

Theory of operation
-------------------
Chunk number j of a job uses slot j mod s, in round r = j div s. A slot has two versions,
r mod 2: while round r is summed up, the result of round r - 1 stays, for workers that have
lost it. A worker sends round r only when it has the result of r - 1; so when anybody's packet of
round r is here, everybody's of r - 1 was, and all had r - 2, whose version may be overwritten.
Results are the only acknowledgement, and the only clock.

SwitchML's packets name the version alone, and a copy of round r that the network held back until
r + 2 would be added to that. Here they name the round: a late one is known as late.

A packet is a *contribution* of one worker; with no values it is one of zeros. So a worker that
only awaits a result (one that another worker sends to all of the rack) contributes nothing, and
the slot is still freed by the same rule. Modes, chosen round by round by the workers alike:

- LOCAL: the sum goes to all workers of the job (multicast), and their next round frees it;
- FORWARD: the sum leaves the rack toward the next agent, and only its acknowledgement frees
  the slot, which the workers are told;
- ONWARD: both: the sum goes to all workers and to the next agent, whose acknowledgement frees
  the slot.

Transitions
-----------
A version holds a round and is *filling*, *complete* (all have contributed) or *over* (complete,
and in FORWARD and ONWARD acknowledged). Before the first round, rounds -2 and -1 are over.

===================== ======================== ============================ ==================
packet                version                  what changes                 answer
===================== ======================== ============================ ==================
contribution, its     holds r - 2; the other   holds r: the values are      as the next line,
round r               holds r - 1 and is over  written, filling             if one is enough
contribution, new bit filling r                added; with the last bit     the sum: to all but in
                                               complete (LOCAL: over)       FORWARD, to the next
                                                                            but in LOCAL
contribution, old bit filling r                -                            -
contribution, old bit complete or over, r      -                            LOCAL, ONWARD: the
                                                                            sum, to its worker
contribution, old bit complete, r              -                            FORWARD, ONWARD: the
                                                                            sum, to the next
contribution, old bit over, r                  -                            FORWARD, ONWARD: freed,
                                                                            to its worker
contribution          holds more than r: late  -                            -
contribution          any other: early         -                            -
received (next agent) complete, r              over                         freed, to all
wanted                complete, r              -                            the sum, to its worker
                                                                            or to the next
===================== ======================== ============================ ==================

Contributions that disagree with the first of their round, in mode or in number of values, are
dropped before anything changes. All that is dropped is counted, in `Slots.dropped`.

A *merged* contribution has several workers' bits (see `best_effort`): one with all bits replaces
what is there, another one is added if none of its bits is there yet, and dropped otherwise.

A batch is dealt with in passes, in each of which no slot occurs twice: so a pass is a few
operations on columns, and slots see their packets in order. A law of the tests: a batch and its
packets one by one come to the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from paceline.collectives.in_network.packets import (
    MODES,
    MOST_WORKERS,
    NOBODY,
    Array,
    Flag,
    Kind,
    blank,
)
from paceline.errors import UsageError

EVERYONE = -1
NEXT = -2


class Outgoing(NamedTuple):
    """Datagrams to send. *packets*: rows, without tag and job; *to*, of each: a worker,
    `EVERYONE` of the job, or the `NEXT` agent."""

    packets: Array
    to: Array


class Memory(NamedTuple):
    """What the slots of a job consist of: row i is slot i, of two versions."""

    rounds: Array
    seen: Array
    over: Array
    flags: Array
    elements: Array
    exponents: Array
    values: Array

    @classmethod
    def of(cls, slots: int, elements: int) -> Memory:
        """For so many slots, each of two times *elements* values."""
        shape = (slots, 2)
        return cls(
            rounds=np.empty(shape, np.int64),
            seen=np.empty(shape, np.uint64),
            over=np.empty(shape, np.bool_),
            flags=np.empty(shape, np.uint8),
            elements=np.empty(shape, np.int64),
            exponents=np.empty(shape, np.int16),
            values=np.empty((*shape, elements), np.int32),
        )

    def part(self, start: int, stop: int) -> Memory:
        """The slots from *start* to *stop*."""
        return Memory(*(column[start:stop] for column in self))


def all_bits(workers: int) -> np.uint64:
    """The bitmap of all. Raises `UsageError` for more workers than it has bits."""
    if not 1 <= workers <= MOST_WORKERS:
        raise UsageError(
            f"{workers} workers at one aggregator: expected 1 to {MOST_WORKERS}, the bits of "
            "its bitmap; put the others at another one"
        )
    return np.uint64((1 << workers) - 1)


class Slots:
    """The machine: the slots of a job of *workers*."""

    def __init__(self, memory: Memory, workers: int) -> None:
        self._all = all_bits(workers)
        self._memory = memory
        self.slots = len(memory.rounds)
        self.dropped: Counter[str] = Counter()
        """By word: packets that changed nothing and were not answered."""
        memory.rounds[:] = (-2, -1)
        memory.seen[:] = self._all
        memory.over[:] = True
        memory.flags[:] = 0
        memory.elements[:] = 0
        memory.exponents[:] = 0

    def take(self, packets: Array) -> Outgoing:
        """Deal with a batch, in order. *packets*: genuine ones of this job."""
        columns = Columns.of(packets)
        within = columns.slot < self.slots
        self._drop("beyond the lease", ~within)
        found = [
            answer
            for rows in passes(columns.slot, within)
            for answer in self._pass(columns, rows)
        ]
        return joined(found, packets.dtype)

    # ---- one pass: no slot occurs twice ----

    def _pass(self, columns: Columns, rows: Array) -> Iterator[Outgoing | None]:
        kind = columns.kind[rows]
        contributed = kind == Kind.CONTRIBUTION
        if contributed.any():
            yield from self._contribute(columns, rows[contributed])
        if not contributed.all():
            yield from self._receive(columns, rows[kind == Kind.RECEIVED])
            yield from self._want(columns, rows[kind == Kind.WANTED])
            known = (Kind.CONTRIBUTION, Kind.RECEIVED, Kind.WANTED)
            self._drop("out of place", ~np.isin(kind, known))

    def _contribute(self, columns: Columns, rows: Array) -> Iterator[Outgoing | None]:
        memory = self._memory
        rows = rows[self._has_own_bits(columns, rows)]
        slot, number, bits = columns.slot[rows], columns.round[rows], columns.bits[rows]
        flags = columns.flags[rows] & np.uint8(MODES)
        elements = columns.elements[rows]
        version = number & 1
        held, seen = memory.rounds[slot, version], memory.seen[slot, version]
        begins = (
            (number == held + 2)
            & (memory.rounds[slot, 1 - version] == number - 1)
            & memory.over[slot, 1 - version]
        )
        joins = number == held
        common = seen & bits
        whole = joins & (bits == self._all) & (seen != self._all) & (common != 0)
        fresh = (joins & (common == 0)) | whole
        stored = memory.elements[slot, version]
        agrees = begins | (
            (flags == memory.flags[slot, version])
            & ((elements == 0) | (stored == 0) | (elements == stored))
        )
        taken = (begins | fresh) & agrees
        self._put(columns, rows, taken, begins | whole)
        complete = taken & (memory.seen[slot, version] == self._all)
        home, away = flags != Flag.FORWARD, flags != 0
        memory.over[slot[complete], version[complete]] = ~away[complete]

        yield self._sums(slot, version, complete & home, EVERYONE)
        yield self._sums(slot, version, complete & away, NEXT)
        known = joins & (common == bits) & agrees
        full = known & (seen == self._all)
        over = memory.over[slot, version]
        asker = np.where(columns.worker[rows] == NOBODY, EVERYONE, columns.worker[rows])
        yield self._sums(slot, version, full & home, asker)
        yield self._sums(slot, version, full & away & ~over, NEXT)
        yield self._freed(slot, version, full & away & over, asker)

        self._drop("late", number < held)
        self._drop("early", ~begins & (number > held))
        self._drop("disagreeing", (begins | joins) & ~agrees)
        self._drop("repeated", known & ~full)
        self._drop("overlapping", joins & agrees & ~fresh & ~known)

    def _has_own_bits(self, columns: Columns, rows: Array) -> Array:
        """A worker has its bit and no other; who merges has some of the job's."""
        bits, worker = columns.bits[rows], columns.worker[rows]
        one = np.left_shift(np.uint64(1), (worker % MOST_WORKERS).astype(np.uint64))
        good = (
            (bits != 0)
            & (bits & ~self._all == 0)
            & ((worker == NOBODY) | (bits == one))
        )
        self._drop("of no worker", ~good)
        return np.asarray(good)

    def _put(
        self, columns: Columns, rows: Array, taken: Array, replaces: Array
    ) -> None:
        """Let *taken* contributions count: written where one *replaces* what was there, or
        is the first with values, and added elsewhere."""
        memory = self._memory
        rows, replaces = rows[taken], replaces[taken]
        slot, number = columns.slot[rows], columns.round[rows]
        version = number & 1
        elements = columns.elements[rows]
        stored = np.where(replaces, 0, memory.elements[slot, version])
        writes = (elements > 0) & (stored == 0)
        adds = (elements > 0) & ~writes
        here = slot[writes], version[writes]
        memory.values[here] = columns.values[rows[writes]]
        here = slot[adds], version[adds]
        memory.values[here] += columns.values[rows[adds]]
        memory.elements[slot, version] = np.maximum(stored, elements)
        bits, exponents = columns.bits[rows], columns.exponent[rows]
        before = np.where(replaces, np.uint64(0), memory.seen[slot, version])
        known = np.where(replaces, exponents, memory.exponents[slot, version])
        memory.seen[slot, version] = before | bits
        memory.exponents[slot, version] = np.maximum(known, exponents)
        memory.rounds[slot, version] = number
        memory.over[slot, version] = False
        memory.flags[slot, version] = columns.flags[rows] & np.uint8(MODES)

    def _receive(self, columns: Columns, rows: Array) -> Iterator[Outgoing | None]:
        slot, version, complete = self._complete(columns, rows)
        forwarded = self._memory.flags[slot, version] != 0
        frees = complete & forwarded & ~self._memory.over[slot, version]
        self._memory.over[slot[frees], version[frees]] = True
        yield self._freed(slot, version, frees, EVERYONE)
        self._drop("received again", ~frees)

    def _want(self, columns: Columns, rows: Array) -> Iterator[Outgoing | None]:
        slot, version, complete = self._complete(columns, rows)
        flags = self._memory.flags[slot, version]
        worker = columns.worker[rows].astype(np.int32)
        known = self._all >> worker.astype(np.uint64) & 1 == 1
        to_worker = complete & known & (flags != Flag.FORWARD)
        onward = complete & ~to_worker & ~self._memory.over[slot, version]
        yield self._sums(slot, version, to_worker, worker)
        yield self._sums(slot, version, onward, NEXT)
        self._drop("wanted in vain", ~(to_worker | onward))

    def _complete(self, columns: Columns, rows: Array) -> tuple[Array, Array, Array]:
        """Slots and versions that packets speak of, and which of them are complete."""
        slot, number = columns.slot[rows], columns.round[rows]
        version = number & 1
        holds = self._memory.rounds[slot, version] == number
        full = self._memory.seen[slot, version] == self._all
        return slot, version, holds & full

    # ---- answers ----

    def _sums(
        self, slot: Array, version: Array, wanted: Array, to: Array | int
    ) -> Outgoing | None:
        answer = self._freed(slot, version, wanted, to)
        if answer is not None:
            slot, version = slot[wanted], version[wanted]
            header = answer.packets["header"]
            header["kind"] = Kind.RESULT
            header["elements"] = self._memory.elements[slot, version]
            header["exponent"] = self._memory.exponents[slot, version]
            answer.packets["values"] = self._memory.values[slot, version]
        return answer

    def _freed(
        self, slot: Array, version: Array, wanted: Array, to: Array | int
    ) -> Outgoing | None:
        memory, count = self._memory, int(np.count_nonzero(wanted))
        if not count:
            return None
        packets = blank(count, memory.values.shape[2])
        slot, version = slot[wanted], version[wanted]
        header = packets["header"]
        header["kind"] = Kind.FREED
        header["flags"] = memory.flags[slot, version]
        header["slot"] = slot
        header["round"] = memory.rounds[slot, version]
        header["bitmap"] = memory.seen[slot, version]
        targets = to[wanted] if isinstance(to, np.ndarray) else np.full(count, to)
        return Outgoing(packets, targets)

    def _drop(self, word: str, which: Array) -> None:
        count = int(np.count_nonzero(which))
        if count:
            self.dropped[word] += count


class Columns(NamedTuple):
    """The headers of a batch, column by column, in types that can be computed with."""

    kind: Array
    flags: Array
    elements: Array
    slot: Array
    round: Array
    exponent: Array
    worker: Array
    bits: Array
    values: Array

    @classmethod
    def of(cls, packets: Array) -> Columns:
        header = packets["header"]
        return cls(
            kind=np.ascontiguousarray(header["kind"]),
            flags=np.ascontiguousarray(header["flags"]),
            elements=header["elements"].astype(np.int64),
            slot=header["slot"].astype(np.int64),
            round=header["round"].astype(np.int64),
            exponent=np.ascontiguousarray(header["exponent"]),
            worker=header["worker"].astype(np.int32),
            bits=np.ascontiguousarray(header["bitmap"]),
            values=packets["values"],
        )


def passes(keys: Array, among: Array) -> Iterator[Array]:
    """Rows *among* which each key occurs once, in the order of occurrence: the first ones of
    all keys, then the second ones, and so on."""
    rows = np.flatnonzero(among)
    if not len(rows):
        return
    rows = rows[np.argsort(keys[rows], kind="stable")]
    ordered = keys[rows]
    place = np.arange(len(rows))
    starts = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    occurrence = place - np.maximum.accumulate(np.where(starts, place, 0))
    for number in range(int(occurrence.max()) + 1):
        yield rows[occurrence == number]


def joined(found: Iterable[Outgoing | None], dtype: np.dtype[Any]) -> Outgoing:
    """All answers of a batch."""
    answers = [answer for answer in found if answer is not None and len(answer.to)]
    if len(answers) == 1:
        return answers[0]
    if not answers:
        return Outgoing(np.empty(0, dtype), np.empty(0, np.int64))
    return Outgoing(
        np.concatenate([answer.packets for answer in answers]),
        np.concatenate([answer.to for answer in answers]),
    )
