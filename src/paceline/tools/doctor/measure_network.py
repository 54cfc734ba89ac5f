"""What the network between the hosts gives: link by link both ways, again and again, and all at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from paceline.cluster.probe import ProbeResult, measure
from paceline.cluster.probe.infer import find_racks
from paceline.cluster.probe.pairs import MOST_BYTES, TRIES, PairProbe
from paceline.interfaces import Runtime
from paceline.tools.doctor.evidence import PathEvidence, TogetherEvidence
from paceline.tools.doctor.thresholds import SLOW_LINK

REPEATS = 4
"""Rounds after the first one."""
MOST_REPEATED = 64
"""Pairs that are measured again; with more of them, those that stand near each other in rank order."""
MOST_DOUBTFUL = 16
"""Others that are measured again, as they looked slow."""
MOST_SHIFTS = 8
"""Rounds in which all send at once."""


@dataclass(frozen=True)
class NetworkFound:
    """*findings*: as ``paceline probe`` has them; *paths* and *together*: between hosts."""

    findings: ProbeResult
    paths: tuple[PathEvidence, ...]
    together: tuple[TogetherEvidence, ...]


def examine_network(
    runtime: Runtime, seconds: float, say: Callable[[str], None]
) -> NetworkFound:
    """Measure the network between the workers' hosts; the same on every rank. Collective.

    *seconds*: for each pair of hosts, each way, in the first round; *say* is told what begins. Raises `UsageError` where there is one
    worker only.
    """
    findings = measure(runtime, seconds_per_pair=seconds, say=say)
    hosts = list(dict.fromkeys(findings.hosts))
    leaders = [findings.hosts.index(host) for host in hosts]
    pairs = PairProbe(runtime, seconds)
    rates: dict[tuple[int, int], list[float]] = {
        (a, b): [findings.goodput[a][b]] for a in leaders for b in leaders if a != b
    }
    sent = dict.fromkeys(rates, 0.0)
    lost = dict.fromkeys(rates, 0.0)
    together: list[TogetherEvidence] = []
    shifts = _shifts(len(leaders))
    repeated = _repeated(leaders)
    flows = [*repeated, *_doubtful(rates, repeated)]
    for number in range(REPEATS):
        say(f"links again, round {number + 2} of {REPEATS + 1}")
        found = pairs.remeasure(flows, [rates[flow][0] for flow in flows])
        for (a, b), one in zip(flows, found, strict=True):
            rates[a, b].append(one.rate)
            sent[a, b] += one.sent
            lost[a, b] += one.lost
            sent[b, a] += one.sent_back
            lost[b, a] += one.lost_back
        for shift in shifts[number::REPEATS]:
            together.append(_at_once(pairs, leaders, hosts, shift, rates, seconds))
    paths = tuple(
        PathEvidence(
            source=findings.hosts[a],
            target=findings.hosts[b],
            rates=tuple(several),
            latency=findings.latency[a][b],
            retransmitted=lost[a, b] / sent[a, b] if sent[a, b] else None,
        )
        for (a, b), several in rates.items()
    )
    return NetworkFound(_by_medians(findings, rates), paths, tuple(together))


def _by_medians(
    findings: ProbeResult, rates: dict[tuple[int, int], list[float]]
) -> ProbeResult:
    """As if the probe had measured the medians of all rounds."""
    hosts = findings.hosts
    first = {host: hosts.index(host) for host in hosts}
    usual = {flow: median(several) for flow, several in rates.items()}
    goodput = [[usual.get((first[a], first[b]), 0.0) for b in hosts] for a in hosts]
    racks = find_racks(goodput, findings.latency, hosts)
    return msgspec.structs.replace(
        findings,
        goodput=goodput,
        racks=racks,
        # They were measured between the racks of the first round.
        uplinks=findings.uplinks if racks == findings.racks else [],
    )


def _repeated(leaders: Sequence[int]) -> list[tuple[int, int]]:
    count = len(leaders)
    reach = count - 1
    while reach > 1 and count * reach > MOST_REPEATED:
        reach -= 1
    near = [
        (i, (i + sign * distance) % count)
        for distance in range(1, reach // 2 + 1)
        for i in range(count)
        for sign in (1, -1)
    ]
    if reach == count - 1:  # all of them
        near = [(i, j) for i in range(count) for j in range(count) if i != j]
    return [(leaders[i], leaders[j]) for i, j in near]


def _doubtful(
    rates: Mapping[tuple[int, int], Sequence[float]],
    repeated: Collection[tuple[int, int]],
) -> list[tuple[int, int]]:
    """Of those that are not *repeated* the ones that were the slowest beside others of both their
    ends: one measure is no path."""
    again = set(repeated)
    best_out: dict[int, float] = {}
    best_into: dict[int, float] = {}
    for (a, b), (rate, *_) in rates.items():
        best_out[a] = max(rate, best_out.get(a, 0.0))
        best_into[b] = max(rate, best_into.get(b, 0.0))
    parts = {
        (a, b): rate / min(best_out[a], best_into[b])
        for (a, b), (rate, *_) in rates.items()
        if (a, b) not in again
    }
    slow = [pair for pair, part in parts.items() if part < SLOW_LINK]
    return sorted(slow, key=lambda pair: (parts[pair], pair))[:MOST_DOUBTFUL]


def _shifts(count: int) -> list[int]:
    """By how many places further each host sends: all of them, or some that are spread over all."""
    every = list(range(1, count))
    if len(every) <= MOST_SHIFTS:
        return every
    step = (count - 1) / MOST_SHIFTS
    spread = {round(1 + i * step) for i in range(MOST_SHIFTS - 1)}
    return sorted({1, count // 2, *spread})


def _at_once(
    pairs: PairProbe,
    leaders: Sequence[int],
    hosts: Sequence[int],
    shift: int,
    rates: dict[tuple[int, int], list[float]],
    seconds: float,
) -> TogetherEvidence:
    """All hosts send to the one that is *shift* places further; each as much as it could alone in
    that time."""
    count = len(leaders)
    flows = [(leaders[i], leaders[(i + shift) % count]) for i in range(count)]
    sizes = [min(MOST_BYTES, int(median(rates[flow]) * seconds)) for flow in flows]
    found = pairs.at_once(flows, sizes, TRIES)
    return TogetherEvidence(
        sources=tuple(hosts),
        targets=tuple(hosts[(i + shift) % count] for i in range(count)),
        rates=tuple(found),
    )
