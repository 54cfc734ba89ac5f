"""Measures the network between the workers of a job, over torch.distributed, in any runtime."""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from paceline.cluster.probe.infer import ProbeResult, Size, find_racks, relative_speeds
from paceline.cluster.probe.pairs import FIRST_BYTES, PairProbe
from paceline.core.broadcast import gather_bytes
from paceline.errors import UsageError
from paceline.interfaces import Pending, Runtime
from paceline.runtimes.real.cluster_check import worker_location

SIZES = tuple(4096 * 4**k for k in range(7))
"""Bytes of the all-reduces: 4 KiB to 16 MiB."""

SECONDS_PER_SIZE = 0.5
LONGEST_SECONDS = 1.0
"""Sizes that take longer are not measured: they add no information."""

IDLE_SECONDS = 0.5

BESIDE_BYTES, BESIDE_AT_ONCE, BESIDE_SECONDS, BESIDE_TURNS = 4096, 8, 0.5, 5
"""All-reduces during computing: their bytes, how many are under way, seconds of a turn, and
turns."""
CPU = torch.device("cpu")


def measure(
    runtime: Runtime,
    *,
    seconds_per_pair: float = 0.1,
    largest: int = SIZES[-1],
    on_progress: Callable[[str], None] = lambda text: None,
) -> ProbeResult:
    """Measure everything; return the same results on every rank. Collective.

    Pairs are measured one after the other, in both directions, *seconds_per_pair* each. No other
    traffic may use the network meanwhile. *on_progress* is called with each phase's name, on every rank.
    Raises `UsageError` if there is only one worker.
    """
    runtime.connect()
    if runtime.size < 2:
        raise UsageError(
            "one worker has no network to measure: expected two or more, such as "
            "--workers 2, or torchrun's options for several machines"
        )
    probe = _Probe(runtime, seconds_per_pair)
    on_progress("hosts")
    hosts, shared_cores = probe.hosts()
    on_progress("latency and goodput, pair by pair")
    goodput, latency = probe.pairs.matrices(hosts)
    racks = find_racks(goodput, latency, hosts)
    on_progress("uplinks")
    uplinks = probe.uplinks(racks, goodput)
    on_progress("all-reduces")
    all_reduce = probe.all_reduces([s for s in SIZES if s <= largest], shared_cores)
    beside = None
    if shared_cores is not None and shared_cores <= runtime.size:
        on_progress("all-reduces beside computing")
        beside = probe.message_while_computing(shared_cores)
    on_progress("compute speeds")
    return ProbeResult(
        runtime=runtime.name,
        hosts=hosts,
        goodput=goodput,
        latency=latency,
        racks=racks,
        uplinks=uplinks,
        all_reduce=all_reduce,
        shared_cores=shared_cores,
        message_while_computing=beside,
        speeds=probe.speeds(),
        names=probe.names(hosts),
    )


