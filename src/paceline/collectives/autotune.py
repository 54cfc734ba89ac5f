"""Chooses the cheapest all-reduce algorithm for each message size (``collective=auto``).

If the cluster is described, the candidates' schedules are priced on it. The choice is then the same
on all ranks and in all runtimes. Otherwise the candidates are timed once, when training begins, and
all ranks use the slowest rank's times. ``native`` stays unless another candidate is cheaper by
`MARGIN`.

``rina`` is a candidate for buffers that switches can sum (`suits_switches`). The cluster must be
described, and a rack with several workers must aggregate. In real jobs the addresses of all
aggregators must be known, too.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, cast

import torch

from paceline.bucketing.cost_models import MeasuredCost
from paceline.cluster import Cluster
from paceline.collectives.algorithms import (
    HalvingDoubling,
    Hierarchical,
    Native,
    Ring,
    Tree,
)
from paceline.collectives.communicator import real
from paceline.collectives.in_network.aggregator_addresses import aggregators_of
from paceline.collectives.in_network.algorithms import (
    Rina,
    suits_switches,
)
from paceline.collectives.timing import seconds
from paceline.interfaces import (
    AllReduceAlgorithm,
    CollectiveSummary,
    Comm,
    Needs,
    Pending,
    Placement,
    ReduceOperation,
    Runtime,
    Schedule,
)
from paceline.interfaces.buckets import wire_bytes
from paceline.units import show_bytes

if TYPE_CHECKING:
    from paceline.collectives.communicator import Communicator

CANDIDATES: Mapping[str, AllReduceAlgorithm] = {
    cls.name: cls() for cls in (Native, Ring, Tree, HalvingDoubling, Hierarchical)
}

MARGIN = 0.05
"""Share of native's time that another algorithm must save to be chosen.

The backend's own algorithm moves the same bytes with less processor time.
"""

MEASURED = (1024, 16 * 1024, 256 * 1024, 4 * 1024 * 1024)
"""Bytes at which candidates are timed."""
REPEATS = 3
MOST_SECONDS = 1.0
"""Limit of the time for measurements: a size that would probably take longer is not measured."""

SHOWN = tuple(1024 * 4**i for i in range(9))


class Auto:
    """Uses the cheapest algorithm for the size of each message."""

    name: ClassVar[str] = "auto"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        purpose="Uses the fastest collective for each message size.",
        formed_by=(
            "the fastest of `native`, `tree`, `halving-doubling` and `hierarchical` for the size of "
            "the message, and `rina` if switches add up float32"
        ),
        sends="the same as the chosen collective",
        good_for="messages of different sizes, and networks that you have not measured",
        limits=(
            (
                "Without a cluster file it measures for about a second when training begins. The choice, "
                "and so the rounding of sums, may differ between runs."
            ),
            "It uses `native` unless another collective is more than 5 % faster, and always under NCCL.",
        ),
    )
    needs: ClassVar[Needs] = "nothing"

    def __init__(self) -> None:
        self._measured: dict[str, MeasuredCost] = {}
        self._known: dict[tuple[Sequence[int], int, bool], str] = {}
        self._rina = Rina()
        self._adds_up = False

    def schedule(self, size: int, at: Placement) -> Schedule:
        """The chosen algorithm's schedule for *size* bytes."""
        return self.row(self.choice(size, at)).schedule(size, at)

    def row(self, name: str) -> AllReduceAlgorithm:
        """The candidate with this name."""
        return self._rina if name == Rina.name else CANDIDATES[name]

    def all_reduce(
        self, comm: Comm, buffer: torch.Tensor, operation: ReduceOperation
    ) -> Pending:
        own = cast("Communicator", comm)
        name = Native.name
        # NCCL chooses an algorithm by itself.
        if not (buffer.is_cuda and own.follows_streams):
            at_switches = suits_switches(real(buffer).dtype, operation)
            size = wire_bytes(buffer)
            name = self.choice(size, comm.placement, at_switches=at_switches)
        return self.row(name).all_reduce(comm, buffer, operation)

    def choice(self, size: int, at: Placement, *, at_switches: bool = True) -> str:
        """The name of the algorithm for a message of *size* bytes.

        *at_switches*: whether switches can sum this buffer. Sizes are rounded up to a power of two,
        so that few choices are computed.
        """
        size = 1 << max(0, size - 1).bit_length()
        switches = self._adds_up and at_switches
        key = at.workers, size, switches
        if key not in self._known:
            if at.cluster is not None:
                self._known[key] = cheapest(at.cluster, at.workers, size, switches)
            else:
                self._known[key] = _least(
                    {name: curve(size) for name, curve in self._measured.items()}
                )
        return self._known[key]

    def setup(self, comm: Communicator, runtime: Runtime, device: torch.device) -> str:
        """Measure the candidates if the cluster is unknown. Return a message for the user.
        Collective."""
        if comm.size == 1 or (device.type == "cuda" and comm.follows_streams):
            return ""
        at, how = comm.placement, "as priced on the cluster"
        self._adds_up = self._found(comm, runtime)
        if at.cluster is None:
            self._measured = measure(comm, runtime, device)
            sizes = next(iter(self._measured.values())).sizes
            how = f"as measured up to {show_bytes(sizes[-1])}"
        elif self._adds_up and Rina.name in [self.choice(n, at) for n in SHOWN]:
            self._rina.setup(comm, runtime)
        spans = []
        for name, of_span in itertools.groupby(
            SHOWN, lambda size: self.choice(size, at)
        ):
            spans.append(f"{name} to {show_bytes(list(of_span)[-1])}")
        spans[-1] = spans[-1].partition(" to ")[0] + (
            " beyond" if len(spans) > 1 else " for all sizes"
        )
        return f"collective=auto: {', '.join(spans)}, {how}"

    def _found(self, comm: Communicator, runtime: Runtime) -> bool:
        """Whether all aggregators of this cluster's racks have a known address."""
        at, addresses = comm.placement, aggregators_of(runtime)
        if at.cluster is None or self._rina.uses_ring_only(at):
            return False
        return addresses is None or at.aggregating <= addresses.keys()


