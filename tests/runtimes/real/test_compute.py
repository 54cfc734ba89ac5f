"""Compute times that are slept out, on a clock of the test's own."""

import pytest

from paceline.cluster.workload import Workload
from paceline.runtimes.real import compute
from paceline.runtimes.real.compute import PacedCompute


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch):
    fake = Time()
    monkeypatch.setattr(compute, "time", fake)
    return fake


def one_pass(paced: PacedCompute, samples: int | None = None) -> None:
    paced.forward(samples, training=True)
    paced.gradient(0)


@pytest.mark.parametrize(("speed", "loading"), [(1.0, 0.5), (0.5, 0.5), (1.0, 4.0)])
def test_a_pass_begins_when_its_input_is_over(time, speed, loading):
    """The script's own loading counts towards it."""
    workload = Workload(
        names=("a",), sizes=(4,), forward=(1.0,), backward=(2.0,), update=8.0, input=3.0
    )
    paced = PacedCompute(workload, None, speed)
    before = max(loading, 3.0 / speed)
    for step in range(3):
        start = time.now
        if step:
            time.now += loading
        one_pass(paced)
        time.now += loading
        one_pass(paced)
        paced.update_begins()
        paced.step_ended()
        passes = 2 if step else 1  # nobody knows what came before the first one
        assert time.now - start == passes * before + (2 * 3.0 + 8.0) / speed


def test_an_evaluation_waits_for_no_input(time):
    workload = Workload(
        names=("a",), sizes=(4,), forward=(1.0,), backward=(2.0,), input=3.0
    )
    paced = PacedCompute(workload, None, 1.0)
    one_pass(paced)
    over = time.now
    paced.forward(None, training=False)
    assert time.now == over
