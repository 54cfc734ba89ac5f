"""Makes a cluster from a probe's measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.cluster.cluster import EMULATED_BURST, Cluster, Processor, Rack


class Size(msgspec.Struct, kw_only=True):
    """All-reduces of one size.

    Attributes:
        seconds: Median time of one alone.
        spread: Median distance to that median, in seconds.
        pair_seconds: Median time of two at a time.
        core_seconds: Processor time of one, over all hosts.
    """

    bytes: int
    seconds: float
    spread: float
    pair_seconds: float
    core_seconds: float


class ProbeResult(msgspec.Struct, kw_only=True):
    """Results of a probe, by worker in rank order. A matrix's row is the sender.

    Attributes:
        hosts: The host of each worker.
        goodput: Bytes per second; zero within a host.
        latency: One-way seconds of an empty message, its processor time included; zero within a
            host.
        uplinks: For each pair of racks found, bytes per second when all workers of one rack send to
            the other at once.
        shared_cores: Cores that all hosts share (None: each has its own).
        message_while_computing: Core-seconds of one message while all these cores compute (None:
            not measured).
        speeds: Relative compute speed.
        names: The name of each worker's host, if hosts are machines.
    """

    runtime: str
    hosts: list[int]
    goodput: list[list[float]]
    latency: list[list[float]]
    racks: list[int]
    uplinks: list[tuple[int, int, float]]
    all_reduce: list[Size]
    shared_cores: int | None
    message_while_computing: float | None = None
    speeds: list[float]
    names: list[str] = []

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.hosts)


SAME_RATE = 0.75
"""Within a rack, a pair reaches at least this part of the best goodput of both its hosts."""

SAME_LATENCY = 3.0
"""Within a rack, a pair's latency is at most this multiple of the shortest latency of either
host."""

NOTICEABLE = 2e-3
"""Seconds by which a latency must be longer to count as longer. Waking up a process on a busy
machine may take nearly as long."""


def find_racks(
    goodput: Sequence[Sequence[float]],
    latency: Sequence[Sequence[float]],
    hosts: Sequence[int],
) -> list[int]:
    """Return each worker's rack, numbered in order of first appearance.

    Two hosts belong together if a stream between them is as fast as the slower one of the two
    reaches anywhere, and its latency as short. A host joins a rack if this is true of most hosts
    there. This test cannot separate two racks if the uplink between them is as fast and as near as
    their hosts' links.
    """
    n = len(hosts)
    leaders = sorted({hosts.index(host) for host in hosts})
    others = {i: [j for j in leaders if j != i] for i in leaders}
    best_out = {
        i: max((goodput[i][j] for j in others[i]), default=0.0) for i in leaders
    }
    best_in = {i: max((goodput[j][i] for j in others[i]), default=0.0) for i in leaders}
    nearest = {i: min((latency[i][j] for j in others[i]), default=0.0) for i in leaders}

    def near(i: int, j: int) -> bool:
        possible = min(best_out[i], best_in[j])
        shortest = min(nearest[i], nearest[j])
        far = latency[i][j] > max(SAME_LATENCY * shortest, shortest + NOTICEABLE)
        return goodput[i][j] >= SAME_RATE * possible and not far

    groups: list[list[int]] = []
    for i in leaders:
        for group in groups:
            together = sum(near(i, j) and near(j, i) for j in group)
            if 2 * together > len(group):
                group.append(i)
                break
        else:
            groups.append([i])
    rack_of_host = {
        hosts[leader]: number for number, group in enumerate(groups) for leader in group
    }
    return [rack_of_host[hosts[i]] for i in range(n)]


Seconds = NDArray[np.float64]

SAME_LINKS = 0.03
"""Links whose relative difference in goodput is smaller get one figure: their median."""

NO_LIMIT = 0.9
"""A rack's uplink is no limit if it carries this part of the sum of its hosts' links."""


def infer_cluster(findings: ProbeResult) -> Cluster:
    """Return the cluster in which the simulated runtime takes the measured times.

    Each host's link is the best goodput to or from it in its rack. A message's latency and
    processor time come from all-reduces of all sizes, one at a time and two at a time. Time that
    does not overlap belongs to processors or the wire; time that overlaps is latency.
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
                burst=_burst(findings),
                names=tuple(findings.names[i] for i in leaders if findings.names),
            )
        )
    return Cluster(tuple(racks), processor=processor)


def relative_speeds(times: Sequence[float]) -> list[float]:
    """Return speeds relative to the fastest worker, from each worker's seconds for the same work."""
    fastest = min(times)
    # Measurements on one machine differ by up to a tenth.
    return [1.0 if fastest / t > 0.9 else round(fastest / t, 2) for t in times]


def fit(sizes: Sequence[Size]) -> tuple[float, float]:
    """Fit start-up and seconds per byte of an all-reduce, by least squares over *sizes*.

    Each size counts alike: errors are relative to its time.
    """
    x = np.array([[1.0, size.bytes] for size in sizes])
    y = np.array([size.seconds for size in sizes])
    (start_up, slope), *_ = np.linalg.lstsq(x / y[:, None], np.ones(len(y)), rcond=None)
    return max(0.0, float(start_up)), max(0.0, float(slope))


