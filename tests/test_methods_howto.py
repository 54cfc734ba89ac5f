"""The method that docs/methods-howto.md shows holds the laws of the kit, as its command says."""

import re
from pathlib import Path

import pytest

import paceline
from paceline.network import uniform_cluster
from paceline.testing import Case, check_method
from paceline.testing.checks import checks_of
from paceline.worlds.virtual import Simulation

PAGE = Path(__file__).parent.parent / "docs" / "methods-howto.md"


def shown():
    """The names that the page's method makes, and the command that tries it."""
    method, command = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {"__name__": __name__}
    exec(compile(method, str(PAGE), "exec"), names)
    return names, command


def case_of_the_page():
    """The case that its command checks."""
    names, command = shown()
    found = []
    *_, line = command.strip().splitlines()
    names.update(Case=Case, check_method=found.append)
    exec(line, names)
    return found[0]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_method_holds_its_laws(workers):
    case = case_of_the_page()

    def body(rank):
        paceline.init()
        for check in checks_of(case, "ddp", workers):
            check(case, "ddp")

    Simulation(uniform_cluster(workers, "1gbit", "50us")).run(body)


@pytest.mark.slow
def test_the_command_of_the_page():
    check_method(case_of_the_page())
