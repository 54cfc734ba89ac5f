"""Measures point to point: from one worker's host to another's, alone and while others send, too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline.cluster.probe import tcp_counters
from paceline.cluster.profiling.timers import waited_for_processor
from paceline.collectives.communicator import Communicator
from paceline.collectives.torch_group import TorchGroup
from paceline.core.broadcast import gather_bytes
from paceline.errors import PeerLostError
from paceline.interfaces import Runtime
from paceline.runtimes.real.cluster_check import worker_location

FIRST_BYTES = 64 * 1024
MOST_BYTES = 2**28
"""The most bytes of one transfer: 86 ms at 25 Gbit/s. Both ends hold them in memory."""
TOO_FAST = 2.0
"""The rate of a transfer's later part is ignored above this multiple of the whole transfer's
rate."""
PINGS = 20
SMALL_MESSAGES = 50
TRIES = 3
DISTURBED = 0.25
"""A transfer is repeated if a worker waited for a processor for more than this part of its time."""
CPU = torch.device("cpu")
Matrix = list[list[float]]


@dataclass(frozen=True)
class LinkMeasurement:
    """The rate in bytes per second from one rank to another, and lost segments.

    *sent* and *lost* count the segments of a few small messages in this direction; *sent_back* and
    *lost_back* count those in the other one. All are zero if the system does not count segments.
    """

    rate: float
    sent: float
    lost: float
    sent_back: float
    lost_back: float


class PairProbe:
    """One worker's end of all measurements between two workers. Collective, as `Comm`s are.

    A transfer takes about *seconds*. The result is the difference between a longer and a shorter
    transfer, so start-up, latency and a shaper's burst cancel.
    """

    def __init__(self, runtime: Runtime, seconds: float) -> None:
        self._runtime, self._seconds = runtime, seconds
        self._rank, self._size = runtime.rank, runtime.size
        # In virtual time, all repetitions take equally long, and nothing is lost.
        simulated = runtime.clock.is_virtual
        self._pings, self._small_messages = (
            (2, 1) if simulated else (PINGS, SMALL_MESSAGES)
        )
        self._tries = 1 if simulated else TRIES
        self._group: Any = dist.group.WORLD
        workers = runtime.workers("probe")
        # Only NCCL needs tensors on its device.
        if not workers.moves_host_tensors:
            self._group = dist.new_group(backend="gloo")
            workers = TorchGroup("probe", self._group)
        self.comm = Communicator(runtime, "probe", workers)
        # Collect the names now: after a pair has failed, the other ranks may not answer.
        names = gather_bytes(worker_location().name.encode(), CPU)
        self._names = [name.decode(errors="replace") for name in names]

    # ---- one pair at a time ----

    def matrices(self, hosts: Sequence[int]) -> tuple[Matrix, Matrix]:
        """Measure goodput and latency from each worker's host to each other worker's."""
        n = self._size
        first_of = {host: hosts.index(host) for host in set(hosts)}
        leaders = sorted(first_of.values())
        flows = [(a, b) for a in leaders for b in leaders if a != b]

        def ask(peer: int) -> list[float]:
            delay = self._ping(peer)
            return [self._stream(peer), delay]

        def answer(peer: int) -> list[float]:
            self._answer_pings(peer)
            self._answer(peer)
            return [0.0, 0.0]

        found = dict(zip(flows, self._in_turn(flows, ask, answer, 2), strict=True))
        goodput = [[0.0] * n for _ in range(n)]
        latency = [[0.0] * n for _ in range(n)]
        for i in range(n):
            for j in range(n):
                flow = first_of[hosts[i]], first_of[hosts[j]]
                goodput[i][j], latency[i][j] = found.get(flow, (0.0, 0.0))
        return goodput, latency

    def remeasure(
        self, flows: Sequence[tuple[int, int]], expected: Sequence[float]
    ) -> list[LinkMeasurement]:
        """Measure *flows* (from rank, to rank) one after the other.

        *expected* are their expected rates in bytes per second.
        """
        rate_of = dict(zip(flows, expected, strict=True))

        def ask(peer: int) -> list[float]:
            sizes = self._parts(rate_of[self._rank, peer])
            for left in reversed(range(self._tries)):
                disturbed = self._is_disturbed(lambda: self._send_parts(peer, sizes))
                theirs = torch.zeros(1, dtype=torch.int64)
                self.receive(theirs, peer)
                over = not left or not (disturbed or theirs.item())
                self.send(torch.tensor([int(over)]), peer)
                if over:
                    break
            return [0.0, *self._send_small_messages(peer), 0.0, 0.0]

        def answer(peer: int) -> list[float]:
            sizes, rates = self._parts(rate_of[peer, self._rank]), []
            over = torch.zeros(1, dtype=torch.int64)
            while not over.item():
                disturbed = self._is_disturbed(
                    lambda: rates.append(self._take_parts(peer, sizes))
                )
                self.send(torch.tensor([int(disturbed)]), peer)
                self.receive(over, peer)
            return [rates[-1], 0.0, 0.0, *self._answer_small_messages(peer)]

        return [LinkMeasurement(*row) for row in self._in_turn(flows, ask, answer, 5)]

    def _in_turn(
        self,
        flows: Sequence[tuple[int, int]],
        ask: Callable[[int], list[float]],
        answer: Callable[[int], list[float]],
        width: int,
    ) -> Matrix:
        """Return the sum of both ends' results for each flow, on all ranks.

        There is no barrier between two flows, since a barrier takes long if many processes share a
        processor. A message from the target of one flow to the source of the next starts it.
        """
        mine = torch.zeros(len(flows), width, dtype=torch.float64)
        word = torch.zeros(1, dtype=torch.int64)
        self.barrier()
        before = None
        for number, (source, target) in enumerate(flows):
            if before is not None and before != source:
                if self._rank == before:
                    self.send(word, source)
                elif self._rank == source:
                    self.receive(word, before)
            with self._between(source, target):
                if self._rank == source:
                    # Start this flow.
                    self.send(word, target)
                    mine[number] = torch.tensor(ask(target))
                    # The target has finished.
                    self.receive(word, target)
                elif self._rank == target:
                    self.receive(word, source)
                    mine[number] = torch.tensor(answer(source))
                    self.send(word, source)
            before = target
        self.comm.all_reduce(mine, "sum").wait()
        found: Matrix = mine.tolist()
        return found

    @contextmanager
    def _between(self, source: int, target: int) -> Iterator[None]:
        """Raise an error that names both ends; torch's message names at most one address."""
        try:
            yield
        except RuntimeError as error:
            ends = [f"rank {rank} ({self._names[rank]})" for rank in (source, target)]
            raise PeerLostError(
                f"the probe failed between {ends[0]} and {ends[1]}: {error}. See whether they "
                "reach each other, on all ports: ping one from the other, look at firewalls, and "
                "whether GLOO_SOCKET_IFNAME names an interface of the same network on both"
            ) from error

    # ---- many at once ----

    def at_once(
        self, flows: Sequence[tuple[int, int]], sizes: Sequence[int], tries: int = 1
    ) -> list[float]:
        """Measure *flows* (from rank, to rank) at the same time, of *sizes* bytes each.

        No rank may send or receive twice. Returns the rate that each target received, in bytes per
        second, from the second quarter on, when all have begun. If a worker waited for a processor,
        all are repeated, up to *tries* times.
        """
        rates = torch.zeros(len(flows), dtype=torch.float64)
        for left in reversed(range(min(tries, self._tries))):
            rates.zero_()
            disturbed = self._is_disturbed(lambda: self._flow(flows, sizes, rates))
            if not left or not self.max(float(disturbed)):
                break
        self.comm.all_reduce(rates, "sum").wait()
        found: list[float] = rates.tolist()
        return found

    def _flow(
        self,
        flows: Sequence[tuple[int, int]],
        sizes: Sequence[int],
        rates: torch.Tensor,
    ) -> None:
        """Run this rank's part of the flows, and put the rate that it receives into *rates*."""
        coming, going = None, None
        for number, (source, target) in enumerate(flows):
            parts = _quarters(sizes[number])
            if self._rank == target:
                coming = number, parts, self._expect(source, parts)
            if self._rank == source:
                going = target, parts
        self.barrier()
        start = self._runtime.clock.now()
        # No rank sends before every rank has taken its start time.
        self.barrier()
        works = [] if going is None else self._begin(*going)
        if coming is not None:
            number, parts, expected = coming
            rates[number] = self._rate(expected, parts, start)
        for work in works:
            work.wait()

    # ---- the two ends of a pair ----

    def _ping(self, peer: int) -> float:
        word = torch.zeros(1, dtype=torch.int64)
        times = []
        for _ in range(self._pings):
            start = self._runtime.clock.now()
            self.send(word, peer)
            self.receive(word, peer)
            times.append((self._runtime.clock.now() - start) / 2)
        # Longer transfers waited for a processor.
        return min(times)

    def _answer_pings(self, peer: int) -> None:
        word = torch.zeros(1, dtype=torch.int64)
        for _ in range(self._pings):
            self.receive(word, peer)
            self.send(word, peer)

    def _stream(self, peer: int) -> float:
        """Return the bytes per second, from longer and longer transfers."""
        size, took = FIRST_BYTES, self._transfer(peer, FIRST_BYTES)
        while took < self._seconds / 4 and size < MOST_BYTES // 4:
            size *= 2
            took = self._transfer(peer, size)
        long = self._transfer(peer, 4 * size)
        again = min(took, self._transfer(peer, size))
        self._transfer(peer, 0)
        return _rate_of(4 * size, long, 3 * size, long - again)

    def _transfer(self, peer: int, size: int) -> float:
        length = torch.tensor([size])
        self.send(length, peer)
        if not size:
            return 0.0
        data = self._blank(size)
        # The peer's buffer is ready.
        self.receive(length, peer)
        start = self._runtime.clock.now()
        self.send(data, peer)
        self.receive(length, peer)
        return self._runtime.clock.now() - start

    def _answer(self, peer: int) -> None:
        word = torch.zeros(1, dtype=torch.int64)
        while True:
            self.receive(word, peer)
            if not int(word.item()):
                return
            data = self._blank(int(word.item()))
            self.send(word, peer)
            self.receive(data, peer)
            self.send(word, peer)

    # ---- a transfer whose first part does not count ----

    def _parts(self, rate: float) -> list[int]:
        return _quarters(min(MOST_BYTES, max(FIRST_BYTES, int(rate * self._seconds))))

    def _send_parts(self, peer: int, sizes: Sequence[int]) -> None:
        # The peer's buffers are ready.
        self.receive(torch.zeros(1, dtype=torch.int64), peer)
        for work in self._begin(peer, sizes):
            work.wait()

    def _take_parts(self, peer: int, sizes: Sequence[int]) -> float:
        works = self._expect(peer, sizes)
        start = self._runtime.clock.now()
        self.send(torch.zeros(1, dtype=torch.int64), peer)
        return self._rate(works, sizes, start)

    def _expect(self, peer: int, sizes: Sequence[int]) -> list[dist.Work]:
        # Post all receives at once. Otherwise the request for the second part would queue
        # behind this rank's own sends.
        works = [
            dist.irecv(self._blank(size), peer, group=self._group) for size in sizes
        ]
        return [work for work in works if work is not None]

    def _begin(self, peer: int, sizes: Sequence[int]) -> list[dist.Work]:
        works = [
            dist.isend(self._blank(size), peer, group=self._group) for size in sizes
        ]
        return [work for work in works if work is not None]

    def _rate(
        self, works: Sequence[dist.Work], sizes: Sequence[int], start: float
    ) -> float:
        """Return the rate from the first part's arrival to the last part's."""
        times = []
        for work in works:
            work.wait()
            times.append(self._runtime.clock.now() - start)
        return _rate_of(sum(sizes), times[-1], sum(sizes[1:]), times[-1] - times[0])

    def _is_disturbed(self, transfer: Callable[[], object]) -> bool:
        """Return whether this process waited for a processor for a large part of a *transfer*.

        If so, the transfer's time does not show the link's rate.
        """
        before, start = waited_for_processor(), time.perf_counter()
        transfer()
        waited = waited_for_processor() - before
        return waited > DISTURBED * (time.perf_counter() - start)

    # ---- small messages, to count losses: a full queue drops some of any size ----

    def _send_small_messages(self, peer: int) -> list[float]:
        """Send small messages; return the segments sent meanwhile, and the lost ones."""
        before, start = tcp_counters.segments(), self._runtime.clock.now()
        for left in reversed(range(self._small_messages)):
            over = not left or self._runtime.clock.now() - start > self._seconds
            self.send(torch.tensor([int(over)]), peer)
            self.receive(torch.zeros(1, dtype=torch.int64), peer)
            if over:
                break
        return _since(before)

    def _answer_small_messages(self, peer: int) -> list[float]:
        before = tcp_counters.segments()
        word = torch.zeros(1, dtype=torch.int64)
        while not word.item():
            self.receive(word, peer)
            self.send(word, peer)
        return _since(before)

    def _blank(self, size: int) -> torch.Tensor:
        return self._runtime.blank(max(1, size), CPU)

    # ---- agreement ----

    def now(self) -> float:
        """Return the time on this worker's clock."""
        return self._runtime.clock.now()

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        dist.send(tensor, peer, group=self._group)

    def receive(self, tensor: torch.Tensor, peer: int) -> None:
        dist.recv(tensor, peer, group=self._group)

    def barrier(self) -> None:
        self.comm.all_reduce(torch.zeros(1), "sum").wait()

    def sum(self, value: float) -> float:
        return self._reduced(value, "sum")

    def max(self, value: float) -> float:
        return self._reduced(value, "max")

    def _reduced(self, value: float, operation: Any) -> float:
        number = torch.tensor([value], dtype=torch.float64)
        self.comm.all_reduce(number, operation).wait()
        return float(number.item())


def _rate_of(size: float, seconds: float, later: float, took: float) -> float:
    """Return the goodput of the *later* bytes of a transfer of *size* bytes.

    If they were much faster than the whole transfer, return the whole transfer's rate. A worker
    that got no processor for a while finds all data there at once, or its first part late.
    """
    whole = size / max(seconds, 1e-9)
    rate = later / max(took, 1e-9)
    return rate if rate < TOO_FAST * whole else whole


def _quarters(size: int) -> list[int]:
    return [max(1, size // 4)] * 4


def _since(before: tuple[int, int]) -> list[float]:
    now = tcp_counters.segments()
    return [float(now[0] - before[0]), float(now[1] - before[1])]
