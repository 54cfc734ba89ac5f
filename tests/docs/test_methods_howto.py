"""The method that docs/tutorials/write-a-method.md shows holds the laws of the kit, as its command says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.cluster import uniform_cluster
from paceline.runtimes.simulated import Simulation
from paceline.testing import Case, check_method
from paceline.testing.method_checks import checks_of
from tests.docs.test_snippets import commands
from tests.support.processes import python_path
from tests.support.tables import sampled

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "tutorials" / "write-a-method.md"


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


@pytest.mark.parametrize("workers", sampled(3, [2, 1, 3]))
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


@pytest.fixture
def followed(tmp_path):
    """Sources in which somebody has done what the page says, letter by letter."""
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=leave)
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=leave)
    text = PAGE.read_text()
    name, registry = re.findall(r"`(src/paceline/methods/\w+\.py)`", text)[:2]
    (tmp_path / name).write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1])
    (shown,) = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    imports, head, row = shown.splitlines()
    old = (tmp_path / registry).read_text()
    assert head.removeprefix(" ") in old
    new = old.replace("from paceline.spec", f"{imports[1:]}\nfrom paceline.spec")
    new = new.replace(head.removeprefix(" "), f"{head[1:]}\n{row[1:]}")
    (tmp_path / registry).write_text(new)
    return tmp_path


@pytest.mark.slow
def test_who_follows_the_page_has_a_method_like_any_other(followed):
    shown = {words[0]: words for words in commands(PAGE)}
    simulate = [*shown["simulate"], "--forward=0.01", "--steps=8"]
    verbs = (
        "from paceline.cli import app\n"
        f"for words in {[shown['list'], simulate]!r}:\n"
        "    app(words, standalone_mode=False)\n"
    )
    own = {"PYTHONPATH": python_path(followed / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", verbs],
        cwd=followed,
        env=dict(os.environ) | own,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^outer-momentum +local +Averages models", done.stdout, re.M)
    assert "outer-momentum:momentum=0.3" in done.stdout
