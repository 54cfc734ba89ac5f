"""Every row of the table, every check, every bucket rule, sampled: the simulated runtime.

All of the table is one command: ``torchrun --nproc-per-node 3 -m paceline.testing``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from paceline.methods import METHODS
from paceline.runtimes.simulated import Simulation
from paceline.spec import parse
from paceline.testing import CASES, CHECKS
from paceline.testing.cases import cluster_of
from paceline.testing.method_checks import RULES, RUNTIME_CHECKS, Trial, trials

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


TABLE = rows_of_cases()
FAST = {row.name: row for row in sampled(TABLE, 1)}
SLOW = {row.name: row for row in sampled(TABLE, SLOW_VIRTUAL)}

ROWS = [
    pytest.param(
        *row,
        marks=() if name in FAST else (pytest.mark.slow,),
        id=name,
    )
    for name, row in (SLOW | FAST).items()
]


@pytest.mark.parametrize(("trial", "workers"), ROWS)
def test_row(trial, workers):
    Simulation(trial.case.cluster(workers)).run(lambda rank: trial.run())


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("check", RUNTIME_CHECKS.values(), ids=RUNTIME_CHECKS)
def test_the_runtime(check, workers):
    Simulation(cluster_of(workers)).run(lambda rank: check())


def test_every_registered_method_has_a_row():
    rows = {parse(case.method).name for case in CASES if isinstance(case.method, str)}
    assert rows == set(METHODS)


@pytest.mark.parametrize("chosen", [FAST, SLOW], ids=["fast", "slow"])
def test_a_sample_has_each_row_each_law_and_each_rule(chosen):
    found = [*chosen.values()]
    assert {row.trial.case.name for row in found} == {case.name for case in CASES}
    for workers in (1, 2, 3):
        tried = [row.trial for row in found if row.workers == workers]
        laws = {
            row.trial.check.name
            for rows in TABLE
            for row in rows
            if row.workers == workers
        }
        assert {trial.check.name for trial in tried} == laws
        assert {trial.rule for trial in tried} == set(RULES)
    assert {row.trial.check.name for row in found} == set(CHECKS)


def test_the_slow_sample_has_each_law_of_each_method():
    def pairs(rows):
        return {(row.method, row.trial.check.name) for row in rows}

    assert pairs(SLOW.values()) == pairs(row for rows in TABLE for row in rows)
