"""What a worker's stream carries: sums of integers, of numbers, and what one sends to all.

An operation is cut into chunks, each of which is one datagram each way. It says which chunks may
be sent yet, writes what they bring, and takes their sums.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from paceline.collectives.in_network.fixed_point import (
    NOT_FINITE,
    SMALLEST,
    FixedPoint,
    exponents_of,
)
from paceline.collectives.in_network.packets import Array


class Operation(Protocol):
    """One operation of a stream; all workers of a job issue the same ones in the same order."""

    @property
    def chunks(self) -> int:
        """How many there are, counted from 0."""
        ...

    def ready(self, chunks: Array) -> Array:
        """Which of these may be sent now."""
        ...

    def bring(self, chunks: Array, packets: Array) -> None:
        """Write number of elements, exponent and values of these into *packets*. It may be
        asked again, until the sum is here."""
        ...

    def take(self, chunks: Array, packets: Array) -> None:
        """The sums of these are here: once each, in any order."""
        ...


class IntegerSum:
    """*values*, int32 and contiguous, become their sums over workers (modulo 2^32).

    With *awaits* a chunk is sent only once `add` or `put` was given what it waits for: an agent
    of a ring adds its own values to what comes from the rack before
    (`Inbox.begin(chunks, take=self.add)`), and spreads what is whole (`put`).
    """

    def __init__(self, values: Array, elements: int, *, awaits: bool = False) -> None:
        self._values, self._elements = values, elements
        self.chunks = -(-len(values) // elements)
        self._whole = len(values) // elements
        self._rows = values[: self._whole * elements].reshape(-1, elements)
        self._rest = values[self._whole * elements :]
        self._here = np.full(self.chunks, not awaits)

    def ready(self, chunks: Array) -> Array:
        return np.asarray(self._here[chunks])

    def arrive(self, chunks: Array) -> None:
        """These may be sent now: what they bring is in the values."""
        self._here[chunks] = True

    def add(self, chunks: Array, packets: Array) -> None:
        """These bring what *packets* hold, as well; once each, before they are sent."""
        whole = chunks < self._whole
        self._rows[chunks[whole]] += packets["values"][whole, : self._elements]
        for row in np.flatnonzero(~whole):
            self._rest += packets["values"][row, : len(self._rest)]
        self.arrive(chunks)

    def put(self, chunks: Array, packets: Array) -> None:
        """These bring what *packets* hold, and nothing else."""
        self.take(chunks, packets)
        self.arrive(chunks)

    def bring(self, chunks: Array, packets: Array) -> None:
        packets["header"]["elements"] = self._elements
        whole = chunks < self._whole
        if whole.all():
            packets["values"][:, : self._elements] = self._rows[chunks]
            return
        packets["values"][whole, : self._elements] = self._rows[chunks[whole]]
        for row in np.flatnonzero(~whole):
            packets["header"]["elements"][row] = len(self._rest)
            packets["values"][row, : len(self._rest)] = self._rest

    def take(self, chunks: Array, packets: Array) -> None:
        whole = chunks < self._whole
        if whole.all():
            self._rows[chunks] = packets["values"][:, : self._elements]
            return
        self._rows[chunks[whole]] = packets["values"][whole, : self._elements]
        for row in np.flatnonzero(~whole):
            self._rest[:] = packets["values"][row, : len(self._rest)]


class Spread(IntegerSum):
    """*values*, int32, become those of the one worker that *brings* any: the others
    contribute datagrams without values."""

    def __init__(
        self, values: Array, elements: int, brings: bool, *, awaits: bool = False
    ) -> None:
        super().__init__(values, elements, awaits=awaits)
        self._brings = brings

    def bring(self, chunks: Array, packets: Array) -> None:
        if self._brings:
            super().bring(chunks, packets)
        else:
            packets["header"]["elements"] = 0


class NumberSum:
    """*numbers*, single precision and contiguous, become their sums over the workers of *fixed*.

    Chunk j brings the values of block j - a, by an exponent that all workers have agreed on,
    and the exponent of its own block j: the sums' exponents are their maxima. The first a
    chunks (a: *ahead*, or the number of blocks if that is less) have no values.
    """

    def __init__(
        self, numbers: Array, elements: int, fixed: FixedPoint, ahead: int
    ) -> None:
        self._numbers, self._elements = numbers, elements
        self._fixed = fixed
        self._blocks = -(-len(numbers) // elements)
        self._ahead = min(ahead, self._blocks)
        self.chunks = self._blocks + self._ahead
        padded = numbers
        if len(numbers) % elements:
            padded = np.zeros(self._blocks * elements, numbers.dtype)
            padded[: len(numbers)] = numbers
        self._padded = padded
        self._rows = padded.reshape(-1, elements)
        self._own = exponents_of(self._rows)
        self._left = self._blocks
        self._agreed = np.zeros(self._blocks, np.int16)
        self._known = np.zeros(self._blocks, np.bool_)
        self.error = 0.0
        """The largest bound of any block's error (`FixedPoint.bound`) up to now."""

    def ready(self, chunks: Array) -> Array:
        block = chunks - self._ahead
        return np.asarray((block < 0) | self._known[np.maximum(block, 0)])

    def bring(self, chunks: Array, packets: Array) -> None:
        header = packets["header"]
        coming = chunks < self._blocks
        exponents = np.full(len(chunks), SMALLEST, np.int16)
        exponents[coming] = self._own[chunks[coming]]
        header["exponent"] = exponents
        header["elements"] = np.where(chunks >= self._ahead, self._elements, 0)
        with_values = np.flatnonzero(chunks >= self._ahead)
        block = chunks[with_values] - self._ahead
        integers = self._fixed.to_integers(self._rows[block], self._agreed[block])
        packets["values"][with_values, : self._elements] = integers

    def take(self, chunks: Array, packets: Array) -> None:
        coming = chunks < self._blocks
        here = chunks[coming]
        self._agreed[here] = packets["header"]["exponent"][coming]
        self._known[here] = True
        summed = np.flatnonzero(chunks >= self._ahead)
        block = chunks[summed] - self._ahead
        agreed = self._agreed[block]
        sums = packets["values"][summed, : self._elements]
        self._rows[block] = self._fixed.to_numbers(sums, agreed)
        finite = agreed[agreed != NOT_FINITE]
        if len(finite):
            self.error = max(self.error, float(self._fixed.bound(finite).max()))
        self._left -= len(summed)
        if self._left == 0 and self._padded is not self._numbers:
            self._numbers[:] = self._padded[: len(self._numbers)]
