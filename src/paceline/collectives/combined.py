"""Schedules made of schedules: one after the other, side by side, among some of the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.interfaces import Schedule, Transfer


@dataclass(frozen=True)
class InTurn:
    """All steps of the first part, then all of the next."""

    parts: tuple[Schedule, ...]

    @property
    def ranks(self) -> int:
        return self.parts[0].ranks

    @property
    def steps(self) -> int:
        return sum(part.steps for part in self.parts)

    def step(self, number: int) -> Iterator[Transfer]:
        before = 0
        for part in self.parts:
            if number - before < part.steps:
                for transfer in part.step(number - before):
                    yield transfer._replace(step=number)
                return
            before += part.steps

    def bytes_sent(self, rank: int) -> int:
        return sum(part.bytes_sent(rank) for part in self.parts)

    @property
    def priced(self) -> None:
        return None


@dataclass(frozen=True)
class SideBySide:
    """The first steps of all parts, then their second ones: for parts that share no rank."""

    parts: tuple[Schedule, ...]

    @property
    def ranks(self) -> int:
        return self.parts[0].ranks

    @property
    def steps(self) -> int:
        return max(part.steps for part in self.parts)

    def step(self, number: int) -> Iterator[Transfer]:
        for part in self.parts:
            if number < part.steps:
                yield from part.step(number)

    def bytes_sent(self, rank: int) -> int:
        return sum(part.bytes_sent(rank) for part in self.parts)

    @property
    def priced(self) -> None:
        return None


@dataclass(frozen=True)
class Among:
    """*schedule* among *members*, some of *ranks* ranks: its rank i is ``members[i]``."""

    ranks: int
    members: tuple[int, ...]
    schedule: Schedule

    @property
    def steps(self) -> int:
        return self.schedule.steps

    def step(self, number: int) -> Iterator[Transfer]:
        for transfer in self.schedule.step(number):
            yield transfer._replace(
                source=self.members[transfer.source],
                destination=self.members[transfer.destination],
            )

    def bytes_sent(self, rank: int) -> int:
        if rank not in self.members:
            return 0
        return self.schedule.bytes_sent(self.members.index(rank))

    @property
    def priced(self) -> None:
        return None
