"""Derives the state of each host, link and rack from the evidence, before it is judged as a fault.

A path is no faster than the links of its two hosts. So each direction of a link is rated by its best paths: a
slow host at the other end slows down only some of them. In the same way a host's packet loss is that of its
best paths.

Racks are inferred from rounds in which all hosts send at the same time, since a single flow may not fill an
uplink (`RackInference`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median, median_high
from typing import Literal

from paceline.tools.doctor.evidence import ConcurrentFlows, Evidence, WorkerEvidence

SLOW_LINK = 0.7
"""Share of the median host's link. Repeated measurements of goodput differ by a tenth on shared machines. Real
causes (100 Mbit/s on a gigabit port, half duplex, a worn cable) make links slower by half and more."""

FEW_PATHS = 0.25
"""Share of a host's paths (or one path) that may be slow by themselves. More slow paths have another cause:
half of them are slow between two undetected racks, all of them at a slow link."""

VARIES = 0.6
"""Slowest over fastest measurement, on the median path of a host. If two jobs alternate on a link it is a half
or less; a shaped or idle link stays above 0.8."""

FEWEST_REPEATS = 3
"""Measurements of a path that are needed to judge its variation."""

LOST = 0.005
"""Share of lost segments under low load. An idle network loses none in thousands. With this share nearly every
step of some hundred segments waits for a retransmission."""

CROWDED = 0.7
"""Rate of flows that leave a group of hosts at once, over their rate alone: less indicates an uplink. Both
rates have the noise of `SLOW_LINK`."""

EXPLAINS = 0.4
"""Share of the squared error of one rack without uplinks: if racks leave more of it, they are a coincidence. With
real racks only noise remains."""

Direction = Literal["out", "in"]
OUT: Direction = "out"
IN: Direction = "in"
Pair = tuple[int, int]
Racks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class NetworkModel:
    """Links, paths, racks and workers by host, derived from *evidence*."""

    evidence: Evidence

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        """Numbers of all hosts."""
        numbers = {one.host for one in self.evidence.workers}
        for path in self.evidence.paths:
            numbers |= {path.source, path.target}
        return tuple(sorted(numbers))

    def on(self, host: int) -> list[WorkerEvidence]:
        """Return the workers of a host."""
        return [one for one in self.evidence.workers if one.host == host]

    def label(self, host: int) -> str:
        """Return a host's name for readers: ``"worker 2"``, ``"node7 (host 2)"``."""
        mine = self.on(host)
        names = {one.host: one.name for one in self.evidence.workers}
        named = len(set(names.values())) == len(names) and names.get(host)
        short = f"host {host}" if len(mine) != 1 else f"worker {mine[0].rank}"
        return f"{names[host]} ({short})" if named else short

    # ---- paths ----

    @cached_property
    def rates(self) -> Mapping[Pair, float]:
        """Goodput by path: the median of its measurements."""
        return self._by_path(lambda rates: median(rates))

    @cached_property
    def steadiness(self) -> Mapping[Pair, float]:
        """Slowest over fastest measurement by path; 1 if there are too few.

        If there are only two hosts, the second slowest and second fastest count, so that one accident
        does not decide.
        """
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
        """Share of retransmitted segments by path; empty if the system does not count them."""
        return {
            (p.source, p.target): p.retransmitted
            for p in self.evidence.paths
            if p.retransmitted is not None
        }

    def paths_of(self, host: int, direction: Direction) -> list[Pair]:
        """Paths that leave, or reach, a host."""
        end = 0 if direction == OUT else 1
        return [pair for pair in self.rates if pair[end] == host]

    def link(self, host: int, direction: Direction) -> float:
        """Return the bytes per second of a host's link.

        It is rated by its best paths, without the very best of many. Paths within its rack and paths
        beyond are ranked separately.
        """
        rack = next((rack for rack in self.racks if host in rack), self.hosts)
        end = 1 if direction == OUT else 0
        kinds: tuple[list[float], list[float]] = ([], [])
        for pair in self.paths_of(host, direction):
            kinds[pair[end] in rack].append(self.rates[pair])
        return max(_near_best(mine, reverse=True) for mine in kinds)

    @cached_property
    def slow_paths(self) -> Mapping[Pair, float]:
        """Paths that are far slower than others of both their hosts, with the rate that they could reach.

        Hosts with many slow paths are left out: the network is built that way. So are paths that were slow
        only once, and those of links that vary or lose packets, where the cause is unclear.
        """
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
        """Return the expected rate of a path, by others of its hosts; in a rack at least the rate beyond it."""
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
        """Share of lost segments of a link: that of its best paths."""
        mine = [self.lost.get(pair, 0.0) for pair in self.paths_of(host, direction)]
        return _near_best(mine, reverse=False)

    def steady(self, host: int, direction: Direction) -> float:
        """Slowest over fastest measurement of a link, on its median path."""
        mine = [self.steadiness[pair] for pair in self.paths_of(host, direction)]
        return median_high(mine) if mine else 1.0

    def heights(self, host: int, direction: Direction) -> tuple[float, float]:
        """Mean and maximum of a link's measurements, on its median path."""
        paths = {(p.source, p.target): p.rates for p in self.evidence.paths}
        mine = [paths[pair] for pair in self.paths_of(host, direction)]
        return median(map(fmean, mine)), median(map(max, mine))

    @cached_property
    def usual_link(self) -> float:
        """Bytes per second of the median host's link, in its better direction."""
        links = [max(self.link(h, OUT), self.link(h, IN)) for h in self.hosts]
        return median(links) if self.evidence.paths else 0.0

    # ---- racks ----

    @cached_property
    def _rack_inference(self) -> RackInference:
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
        flows = self.evidence.concurrent
        return RackInference(self.hosts, flows, self.rates, best, restless)

    @cached_property
    def racks(self) -> tuple[tuple[int, ...], ...]:
        """Hosts by rack: groups with a scarce uplink between them; one group where no uplink is scarce."""
        return self._rack_inference.racks()

    def uplink(self, rack: Sequence[int]) -> tuple[float, float] | None:
        """Return the bytes per second that a rack's hosts get together beyond it, and could send alone.

        None if the uplink is not scarce.
        """
        return self._rack_inference.uplink(rack) if len(self.racks) > 1 else None

    # ---- workers ----

    @cached_property
    def trains(self) -> bool:
        """Whether a script ran."""
        return all(one.step is not None for one in self.evidence.workers)

    @cached_property
    def passes(self) -> Mapping[int, float]:
        """Forward and backward seconds of a step, by rank."""
        return {
            one.rank: one.step.forward.median + one.step.backward.median
            for one in self.evidence.workers
            if one.step is not None
        }

    @cached_property
    def passes_a_step(self) -> int:
        """Passes of a step: more than one where gradients are accumulated."""
        steps = [one.step for one in self.evidence.workers if one.step is not None]
        return max((step.passes for step in steps), default=1)

    @cached_property
    def inputs(self) -> Mapping[int, float]:
        """Input seconds of a step, by rank."""
        return {
            one.rank: one.step.input.median
            for one in self.evidence.workers
            if one.step is not None
        }


