"""Which side of a trial is used, and whether the words say why."""

from __future__ import annotations

import pytest

from paceline.bucketing.tuner import ROUNDS, decide

NOISY = 0.1


@pytest.mark.parametrize(
    ("ratio", "better", "why"),
    [
        (0.999, True, "the plan is used"),
        (1.0, False, "the plan is no faster, and DDP's rule is kept"),
        (1.001, False, "the plan is no faster, and DDP's rule is kept"),
    ],
)
def test_where_times_repeat_one_round_decides(
    ratio: float, better: bool, why: str
) -> None:
    verdict = decide([ratio], 0.0)
    assert verdict is not None
    assert (verdict.better, verdict.why) == (better, why)


@pytest.mark.parametrize(
    ("ratio", "spread", "why"),
    [
        (0.90, 0.01, "the plan is clearly faster, and is used"),
        (1.10, 0.01, "the plan is clearly slower, and DDP's rule is kept"),
        (0.96, 0.001, None),  # not by much
        (0.75, NOISY, None),  # not beyond the noise
        (1.25, NOISY, None),
    ],
)
def test_what_is_clear_needs_no_second_round(
    ratio: float, spread: float, why: str | None
) -> None:
    verdict = decide([ratio], spread)
    assert (verdict and verdict.why) == why


@pytest.mark.parametrize(
    ("ratios", "better", "why"),
    [
        (
            [0.94, 0.93, 1.01, 0.92],
            False,
            "the plan was faster in 3 of 4 rounds and must be in all of them, so DDP's "
            "rule is kept",
        ),
        (
            [0.99, 0.98, 0.986, 0.984],
            False,
            "the plan was faster in all 4 rounds, but by 1.5 %, and must be by 3 %, so "
            "DDP's rule is kept",
        ),
        (
            [0.99, 0.9, 0.9, 0.9],
            True,
            "the plan was faster in all 4 rounds, and is used",
        ),
    ],
)
def test_noisy_times_take_all_rounds(
    ratios: list[float], better: bool, why: str
) -> None:
    assert len(ratios) == ROUNDS
    for rounds in range(1, ROUNDS):
        assert decide(ratios[:rounds], NOISY) is None
    verdict = decide(ratios, NOISY)
    assert verdict is not None
    assert (verdict.better, verdict.why) == (better, why)
