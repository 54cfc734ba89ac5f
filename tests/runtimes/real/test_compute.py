"""Computing that is slept out: a step of a workload takes its times, input included."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.cluster import Workload
from paceline.runtimes.real import compute
from paceline.runtimes.real.compute import PacedCompute


@pytest.fixture
def clock(monkeypatch):
    """The host's clock, which goes on when somebody sleeps."""

    def sleep(seconds: float) -> None:
        clock.now += seconds

    clock = SimpleNamespace(now=100.0, sleep=sleep, perf_counter=lambda: clock.now)
    monkeypatch.setattr(compute, "time", clock)
    return clock


def take_step(paced: PacedCompute, passes: int = 1) -> None:
    for _ in range(passes):
        paced.step_begins()
        paced.forward(1, training=True)
        paced.gradient(0)
        paced.gradient_taken()
    paced.update_begins()
    paced.step_ended()


@pytest.mark.parametrize("loads", [0.0, 1.5, 4.0, 5.0])
@pytest.mark.parametrize("passes", [1, 2])
def test_what_a_script_loads_passes_within_a_steps_input(clock, passes, loads):
    workload = Workload(
        names=("w",),
        sizes=(4,),
        forward=(1.0,),
        backward=(2.0,),
        update=0.5,
        input=2.0,
        overhead=0.25,
        passes=passes,
    )
    paced = PacedCompute(workload, 1.0, speed=0.5)
    take_step(paced, passes)
    ended = clock.now
    clock.now += loads
    take_step(paced, passes)
    step = passes * (1.0 + 2.0) + 0.25 + 0.5
    assert clock.now - ended == pytest.approx(max(2.0 * 2.0, loads) + 2.0 * step)


def test_a_script_that_paces_itself_waits_for_no_input(clock):
    workload = Workload(
        names=("w",), sizes=(4,), forward=(0.0,), backward=(0.0,), input=2.0
    )
    paced = PacedCompute(workload, 1.0, speed=1.0)
    take_step(paced)
    paced.give_up()
    ended = clock.now
    take_step(paced)
    assert clock.now == ended
