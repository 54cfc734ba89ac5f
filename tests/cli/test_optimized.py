"""The verbs under ``python -OO``, which drops docstrings: what tables say is data."""

import json
import subprocess
import sys

import pytest

from paceline.cli.list import plain
from paceline.cli.registry_entries import ENTRIES
from tests.cli.test_plan import SCRIPT


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
@pytest.mark.parametrize("kind", ENTRIES)
def test_tables_are_the_same(kind):
    table = printed("-m", "paceline", "list", kind)
    for entry in ENTRIES[kind]():
        assert f"\n{entry.name} " in table
        assert plain(entry.summary.purpose) in table


@pytest.mark.slow
def test_a_plan_has_rows(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = (
        "train.py",
        "--workers",
        "2",
        "--json",
        "--no-html",
        "--consistency",
        "exact",
    )
    said = json.loads(
        printed("-m", "paceline", "plan", *words, "--max-work", "1e4", cwd=tmp_path)
    )
    assert said["estimates"]
