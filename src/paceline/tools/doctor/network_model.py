"""What the evidence says of each host and link, before anything is called a fault.

A path is no faster than its two hosts' links. So a host's link, each direction for itself, is as
good as its best paths: what is slow at the other end makes some paths slow, not these. By the same
argument a host loses as little as its best paths do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median, median_high

from paceline.tools.doctor.evidence import Evidence, WorkerEvidence
from paceline.tools.doctor.racks import Pair, Rounds
from paceline.tools.doctor.thresholds import (
    FEW_PATHS,
    FEWEST_REPEATS,
    LOST,
    SLOW_LINK,
    VARIES,
)

Direction = str
"""``"out"`` or ``"in"``."""
OUT, IN = "out", "in"


@dataclass(frozen=True)
class NetworkModel:
    """*evidence*, with what follows from it by host."""

    evidence: Evidence

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        """All hosts' numbers."""
        numbers = {one.host for one in self.evidence.workers}
        for path in self.evidence.paths:
            numbers |= {path.source, path.target}
        return tuple(sorted(numbers))

    def on(self, host: int) -> list[WorkerEvidence]:
        """The workers of a host."""
        return [one for one in self.evidence.workers if one.host == host]

    def label(self, host: int) -> str:
        """What people call a host."""
        mine = self.on(host)
        names = {one.host: one.name for one in self.evidence.workers}
        named = len(set(names.values())) == len(names) and names.get(host)
        short = f"host {host}" if len(mine) != 1 else f"worker {mine[0].rank}"
        return f"{names[host]} ({short})" if named else short

    # ---- paths ----

    @cached_property
    def rates(self) -> Mapping[Pair, float]:
        """Goodput by path: the median of its repeats."""
        return self._by_path(lambda rates: median(rates))

    @cached_property
    def steadiness(self) -> Mapping[Pair, float]:
        """The least repeat of a path over the most, where there are enough; of two hosts, whose one
        path an accident may meet, the second ones."""
        pairs = len(self.hosts) > 2

        def of(rates: Sequence[float]) -> float:
            ranked = sorted(rates)
            if len(ranked) < FEWEST_REPEATS:
                return 1.0
            if pairs or len(ranked) < FEWEST_REPEATS + 2:
                return ranked[0] / ranked[-1]
            return ranked[1] / ranked[-2]

        return self._by_path(of)

    def _by_path(self, of: Callable[[Sequence[float]], float]) -> dict[Pair, float]:
        return {(p.source, p.target): of(p.rates) for p in self.evidence.paths}

    @cached_property
    def lost(self) -> Mapping[Pair, float]:
        """The part of segments that were sent again, by path; nothing where nobody counts."""
        return {
            (p.source, p.target): p.retransmitted
            for p in self.evidence.paths
            if p.retransmitted is not None
        }

    def paths_of(self, host: int, direction: Direction) -> list[Pair]:
        """Those that leave, or reach, a host."""
        end = 0 if direction == OUT else 1
        return [pair for pair in self.rates if pair[end] == host]

    def link(self, host: int, direction: Direction) -> float:
        """Bytes per second of a host's link: as its best paths, of many not the very best; those
        in its rack and those beyond, each for themselves."""
        rack = next((rack for rack in self.racks if host in rack), self.hosts)
        end = 1 if direction == OUT else 0
        kinds: tuple[list[float], list[float]] = ([], [])
        for pair in self.paths_of(host, direction):
            kinds[pair[end] in rack].append(self.rates[pair])
        return max(_near_best(mine, reverse=True) for mine in kinds)

    @cached_property
    def slow_paths(self) -> Mapping[Pair, float]:
        """Paths, from and to, that are far slower than others of both their hosts, and what they could
        give. Only those of hosts which have few of them: where many are slow, it is built like that.
        What is slow once is no path's, and where links are restless or lose nobody can tell."""
        found = {
            (path.source, path.target): usual
            for path in self.evidence.paths
            if len(path.rates) >= FEWEST_REPEATS
            and not self._is_unclear(path.source)
            and not self._is_unclear(path.target)
            and sorted(path.rates)[-2]
            < SLOW_LINK * (usual := self._usual_of(path.source, path.target))
        }
        peers: dict[int, set[int]] = {host: set() for host in self.hosts}
        for source, target in found:
            peers[source].add(target)
            peers[target].add(source)
        most = max(1.0, FEW_PATHS * (len(self.hosts) - 1))
        few = {host for host, others in peers.items() if len(others) <= most}
        return {pair: usual for pair, usual in found.items() if few.issuperset(pair)}

    def _usual_of(self, source: int, target: int) -> float:
        """What a path should give, by others of its two hosts: in a rack no less than beyond it."""
        rack = next((rack for rack in self.racks if source in rack), self.hosts)
        out, into = self.paths_of(source, OUT), self.paths_of(target, IN)
        if target not in rack:
            out = [pair for pair in out if pair[1] not in rack]
            own = next((one for one in self.racks if target in one), self.hosts)
            into = [pair for pair in into if pair[0] not in own]
        return min(
            _near_best([self.rates[pair] for pair in mine], reverse=True)
            for mine in (out, into)
        )

    def _is_unclear(self, host: int) -> bool:
        return any(
            self.steady(host, way) < VARIES or self.loss(host, way) > LOST
            for way in (OUT, IN)
        )

    def loss(self, host: int, direction: Direction) -> float:
        """As on its best paths."""
        mine = [self.lost.get(pair, 0.0) for pair in self.paths_of(host, direction)]
        return _near_best(mine, reverse=False)

    def steady(self, host: int, direction: Direction) -> float:
        """As on its median path."""
        mine = [self.steadiness[pair] for pair in self.paths_of(host, direction)]
        return median_high(mine) if mine else 1.0

    def heights(self, host: int, direction: Direction) -> tuple[float, float]:
        """The mean of a host's repeats, and the most of them, on the median path."""
        paths = {(p.source, p.target): p.rates for p in self.evidence.paths}
        mine = [paths[pair] for pair in self.paths_of(host, direction)]
        return median(map(fmean, mine)), median(map(max, mine))

    @cached_property
    def usual_link(self) -> float:
        """The median host's, in its better direction."""
        links = [max(self.link(h, OUT), self.link(h, IN)) for h in self.hosts]
        return median(links) if self.evidence.paths else 0.0

    # ---- racks ----

    @cached_property
    def rounds(self) -> Rounds:
        """What hosts get that all send at once, and alone."""
        best = {
            host: (
                max((self.rates[pair] for pair in self.paths_of(host, OUT)), default=0),
                max((self.rates[pair] for pair in self.paths_of(host, IN)), default=0),
            )
            for host in self.hosts
        }
        restless = frozenset(
            host
            for host in self.hosts
            if min(self.steady(host, OUT), self.steady(host, IN)) < VARIES
        )
        together = self.evidence.together
        return Rounds(self.hosts, together, self.rates, best, restless)

    @cached_property
    def racks(self) -> tuple[tuple[int, ...], ...]:
        """Hosts in groups that have a scarce link between them; one group where none is scarce."""
        return self.rounds.racks()

    def uplink(self, rack: Sequence[int]) -> tuple[float, float] | None:
        """What all hosts of a rack get together beyond it, and what they could; None where that
        is hardly less."""
        return self.rounds.uplink(rack) if len(self.racks) > 1 else None

    # ---- workers ----

    @cached_property
    def trains(self) -> bool:
        """Whether a script ran."""
        return all(one.step is not None for one in self.evidence.workers)

    @cached_property
    def passes(self) -> Mapping[int, float]:
        """Seconds of forward and backward in a step, by rank."""
        return {
            one.rank: one.step.forward.median + one.step.backward.median
            for one in self.evidence.workers
            if one.step is not None
        }

    @cached_property
    def passes_a_step(self) -> int:
        """Forward and backward passes of a step: more than one where gradients are accumulated."""
        steps = [one.step for one in self.evidence.workers if one.step is not None]
        return max((step.passes for step in steps), default=1)

    @cached_property
    def inputs(self) -> Mapping[int, float]:
        """Seconds before the first pass of a step, by rank."""
        return {
            one.rank: one.step.input.median
            for one in self.evidence.workers
            if one.step is not None
        }


def _near_best(values: Sequence[float], *, reverse: bool) -> float:
    """The best, or of four and more the second, and so on: a lucky measure is no link."""
    ranked = sorted(values, reverse=reverse)
    return ranked[(len(ranked) - 1) // 4] if ranked else 0.0
