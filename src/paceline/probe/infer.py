"""A cluster, from what a probe found."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from paceline.network.cluster import Cluster, Processor, Rack
from paceline.probe.findings import Findings, Size

SAME_LINKS = 0.03
"""Links whose goodput differs by less are given one figure: their median."""

NO_LIMIT = 0.9
"""Racks' uplinks that give this part of what their hosts' links can do are no limit."""


def infer_cluster(findings: Findings) -> Cluster:
    """The cluster in which the virtual world takes the times that were measured.

    Each host's link is the best goodput to or from it in its rack. A message's latency and
    its processor time come from all-reduces of one size, one at a time and two at a time:
    what does not overlap is the processors', what does is latency.
    """
    latency, processor = _start_up(findings)
    racks = []
    for rack in sorted(set(findings.racks)):
        members = [i for i, number in enumerate(findings.racks) if number == rack]
        hosts = list(dict.fromkeys(findings.hosts[i] for i in members))
        leaders = [findings.hosts.index(host) for host in hosts]
        links = _links(findings, leaders)
        racks.append(
            Rack(
                workers=len(members),
                link=links[0] if len(set(links)) == 1 else tuple(links),
                latency=latency,
                uplink=_uplink(findings, rack, sum(links)),
                speed=tuple(findings.speeds[i] for i in members),
                workers_per_host=len(members) // len(hosts),
            )
        )
    return Cluster(tuple(racks), processor=processor)


def fit(sizes: Sequence[Size]) -> tuple[float, float]:
    """Start-up and seconds per byte of an all-reduce: least squares over *sizes*, each
    size counting alike (errors relative to its time)."""
    x = np.array([[1.0, size.bytes] for size in sizes])
    y = np.array([size.seconds for size in sizes])
    (start_up, slope), *_ = np.linalg.lstsq(x / y[:, None], np.ones(len(y)), rcond=None)
    return max(0.0, float(start_up)), max(0.0, float(slope))


def _links(findings: Findings, leaders: Sequence[int]) -> list[float]:
    everyone = sorted({findings.hosts.index(host) for host in findings.hosts})
    links = []
    for i in leaders:
        near = [j for j in leaders if j != i] or [j for j in everyone if j != i]
        rates = [findings.goodput[i][j] for j in near]
        rates += [findings.goodput[j][i] for j in near]
        # The best is what the link can do; several pairs agree on it, and one may be lucky.
        rates.sort(reverse=True)
        links.append(statistics.median(rates[: max(1, len(rates) // 2)]))
    middle = statistics.median(links) if links else 0.0
    if links and all(abs(rate / middle - 1) < SAME_LINKS for rate in links):
        return [middle] * len(links)
    return links


def _uplink(findings: Findings, rack: int, links: float) -> float | None:
    rates = [rate for a, b, rate in findings.uplinks if rack in (a, b)]
    if not rates:
        return None
    best = max(rates)
    return None if best > NO_LIMIT * links else best


def _start_up(findings: Findings) -> tuple[float, Processor | None]:
    """A message's latency, and what it costs processors."""
    n = findings.workers
    steps = 2 * (n - 1)
    if n == 1 or not findings.all_reduce:
        return 0.0, None
    small = findings.all_reduce[0]
    alone, pair = small.seconds, max(small.pair_seconds, small.seconds)
    if findings.shared_cores is None and findings.world == "virtual":
        others = [v for row in findings.latency for v in row if v > 0]
        return min(others, default=0.0), None
    busy = min(pair - alone, alone)
    latency = (alone - busy) / steps
    cores = findings.shared_cores
    # The processors of one machine do everybody's messages; a host's only its own.
    message = busy * cores / (n * steps) if cores is not None else busy / steps
    return latency, Processor(
        message=message, byte=_byte(findings.all_reduce, n), cores=cores
    )


def _byte(sizes: Sequence[Size], workers: int) -> float:
    """Core-seconds a byte, from how much more larger all-reduces cost."""
    first, last = sizes[0], sizes[-1]
    sent = 2 * (workers - 1) * (last.bytes - first.bytes)  # by all workers together
    return max(0.0, (last.core_seconds - first.core_seconds) / sent) if sent else 0.0
