"""The next agent's side of sums that leave a rack: takes each once, and acknowledges each copy.

========================================== ============================== ================
datagram                                   what changes                   answer
========================================== ============================== ================
a forwarded sum of a chunk that is awaited the operation takes it         received
the same, of a chunk that was taken        -                              received
the same, of a chunk not yet asked for     it is kept, one per slot       - (once it is
                                                                          asked for)
========================================== ============================== ================

The rack before has *slots* of its own, in which it counts chunks on and on; so does this side,
operation by operation (`Inbox.skip` for those whose sums do not leave), in the same order. What is lost on the way
the rack's workers send again, until their slot is freed; an agent that would not wait for that
asks for it (`Inbox.wanted`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from paceline.collectives.in_network.packets import (
    MODES,
    NOBODY,
    Array,
    Flag,
    Kind,
    blank,
)

_NONE = np.zeros(0, np.int64)

Taken = Callable[[Array, Array], None]
"""Gets chunks, counted from the operation's first one, and their datagrams."""


def sent_alone(packets: Array) -> Array:
    """A worker's contributions, as the sums of a group that has no other: *packets*, in place.
    They go straight to the next agents, who acknowledge them as any."""
    packets["header"]["kind"] = Kind.RESULT
    packets["header"]["worker"] = NOBODY
    return packets


def freed_alone(packets: Array) -> Array:
    """What the next agents answer to a worker that is alone, as his `Stream` takes it."""
    packets = packets[packets["header"]["kind"] == Kind.RECEIVED]
    packets["header"]["kind"] = Kind.FREED
    return packets


class Inbox:
    """What comes from the rack before, whose job there has so many *slots*."""

    def __init__(
        self,
        *,
        slots: int,
        elements: int,
        number: int = 0,
        turn: tuple[int, int] = (0, 1),
    ) -> None:
        """*number*: that of the job at the aggregator before. *turn*: (i, n) where n agents
        take turns: this one is sent what comes from slots i, i + n, ..."""
        self._slots, self._elements, self._number = slots, elements, number
        self._turn = turn
        self._first = self._end = 0
        self._here = np.zeros(0, np.bool_)
        self._take: Taken | None = None
        self._early: dict[int, Array] = {}
        """By slot: what came for an operation that is not yet here."""
        self.counts: Counter[str] = Counter()

    def begin(self, chunks: int, take: Taken, leaving: Array | bool = True) -> Array:
        """So many chunks are awaited now, once those before are `finished`: those whose sums are
        *leaving* the rack. Returns the answers to those that were here already, without
        tag."""
        assert self.finished, "an operation is under way"
        self._here = ~(self.turns(chunks) & leaving)
        self._first, self._end = self._end, self._end + chunks
        self._take = take
        early, self._early = list(self._early.values()), {}
        return self.take(np.concatenate(early)) if early else self._asking(_NONE)

    def turns(self, chunks: int) -> Array:
        """Which of the next so many chunks come to this agent."""
        number, agents = self._turn
        slots = np.arange(self._end, self._end + chunks) % self._slots
        return np.asarray(slots % agents == number)

    def skip(self, chunks: int) -> None:
        """The rack before carries out an operation of so many chunks whose sums it keeps."""
        assert self.finished, "an operation is under way"
        self._first = self._end = self._end + chunks
        self._here = np.zeros(0, np.bool_)

    @property
    def finished(self) -> bool:
        """Whether all that was awaited is here."""
        return bool(self._here.all())

    def take(self, packets: Array) -> Array:
        """Deal with a batch of genuine datagrams; the answers, without tag."""
        header = packets["header"]
        forwarded = (header["kind"] == Kind.RESULT) & (
            header["flags"] & np.uint8(MODES) != 0
        )
        slot = header["slot"].astype(np.int64)
        chunk = header["round"].astype(np.int64) * self._slots + slot
        forwarded &= slot < self._slots
        known = forwarded & (chunk < self._end)
        for row in np.flatnonzero(forwarded & ~known).tolist():
            self._early[int(slot[row])] = packets[row : row + 1].copy()
        rows = np.flatnonzero(known & (chunk >= self._first))
        place = chunk[rows] - self._first
        new = ~self._here[place]
        place, firsts = np.unique(place[new], return_index=True)
        self._here[place] = True
        if len(place) and self._take is not None:
            self._take(place, packets[rows[new][firsts]])
        self.counts["taken"] += len(place)
        self.counts["dropped"] += len(packets) - int(np.count_nonzero(known))
        answers = self._asking(chunk[known])
        answers["header"]["kind"] = Kind.RECEIVED
        return answers

    def wanted(self) -> Array:
        """Questions for the chunks that are still awaited, among the next ones of each slot,
        without tag."""
        missing = np.flatnonzero(~self._here) + self._first
        _, firsts = np.unique(missing % self._slots, return_index=True)
        questions = self._asking(missing[firsts])
        questions["header"]["kind"] = Kind.WANTED
        return questions

    def _asking(self, chunks: Array) -> Array:
        packets = blank(len(chunks), self._elements)
        header = packets["header"]
        header["flags"] = Flag.FORWARD
        header["job"] = self._number
        header["slot"] = chunks % self._slots
        header["round"] = chunks // self._slots
        header["worker"] = NOBODY
        return packets
