"""Slots that jobs compete for, and the server that what finds none falls back to.

After ATP (Lao et al., NSDI 2021; rules from its public P4 and server code). A switch adds up what
it can, and passes on to the job's server what it cannot, so no job needs slots of its own, and
any number of switches may be in between. Windows, rounds and repeats are a worker's as under
`slots`; only what is sent again says so.

The switch (`BestEffort`): slot j of a job competes for place (hash(job) + j) mod places.
-----------------------------------------------------------------------------------------
============================== ======================== ====================== =================
packet                         the place                what changes           answer
============================== ======================== ====================== =================
contribution                   free, or the same job's  it is this round's     as the next line,
                               slot in an older round                          if one is enough
contribution, new bit          this round's             added                  with the last bit:
                                                                               merged, to the
                                                                               server
contribution, old bit          this round's             -                      all are in: merged,
                                                                               to the server
contribution                   the slot's, in a newer   -                      - (late)
                               round
contribution                   another's: collision     -                      as it is, to the
                                                                               server
contribution, repeated         this round's             free                   what is there, to
                                                                               the server, as one
                                                                               repeated; and as it
                                                                               is, if it is new
contribution, repeated         any other                -                      as it is, to the
                                                                               server
parameters, from the server    this round's             free                   as they are, to
                                                                               all or to one
parameters                     any other                -                      likewise
============================== ======================== ====================== =================

*All*, and *the last bit*: of the workers whose contributions come through this switch. A job's
slots may differ in that, in turn: slot j has those in ``expected[j mod len(expected)]``. So one
switch may be the first that some slots' contributions meet, and for others that of the server's
rack, where the sums of all racks are added up before the last link (ATP aggregates at both).
What merges several workers' is a contribution as any.

So a place is held from the first contribution to the server's answer. A copy that the network
held back may claim a place for a round that is over: the job's next round takes it over (whoever
sends it has the older result, so nobody needs the older sum), and the end of the job frees it.

The server (`FallbackServer`) is `protocol.Slots` for merged contributions: one with all bits
replaces what is there, one with some is added if none of them is there yet. Its result answers
every repeat, until the next round is complete.

In ATP's own rules what is sent again is added to what is there, if it is new. But the server may have
it already, and then drops all that comes with it; those wait for their own timers.

Left out: ECN marks and windows that shrink (compiled off in the public code), and the check of
saturated sums (exponents are agreed first: see `fixed_point`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from paceline.collectives.in_network.packets import NOBODY, Array, Flag, Kind, blank
from paceline.collectives.in_network.slots import (
    EVERYONE,
    NEXT,
    Columns,
    Memory,
    Outgoing,
    Slots,
    joined,
    passes,
)

_MIX = 0x9E3779B1
"""Knuth's multiplicative hash."""


class _Places(NamedTuple):
    job: Array
    """0: free."""
    slot: Array
    round: Array
    bits: Array
    elements: Array
    exponents: Array
    values: Array


