"""A training in which nothing was deferred says why, beside figures that look like bsp's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.methods.osp.deferral import Rate
from paceline.methods.osp.measurement import StepWatch
from paceline.methods.osp.options import OSPOptions
from tests.methods.osp.helpers import HALF
from tests.support.training import train_to_one_model

CONSTANT = OSPOptions(budget="constant")


def watched(options: OSPOptions) -> StepWatch:
    run: Any = SimpleNamespace(stopwatch=None, report=print)
    return StepWatch(options, run)


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
        (CONSTANT, 15, 1.0, True, "what may wait is decided every 20 steps, and there"),
        (CONSTANT, 90, 1.0, False, "steps did not wait for the network"),
        (CONSTANT, 90, 1.0, True, "it would not have made steps shorter, with 80 % of"),
        (
            OSPOptions(),
            900,
            0.5,
            True,
            "it would not have made steps shorter, with 40 ",
        ),
    ],
)
def test_the_reason(
    options: OSPOptions, steps: int, part: float, waited: bool, why: str
) -> None:
    watch = watched(options)
    watch.rate = Rate(0.0, 1e-9 * waited)
    if part == 0.5:  # the loss has fallen by so much
        for loss in [4.0] * 50 + [2.0] * 50:
            watch.growth.step(loss)
    assert watch.growth.part == part
    sentence = watch.why_nothing(steps)
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