class _Probe:
    def __init__(self, runtime: Runtime, seconds_per_pair: float) -> None:
        self._runtime = runtime
        self._rank, self._size = runtime.rank, runtime.size
        self._seconds = seconds_per_pair
        self.pairs = PairProbe(runtime, seconds_per_pair)

    # ---- hosts ----

    def hosts(self) -> tuple[list[int], int | None]:
        """Find each worker's host, and the number of cores if all workers share them.

        Two workers are on one machine if its name and boot id are equal. They are on one host if
        they also share a network there. If that makes a single host, loopback is the network, and
        each worker counts as a host.
        """
        cluster = self._runtime.cluster
        if self._runtime.clock.is_virtual and cluster is not None:
            return [cluster.host_of(worker) for worker in range(self._size)], None
        mine = worker_location()
        machines = self._gather([_number(mine.machine)])
        networks = self._gather([_number(mine.host)])
        order = list(dict.fromkeys(row[0] for row in networks))
        hosts = [order.index(row[0]) for row in networks]
        if len(order) == 1:
            hosts = list(range(self._size))
        one_machine = len({row[0] for row in machines}) == 1
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        # Workers may be bound to different cores.
        cores = int(self.pairs.max(float(cores)))
        return hosts, cores if one_machine else None

    def names(self, hosts: Sequence[int]) -> list[str]:
        """Return the name of each worker's host; empty if names do not identify hosts."""
        names = [
            one.decode() for one in gather_bytes(worker_location().name.encode(), CPU)
        ]
        return names if len(set(names)) == len(set(hosts)) > 1 else []

    def speeds(self) -> list[float]:
        """Return relative compute speeds: from the runtime, or else measured by a matrix product.

        Workers measure one after the other, since they may share cores.
        """
        if self._runtime.cluster is not None:
            return list(self._runtime.cluster.speeds)
        times = []
        a = torch.randn(256, 256)
        for turn in range(self._size):
            self.pairs.barrier()
            mine = 0.0
            if turn == self._rank:
                samples = []
                for _ in range(15):
                    start = time.perf_counter()
                    for _ in range(10):
                        a @ a
                    samples.append(time.perf_counter() - start)
                mine = statistics.median(samples)
            times.append(self.pairs.sum(mine))
        return relative_speeds(times)

    # ---- racks ----

    def uplinks(
        self, racks: Sequence[int], goodput: Sequence[Sequence[float]]
    ) -> list[tuple[int, int, float]]:
        """Measure the goodput from each rack to each other one.

        As many pairs of workers send as the smaller rack has workers.
        """
        found = []
        for a in sorted(set(racks)):
            for b in sorted(set(racks)):
                if a == b:
                    continue
                senders = [i for i, rack in enumerate(racks) if rack == a]
                takers = [i for i, rack in enumerate(racks) if rack == b]
                pairs = list(zip(senders, takers, strict=False))
                size = int(goodput[senders[0]][takers[0]] * 4 * self._seconds)
                self.pairs.barrier()
                start = self._runtime.clock.now()
                for sender, taker in pairs:
                    if self._rank == sender:
                        self.pairs.send(self._runtime.blank(size, CPU), taker)
                    elif self._rank == taker:
                        data = self._runtime.blank(size, CPU)
                        self.pairs.receive(data, sender)
                took = self.pairs.max(self._runtime.clock.now() - start)
                found.append((a, b, len(pairs) * size / took))
        return found

    # ---- all-reduces ----

    def all_reduces(self, sizes: Sequence[int], shared_cores: int | None) -> list[Size]:
        """Measure each size: one at a time, two at a time, and the processor time."""
        self._run(FIRST_BYTES, 1)
        idle = self._idle_load(shared_cores)
        found: list[Size] = []
        for size in sizes:
            estimate = self.pairs.max(self._run(size, 1))
            if found and estimate > LONGEST_SECONDS:
                # A larger size only takes longer, in proportion to its bytes.
                break
            repeats = max(3, min(40, int(SECONDS_PER_SIZE / max(estimate, 1e-6))))
            if self._runtime.clock.is_virtual:
                # In virtual time, all repetitions take equally long.
                repeats = 1
            self.pairs.barrier()
            before = self._core_seconds(shared_cores)
            start = self._runtime.clock.now()
            times = [self._run(size, 1) for _ in range(repeats)]
            spent = self._core_seconds(shared_cores) - before
            spent -= idle * (self._runtime.clock.now() - start)
            spent = max(0.0, spent / repeats)
            pairs = [
                self._run(size, 2) for _ in range(max(min(3, repeats), repeats // 2))
            ]
            middle = statistics.median(times)
            spread = statistics.median(abs(t - middle) for t in times)
            # All workers of one machine read the same counter: rank 0's reading is enough.
            if shared_cores is not None and self._rank:
                spent = 0.0
            found.append(
                Size(
                    bytes=size,
                    seconds=self.pairs.sum(middle) / self._size,
                    spread=self.pairs.sum(spread) / self._size,
                    pair_seconds=self.pairs.sum(statistics.median(pairs)) / self._size,
                    core_seconds=self.pairs.sum(spent),
                )
            )
        return found

    def message_while_computing(self, shared_cores: int) -> float | None:
        """Measure the core-seconds of one message while all cores compute.

        It compares the time of the same computing with and without all-reduces under way, for which
        no worker waits meanwhile. Returns None if the network is so slow that the measurement would
        take minutes.
        """
        work = torch.randn(64, 64)
        start = time.thread_time()
        for _ in range(200):
            work @ work
        each = (time.thread_time() - start) / 200
        alone = self.pairs.max(self._run(BESIDE_BYTES, BESIDE_AT_ONCE))
        if 9 * alone > LONGEST_SECONDS:
            return None
        # Compute for three times as long as the all-reduces take by themselves, so that they
        # end meanwhile.
        share = max(1.0, self._size / shared_cores)
        part = max(1, int(self.pairs.max(3 * alone / share / each) / BESIDE_AT_ONCE))
        rounds = max(3, int(BESIDE_SECONDS / (3 * alone)))

        def turn(messages: bool) -> float:
            before: list[Pending] = []
            self.pairs.barrier()
            start = self._runtime.clock.now()
            for _ in range(rounds):
                under_way = []
                for _ in range(BESIDE_AT_ONCE):
                    if messages:
                        blank = self._runtime.blank(BESIDE_BYTES, CPU)
                        under_way.append(self.pairs.comm.all_reduce(blank, "sum"))
                    for _ in range(part):
                        work @ work
                for pending in before:
                    pending.wait()
                before = under_way
            for pending in before:
                pending.wait()
            self.pairs.barrier()
            return self._runtime.clock.now() - start

        turns = [turn(True) - turn(False) for _ in range(BESIDE_TURNS)]
        longer = self.pairs.max(statistics.median(turns))
        sent = rounds * BESIDE_AT_ONCE * 2 * (self._size - 1) * self._size
        return max(0.0, longer * shared_cores / sent)

    def _run(self, size: int, together: int) -> float:
        buffers = [self._runtime.blank(size, CPU) for _ in range(together)]
        start = self._runtime.clock.now()
        for pending in [self.pairs.comm.all_reduce(b, "sum") for b in buffers]:
            pending.wait()
        return self._runtime.clock.now() - start

    def _idle_load(self, shared_cores: int | None) -> float:
        """Return the cores that other processes keep busy while all workers are idle."""
        if shared_cores is None:
            return 0.0
        self.pairs.barrier()
        before, start = self._core_seconds(shared_cores), time.perf_counter()
        time.sleep(IDLE_SECONDS)
        spent = self._core_seconds(shared_cores) - before
        return spent / (time.perf_counter() - start)

    def _core_seconds(self, shared_cores: int | None) -> float:
        """Return the processor time so far, in core-seconds.

        It is the machine's if all hosts are on it, and this process's otherwise. The kernel's work
        for the network counts for the machine, but for no process.
        """
        if self._runtime.clock.is_virtual:
            return 0.0
        if shared_cores is None or not Path("/proc/stat").exists():
            return time.process_time()
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        ticks = [int(field) for field in fields]
        idle = ticks[3] + ticks[4]
        return (sum(ticks[:8]) - idle) / os.sysconf("SC_CLK_TCK")

    # ---- agreement ----

    def _gather(self, row: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(row, dtype=torch.int64)
        everyone = torch.empty(self._size * len(row), dtype=torch.int64)
        self.pairs.comm.all_gather(everyone, mine).wait()
        rows: list[list[int]] = everyone.view(self._size, -1).tolist()
        return rows


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
