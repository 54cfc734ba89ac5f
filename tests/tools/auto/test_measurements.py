"""What a rank concludes from rates of links and from compute times."""

from types import SimpleNamespace

import pytest
import torch

from paceline.cluster import Cluster, Rack, uniform_cluster
from paceline.tools.auto.measurements import (
    TrainingMeasurements,
    links_alike,
    with_speeds,
)

MBIT = 125e3


def test_whether_a_network_is_as_it_was():
    before = uniform_cluster(4, "100mbit", "50us")
    assert links_alike([100 * MBIT] * 4, before)
    assert links_alike([90 * MBIT] * 4, before)
    assert not links_alike([60 * MBIT] * 4, before)
    assert not links_alike([200 * MBIT] * 4, before)
    assert not links_alike([100 * MBIT] * 3 + [30 * MBIT], before), "one slow link"
    assert not links_alike([100 * MBIT] * 3, before)


def test_speeds_of_workers_rack_by_rack():
    two = Cluster((Rack(workers=2, link=1e6, latency=0.0),) * 2)
    found = with_speeds(two, [1.0, 0.97, 0.5, 1.0])
    assert found.speeds == (1.0, 1.0, 0.5, 1.0)


class StopwatchOf:
    """Its marks are these times."""

    def __init__(self, *times):
        self._times = iter(times)

    def mark(self):
        return next(self._times)

    def seconds(self, start, marks):
        return [mark - start for mark in marks]


def test_the_last_steps_have_the_times_between_their_ends():
    model = torch.nn.Linear(1, 1)
    watch = StopwatchOf(7.0, 8.0, 10.0, 10.5)
    runtime = SimpleNamespace(
        size=2, recorder=None, clock=SimpleNamespace(stopwatch=lambda device: watch)
    )
    inputs = SimpleNamespace(
        model=model, parameters=list(model.named_parameters()), runtime=runtime
    )
    config = SimpleNamespace(load_cluster=lambda workers: None)
    measured = TrainingMeasurements(inputs, config, *[None] * 5)
    for _ in range(3):
        measured.step_ended()
    assert measured.last(3) == pytest.approx([1.0, 2.0, 0.5])
    assert measured.last(2) == pytest.approx([2.0, 0.5])
