"""All-reduce by recursive halving and doubling.

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005), section 4.5 (Rabenseifner's algorithm). Of n ranks the p = 2^k lowest take
part; each of the n - p others first gives its buffer to one of them, and gets the result
from there. In k steps two ranks exchange halves of what they both still hold, at half the
distance and half the size each time; k steps more put it together again.

Moves: as much as a ring, in 2 log2 n messages instead of 2 (n - 1), for p = n.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.interfaces import Transfer


@dataclass(frozen=True)
class HalvingDoubling:
    """The schedule over *size* units."""

    ranks: int
    size: int

    @property
    def _levels(self) -> int:
        return self.ranks.bit_length() - 1

    @property
    def _surplus(self) -> int:
        """How many ranks only give and get."""
        return self.ranks - (1 << self._levels)

    @property
    def steps(self) -> int:
        return 2 * self._levels + (2 if self._surplus else 0)

    def step(self, number: int) -> Iterator[Transfer]:
        inner = 1 << self._levels
        if self._surplus:
            if number in (0, self.steps - 1):
                for given in range(self._surplus):
                    ends = (
                        (inner + given, given) if not number else (given, inner + given)
                    )
                    yield Transfer(*ends, self.size, 0, not number)
                return
            level = number - 1
        else:
            level = number
        halving = level < self._levels
        depth = level if halving else 2 * self._levels - 1 - level
        for rank in range(inner):
            partner = rank ^ (inner >> (depth + 1))
            # Halving gives what the partner is to hold; doubling what this rank holds.
            start, stop = self._held(partner if halving else rank, depth + 1)
            yield Transfer(rank, partner, stop - start, start, halving)

    def _held(self, rank: int, depth: int) -> tuple[int, int]:
        """The part that *rank* is left with after so many halvings."""
        start, stop = 0, self.size
        for level in range(depth):
            middle = start + -(-(stop - start) // 2)
            if rank & (1 << (self._levels - 1 - level)):
                start = middle
            else:
                stop = middle
        return start, stop

    def bytes_sent(self, rank: int) -> int:
        inner = 1 << self._levels
        if rank >= inner:
            return self.size
        sent = self.size if rank < self._surplus else 0
        for depth in range(self._levels):
            partner = rank ^ (inner >> (depth + 1))
            for holder in (partner, rank):
                start, stop = self._held(holder, depth + 1)
                sent += stop - start
        return sent

    @property
    def priced(self) -> None:
        return None