def _near_best(values: Sequence[float], *, reverse: bool) -> float:
    """Return the best value; of four or more the second best, and so on: one may be lucky."""
    ranked = sorted(values, reverse=reverse)
    return ranked[(len(ranked) - 1) // 4] if ranked else 0.0


@dataclass(frozen=True)
class RackInference:
    """Racks behind a scarce uplink, inferred from rounds in which all hosts send at the same time.

    In the round in which host i sends to host i + s, s decides how many flows cross an uplink. Each partition of
    the hosts predicts every flow's rate. Within a rack it is the flow's rate alone. Beyond it, it is the flow's
    part of the total that crossed in the fullest round. The partition with the smallest error is taken, if it
    explains most of the error of a single rack.

    Attributes:
        hosts: All hosts.
        concurrent: The rounds.
        rates: Rate of each path alone.
        best: By host, the highest rate that leaves it and that reaches it.
        restless: Hosts whose links vary, so that they say nothing about racks.
    """

    hosts: tuple[int, ...]
    concurrent: tuple[ConcurrentFlows, ...]
    rates: Mapping[Pair, float]
    best: Mapping[int, tuple[float, float]]
    restless: frozenset[int] = frozenset()

    def racks(self) -> Racks:
        """Hosts by rack; all in one if no uplink is scarce."""
        one = (self.hosts,)
        if not self._flows:
            return one
        scarce = [racks for racks in self._partitions() if self._is_scarce(racks)]
        best = min(scarce, key=self._error, default=one)
        return best if self._error(best) < EXPLAINS * self._error(one) else one

    def uplink(self, rack: Sequence[int]) -> tuple[float, float] | None:
        """See `NetworkModel.uplink`; in the worse direction."""
        found = [
            (got, could)
            for end in (0, 1)
            for got, could in [self._crossing(rack, end)]
            if got < CROWDED * self._usual * could
        ]
        return min(found, default=None)

    @cached_property
    def _flows(self) -> list[list[tuple[Pair, float]]]:
        """Paths and rates of each round."""
        return [
            [
                ((a, b), rate)
                for a, b, rate in zip(one.sources, one.targets, one.rates, strict=True)
                if self.rates.get((a, b))
            ]
            for one in self.concurrent
        ]

    @cached_property
    def _usual(self) -> float:
        """Share of its rate alone that an undisturbed flow keeps: shared processors slow all flows alike."""
        shares = sorted(
            rate / self.rates[pair] for flows in self._flows for pair, rate in flows
        )
        return min(1.0, shares[9 * len(shares) // 10]) if shares else 1.0

    def _partitions(self) -> list[Racks]:
        """Partitions of the hosts: in two parts, in equal blocks, or in turns."""
        hosts, count = self.hosts, len(self.hosts)
        ways: list[Racks] = [(hosts[:cut], hosts[cut:]) for cut in range(1, count)]
        for parts in range(2, count // 2 + 1):
            if count % parts == 0:
                each = count // parts
                ways.append(tuple(hosts[i : i + each] for i in range(0, count, each)))
                ways.append(tuple(hosts[i::parts] for i in range(parts)))
        return list(dict.fromkeys(ways))

    def _is_scarce(self, racks: Racks) -> bool:
        return any(self.uplink(rack) for rack in racks if len(rack) > 1)

    def _error(self, racks: Racks) -> float:
        """Sum of squared relative errors of the rates that a partition predicts."""
        rack_of = {host: number for number, rack in enumerate(racks) for host in rack}
        caps = [tuple(self._crossing(rack, end)[0] for end in (0, 1)) for rack in racks]
        error = 0.0
        for flows in self._flows:
            ends = [
                (rack_of[a], rack_of[b])
                for (a, b), _ in flows
                if rack_of[a] != rack_of[b]
            ]
            leave, reach = Counter(a for a, _ in ends), Counter(b for _, b in ends)
            for (a, b), rate in flows:
                if a in self.restless or b in self.restless:
                    continue
                alone = self._usual * self.rates[a, b]
                expected, here, there = alone, rack_of[a], rack_of[b]
                if here != there:
                    expected = min(
                        alone,
                        caps[here][0] / leave[here],
                        caps[there][1] / reach[there],
                    )
                error += ((rate - expected) / self.rates[a, b]) ** 2
        return error

    def _crossing(self, rack: Sequence[int], end: int) -> tuple[float, float]:
        """Summed rates of the flows that leave (*end* 0) or reach (1) a rack, and of their links.

        Taken from the rounds with most such flows; infinite if no two ever cross at the same time.
        """
        inside = set(rack)
        sums: list[tuple[int, float, float]] = []
        for flows in self._flows:
            mine = [
                (rate, min(self.best[pair[0]][0], self.best[pair[1]][1]))
                for pair, rate in flows
                if pair[end] in inside and pair[1 - end] not in inside
            ]
            got, could = sum(one for one, _ in mine), sum(one for _, one in mine)
            sums.append((len(mine), got, could))
        most = max(count for count, _, _ in sums)
        if most < 2:
            return math.inf, math.inf
        return (
            median(got for count, got, _ in sums if count == most),
            median(could for count, _, could in sums if count == most),
        )
