"""Which collective is the cheapest for a message.

Where the cluster is known, the candidates' schedules are priced on it: the same on all ranks
and in all runtimes. Where it is not, they are timed once, when training begins, and all ranks go
by the slowest one's times. ``native`` is kept unless another one is cheaper by `MARGIN`.

``rina`` is a candidate for what switches form (`aggregated.suits_switches`), where the cluster is
known, switches add up, and no rack has more workers than one takes; in real jobs where what does is
found.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from paceline.bucketing import TableCost
from paceline.cluster import Cluster
from paceline.collectives.algorithms import (
    HalvingDoubling,
    Hierarchical,
    Native,
    Ring,
    Tree,
)
from paceline.collectives.in_network.algorithms import exponent_bytes, suits_switches
from paceline.collectives.in_network.packets import MOST_WORKERS
from paceline.collectives.in_network.rina import Rina
from paceline.collectives.placement import aggregating_racks
from paceline.collectives.pricing import seconds
from paceline.collectives.send_receive import real
from paceline.interfaces import (
    CollectiveSummary,
    Comm,
    Pending,
    ReduceOperation,
    Runtime,
    Schedule,
)
from paceline.interfaces.buckets import wire_bytes
from paceline.units import show_bytes

if TYPE_CHECKING:
    from paceline.collectives.communicator import TorchComm

CANDIDATES: Mapping[str, Any] = {
    cls.name: cls() for cls in (Native, Ring, Tree, HalvingDoubling, Hierarchical)
}

MARGIN = 0.05
"""What a schedule must save, of native's time, to be taken: the backend moves the same bytes
with less of the processor."""

MEASURED = (1024, 16 * 1024, 256 * 1024, 4 * 1024 * 1024)
"""Bytes at which candidates are timed."""
REPEATS = 3
MOST_SECONDS = 1.0
"""About as long as measuring may take: no larger size is begun that would take longer."""

SHOWN = tuple(1024 * 4**i for i in range(9))


class Auto:
    """The row that is the cheapest for a message of this size."""

    name: ClassVar[str] = "auto"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        formed_by=(
            "the cheapest of `native`, `tree`, `halving-doubling`, `hierarchical`, and"
            " `rina` where switches add up float32, for the size of the message: "
            "priced on the cluster where that is known, else as measured when training"
            " begins"
        ),
        sends="what the one that it takes sends",
        good_for="messages of different sizes, and networks that one has not measured",
    )
    needs_servers: ClassVar[bool] = False

    def __init__(self) -> None:
        self._measured: dict[str, TableCost] = {}
        self._known: dict[tuple[tuple[int, ...], int, bool], str] = {}
        self._rina = Rina()
        self._adds_up = False

    def schedule(self, size: int, comm: Comm, racks: Sequence[int] | None) -> Schedule:
        """Of *size* bytes."""
        row = self.row(self.choice(size, cast("TorchComm", comm)))
        found: Schedule = row.schedule(size, comm, racks)
        return found

    def row(self, name: str) -> Any:
        """The candidate of that name."""
        return self._rina if name == Rina.name else CANDIDATES[name]

    def run(
        self, comm: Comm, buffer: torch.Tensor, operation: ReduceOperation
    ) -> Pending:
        own = cast("TorchComm", comm)
        name = Native.name
        if not (buffer.is_cuda and own.follows_streams):  # NCCL chooses by itself
            at_switches = suits_switches(real(buffer).dtype, operation)
            name = self.choice(wire_bytes(buffer), own, at_switches=at_switches)
        if name == Native.name:
            return own.all_reduce_natively(buffer, operation)
        pending: Pending = self.row(name).run(comm, buffer, operation)
        return pending

    def choice(self, size: int, comm: TorchComm, *, at_switches: bool = True) -> str:
        """The row for a message of *size* bytes among the ranks of *comm*. *at_switches*: whether
        switches could form it. Sizes up to the next power of two are one."""
        size = 1 << max(0, size - 1).bit_length()
        places = comm.places
        switches = self._adds_up and at_switches
        key = places.workers, size, switches
        if key not in self._known:
            if places.cluster is not None:
                self._known[key] = cheapest(
                    places.cluster, places.workers, size, switches
                )
            else:
                self._known[key] = _least(
                    {name: curve(size) for name, curve in self._measured.items()}
                )
        return self._known[key]

    def begin(self, comm: TorchComm, runtime: Runtime, device: torch.device) -> str:
        """Measure, where nothing is known. Returns what to tell people. Collective."""
        if comm.size == 1 or (device.type == "cuda" and comm.follows_streams):
            return ""
        how = "as priced on the cluster"
        self._adds_up = self._found(comm, runtime)
        if comm.places.cluster is None:
            self._measured = measure(comm, runtime, device)
            sizes = next(iter(self._measured.values())).sizes
            how = f"as measured up to {show_bytes(sizes[-1])}"
        elif self._adds_up and Rina.name in [self.choice(n, comm) for n in SHOWN]:
            self._rina.begin(comm, runtime)
        spans = []
        for name, of_span in itertools.groupby(
            SHOWN, lambda size: self.choice(size, comm)
        ):
            spans.append(f"{name} to {show_bytes(list(of_span)[-1])}")
        spans[-1] = spans[-1].partition(" to ")[0] + (
            " beyond" if len(spans) > 1 else " for all sizes"
        )
        told = f"collective=auto: {', '.join(spans)}, {how}"
        if comm.places.cluster is not None and not self._rina.has_room(comm):
            told += (
                f"; rina is left out, since a rack has more than {MOST_WORKERS} workers, the "
                "most that one aggregator takes"
            )
        return told

    def _found(self, comm: TorchComm, runtime: Runtime) -> bool:
        """Whether the switches that add up on this cluster can be used."""
        if comm.places.cluster is None or self._rina.plain(comm):
            return False
        if not self._rina.has_room(comm):
            return False
        addresses = runtime.aggregators
        return addresses is None or comm.aggregating <= addresses.keys()


@lru_cache(maxsize=4096)
def cheapest(
    cluster: Cluster, workers: tuple[int, ...], size: int, switches: bool = False
) -> str:
    """The cheapest row for *size* bytes among *workers* of *cluster*, on idle links; of
    those that need *switches* to add up, too."""
    racks = [cluster.rack_of_host(cluster.host_of(worker)) for worker in workers]
    adding = aggregating_racks(cluster) if switches else frozenset[int]()
    shape = cast(
        Comm, SimpleNamespace(size=len(workers), racks=racks, aggregating=adding)
    )
    if len(workers) == 1:
        return Native.name
    times = {
        name: seconds(row.schedule(size, shape, racks), cluster, workers)
        for name, row in CANDIDATES.items()
    }
    rina = Rina()
    if not rina.plain(shape) and rina.has_room(shape):
        exponents = exponent_bytes(size // 4)
        agreeing = CANDIDATES[HalvingDoubling.name].schedule(exponents, shape, racks)
        times[rina.name] = seconds(agreeing, cluster, workers) + seconds(
            rina.schedule(size, shape, racks), cluster, workers
        )
    return _least(times)


def _least(times: Mapping[str, float]) -> str:
    """The cheapest, or native where it saves too little; native where nothing is known."""
    if not times:
        return Native.name
    best = min(times, key=lambda name: times[name])
    saves = times[best] < (1 - MARGIN) * times[Native.name]
    return best if saves else Native.name


def measure(
    comm: TorchComm, runtime: Runtime, device: torch.device
) -> dict[str, TableCost]:
    """Each candidate's seconds by its bytes, as the slowest rank found them: the same on
    all. A ring is what native is, and is not tried. Collective."""
    stopwatch = runtime.stopwatch(device)
    rows = {name: row for name, row in CANDIDATES.items() if name != Ring.name}

    def timed(row: Any, size: int) -> float:
        buffer = runtime.blank(size, device)
        start = stopwatch.mark()
        if isinstance(row, Native):
            pending = comm.all_reduce_natively(buffer, "sum")
        else:
            pending = row.run(comm, buffer, "sum")
        pending.wait()
        return stopwatch.seconds(start, [stopwatch.mark()])[0]

    for row in rows.values():
        timed(row, MEASURED[0])  # connections and threads are made here
    curves: list[list[float]] = []
    spent = 0.0
    for before, size in zip((0, *MEASURED), MEASURED, strict=False):
        if before and spent * size / before > MOST_SECONDS:
            break  # all ranks have spent the same
        middle = [
            statistics.median(timed(row, size) for _ in range(REPEATS))
            for row in rows.values()
        ]
        agreed = torch.tensor(middle, dtype=torch.float64, device=device)
        comm.all_reduce_natively(agreed, "max").wait()
        curves.append(agreed.tolist())
        spent = REPEATS * sum(curves[-1])
    return {
        name: TableCost(
            MEASURED[: len(curves)], tuple(itertools.accumulate(times, max))
        )
        for name, times in zip(rows, zip(*curves, strict=True), strict=True)
    }
