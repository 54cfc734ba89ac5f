"""Probes the network for a few seconds, between two steps of a training.

In each round, all hosts send at once, each to the host a fixed number of places further.
Collectives use the network in this way, and n hosts are measured in the time of one pair. Then
small all-reduces show a message's cost. `measure` measures pair by pair, and more precisely.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from operator import truediv

import msgspec
import torch

from paceline.cluster import Cluster
from paceline.cluster.probe.infer import (
    ProbeResult,
    Size,
    find_racks,
    infer_cluster,
)
from paceline.cluster.probe.pairs import FIRST_BYTES, PairProbe
from paceline.core.broadcast import gather_bytes
from paceline.interfaces import Runtime
from paceline.runtimes.real.cluster_check import WorkerLocation, worker_location

MOST_SHIFTS = 7
"""The most rounds in which all hosts send at once."""
LEAST_BYTES, MOST_BYTES = 4096, 2**26
"""Bytes of a flow. A worker holds the most twice, in addition to its training: 128 MiB. They take
21 ms at 25 Gbit/s, of which three quarters count."""
FOR_LINKS, FOR_SUMS = 0.6, 0.3
"""The parts of the time for links and for all-reduces; the rest is for the work between them."""
SIZES = tuple(4096 * 8**k for k in range(4))
"""Sizes of all-reduces: 4 KiB to 2 MiB."""
REPEATS = 5
CPU = torch.device("cpu")


def quick_probe(runtime: Runtime, seconds: float, device: torch.device) -> Cluster:
    """Measure the network for about *seconds*.

    Args:
        runtime: The job's runtime.
        seconds: Duration.
        device: The device of small messages between ranks.

    Returns:
        A cluster in which the simulated runtime takes the measured times, the same on all ranks.
    """
    pairs = PairProbe(runtime, seconds / 20)
    hosts, shared_cores = _hosts(runtime, device)
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    rates = _rates(pairs, leaders, FOR_LINKS * seconds)
    goodput = _matrix(runtime.size, hosts, leaders, rates)
    near = [[0.0] * runtime.size for _ in range(runtime.size)]
    racks = find_racks(goodput, near, hosts)
    return infer_cluster(
        ProbeResult(
            runtime=runtime.name,
            hosts=hosts,
            goodput=goodput,
            latency=near,
            racks=racks,
            uplinks=_uplinks(racks, rates),
            all_reduce=_sums(runtime, pairs, FOR_SUMS * seconds),
            shared_cores=shared_cores,
            speeds=[1.0] * runtime.size,
        )
    )


def neighbour_rates(
    runtime: Runtime, seconds: float, device: torch.device
) -> list[float]:
    """Measure briefly the rate from each host to the next one, while all send.

    Args:
        runtime: The job's runtime.
        seconds: Duration.
        device: The device of small messages between ranks.

    Returns:
        Bytes per second of each host; the same on all ranks. Empty if there is one host.
    """
    pairs = PairProbe(runtime, seconds / 20)
    hosts, _ = _hosts(runtime, device)
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    if len(leaders) == 1:
        return []
    return list(_Rounds(pairs, leaders).measure(1, seconds / 2).values())


def _hosts(runtime: Runtime, device: torch.device) -> tuple[list[int], int | None]:
    """Find each worker's host, and the number of cores if all workers share them.

    If all workers are on one host, loopback is the network, and each worker counts as a host.
    """
    encoded = gather_bytes(msgspec.json.encode(worker_location()), device)
    locations = [msgspec.json.decode(one, type=WorkerLocation) for one in encoded]
    order = list(dict.fromkeys(one.host for one in locations))
    hosts = [order.index(one.host) for one in locations]
    if len(order) == 1:
        hosts = list(range(runtime.size))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return hosts, cores if len({one.machine for one in locations}) == 1 else None


Flows = dict[tuple[int, int], float]
"""Bytes per second from one rank to another, in one round."""


class _Rounds:
    """Rounds in which all hosts send at once, each to the host *shift* places further.

    A round begins with small transfers. Its last transfer is as large as the time allows, judged by
    the time of the small one on the clock of all ranks. That time includes more than links: on
    loopback, memory takes longer than sending. A shaper's burst must not count. Each flow sends as
    much as it can in that time, so one slow host among fast ones does not prolong a round.
    """

    def __init__(self, pairs: PairProbe, leaders: Sequence[int]) -> None:
        self._pairs, self._leaders = pairs, leaders
        self.spent = 0.0
        self._busy = 1.0
        """The part of a transfer's time that its slowest flow takes, at the measured rate."""
        self._sent: dict[int, float] = {}
        self._taken: dict[int, float] = {}

    def measure(self, shift: int, seconds: float) -> Flows:
        """Do one round of about *seconds*; it takes longer only if its first bytes do."""
        count, first = len(self._leaders), self.spent
        flows = [
            (self._leaders[i], self._leaders[(i + shift) % count]) for i in range(count)
        ]
        sizes = [FIRST_BYTES] * count
        if self._sent:
            usual = [min(self._sent[a], self._taken[b]) for a, b in flows]
            sizes = self._within(seconds / 16, usual)
        while True:
            found, took = self._send(flows, sizes)
            if took > seconds / 8 or max(sizes) == MOST_BYTES:
                break
            sizes = [min(4 * size, MOST_BYTES) for size in sizes]
        left = seconds - (self.spent - first)
        if left > took and min(sizes) < MOST_BYTES:
            found, _ = self._send(flows, self._within(left, list(found.values())))
        return found

    def _send(
        self, flows: Sequence[tuple[int, int]], sizes: Sequence[int]
    ) -> tuple[Flows, float]:
        """Send *sizes* bytes on each flow; return the rates, and the seconds of the whole transfer."""
        start = self._pairs.now()
        rates = self._pairs.at_once(flows, sizes)
        took = self._pairs.max(self._pairs.now() - start)
        self.spent += took
        self._busy = min(1.0, max(map(truediv, sizes, rates)) / took)
        for (a, b), rate in zip(flows, rates, strict=True):
            self._sent[a] = max(rate, self._sent.get(a, 0.0))
            self._taken[b] = max(rate, self._taken.get(b, 0.0))
        return dict(zip(flows, rates, strict=True)), took

    def _within(self, seconds: float, rates: Sequence[float]) -> list[int]:
        """Return the bytes that flows of these *rates* send in *seconds*."""
        bytes_ = [int(seconds * self._busy * rate) for rate in rates]
        return [max(LEAST_BYTES, min(MOST_BYTES, size)) for size in bytes_]


