"""Schedules made of schedules: in turn, side by side, among some of the ranks, in part."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from paceline.collectives.schedules import transfers_of
from paceline.interfaces import Priced, Schedule, Transfer


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
                yield from part.step(number - before)
                return
            before += part.steps

    def step_of(self, number: int, rank: int) -> Iterator[Transfer]:
        """See `transfers_of`."""
        before = 0
        for part in self.parts:
            if number - before < part.steps:
                yield from transfers_of(part, number - before, rank)
                return
            before += part.steps

    def bytes_sent(self, rank: int) -> int:
        return sum(part.bytes_sent(rank) for part in self.parts)

    @property
    def priced(self) -> Sequence[Sequence[Priced]] | None:
        phases: list[Sequence[Priced]] = []
        for part in self.parts:
            if part.priced is None:
                return None
            phases += part.priced
        return phases


@dataclass(frozen=True)
class SideBySide:
    """The first steps of all parts, then their second ones: for parts that share no rank, or
    no part of the buffer."""

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

    def step_of(self, number: int, rank: int) -> Iterator[Transfer]:
        """See `transfers_of`."""
        for part in self.parts:
            if number < part.steps:
                yield from transfers_of(part, number, rank)

    def bytes_sent(self, rank: int) -> int:
        return sum(part.bytes_sent(rank) for part in self.parts)

    @property
    def priced(self) -> Sequence[Sequence[Priced]] | None:
        """Of parts of one phase each that share no rank: others do not move as if they were
        alone, or wait for each other in between."""
        activities: list[Priced] = []
        seen: set[int] = set()
        for part in self.parts:
            if part.priced is None or len(part.priced) > 1:
                return None
            for activity in (activity for phase in part.priced for activity in phase):
                if not seen.isdisjoint(activity.members):
                    return None
                seen.update(activity.members)
                activities.append(activity)
        return (activities,)


@dataclass(frozen=True)
class Among:
    """*schedule* among *members*, some of *ranks* ranks: its rank i is ``members[i]``, and its
    first unit the one at *offset* of their buffers."""

    ranks: int
    members: tuple[int, ...]
    schedule: Schedule
    offset: int = 0

    @property
    def steps(self) -> int:
        return self.schedule.steps

    def step(self, number: int) -> Iterator[Transfer]:
        return map(self._among, self.schedule.step(number))

    def step_of(self, number: int, rank: int) -> Iterator[Transfer]:
        """See `transfers_of`."""
        if rank not in self.members:
            return iter(())
        own = transfers_of(self.schedule, number, self.members.index(rank))
        return map(self._among, own)

    def _among(self, transfer: Transfer) -> Transfer:
        return transfer._replace(
            source=self.members[transfer.source],
            destination=self.members[transfer.destination],
            offset=self.offset + transfer.offset,
        )

    def bytes_sent(self, rank: int) -> int:
        if rank not in self.members:
            return 0
        return self.schedule.bytes_sent(self.members.index(rank))

    @property
    def priced(self) -> Sequence[Sequence[Priced]] | None:
        phases = self.schedule.priced
        if phases is None:
            return None
        return [
            [_PricedAmong(self.members, activity) for activity in phase]
            for phase in phases
        ]


@dataclass(frozen=True)
class _PricedAmong:
    """*activity* among some ranks."""

    of: tuple[int, ...]
    activity: Priced

    @property
    def pattern(self) -> Hashable:
        return self.of, self.activity.pattern

    @property
    def connections(self) -> Iterable[tuple[int, int]]:
        return ((self.of[a], self.of[b]) for a, b in self.activity.connections)

    @property
    def members(self) -> Sequence[int]:
        return [self.of[rank] for rank in self.activity.members]

    @property
    def messages_sent(self) -> int:
        return self.activity.messages_sent

    @property
    def bytes_per_connection(self) -> int:
        return self.activity.bytes_per_connection

    def latency(self, one_way: Callable[[int, int], float]) -> float:
        return self.activity.latency(lambda a, b: one_way(self.of[a], self.of[b]))


@dataclass(frozen=True)
class Some:
    """The steps of *schedule* from *first* to before *stop*, as a schedule."""

    schedule: Schedule
    first: int
    stop: int

    @property
    def ranks(self) -> int:
        return self.schedule.ranks

    @property
    def steps(self) -> int:
        return self.stop - self.first

    def step(self, number: int) -> Iterator[Transfer]:
        return self.schedule.step(self.first + number)

    def step_of(self, number: int, rank: int) -> Iterator[Transfer]:
        """See `transfers_of`."""
        return transfers_of(self.schedule, self.first + number, rank)

    def bytes_sent(self, rank: int) -> int:
        return _sent(self, rank)

    @property
    def priced(self) -> None:
        return None


@lru_cache(maxsize=256)
def _sent(some: Some, rank: int) -> int:
    transfers = (t for number in range(some.steps) for t in some.step(number))
    return sum(t.size for t in transfers if t.source == rank)
