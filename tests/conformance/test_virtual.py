"""Every row of the table, every check, every fusion rule: the virtual world."""

import pytest

from paceline.methods import METHODS
from paceline.spec import parse
from paceline.testing import CASES, CHECKS
from paceline.testing.cases import cluster_of
from paceline.testing.checks import RULES, WORLD_CHECKS, trials
from paceline.worlds.virtual import Simulation
from tests.conformance.table import sample

TABLE = {workers: trials(workers) for workers in (1, 2, 3)}
FAST = {workers: sample(table, every=8) for workers, table in TABLE.items()}
"""The whole table takes minutes."""

ROWS = [
    pytest.param(
        trial,
        workers,
        marks=() if trial in FAST[workers] else (pytest.mark.slow,),
        id=f"{trial.case.name}-{trial.rule}-{workers}-{trial.check.name}",
    )
    for workers, table in TABLE.items()
    for trial in table
]


@pytest.mark.parametrize(("trial", "workers"), ROWS)
def test_row(trial, workers):
    Simulation(trial.case.cluster(workers)).run(lambda rank: trial.run())


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("check", WORLD_CHECKS.values(), ids=WORLD_CHECKS)
def test_the_world(check, workers):
    Simulation(cluster_of(workers)).run(lambda rank: check())


def test_every_registered_method_has_a_row():
    rows = {parse(case.method).name for case in CASES if isinstance(case.method, str)}
    assert rows == set(METHODS)


def test_the_fast_sample_has_each_row_each_law_and_each_rule():
    for workers, fast in FAST.items():
        assert {t.check.name for t in fast} == {t.check.name for t in TABLE[workers]}
        assert {t.rule for t in fast} == set(RULES)
        assert len({t.case.name for t in fast}) == len(CASES)
    assert {t.check.name for fast in FAST.values() for t in fast} == set(CHECKS)
