"""Every row of the table, every check, every fusion rule: the virtual world."""

import pytest

from paceline.methods import METHODS
from paceline.network import uniform_cluster
from paceline.spec import parse
from paceline.testing import CASES
from paceline.testing.checks import RULES, WORLD_CHECKS, checks_of
from paceline.worlds.virtual import Simulation

WRITES = {"a_checkpoint_is_a_restart", "a_checkpoint_loses_nothing"}
"""Files, which take their time."""


def row(case, rule, check, workers):
    """The whole table takes minutes: most of it is for the slow tests."""
    three = workers == 3 and rule in ("ddp", "optimal")
    fast = three or (rule == "ddp" and check.name not in WRITES)
    return pytest.param(
        case,
        rule,
        check,
        workers,
        marks=() if fast else (pytest.mark.slow,),
        id=f"{case.name}-{rule}-{workers}-{check.name}",
    )


ROWS = [
    row(case, rule, check, workers)
    for case in CASES
    for rule in RULES
    for workers in (1, 2, 3)
    for check in checks_of(case, rule, workers)
]


def simulate(workers, body):
    Simulation(uniform_cluster(workers, "1gbit", "50us")).run(body)


@pytest.mark.parametrize(("case", "rule", "check", "workers"), ROWS)
def test_row(case, rule, check, workers):
    simulate(workers, lambda rank: check(case, rule))


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("check", WORLD_CHECKS.values(), ids=WORLD_CHECKS)
def test_the_world(check, workers):
    simulate(workers, lambda rank: check())


def test_every_registered_method_has_a_row():
    rows = {parse(case.method).name for case in CASES if isinstance(case.method, str)}
    assert rows == set(METHODS)