class BestEffort:
    """The switch: so many *places*, for all jobs."""

    def __init__(self, places: int, elements: int) -> None:
        self.places = places
        self._held = _Places(
            job=np.zeros(places, np.int64),
            slot=np.zeros(places, np.int64),
            round=np.zeros(places, np.int64),
            bits=np.zeros(places, np.uint64),
            elements=np.zeros(places, np.int64),
            exponents=np.zeros(places, np.int16),
            values=np.empty((places, elements), np.int32),
        )
        self.dropped: Counter[str] = Counter()
        self.collisions = 0
        """Contributions that were passed on because their place was another's."""

    @property
    def taken(self) -> int:
        """How many places are held."""
        return int(np.count_nonzero(self._held.job))

    def take(self, job: int, expected: Array, packets: Array) -> Outgoing:
        """Deal with a batch of genuine packets of *job*, in order. *expected*: the bits of those
        whose contributions come through this switch, for slots in turn."""
        columns = Columns.of(packets)
        places = self._places_of(job, columns)
        bits, everyone = columns.bits, expected[columns.slot % len(expected)]
        answered = columns.kind == Kind.PARAMETERS
        good = answered | ((bits & ~everyone == 0) & (bits != 0))
        self._drop("of no worker", ~good)
        found: list[Outgoing] = []
        for rows in passes(places, good):
            kind = columns.kind[rows]
            gradient = rows[kind == Kind.CONTRIBUTION]
            found += self._contribute(packets, columns, places, gradient, job, everyone)
            answers = rows[kind == Kind.PARAMETERS]
            found.append(self._answer(packets, columns, places, answers, job))
            known = (Kind.CONTRIBUTION, Kind.PARAMETERS)
            self._drop("out of place", ~np.isin(kind, known))
        return joined(found, packets.dtype)

    def forget(self, job: int) -> None:
        """The job has ended: its places are free."""
        self._held.job[self._held.job == job] = 0

    def _places_of(self, job: int, columns: Columns) -> Array:
        return (columns.slot + (job * _MIX >> 7)) % self.places

    def _contribute(
        self,
        packets: Array,
        columns: Columns,
        places: Array,
        rows: Array,
        job: int,
        everyone: Array,
    ) -> Iterator[Outgoing]:
        if not len(rows):
            return
        held, place = self._held, places[rows]
        slot, number = columns.slot[rows], columns.round[rows]
        elements, bits = columns.elements[rows], columns.bits[rows]
        repeated = columns.flags[rows] & Flag.REPEATED != 0
        own = (held.job[place] == job) & (held.slot[place] == slot)
        same = own & (held.round[place] == number)
        late = own & (held.round[place] > number) & ~repeated
        free = (held.job[place] == 0) | (own & (held.round[place] < number))
        stored = held.elements[place]
        agrees = (elements == 0) | (stored == 0) | (elements == stored)
        refused = same & ~agrees
        claims = free & ~repeated
        new = same & agrees & ~repeated & (bits & held.bits[place] == 0)
        beside = same & agrees & repeated & (bits & ~held.bits[place] != 0)
        self._put(columns, rows, place, claims, new, job)
        full = held.bits[place] == everyone[rows]
        merged = (claims | (same & agrees)) & (full | (same & repeated))
        yield self._merged(place, merged, repeated)
        flushed = same & agrees & repeated
        held.job[place[flushed]] = 0
        aside = ~(claims | same | late) | beside
        passed_on = Outgoing(
            packets[rows[aside]], np.full(np.count_nonzero(aside), NEXT)
        )
        collided = ~repeated[aside]
        passed_on.packets["header"]["flags"][collided] |= np.uint8(Flag.COLLIDED)
        self.collisions += int(np.count_nonzero(collided))
        yield passed_on
        self._drop("late", late)
        self._drop("disagreeing", refused)
        self._drop("repeated", same & agrees & ~new & ~merged)

    def _put(
        self,
        columns: Columns,
        rows: Array,
        place: Array,
        claims: Array,
        new: Array,
        job: int,
    ) -> None:
        held, counts = self._held, claims | new
        rows, place, claims = rows[counts], place[counts], claims[counts]
        elements, bits = columns.elements[rows], columns.bits[rows]
        stored = np.where(claims, 0, held.elements[place])
        writes = (elements > 0) & (stored == 0)
        adds = (elements > 0) & ~writes
        held.values[place[writes]] = columns.values[rows[writes]]
        held.values[place[adds]] += columns.values[rows[adds]]
        held.elements[place] = np.maximum(stored, elements)
        before = np.where(claims, np.uint64(0), held.bits[place])
        held.bits[place] = before | bits
        exponents = columns.exponent[rows]
        known = np.where(claims, exponents, held.exponents[place])
        held.exponents[place] = np.maximum(known, exponents)
        held.job[place] = job
        held.slot[place] = columns.slot[rows]
        held.round[place] = columns.round[rows]

    def _merged(self, place: Array, which: Array, repeated: Array) -> Outgoing:
        """What these places hold, for the server."""
        held, place, repeated = self._held, place[which], repeated[which]
        packets = blank(len(place), held.values.shape[1])
        header = packets["header"]
        header["kind"] = Kind.CONTRIBUTION
        header["slot"], header["round"] = held.slot[place], held.round[place]
        header["elements"] = held.elements[place]
        header["exponent"] = held.exponents[place]
        header["bitmap"] = held.bits[place]
        header["flags"][repeated] = Flag.REPEATED
        packets["values"] = held.values[place]
        return Outgoing(packets, np.full(len(place), NEXT))

    def _answer(
        self, packets: Array, columns: Columns, places: Array, rows: Array, job: int
    ) -> Outgoing:
        held, place = self._held, places[rows]
        same = (
            (held.job[place] == job)
            & (held.slot[place] == columns.slot[rows])
            & (held.round[place] == columns.round[rows])
        )
        held.job[place[same]] = 0
        worker = columns.worker[rows]
        return Outgoing(packets[rows], np.where(worker == NOBODY, EVERYONE, worker))

    def _drop(self, word: str, which: Array) -> None:
        count = int(np.count_nonzero(which))
        if count:
            self.dropped[word] += count


class FallbackServer:
    """The server behind the switches, for one job of *workers*, or for some of its slots: what
    it answers goes to all, or to one of them, by way of the switches."""

    def __init__(self, slots: int, elements: int, workers: int) -> None:
        self._slots = Slots(Memory.of(slots, elements), workers)

    @property
    def dropped(self) -> Counter[str]:
        """As `Slots` has it."""
        return self._slots.dropped

    def take(self, packets: Array) -> Array:
        """Deal with a batch of contributions; the answers: `NOBODY` as worker is for all."""
        answers = self._slots.take(packets)
        header = answers.packets["header"]
        header["kind"] = Kind.PARAMETERS
        header["worker"] = np.where(answers.to == EVERYONE, NOBODY, answers.to)
        return answers.packets
