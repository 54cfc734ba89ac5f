"""Racks behind a scarce uplink, from what hosts get that all send at once.

Alone, a stream may fill no uplink, so racks cannot be told from pairs of hosts. In rounds in which host i sends to
host i + s, as many streams cross an uplink as s makes them. Each way to part the hosts says what
every stream would get: one within a rack what it gets alone, one beyond it its part of what all
that cross there got in the fullest round. The way that comes nearest to what was measured is taken, if it
explains most of what one rack does not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from paceline.tools.doctor.evidence import TogetherEvidence
from paceline.tools.doctor.thresholds import CROWDED, EXPLAINS

Pair = tuple[int, int]
Racks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Rounds:
    """*rates*: what each path gets alone; *best*: by host, the most that leaves it and that reaches
    it on any path. *restless*: hosts whose links give now more, now less, which says nothing of racks."""

    hosts: tuple[int, ...]
    together: tuple[TogetherEvidence, ...]
    rates: Mapping[Pair, float]
    best: Mapping[int, tuple[float, float]]
    restless: frozenset[int] = frozenset()

    def racks(self) -> Racks:
        """The hosts by rack; all in one where no uplink is scarce."""
        one = (self.hosts,)
        if not self._flows:
            return one
        ways = [way for way in self._ways() if self._is_scarce(way)]
        best = min(ways, key=self._error, default=one)
        return best if self._error(best) < EXPLAINS * self._error(one) else one

    def uplink(self, rack: Sequence[int]) -> tuple[float, float] | None:
        """What all hosts of a rack get together beyond it, in its worse direction, and what
        they could; None where that is hardly less."""
        found = [
            (got, could)
            for end in (0, 1)
            for got, could in [self._crossing(rack, end)]
            if got < CROWDED * self._usual * could
        ]
        return min(found, default=None)

    @cached_property
    def _flows(self) -> list[list[tuple[Pair, float]]]:
        """Of each round: paths, and what they got."""
        return [
            [
                ((a, b), rate)
                for a, b, rate in zip(one.sources, one.targets, one.rates, strict=True)
                if self.rates.get((a, b))
            ]
            for one in self.together
        ]

    @cached_property
    def _usual(self) -> float:
        """What is left to streams that share no link: processors that all hosts share are short
        for all alike."""
        shares = sorted(
            rate / self.rates[pair] for flows in self._flows for pair, rate in flows
        )
        return min(1.0, shares[9 * len(shares) // 10]) if shares else 1.0

    def _ways(self) -> list[Racks]:
        """Ways to part the hosts: in two anywhere, in equal parts, in turns."""
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
        """How far what it says of each stream is from what that got, all together."""
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
                said, here, there = alone, rack_of[a], rack_of[b]
                if here != there:
                    said = min(
                        alone,
                        caps[here][0] / leave[here],
                        caps[there][1] / reach[there],
                    )
                error += ((rate - said) / self.rates[a, b]) ** 2
        return error

    def _crossing(self, rack: Sequence[int], end: int) -> tuple[float, float]:
        """In the rounds in which most streams leave (*end* 0) or reach (1) a rack: what they get
        together, and what their hosts could send; endless where no two ever do at once."""
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
