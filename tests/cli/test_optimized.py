"""The verbs under ``python -OO``, which drops docstrings: what tables say is data."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_plan import SCRIPT

DOCS = Path(__file__).parent.parent.parent / "docs"


PAGES = ("methods.md", "compressors.md", "collectives.md")
TABLES = """
import json
from paceline.collectives.docs_table import collectives_page
from paceline.compression.docs_table import compression_page
from paceline.methods.docs_table import methods_page
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
def test_a_plan_has_rows(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = (
        "train.py",
        "--workers",
        "2",
        "--json",
        "--no-plots",
        "--consistency",
        "exact",
    )
    said = json.loads(
        printed("-m", "paceline", "plan", *words, "--budget", "2", cwd=tmp_path)
    )
    assert said["rows"]
