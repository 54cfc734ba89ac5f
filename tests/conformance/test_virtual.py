"""Every row of the table, every check, every fusion rule: the virtual world."""

import pytest

from paceline.methods import METHODS
from paceline.network import uniform_cluster
from paceline.spec import parse
from paceline.testing import CASES, CHECKS
from paceline.testing.checks import RULES
from paceline.worlds.virtual import Simulation


def setting(rule, workers):
    """The whole table takes minutes: most of it is for the slow tests."""
    fast = rule == "ddp" or (rule == "optimal" and workers == 3)
    marks = () if fast else (pytest.mark.slow,)
    return pytest.param(rule, workers, marks=marks, id=f"{rule}-{workers}")


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize(
    ("rule", "workers"), [setting(rule, n) for rule in RULES for n in (1, 2, 3)]
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_row(case, rule, check, workers):
    simulation = Simulation(uniform_cluster(workers, "1gbit", "50us"))
    simulation.run(lambda rank: check(case, rule))


def test_every_registered_method_has_a_row():
    rows = {parse(case.method).name for case in CASES if isinstance(case.method, str)}
    assert rows == set(METHODS)