def _links(findings: ProbeResult, leaders: Sequence[int]) -> list[float]:
    everyone = sorted({findings.hosts.index(host) for host in findings.hosts})
    links = []
    for i in leaders:
        near = [j for j in leaders if j != i] or [j for j in everyone if j != i]
        rates = [findings.goodput[i][j] for j in near]
        rates += [findings.goodput[j][i] for j in near]
        # Take the median of the better half: several pairs agree on the link's rate, and a single
        # one may be an outlier.
        rates.sort(reverse=True)
        links.append(statistics.median(rates[: max(1, len(rates) // 2)]))
    middle = statistics.median(links) if links else 0.0
    if links and all(abs(rate / middle - 1) < SAME_LINKS for rate in links):
        return [middle] * len(links)
    return links


def _uplink(findings: ProbeResult, rack: int, links: float) -> float | None:
    rates = [rate for a, b, rate in findings.uplinks if rack in (a, b)]
    if not rates:
        return None
    best = max(rates)
    return None if best > NO_LIMIT * links else best


def _start_up(findings: ProbeResult) -> tuple[float, Processor | None]:
    """Fit a message's latency and processor time to all sizes."""
    n = findings.workers
    steps = 2 * (n - 1)
    if findings.runtime == "simulated" or n == 1 or not findings.all_reduce:
        others = [v for row in findings.latency for v in row if v > 0]
        return min(others, default=0.0), None
    cores = findings.shared_cores
    per_byte = _byte(findings.all_reduce, n)
    # The cores of one machine handle all hosts' messages. A host's own cores handle only its
    # messages.
    share = n / cores if cores is not None else 1.0
    ring = [findings.goodput[i][(i + 1) % n] for i in range(n)]
    slowest = min(rate for rate in ring if rate) if any(ring) else math.inf
    sent = [steps / n * size.bytes for size in findings.all_reduce]
    wire = np.array([bytes_sent / slowest for bytes_sent in sent])
    busy = np.array([bytes_sent * per_byte * share for bytes_sent in sent])
    burst = _burst(findings)
    chain, work = _fit_start_up(findings.all_reduce, wire, busy, burst)
    message, while_computing = work / (steps * share), findings.message_while_computing
    if while_computing is not None:
        while_computing = max(message, while_computing)
    processor = Processor(
        message=message,
        message_while_computing=while_computing,
        byte=per_byte,
        cores=cores,
    )
    return chain / steps, processor


def _burst(findings: ProbeResult) -> float:
    """Return the seconds at its rate that a link lets through at once, after a pause."""
    return EMULATED_BURST if findings.runtime == "emulated" else 0.0


def _fit_start_up(
    sizes: Sequence[Size], wire: Seconds, busy: Seconds, burst: float
) -> tuple[float, float]:
    """Fit the seconds of latency, and of processor work, in the start-up of an all-reduce.

    The model is the simulated runtime's: bytes move while processors work, and the slower of the
    two sets the pace. Two all-reduces at a time share both, and their latencies overlap.
    Consecutive all-reduces move only the bytes that links carry, except bytes that pass at once
    (*burst*). The fit minimizes the sum of relative errors over all sizes, alone and in pairs, so
    that a few outliers do not matter.
    """
    alone = np.array([size.seconds for size in sizes])
    pairs = np.array([max(size.pair_seconds, size.seconds) for size in sizes])

    def error(chain: Seconds, work: Seconds) -> Seconds:
        # A link is idle during latency, and may fill its bucket for that long.
        saved = np.minimum(chain, burst)
        one = chain + np.maximum(wire - saved, work + busy)
        two = chain + np.maximum(2 * wire - saved, 2 * (work + busy))
        errors: Seconds = np.abs(one / alone - 1).sum(-1) + np.abs(two / pairs - 1).sum(
            -1
        )
        return errors

    top = float(np.median(alone[: max(1, len(sizes) // 2)])) * 1.5
    low_chain = low_work = 0.0
    high_chain = high_work = top
    best = (0.0, 0.0)
    # Search a grid, then finer ones around its best point.
    for _ in range(4):
        chains = np.linspace(low_chain, high_chain, 41)
        works = np.linspace(low_work, high_work, 41)
        errors = error(chains[:, None, None], works[None, :, None])
        i, j = np.unravel_index(int(np.argmin(errors)), errors.shape)
        best = float(chains[i]), float(works[j])
        step_chain, step_work = chains[1] - chains[0], works[1] - works[0]
        low_chain, high_chain = (
            max(0.0, best[0] - 2 * step_chain),
            best[0] + 2 * step_chain,
        )
        low_work, high_work = max(0.0, best[1] - 2 * step_work), best[1] + 2 * step_work
    return best


def _byte(sizes: Sequence[Size], workers: int) -> float:
    """Return the core-seconds per byte, from the cost of larger all-reduces."""
    first, last = sizes[0], sizes[-1]
    sent = 2 * (workers - 1) * (last.bytes - first.bytes)  # by all workers together
    return max(0.0, (last.core_seconds - first.core_seconds) / sent) if sent else 0.0