@lru_cache(maxsize=4096)
def cheapest(
    cluster: Cluster, workers: tuple[int, ...], size: int, switches: bool = False
) -> str:
    """The cheapest algorithm for *size* bytes among *workers* of *cluster*, on idle links.

    *switches*: whether aggregating switches may be used.
    """
    if len(workers) == 1:
        return Native.name
    at = Placement.on(cluster, workers)
    if not switches:
        at = replace(at, aggregating=frozenset())
    times = {
        name: seconds(row.schedule(size, at), cluster, workers)
        for name, row in CANDIDATES.items()
    }
    rina = Rina()
    if not rina.uses_ring_only(at):
        agreeing = rina.agreement(size // 4, at)
        times[rina.name] = seconds(agreeing, cluster, workers) + seconds(
            rina.schedule(size, at), cluster, workers
        )
    return _least(times)


def _least(times: Mapping[str, float]) -> str:
    """The cheapest algorithm; native if the saving is below `MARGIN`, or if no times are known."""
    if not times:
        return Native.name
    best = min(times, key=lambda name: times[name])
    saves = times[best] < (1 - MARGIN) * times[Native.name]
    return best if saves else Native.name


def measure(
    comm: Communicator, runtime: Runtime, device: torch.device
) -> dict[str, MeasuredCost]:
    """Time each candidate at several sizes. Collective.

    Returns seconds by bytes for each candidate, as the slowest rank measured them, so that all
    ranks get the same curves. The ring is not timed, because native is a ring.
    """
    stopwatch = runtime.clock.stopwatch(device)
    rows = {name: row for name, row in CANDIDATES.items() if name != Ring.name}

    def timed(row: AllReduceAlgorithm, size: int) -> float:
        buffer = runtime.blank(size, device)
        start = stopwatch.mark()
        row.all_reduce(comm, buffer, "sum").wait()
        return stopwatch.seconds(start, [stopwatch.mark()])[0]

    for row in rows.values():
        # The first use makes connections and threads; it is not timed.
        timed(row, MEASURED[0])
    curves: list[list[float]] = []
    spent = 0.0
    for before, size in zip((0, *MEASURED), MEASURED, strict=False):
        if before and spent * size / before > MOST_SECONDS:
            break  # all ranks break here together, since times are agreed
        middle = [
            statistics.median(timed(row, size) for _ in range(REPEATS))
            for row in rows.values()
        ]
        agreed = torch.tensor(middle, dtype=torch.float64, device=device)
        comm.all_reduce_natively(agreed, "max").wait()
        curves.append(agreed.tolist())
        spent = REPEATS * sum(curves[-1])
    return {
        name: MeasuredCost(
            MEASURED[: len(curves)], tuple(itertools.accumulate(times, max))
        )
        for name, times in zip(rows, zip(*curves, strict=True), strict=True)
    }
