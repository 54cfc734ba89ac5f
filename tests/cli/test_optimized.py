"""The verbs under ``python -OO``, which drops docstrings: what tables say is data."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.methods import METHODS
from tests.cli.test_plan import SCRIPT

DOCS = Path(__file__).parent.parent.parent / "docs"


WAITS = """
from paceline.methods import METHODS
from paceline.tools.plan.rows import _waits_for
print(*(f"{name}: {_waits_for(cls())}" for name, cls in METHODS.items()), sep="\\n")
"""


PAGES = ("methods.md", "compressors.md", "collectives.md")
TABLES = """
import json
from paceline.collectives.table import collectives_page
from paceline.compression.table import compression_page
from paceline.methods.table import methods_page
print(json.dumps([methods_page(), compression_page(), collectives_page()]))
"""


def printed(*words, **options):
    ran = subprocess.run(
        [sys.executable, "-OO", *words],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_tables_are_the_same():
    pages = json.loads(printed("-c", TABLES))
    assert pages == [(DOCS / name).read_text() for name in PAGES]


@pytest.mark.slow
def test_all_methods_say_what_they_wait_for():
    waits = dict(line.split(": ", 1) for line in printed("-c", WAITS).splitlines())
    assert waits.keys() == METHODS.keys()
    assert all(waits.values()), waits


@pytest.mark.slow
def test_a_plan_says_what_its_methods_wait_for(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("train.py", "--workers", "2", "--json", "--no-plots", "--quality", "exact")
    said = json.loads(
        printed("-m", "paceline", "plan", *words, "--budget", "2", cwd=tmp_path)
    )
    waits = {row["spec"]: row["waits_for"] for row in said["rows"]}
    assert waits
    assert all(waits.values()), waits
