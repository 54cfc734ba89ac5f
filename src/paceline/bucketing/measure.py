"""The cost of a mean, measured in place: on the communicator that training uses, through
what its gradients are compressed with."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch

from paceline.bucketing.cost_models import TableCost
from paceline.interfaces import Comm, Pending, Stopwatch

SMALLEST_BYTES = 4096
LARGEST_BYTES = 8 * 1024 * 1024
"""Beyond it the curve goes on as steeply as it ends: a larger buffer would take a slow
network longer than it tells."""

STEP = 4
"""Ratio of one size to the next."""

REPEATS = 5
SECONDS_PER_SIZE = 0.05
"""Repeat, up to `REPEATS` times, for as long as this at each size."""


def measure_mean(
    comm: Comm,
    largest: int,
    device: torch.device,
    stopwatch: Stopwatch,
    blank: Callable[[int, torch.device], torch.Tensor],
    mean: Callable[[torch.Tensor], Pending],
) -> TableCost:
    """The curve from `SMALLEST_BYTES` to *largest* bytes (at most `LARGEST_BYTES`).

    The same on every rank: times are means over ranks of each rank's median. With several
    lanes, pairs of small ones show how much of the start-up overlaps. *mean* forms one.
    Collective.
    """
    top = max(SMALLEST_BYTES, min(largest, LARGEST_BYTES))
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * STEP < top:
        sizes.append(sizes[-1] * STEP)
    if top > sizes[-1]:
        sizes.append(top)

    def timed(size: int, together: int) -> float:
        buffers = [blank(size, device) for _ in range(together)]
        start = stopwatch.mark()
        for pending in [mean(buffer) for buffer in buffers]:
            pending.wait()
        return stopwatch.seconds(start, [stopwatch.mark()])[0]

    def typical(size: int, together: int = 1) -> float:
        first = _mean(comm, device, timed(size, together))
        if stopwatch.repeats:
            return first
        # All ranks repeat alike: they have agreed on how long one takes.
        repeats = min(REPEATS, int(SECONDS_PER_SIZE / first) if first > 0 else REPEATS)
        if not repeats:
            return first
        times = [timed(size, together) for _ in range(repeats)]
        return _mean(comm, device, statistics.median(times))

    timed(SMALLEST_BYTES, 1)  # connections and buffers are made here
    seconds = [typical(size) for size in sizes]
    seconds = list(itertools.accumulate(seconds, max))  # noise may not make it fall
    overlapping = 0.0
    if comm.lanes(device) > 1:
        both = typical(SMALLEST_BYTES, 2)
        # One alone: start-up + wire; two together: start-up + 2 wires, if it overlaps.
        overlapping = min(seconds[0], max(0.0, 2 * seconds[0] - both))
    return TableCost(tuple(sizes), tuple(seconds), overlapping)


def _mean(comm: Comm, device: torch.device, value: float) -> float:
    mean = torch.tensor([value], dtype=torch.float64, device=device)
    comm.all_reduce(mean, "sum").wait()
    return float(mean.item()) / comm.size
