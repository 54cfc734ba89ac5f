"""What a step's passes show of its times, by a clock that is moved by hand."""

from __future__ import annotations

from paceline.bucketing.measure import StepTimer
from paceline.cluster.profiling.timers import HostStopwatch


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
