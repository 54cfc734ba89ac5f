"""What is measured of a training: when gradients are ready, and what an all-reduce costs."""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline.bucketing.cost_models import MeasuredCost
from paceline.bucketing.measure import (
    LARGEST_BYTES,
    SMALLEST_BYTES,
    StepTimer,
    measure_all_reduce,
)
from paceline.cluster import Cluster, Rack
from paceline.cluster.profiling.timers import HostStopwatch
from paceline.collectives.communicator import Communicator
from paceline.collectives.registry import COLLECTIVES, attach
from paceline.collectives.schedules import Ring
from paceline.interfaces import current_runtime
from paceline.runtimes.simulated import Simulation
from tests.bucketing.cases import on
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


def test_measured_once_is_measured_often() -> None:
    """Though a tree is done earlier on some workers: a plan measures once, a training several times."""
    links = (LINK, LINK, LINK, LINK / 10)
    cluster = Cluster((Rack(workers=4, link=links, latency=LATENCY),))

    curves: list[MeasuredCost] = []

    def body(rank: int) -> None:
        paceline.init()
        runtime = current_runtime()
        assert runtime is not None
        comm = attach(COLLECTIVES["tree"](), runtime, Communicator(runtime))
        curve = measure_all_reduce(comm, runtime, CPU, 1_000_000, comm.all_reduce)
        if rank == 0:
            curves.append(curve)

    for repeats in (True, False):
        Simulation(cluster, repeats=repeats).run(body)
    once, often = curves
    assert once.seconds == pytest.approx(often.seconds, rel=1e-9)


class Driven:
    """`StepTimer` of two tensors whose gradients come last first."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timer = StepTimer(HostStopwatch(lambda: self.now), [1, 0])

    def forward(self, at: float, uses: dict[int, float]) -> None:
        self.now = at
        self.timer.step_begins()
        for index, time in uses.items():
            self.now = at + time
            self.timer.used(index)

    def backward(self, at: float) -> None:
        for index in (1, 0):
            self.now = at + 1.0 - index
            self.timer.gradient_ready(index)
        self.now = at + 2.0
        self.timer.ended()


def test_one_forward_pass_and_one_backward_pass() -> None:
    driven = Driven()
    driven.forward(10.0, {0: 0.5, 1: 3.0})
    driven.backward(16.0)
    timer = driven.timer
    assert timer.use_times() == [3.0, 0.5]  # in ready order
    assert timer.use_order() == [0, 1]
    assert timer.ready_times() == [6.0, 7.0]
    assert timer.duration() == [8.0]
    assert timer.period() == []  # nothing was seen before
    timer.forget()
    driven.forward(20.0, {0: 0.0})
    driven.backward(23.0)
    assert timer.use_times() == [0.0, 0.0]  # a use that nobody saw is at once
    assert timer.duration() == [5.0]
    assert timer.period() == [25.0 - 18.0]  # with what was between


def test_a_step_of_several_passes_begins_with_the_first() -> None:
    """Gradients that are accumulated: updates are waited for in the first forward pass."""
    driven = Driven()
    driven.forward(10.0, {0: 0.5, 1: 3.0})
    driven.forward(20.0, {})
    driven.backward(26.0)
    assert driven.timer.use_times() == [3.0, 0.5]
    assert driven.timer.ready_times() == [6.0, 7.0]


def test_uses_outside_the_forward_passes_do_not_count() -> None:
    driven = Driven()
    driven.now = 5.0
    driven.timer.used(0)  # an average of weights, before the step begins
    driven.forward(10.0, {1: 2.0})
    driven.backward(16.0)
    driven.timer.used(0)  # and after backward has begun
    assert driven.timer.use_times() == [2.0, 0.0]


def test_who_does_not_listen_marks_nothing() -> None:
    driven = Driven()
    driven.timer.listening = False
    driven.forward(10.0, {0: 0.5, 1: 3.0})
    driven.backward(16.0)
    assert driven.timer.seen_order() == []
    assert driven.timer.duration() == driven.timer.period() == []
    driven.timer.forget()
    driven.timer.listening = True
    driven.forward(20.0, {})
    driven.backward(26.0)
    assert driven.timer.duration() == [8.0]
    assert driven.timer.period() == []