def _rates(pairs: PairProbe, leaders: Sequence[int], seconds: float) -> list[Flows]:
    count = len(leaders)
    if count == 1:
        return []
    every = range(1, count)
    step = max(1.0, (count - 1) / MOST_SHIFTS)
    shifts = sorted({every[int(i * step)] for i in range(min(count - 1, MOST_SHIFTS))})
    rounds, found = _Rounds(pairs, leaders), list[Flows]()
    for done, shift in enumerate(shifts):
        left = seconds - rounds.spent
        # *spent* is equal on all ranks.
        if left > 0:
            found.append(rounds.measure(shift, left / (len(shifts) - done)))
    return found


def _matrix(
    size: int, hosts: Sequence[int], leaders: Sequence[int], rounds: Sequence[Flows]
) -> list[list[float]]:
    """Return the goodput from each worker's host to each other's.

    A pair that was not measured gets the smaller of its two hosts' rates to other hosts.
    """
    known: Flows = {}
    for flows in rounds:
        known |= flows
    sent = {
        a: max((r for (s, _), r in known.items() if s == a), default=0.0)
        for a in leaders
    }
    taken = {
        b: max((r for (_, t), r in known.items() if t == b), default=0.0)
        for b in leaders
    }
    leader_of = {hosts[leader]: leader for leader in leaders}
    at = [leader_of[host] for host in hosts]
    return [
        [
            0.0
            if at[i] == at[j]
            else known.get((at[i], at[j]), min(sent[at[i]], taken[at[j]]))
            for j in range(size)
        ]
        for i in range(size)
    ]


def _uplinks(
    racks: Sequence[int], rounds: Sequence[Flows]
) -> list[tuple[int, int, float]]:
    """Return the highest rate of a round from each rack to each other rack."""
    most: dict[tuple[int, int], float] = {}
    for flows in rounds:
        sums: dict[tuple[int, int], float] = {}
        for (a, b), rate in flows.items():
            if racks[a] != racks[b]:
                key = racks[a], racks[b]
                sums[key] = sums.get(key, 0.0) + rate
        for key, rate in sums.items():
            most[key] = max(rate, most.get(key, 0.0))
    return [(a, b, rate) for (a, b), rate in sorted(most.items())]


def _sums(runtime: Runtime, pairs: PairProbe, seconds: float) -> list[Size]:
    """Time all-reduces, alone and two at a time, for as long as the time allows."""
    found: list[Size] = []
    for size in SIZES:
        estimate = pairs.max(_sum(runtime, pairs, size, 1))
        if found and estimate * 3 > seconds / len(SIZES):
            break
        repeats = max(
            1, min(REPEATS, int(seconds / len(SIZES) / 3 / max(estimate, 1e-6)))
        )
        alone = [_sum(runtime, pairs, size, 1) for _ in range(repeats)]
        both = [_sum(runtime, pairs, size, 2) for _ in range(repeats)]
        middle, pair = statistics.median(alone), statistics.median(both)
        found.append(
            Size(
                bytes=size,
                seconds=pairs.sum(middle) / runtime.size,
                spread=pairs.sum(max(alone) - min(alone)) / runtime.size,
                pair_seconds=pairs.sum(pair) / runtime.size,
                core_seconds=0.0,
            )
        )
    return found


def _sum(runtime: Runtime, pairs: PairProbe, size: int, together: int) -> float:
    buffers = [runtime.blank(size, CPU) for _ in range(together)]
    start = runtime.clock.now()
    for pending in [pairs.comm.all_reduce(buffer, "sum") for buffer in buffers]:
        pending.wait()
    return runtime.clock.now() - start
