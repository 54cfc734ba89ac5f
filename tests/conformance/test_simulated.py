"""Every row of the table, every check, every bucket rule, sampled: the simulated runtime."""

import pytest

from paceline.methods import METHODS
from paceline.runtimes.simulated import Simulation
from paceline.spec import parse
from paceline.testing import CASES, CHECKS
from paceline.testing.cases import cluster_of
from paceline.testing.method_checks import RULES, RUNTIME_CHECKS
from tests.conformance.table import (
    SLOW_VIRTUAL,
    rows_of_cases,
    sampled,
)

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
