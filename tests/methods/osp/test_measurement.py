"""What a worker measures of its steps, its budget, and why it says that nothing was deferred."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.methods.osp import OSP
from paceline.methods.osp.deferral import fill_budget
from paceline.methods.osp.measurement import (
    TRIAL_STEPS,
    VISIBLE,
    Budget,
    ModelPieces,
    Rate,
    StepTimer,
    StepTimes,
    measured_rate,
    step_seconds,
)
from paceline.methods.osp.options import EPOCHS, OSPOptions
from tests.methods.osp.helpers import HALF, steps
from tests.support.training import train_to_one_model

# ---- times, and the network's rate ----


def test_a_step_by_hand():
    # 2 s for what was deferred; bucket 0 waits for it, bucket 1 for its gradients.
    times, rate = StepTimes([1.0, 8.0], 8.5), Rate(1.0, 0.01)
    assert step_seconds(times, 100, [200, 50], rate) == pytest.approx(8 + 1.5)
    assert step_seconds(times, 100, [900, 50], rate) == pytest.approx(2 + 10 + 1.5)
    # Workers meet in the last bucket's message also where it is empty.
    assert step_seconds(times, 100, [200, 0], rate) == pytest.approx(8 + 1)
    assert step_seconds(times, 0, [0, 0], Rate(0.0, 0.01)) == 8.5


@given(steps(), st.floats(0, 1))
def test_the_measured_rate_explains_the_observed_time(step, part):
    parts, times, rate, order = step
    deferred = fill_budget(parts, order, part * sum(parts.sizes))
    size, left = parts.total(deferred), parts.left(deferred)
    observed = step_seconds(times, size, left, rate)
    measured = measured_rate(times, size, left, rate, observed)
    free = step_seconds(times, size, left, Rate(rate.start_up, 0.0))
    if measured is None:
        assert observed <= free * (1 + VISIBLE)
    else:
        again = step_seconds(times, size, left, Rate(rate.start_up, measured))
        assert again == pytest.approx(observed, rel=1e-6)
        assert measured == pytest.approx(rate.per_byte, rel=1e-3)


def test_where_nothing_is_sent_nothing_is_measured():
    assert measured_rate(StepTimes([1.0], 1.0), 0, [0], Rate(0.0, 0.0), 9.0) is None


class Counting:
    """A stopwatch whose marks are the moments given."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, start: float, marks: Sequence[float]) -> list[float]:
        return [mark - start for mark in marks]


def test_a_step_takes_as_long_as_half_of_them_do() -> None:
    clock = Counting()
    run: Any = SimpleNamespace(stopwatch=clock, report=print)
    timer = StepTimer(OSP(), run)

    def whole() -> float:
        parts = ModelPieces([0], [0], 1)
        return timer.report(timer.times(), parts, [], 1.0).whole

    def steps(*lengths: float, layout: int) -> None:
        for length in lengths:
            timer.step_begins()
            timer.bucket_ready()
            timer.mark()
            timer.mark()
            clock.now += length
            timer.step_ended(layout, None)

    steps(*[1.0] * (1 + TRIAL_STEPS), layout=0)
    assert whole() == 1.0
    steps(9.0, layout=1)  # which belongs to neither
    for _ in range(TRIAL_STEPS):
        assert whole() == 0.0
        steps(2.0, layout=1)
    assert whole() == 2.0


# ---- the budget ----


def budget_of(kind, ramp=20):
    said = []
    return Budget(kind, ramp, SimpleNamespace(report=said.append)), said


def test_constant_growth_is_all_from_the_start():
    grows, said = budget_of("constant")
    assert grows.part == 1.0
    assert not said


def test_linear_growth_takes_its_ramp():
    grows, said = budget_of("linear", 4)
    parts = [grows.part]
    for _ in range(6):
        grows.step(None)
        parts.append(grows.part)
    assert parts == [0, 0.25, 0.5, 0.75, 1, 1, 1]
    assert not said


