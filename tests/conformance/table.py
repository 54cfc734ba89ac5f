"""How much of the table of the kit is tried where. All of it is one command
(``torchrun --nproc-per-node 3 -m paceline.testing``); here every row, law and rule is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from paceline.spec import parse
from paceline.testing import CASES, CHECKS
from paceline.testing.method_checks import Trial, trials

SLOW_REAL = {1: 22, 2: 22, 3: 27}
"""One in so many trials of each row on so many workers, in the slow tests; the fast ones have
`job`."""
SLOW_EMULATED = 28
SLOW_VIRTUAL = 8
"""So many laws at least of each row, whatever the number of workers, and all of each method."""


class Row(NamedTuple):
    """A trial on so many simulated workers."""

    trial: Trial
    workers: int

    @property
    def name(self) -> str:
        case, rule, check = self.trial
        return f"{case.name}-{rule}-{self.workers}-{check.name}"

    @property
    def method(self) -> str:
        """As registered."""
        return parse(self.trial.case.name).name

    @property
    def dimensions(self) -> list[tuple[object, int]]:
        """Of which each value is tried about as often as the others."""
        return [(self.trial.check, self.workers), (self.trial.rule, self.workers)]


def rows_of_cases() -> list[list[Row]]:
    """All trials on 1, 2 and 3 workers: a list per case."""
    numbers = {case.name: number for number, case in enumerate(CASES)}
    found: list[list[Row]] = [[] for _ in CASES]
    for workers in (1, 2, 3):
        for trial in trials(workers):
            found[numbers[trial.case.name]].append(Row(trial, workers))
    return found


def sampled(rows: Sequence[Sequence[Row]], laws: int) -> list[Row]:
    """Of each case so many rows, of different laws. Each is the one whose law, on its number of
    workers, was chosen least before, and then its rule: few rows try every law and every rule.
    Where these are several laws, each method meets the other ones in one of its cases."""
    times, found = Counter[tuple[object, object]](), list[Row]()
    for turn in range(laws if laws == 1 else len(CHECKS)):
        for of_case in rows:
            untried = [
                row
                for row in of_case
                if not times[row.trial.case, row.trial.check]
                and (turn < laws or not times[row.method, row.trial.check])
            ]
            if untried:
                row = min(
                    untried, key=lambda row: [times[key] for key in row.dimensions]
                )
                case, _, check = row.trial
                times.update([*row.dimensions, (case, check), (row.method, check)])
                found.append(row)
    return found
