"""The all-reduce curve, measured in the simulated runtime, against the ring's formula."""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline.bucketing.cost_models import MeasuredCost
from paceline.bucketing.measure import (
    LARGEST_BYTES,
    SMALLEST_BYTES,
    measure_all_reduce,
)
from paceline.collectives.communicator import Communicator
from paceline.collectives.schedules import Ring
from paceline.interfaces import current_runtime
from tests.bucketing.tunings import on
from tests.support.simulations import LATENCY, LINK
from tests.support.tables import crossed

CPU = torch.device("cpu")


def measured(largest: int) -> MeasuredCost:
    runtime = current_runtime()
    assert runtime is not None
    comm = Communicator(runtime)
    # Ranks come at different times, as they do after a backward pass.
    paceline.pace(0.01 * paceline.rank())
    return measure_all_reduce(comm, runtime, CPU, largest, comm.all_reduce)


def ring_seconds(workers: int, size: float) -> float:
    ring = Ring(workers, int(size))
    ((activity,),) = ring.phases()
    return ring.steps * LATENCY + activity.bytes / LINK


@pytest.mark.parametrize(
    ("workers", "at_once", "largest"),
    crossed(2, [2, 3, 8], [1, 2], [100, 4096, 300_000, 100_000_000]),
)
def test_the_curve_is_the_rings(workers, at_once, largest):
    answers, _ = on(workers, lambda rank: measured(largest), lanes=at_once)
    cost = answers[0]
    assert answers == workers * [cost]
    assert cost.sizes[0] == SMALLEST_BYTES
    assert cost.sizes[-1] == max(SMALLEST_BYTES, min(largest, LARGEST_BYTES))
    expected = [ring_seconds(workers, size) for size in cost.sizes]
    assert cost.seconds == pytest.approx(expected, rel=1e-9)
    start_up = 2 * (workers - 1) * LATENCY
    overlapping = start_up if at_once == 2 else 0.0
    assert cost.overlappable_startup == pytest.approx(overlapping, rel=1e-9, abs=1e-15)


def test_beyond_the_largest_size_the_curve_goes_on_as_steeply():
    answers, _ = on(4, lambda rank: measured(100_000_000))
    for size in (20_000_000, 400_000_000):
        assert answers[0](size) == pytest.approx(ring_seconds(4, size), rel=1e-9)
