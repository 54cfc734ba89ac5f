"""Every row of the table, every check, every fusion rule, sampled: the virtual world."""

import pytest

from paceline.methods import METHODS
from paceline.spec import parse
from paceline.testing import CASES, CHECKS
from paceline.testing.cases import cluster_of
from paceline.testing.checks import RULES, WORLD_CHECKS, sample, trials
from paceline.worlds.virtual import Simulation
from tests.conformance.table import FAST_VIRTUAL, SLOW_VIRTUAL

TABLE = {workers: trials(workers) for workers in (1, 2, 3)}
FAST = {workers: sample(table, FAST_VIRTUAL) for workers, table in TABLE.items()}
SLOW = {workers: sample(table, SLOW_VIRTUAL) for workers, table in TABLE.items()}

ROWS = [
    pytest.param(
        trial,
        workers,
        marks=() if trial in FAST[workers] else (pytest.mark.slow,),
        id=f"{trial.case.name}-{trial.rule}-{workers}-{trial.check.name}",
    )
    for workers, table in TABLE.items()
    for trial in table
    if trial in FAST[workers] or trial in SLOW[workers]
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


@pytest.mark.parametrize("chosen", [FAST, SLOW], ids=["fast", "slow"])
def test_a_sample_has_each_row_each_law_and_each_rule(chosen):
    for workers, found in chosen.items():
        assert {t.check.name for t in found} == {t.check.name for t in TABLE[workers]}
        assert {t.rule for t in found} == set(RULES)
        assert len({t.case.name for t in found}) == len(CASES)
    assert {t.check.name for found in chosen.values() for t in found} == set(CHECKS)
