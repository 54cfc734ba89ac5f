"""How much of the table of the kit is tried where. All of it is one command
(``torchrun --nproc-per-node 3 -m paceline.testing``); here every row, law and rule is."""

from __future__ import annotations

from typing import NamedTuple

from paceline.testing import CASES
from paceline.testing.checks import Trial, trials

SLOW_REAL, SLOW_REAL_OF_TWO = 9, 16
"""One in so many trials of each row, in the slow tests; the fast ones have `job`."""
FAST_VIRTUAL, SLOW_VIRTUAL = 41, 3
"""One in so many of all trials of a row, whatever the number of workers."""


class Row(NamedTuple):
    """A trial on so many virtual workers."""

    trial: Trial
    workers: int

    @property
    def name(self) -> str:
        case, rule, check = self.trial
        return f"{case.name}-{rule}-{self.workers}-{check.name}"


def rows_of_cases() -> list[list[Row]]:
    """All trials on 1, 2 and 3 workers: a list per case."""
    numbers = {case.name: number for number, case in enumerate(CASES)}
    found: list[list[Row]] = [[] for _ in CASES]
    for workers in (1, 2, 3):
        for trial in trials(workers):
            found[numbers[trial.case.name]].append(Row(trial, workers))
    return found


def sampled(rows: list[list[Row]], every: int) -> list[Row]:
    """Of each case one row in so many; from case to case others."""
    return [
        row
        for number, of_case in enumerate(rows)
        for position, row in enumerate(of_case)
        if (position + number) % every == 0
    ]
