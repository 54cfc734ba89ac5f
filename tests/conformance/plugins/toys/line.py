"""An all-reduce made of sends and receives: along a line of ranks, and back.

Steps 0 to n-2: rank k sends what it has added up so far to rank k+1, which adds its own.
Steps n-1 to 2n-3: the sum goes back, from the last rank to the first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from paceline.collectives.algorithms import Scheduled
from paceline.interfaces import Placement, Schedule, Transfer


@dataclass(frozen=True)
class Along(Schedule):
    """The transfers of a line of ranks over *size* units."""

    size: int

    @property
    def steps(self) -> int:
        return 2 * (self.ranks - 1)

    def step(self, number: int) -> Iterator[Transfer]:
        there = self.ranks - 1
        if number < there:
            yield Transfer(number, number + 1, self.size, adds=True)
        else:
            rank = 2 * there - number
            yield Transfer(rank, rank - 1, self.size)


class Line(Scheduled):
    """Formed by: a line of all ranks, and back. Sends: the buffer once each way. Good for:
    chains of machines that have links to their neighbours alone."""

    name: ClassVar[str] = "line"

    def schedule(self, size: int, at: Placement) -> Schedule:
        return Along(at.size, size)
