"""The schedules of collectives; `interfaces.Schedule` defines what a schedule is.

`Ring`, `Tree`, `Star`, `Exchange` and `HalvingDoubling` are one algorithm each. `sequential`,
`parallel`, `on_ranks` and `step_range` combine schedules; `hierarchical` is built of them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, islice, pairwise, zip_longest
from typing import ClassVar

from paceline.errors import UsageError
from paceline.interfaces import Activity, Schedule, Transfer

OneWay = Callable[[int, int], float]


def offset_of(size: int, parts: int, index: int) -> int:
    """The offset of segment *index*, of *parts* segments over *size* units; see `segment`."""
    base, extra = divmod(size, parts)
    index %= parts
    return base * index + min(index, extra)


def segment(size: int, parts: int, index: int) -> int:
    """The units of segment *index*, of *parts* segments over *size* units.

    Segments are as equal as whole units allow, larger ones first.
    """
    base, extra = divmod(size, parts)
    return base + (index % parts < extra)


@dataclass(frozen=True)
class Ring(Schedule):
    """Rings of ``rounds`` times n-1 steps over *size* units cut into n segments.

    An all-reduce has two rounds: a reduce-scatter, then an all-gather. A reduce-scatter or an
    all-gather alone (*gather*: nothing is added) has one round. In step s, rank r sends segment r -
    s - *shift* to rank r + 1 (mod n). This is the bandwidth-optimal algorithm of Patarasuk and Yuan
    (2009), section 3, which gloo and NCCL use for large buffers. A reduce-scatter leaves segment r
    + 1 - *shift* at rank r.
    """

    size: int
    rounds: int = 2
    gather: bool = False
    shift: int = 0

    @property
    def steps(self) -> int:
        return self.rounds * (self.ranks - 1)

    def step(self, number: int) -> Iterator[Transfer]:
        return (self._sent_by(rank, number) for rank in range(self.ranks))

    def own_steps(self, rank: int) -> Iterator[Sequence[Transfer]]:
        before = (rank - 1) % self.ranks
        for number in range(self.steps):
            yield self._sent_by(before, number), self._sent_by(rank, number)

    def _sent_by(self, rank: int, number: int) -> Transfer:
        n = self.ranks
        adds = number < n - 1 and not self.gather
        index = rank - number - self.shift
        size, offset = segment(self.size, n, index), offset_of(self.size, n, index)
        return Transfer(rank, (rank + 1) % n, size, offset, adds)

    def bytes_sent(self, rank: int) -> int:
        n, first = self.ranks, rank - self.shift
        # In one round a rank sends every segment except the one that its next step would send.
        return sum(
            self.size - segment(self.size, n, first - (r + 1) * (n - 1))
            for r in range(self.rounds)
        )

    def phases(self) -> Sequence[Sequence[Activity]]:
        """One phase: the largest segment sets the pace, because smaller ones wait behind it in
        every step."""
        largest = -(-self.size // self.ranks)
        activity = Activity(
            key=(Ring, self.rounds),
            ranks=range(self.ranks),
            traffic=self._traffic,
            bytes=self.steps * largest,
            messages=self.steps,
            latency=self._latency,
        )
        return ((activity,),)

    def _traffic(self) -> dict[tuple[int, int], float]:
        n = self.ranks
        return {(rank, (rank + 1) % n): 1 for rank in range(n if n > 1 else 0)}

    def _latency(self, one_way: OneWay) -> float:
        """The latency of the slowest chain: a segment that starts at rank k crosses ``steps`` edges
        in a row."""
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

    def halves(self) -> tuple[Ring | None, Ring | None]:
        if self.rounds == 1:
            return (None, self) if self.gather else (self, None)
        # The second round continues where the first ended: n - 1 segments further.
        return (
            replace(self, rounds=1),
            replace(self, rounds=1, gather=True, shift=self.shift - 1),
        )


@dataclass(frozen=True)
class Tree(Schedule):
    """A binomial tree: a broadcast from *root*, or with *reduce* a reduction to it.

    In step s of a broadcast, ranks at a distance below 2^s from the root (mod n) send to the ranks
    2^s further. Each pair starts as soon as both ends are ready.
    """

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

    def bytes_sent(self, rank: int) -> int:
        place = (rank - self.root) % self.ranks
        if self.reduce:
            return 0 if place == 0 else self.size
        # A child is 2^s further, for each step s after the step in which *rank* received.
        first = place.bit_length()
        return self.size * sum(
            place + (1 << s) < self.ranks for s in range(first, self.steps)
        )

    def halves(self) -> tuple[Tree | None, Tree | None]:
        return (self, None) if self.reduce else (None, self)


@dataclass(frozen=True)
class Star(Schedule):
    """*root* sends *size* units to each other rank. With *gather* it receives them instead; *adds*:
    it sums."""

    size: int
    root: int = 0
    gather: bool = False
    adds: bool = False

    steps: ClassVar[int] = 1

    def step(self, number: int) -> Iterator[Transfer]:
        for rank in range(self.ranks):
            if rank != self.root:
                a, b = (rank, self.root) if self.gather else (self.root, rank)
                yield Transfer(a, b, self.size, 0, self.adds)

    def bytes_sent(self, rank: int) -> int:
        if self.gather:
            return 0 if rank == self.root else self.size
        return self.size * (self.ranks - 1) if rank == self.root else 0


@dataclass(frozen=True)
class Exchange(Schedule):
    """Every rank sends *size* units to every other rank, at distance ``distances[s]`` in step s.

    This is an all-to-all. With a size of zero and doubling distances it is a dissemination barrier
    (Hensgen, Finkel and Manber 1988): see `barrier`.
    """

    size: int
    distances: tuple[int, ...]

    @property
    def steps(self) -> int:
        return len(self.distances)

    def step(self, number: int) -> Iterator[Transfer]:
        distance = self.distances[number]
        for rank in range(self.ranks):
            yield Transfer(rank, (rank + distance) % self.ranks, self.size)

    def own_steps(self, rank: int) -> Iterator[Sequence[Transfer]]:
        n = self.ranks
        for distance in self.distances:
            yield (
                Transfer((rank - distance) % n, rank, self.size),
                Transfer(rank, (rank + distance) % n, self.size),
            )

    def bytes_sent(self, rank: int) -> int:
        return self.size * len(self.distances)


def all_to_all(ranks: int, size: int) -> Exchange:
    """Each rank sends *size* bytes to each other rank."""
    return Exchange(ranks, size, tuple(range(1, ranks)))


def barrier(ranks: int) -> Exchange:
    """No rank leaves before all ranks have entered: ceil(log2 n) empty messages per rank."""
    return Exchange(ranks, 0, tuple(1 << i for i in range((ranks - 1).bit_length())))


@dataclass(frozen=True)
class HalvingDoubling(Schedule):
    """All-reduce by recursive halving and doubling, over *size* units.

    Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH"
    (2005), section 4.5 (Rabenseifner's algorithm). The p = 2^k lowest of n ranks run it. Each of
    the n - p other ranks first sends its buffer to one of them, and receives the result from it at
    the end. In each of k steps two ranks exchange halves of the range that both still hold;
    distance and size halve each time. Another k steps gather the result. For p = n it moves as much
    as a ring, in 2 log2 n messages instead of 2 (n - 1).
    """

    size: int

    @property
    def _levels(self) -> int:
        return self.ranks.bit_length() - 1

    @property
    def _surplus(self) -> int:
        """The number of ranks that only send their buffer and receive the result."""
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
            # When halving, send the partner's part; when doubling, send the part that this rank
            # holds.
            start, stop = self._held(partner if halving else rank, depth + 1)
            yield Transfer(rank, partner, stop - start, start, halving)

    def _held(self, rank: int, depth: int) -> tuple[int, int]:
        """The range that *rank* still holds after *depth* halvings."""
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

    def halves(self) -> tuple[Schedule, Schedule]:
        cut = self.steps // 2
        return step_range(self, 0, cut), step_range(self, cut, self.steps)


# ---- combinations of schedules ----


def sequential(*parts: Schedule) -> Schedule:
    """All steps of the first part, then all of the next."""
    return Sequential(parts[0].ranks, parts)


def parallel(*parts: Schedule) -> Schedule:
    """The first steps of all parts, then their second ones.

    Parts share no rank, or no part of the buffer.
    """
    return Parallel(parts[0].ranks, parts)


def on_ranks(
    schedule: Schedule, ranks: int, members: tuple[int, ...], offset: int = 0
) -> Schedule:
    """Run *schedule* among *members*, some of *ranks* ranks.

    The schedule's rank i is ``members[i]``, and its first unit is the one at *offset* of their
    buffers.
    """
    return OnRanks(ranks, members, schedule, offset)


def step_range(schedule: Schedule, first: int, stop: int) -> Schedule:
    """The steps *first* to *stop* - 1 of *schedule*."""
    return StepRange(schedule.ranks, schedule, first, stop)


@dataclass(frozen=True)
class Sequential(Schedule):
    """See `sequential`."""

    parts: tuple[Schedule, ...]

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

    def own_steps(self, rank: int) -> Iterable[Sequence[Transfer]]:
        return chain.from_iterable(part.own_steps(rank) for part in self.parts)

    def bytes_sent(self, rank: int) -> int:
        return sum(part.bytes_sent(rank) for part in self.parts)

    def phases(self) -> Sequence[Sequence[Activity]] | None:
        phases: list[Sequence[Activity]] = []
        for part in self.parts:
            found = part.phases()
            if found is None:
                return None
            phases += found
        return phases

    def halves(self) -> tuple[Schedule | None, Schedule | None]:
        return _halves_of(self.parts, sequential)


@dataclass(frozen=True)
class Parallel(Schedule):
    """See `parallel`."""

    parts: tuple[Schedule, ...]

    @property
    def steps(self) -> int:
        return max(part.steps for part in self.parts)

    def step(self, number: int) -> Iterator[Transfer]:
        for part in self.parts:
            if number < part.steps:
                yield from part.step(number)

    def own_steps(self, rank: int) -> Iterator[Sequence[Transfer]]:
        of_parts = [part.own_steps(rank) for part in self.parts]
        for together in zip_longest(*of_parts, fillvalue=()):
            yield [transfer for own in together for transfer in own]

    def bytes_sent(self, rank: int) -> int:
        return sum(part.bytes_sent(rank) for part in self.parts)

    def phases(self) -> Sequence[Sequence[Activity]] | None:
        """One phase, if each part has one phase and no two share a rank; else None.

        Parts that share a rank delay each other, so they cannot be priced as if each were alone.
        """
        activities: list[Activity] = []
        seen: set[int] = set()
        for part in self.parts:
            found = part.phases()
            if found is None or len(found) > 1:
                return None
            for activity in chain.from_iterable(found):
                if not seen.isdisjoint(activity.ranks):
                    return None
                seen.update(activity.ranks)
                activities.append(activity)
        return (activities,)

    def halves(self) -> tuple[Schedule | None, Schedule | None]:
        return _halves_of(self.parts, parallel)


def _halves_of(
    parts: tuple[Schedule, ...], combine: Callable[..., Schedule]
) -> tuple[Schedule | None, Schedule | None]:
    """The halves that the parts have, combined as the parts are."""
    both = zip(*(part.halves() for part in parts), strict=True)
    found = [[half for half in halves if half is not None] for halves in both]
    adding, spreading = (combine(*halves) if halves else None for halves in found)
    return adding, spreading


@dataclass(frozen=True)
class OnRanks(Schedule):
    """See `on_ranks`."""

    members: tuple[int, ...]
    schedule: Schedule
    offset: int = 0

    @property
    def steps(self) -> int:
        return self.schedule.steps

    def step(self, number: int) -> Iterator[Transfer]:
        return map(self._relabelled, self.schedule.step(number))

    def own_steps(self, rank: int) -> Iterator[Sequence[Transfer]]:
        if rank in self.members:
            for step in self.schedule.own_steps(self.members.index(rank)):
                yield [self._relabelled(transfer) for transfer in step]
        else:
            yield from [()] * self.steps

    def _relabelled(self, transfer: Transfer) -> Transfer:
        return transfer._replace(
            source=self.members[transfer.source],
            destination=self.members[transfer.destination],
            offset=self.offset + transfer.offset,
        )

    def bytes_sent(self, rank: int) -> int:
        if rank not in self.members:
            return 0
        return self.schedule.bytes_sent(self.members.index(rank))

    def phases(self) -> Sequence[Sequence[Activity]] | None:
        phases = self.schedule.phases()
        if phases is None:
            return None
        return [[one.relabel(self.members) for one in phase] for phase in phases]

    def halves(self) -> tuple[Schedule | None, Schedule | None]:
        adding, spreading = (
            None if half is None else replace(self, schedule=half)
            for half in self.schedule.halves()
        )
        return adding, spreading


@dataclass(frozen=True)
class StepRange(Schedule):
    """See `step_range`."""

    schedule: Schedule
    first: int
    stop: int

    @property
    def steps(self) -> int:
        return self.stop - self.first

    def step(self, number: int) -> Iterator[Transfer]:
        return self.schedule.step(self.first + number)

    def own_steps(self, rank: int) -> Iterator[Sequence[Transfer]]:
        return islice(self.schedule.own_steps(rank), self.first, self.stop)

    def bytes_sent(self, rank: int) -> int:
        return _sent_in_range(self, rank)


@lru_cache(maxsize=256)
def _sent_in_range(some: StepRange, rank: int) -> int:
    return Schedule.bytes_sent(some, rank)


# ---- hierarchical ----


def racks_or_rows(ranks: int, racks: Sequence[int] | None) -> tuple[int, ...]:
    """*racks*; if they are unknown, rows of about sqrt(n) of the n *ranks*.

    Raises `UsageError` if *racks* has another number of ranks.
    """
    if racks is None:
        width = math.isqrt(ranks - 1) + 1 if ranks > 1 else 1
        return tuple(rank // width for rank in range(ranks))
    if len(racks) != ranks:
        raise UsageError(
            f"racks: expected one for each of {ranks} ranks, got {len(racks)}: the cluster "
            "that was described has another number of workers"
        )
    return tuple(racks)


@lru_cache(maxsize=256)
def hierarchical(size: int, racks: tuple[int, ...]) -> Schedule:
    """All-reduce over *size* units in three stages; ``racks[i]`` is the rack of rank i.

    1. Reduce-scatter in each rack: each of its g ranks then holds the rack's sum of one g-th.
    2. All-reduce across racks: the ranks that hold the same part form a ring. All rings run at once.
    3. All-gather in each rack.

    All stages use rings. For r racks, 2 (r - 1) / r of the buffer crosses a rack's uplink, however
    many ranks the rack has. With racks of equal size this is the torus of "Massively Distributed
    SGD: ImageNet/ResNet-50 Training in a Flash" (Mikami et al. 2018). Ranks in racks of different
    sizes hold parts of different lengths. Then the buffer is cut wherever a part of any rack ends.
    So each piece has one holder in each rack, and these holders form the piece's ring.
    """
    ranks, groups = len(racks), _ranks_by_rack(racks)
    if len(groups) in (1, ranks) or not size:
        return Ring(ranks, size)

    def in_racks(gather: bool) -> Schedule:
        # With a shift of one, a reduce-scatter leaves part i at rank i of the rack. An
        # all-gather without shift starts from there.
        ring = partial(Ring, size=size, rounds=1, gather=gather, shift=int(not gather))
        return parallel(
            *(on_ranks(ring(len(m)), ranks, m) for m in groups if len(m) > 1)
        )

    starts = [[offset_of(size, len(m), i) for i in range(len(m))] for m in groups]
    cuts = sorted({start for parts in starts for start in parts} | {size})
    across = parallel(
        *(
            on_ranks(
                Ring(len(groups), stop - start),
                ranks,
                tuple(
                    m[bisect_right(parts, start) - 1]
                    for m, parts in zip(groups, starts, strict=True)
                ),
                start,
            )
            for start, stop in pairwise(cuts)
        )
    )
    return sequential(in_racks(False), across, in_racks(True))


def _ranks_by_rack(racks: Sequence[int]) -> list[tuple[int, ...]]:
    """The ranks of each rack, in the order of racks' first ranks."""
    members: dict[int, list[int]] = {}
    for rank, rack in enumerate(racks):
        members.setdefault(rack, []).append(rank)
    return [tuple(ranks) for ranks in members.values()]