def test_growth_follows_the_least_mean_loss():
    grows, said = budget_of("loss", 2 * EPOCHS)  # means over two steps
    parts = []
    for loss in (9.0, 7.0, 4.0, 4.0, 6.0, 6.0, math.nan, 2.0, -1.0, -1.0):
        grows.step(loss)
        parts.append(grows.part)
    # means 8, 4, 6 (the least stays 4), 2 (a loss that is not a number is left out), -1
    assert parts == [0, 0, 0, 0.5, 0.5, 0.5, 0.5, 0.75, 0.75, 1.0]
    assert not said


def test_without_a_loss_growth_is_linear_and_says_so_once():
    grows, said = budget_of("loss", 2 * EPOCHS)
    for step in range(1, 2 * EPOCHS + 1):
        grows.step(None)
        assert grows.part == (0 if step == 1 else step / (2 * EPOCHS))
    assert len(said) == 1
    assert "step(loss=loss)" in said[0]
    assert f"{2 * EPOCHS} steps" in said[0]


def test_a_loss_that_is_no_longer_told_leaves_growth_where_it_is():
    grows, said = budget_of("loss", EPOCHS)
    for loss in (4.0, 1.0, None, None, None):
        grows.step(loss)
    assert grows.part == 0.75
    assert not said


@pytest.mark.parametrize("loss", [0.0, -3.0])
def test_a_first_loss_that_cannot_fall_grows_the_budget_linearly(loss):
    budget, said = budget_of("loss")
    for _ in range(10):
        budget.step(loss)
    assert budget.part == 0.5
    assert len(said) == 1
    assert f"the first losses' mean is {loss:.3g}" in said[0]


# ---- why nothing was deferred ----


CONSTANT = OSPOptions(budget="constant")


def watched(options: OSPOptions) -> StepTimer:
    run: Any = SimpleNamespace(stopwatch=None, report=print)
    return StepTimer(options, run)


@pytest.mark.parametrize(
    ("options", "steps", "part", "waited", "why"),
    [
        (
            OSPOptions(),
            30,
            0.0,
            True,
            "budget=loss grows as the loss falls, which is seen after 100 steps (of 30 "
            "here); budget=constant defers from the start",
        ),
        (CONSTANT, 15, 1.0, True, "it decides every 20 steps, and training had 15"),
        (CONSTANT, 90, 1.0, False, "steps did not wait for the network"),
        (CONSTANT, 90, 1.0, True, "deferring up to 80 % of the model would not have"),
        (
            OSPOptions(),
            900,
            0.5,
            True,
            "deferring up to 40 % of the model would not have",
        ),
    ],
)
def test_the_reason(
    options: OSPOptions, steps: int, part: float, waited: bool, why: str
) -> None:
    timer = watched(options)
    timer.rate = Rate(0.0, 1e-9 * waited)
    if part == 0.5:  # the loss has fallen by so much
        for loss in [4.0] * 50 + [2.0] * 50:
            timer.budget.step(loss)
    assert timer.budget.part == part
    sentence = timer.why_nothing(steps)
    assert sentence is not None
    assert sentence.startswith(f"osp deferred nothing: {why}")


@pytest.mark.parametrize("options", [OSPOptions(defer="nothing"), OSPOptions(most=0.0)])
def test_who_asks_for_nothing_is_told_nothing(options: OSPOptions) -> None:
    assert watched(options).why_nothing(900) is None


@pytest.mark.parametrize("collective", ["native", "parameter-server"])
def test_a_training_says_it_once_where_nothing_was_deferred(
    collective: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train_to_one_model(f"osp:collective={collective}", steps=3)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("paceline: osp deferred nothing: budget=loss grows as")
    assert "(of 3 here)" in line
    train_to_one_model(HALF.replace("native", collective), steps=4)
    assert capsys.readouterr().err == ""
