"""How much of the table of the kit is tried where. All of it is one command
(``torchrun --nproc-per-node 3 -m paceline.testing``); here every row, law and rule is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from paceline.testing import CASES
from paceline.testing.method_checks import Trial, trials

SLOW_REAL = {1: 22, 2: 22, 3: 27}
"""One in so many trials of each row on so many workers, in the slow tests; the fast ones have
`job`."""
SLOW_EMULATED = 28
SLOW_VIRTUAL = 8
"""One in so many of all trials of a row, whatever the number of workers."""


class Row(NamedTuple):
    """A trial on so many simulated workers."""

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


def one_of_each(rows: Sequence[Sequence[Row]]) -> list[Row]:
    """Of each case the row whose law, on its number of workers, was chosen least before, and
    then its rule: few rows try every law and every rule."""
    times, found = Counter[tuple[object, int]](), []
    for of_case in rows:
        row = min(
            of_case,
            key=lambda row: [times[key, row.workers] for key in row.trial[:0:-1]],
        )
        times.update((key, row.workers) for key in row.trial[1:])
        found.append(row)
    return found


def sampled(rows: list[list[Row]], every: int) -> list[Row]:
    """Of each case one row in so many; from case to case others."""
    return [
        row
        for number, of_case in enumerate(rows)
        for position, row in enumerate(of_case)
        if (position + number) % every == 0
    ]
