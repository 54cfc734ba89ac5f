"""docs/how-to/find-what-is-slow.md: its table is the registry's. docs/how-to/index.md: each public thread has an answer.

The commands of both exist.
"""

import re
import shlex
from pathlib import Path

import pytest
import typer

from paceline.cli import app
from paceline.core.settings import parse_method
from paceline.tools.doctor.faults import faults_table

HOW_TO = Path(__file__).parents[3] / "docs" / "how-to"
PAGE = (HOW_TO / "find-what-is-slow.md").read_text()
INDEX = (HOW_TO / "index.md").read_text()
THREADS = 15
VERBS = typer.main.get_command(app).commands
LAUNCHERS = ("--nnodes", "--nproc-per-node", "--rdzv-endpoint")


def commands():
    """Every command on the two pages."""
    found = re.findall(r"`(paceline [^`]+)`", PAGE + INDEX)
    for block in re.findall(r"```sh\n(.*?)```", PAGE + INDEX, re.DOTALL):
        found += block.splitlines()
    return [one for one in found if len(one.split()) > 2]


def test_the_table_of_faults_is_the_registry():
    assert faults_table() in PAGE


def test_each_thread_has_an_answer_and_a_command():
    part = INDEX.partition("## Questions that people ask")[2].partition("\n## ")[0]
    rows = [line for line in part.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == THREADS
    for row in rows:
        asks, answer, command = (cell.strip() for cell in row.strip("|").split(" | "))
        assert re.search(r"#\d+", asks)
        assert answer
        assert command.startswith("`paceline ")


@pytest.mark.parametrize("command", commands())
def test_commands_exist(command):
    words = shlex.split(command, comments=True)
    known = {word for one in VERBS[words[1]].params for word in one.opts}
    for number, word in enumerate(words):
        if word.startswith("--"):
            assert word in known or word in LAUNCHERS, word
        if words[number - 1] in ("--method", "--method"):
            parse_method(word)
