"""What a trial of a measured plan against DDP's buckets, or another plan, tells.

Both are used for some steps in turn, round after round. Where times repeat exactly, one
round decides; where they do not, a plan must win every round, and clearly: small gains in
a noisy trial are luck as often as not.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

ROUNDS = 4
REPEATABLE = 1e-6
"""Relative spread below which times are taken as exact: a simulated runtime without jitter."""

CLEAR = 3.0
NOISE = 0.05
"""A difference of so many times the spread, and of this part, ends a trial after its first
round."""

WORTH_IT = 0.97
"""A plan must take less than this part of what it would replace, where times are not exact."""


@dataclass(frozen=True)
class Verdict:
    """Whether the plan is *better*, and *why*, in words that say what is used."""

    better: bool
    why: str


def judge(
    ratios: Sequence[float],
    spread: float,
    otherwise: str = "DDP's rule is kept",
    what: str = "the plan",
) -> Verdict | None:
    """*ratios* are the plan's time over that of what it would replace, a round each;
    *spread* is that of times in the last round; *otherwise* says what stays if the plan is
    not used; *what* it is called. None: another round is needed."""
    won = sum(ratio < 1 for ratio in ratios)
    if spread < REPEATABLE:
        if ratios[-1] < 1 - REPEATABLE:
            return Verdict(True, f"{what} is used")
        return Verdict(False, f"{what} is no faster, and {otherwise}")
    if len(ratios) == 1 and abs(ratios[0] - 1) > max(CLEAR * spread, NOISE):
        if won:
            return Verdict(True, f"{what} is clearly faster, and is used")
        return Verdict(False, f"{what} is clearly slower, and {otherwise}")
    if len(ratios) < ROUNDS:
        return None
    if won < ROUNDS:
        return Verdict(
            False,
            f"{what} was faster in {won} of {ROUNDS} rounds and must be in all of "
            f"them, so {otherwise}",
        )
    gain = 100 * (1 - statistics.median(ratios))
    if statistics.median(ratios) < WORTH_IT:
        return Verdict(True, f"{what} was faster in all {ROUNDS} rounds, and is used")
    return Verdict(
        False,
        f"{what} was faster in all {ROUNDS} rounds, but by {gain:.1f} %, and must be "
        f"by {100 * (1 - WORTH_IT):.0f} %, so {otherwise}",
    )
