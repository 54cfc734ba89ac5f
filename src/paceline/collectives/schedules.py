"""The schedules that others are made of: see `interfaces.Schedule` for what one is."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from paceline.interfaces import Schedule, Transfer


def transfers_of(schedule: Schedule, number: int, rank: int) -> Iterator[Transfer]:
    """The transfers of step *number* that *rank* sends or receives, in the schedule's order.

    A schedule of many steps has a method ``step_of(number, rank)`` that makes no others: n ranks
    that look through all transfers of n steps take time in proportion to n^2 each.
    """
    own: Callable[[int, int], Iterator[Transfer]] | None = getattr(
        schedule, "step_of", None
    )
    if own is not None:
        return own(number, rank)
    return (t for t in schedule.step(number) if rank in (t.source, t.destination))


def offset_of(size: int, parts: int, index: int) -> int:
    """Where one of *parts* segments of *size* units begins, see `segment`."""
    base, extra = divmod(size, parts)
    index %= parts
    return base * index + min(index, extra)


def segment(size: int, parts: int, index: int) -> int:
    """Units of one of *parts* segments of *size* units: as equal as units allow, larger
    ones first."""
    base, extra = divmod(size, parts)
    return base + (index % parts < extra)


@dataclass(frozen=True)
class Ring:
    """Rings of ``rounds`` times n-1 steps over *size* units cut into n segments.

    All-reduce is two rounds (reduce-scatter, then all-gather), reduce-scatter and
    all-gather (*gather*: nothing is added) one each. In step s, rank r sends segment
    r - s - *shift* to rank r + 1 (mod n): the bandwidth-optimal algorithm of Patarasuk and
    Yuan (2009), section 3; gloo's and NCCL's for large buffers. A reduce-scatter leaves
    segment r + 1 - *shift* at rank r.
    """

    ranks: int
    size: int
    rounds: int = 2
    gather: bool = False
    shift: int = 0

    @property
    def steps(self) -> int:
        return self.rounds * (self.ranks - 1)

    def step(self, number: int) -> Iterator[Transfer]:
        return (self._sent_by(rank, number) for rank in range(self.ranks))

    def step_of(self, number: int, rank: int) -> Iterator[Transfer]:
        """See `transfers_of`."""
        yield self._sent_by((rank - 1) % self.ranks, number)
        yield self._sent_by(rank, number)

    def _sent_by(self, rank: int, number: int) -> Transfer:
        n = self.ranks
        adds = number < n - 1 and not self.gather
        index = rank - number - self.shift
        size, offset = segment(self.size, n, index), offset_of(self.size, n, index)
        return Transfer(rank, (rank + 1) % n, size, offset, adds)

    def bytes_sent(self, rank: int) -> int:
        n, first = self.ranks, rank - self.shift
        # In one round a rank sends every segment but the one that would come next.
        return sum(
            self.size - segment(self.size, n, first - (r + 1) * (n - 1))
            for r in range(self.rounds)
        )

    @property
    def priced(self) -> Sequence[Sequence[Ring]]:
        return ((self,),)

    @property
    def members(self) -> Sequence[int]:
        return range(self.ranks)

    @property
    def pattern(self) -> Hashable:
        return Ring, self.rounds

    @property
    def connections(self) -> Iterable[tuple[int, int]]:
        n = self.ranks
        return ((rank, (rank + 1) % n) for rank in range(n if n > 1 else 0))

    @property
    def messages_sent(self) -> int:
        return self.steps

    @property
    def bytes_per_connection(self) -> int:
        """What the busiest connection carries: every step's largest segment.

        The largest segment sets the pace: it travels all steps, and what is smaller waits
        behind it.
        """
        return self.steps * -(-self.size // self.ranks)

    def latency(self, one_way: Callable[[int, int], float]) -> float:
        """Seconds of latency on the longest chain of dependent messages.

        The segment that starts at rank k crosses ``steps`` edges in a row; the slowest
        start counts. *one_way* gives seconds between two ranks.
        """
        n, steps = self.ranks, self.steps
        edges = [one_way(rank, (rank + 1) % n) for rank in range(n)]
        if steps <= 0:
            return 0.0
        if len(set(edges)) == 1:
            return steps * edges[0]
        laps, rest = divmod(steps, n)
        chain = longest = math.fsum(edges[:rest])
        for start in range(n - 1):  # slide the window of *rest* edges round the ring
            chain += edges[(start + rest) % n] - edges[start]
            longest = max(longest, chain)
        return laps * math.fsum(edges) + longest


@dataclass(frozen=True)
class Tree:
    """A binomial tree from *root*: broadcast, or with *reduce* the same towards it.

    In step s of a broadcast the ranks nearer than 2^s to the root (counted from it, mod n)
    send to those 2^s further. Each pair starts as soon as its two ends are ready.
    """

    ranks: int
    size: int
    root: int = 0
    reduce: bool = False

    @property
    def steps(self) -> int:
        return (self.ranks - 1).bit_length()

    def step(self, number: int) -> Iterator[Transfer]:
        distance = 1 << (self.steps - 1 - number if self.reduce else number)
        for near in range(min(distance, self.ranks - distance)):
            a = (self.root + near) % self.ranks
            b = (self.root + near + distance) % self.ranks
            if self.reduce:
                a, b = b, a
            yield Transfer(a, b, self.size, 0, self.reduce)

    @property
    def priced(self) -> None:
        return None

    def bytes_sent(self, rank: int) -> int:
        place = (rank - self.root) % self.ranks
        if self.reduce:
            return 0 if place == 0 else self.size
        # Children are 2^s further, for every step s after the one that reached *rank*.
        first = place.bit_length()
        return self.size * sum(
            place + (1 << s) < self.ranks for s in range(first, self.steps)
        )


@dataclass(frozen=True)
class Star:
    """*root* sends *size* units to each other rank, or with *gather* receives them, and
    *adds* them up."""

    ranks: int
    size: int
    root: int = 0
    gather: bool = False
    adds: bool = False

    @property
    def steps(self) -> int:
        return 1

    def step(self, number: int) -> Iterator[Transfer]:
        for rank in range(self.ranks):
            if rank != self.root:
                a, b = (rank, self.root) if self.gather else (self.root, rank)
                yield Transfer(a, b, self.size, 0, self.adds)

    @property
    def priced(self) -> None:
        return None

    def bytes_sent(self, rank: int) -> int:
        if self.gather:
            return 0 if rank == self.root else self.size
        return self.size * (self.ranks - 1) if rank == self.root else 0


@dataclass(frozen=True)
class Exchange:
    """Every rank sends *size* units to each other one, at distance s + 1 in step s.

    All-to-all; with a size of zero bytes and doubling distances it is a barrier
    (dissemination, Hensgen, Finkel and Manber 1988): see `barrier`.
    """

    ranks: int
    size: int
    distances: tuple[int, ...]

    @property
    def steps(self) -> int:
        return len(self.distances)

    def step(self, number: int) -> Iterator[Transfer]:
        distance = self.distances[number]
        for rank in range(self.ranks):
            yield Transfer(rank, (rank + distance) % self.ranks, self.size)

    def step_of(self, number: int, rank: int) -> Iterator[Transfer]:
        """See `transfers_of`."""
        n, distance = self.ranks, self.distances[number]
        yield Transfer((rank - distance) % n, rank, self.size)
        yield Transfer(rank, (rank + distance) % n, self.size)

    @property
    def priced(self) -> None:
        return None

    def bytes_sent(self, rank: int) -> int:
        return self.size * len(self.distances)


def all_to_all(ranks: int, size: int) -> Exchange:
    """Each rank sends *size* bytes to each other rank."""
    return Exchange(ranks, size, tuple(range(1, ranks)))


def barrier(ranks: int) -> Exchange:
    """Nobody leaves before everybody came: ceil(log2 n) empty messages a rank."""
    return Exchange(ranks, 0, tuple(1 << i for i in range((ranks - 1).bit_length())))
