"""The verbs under ``python -OO``, which drops docstrings: what tables say is data."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.list import plain
from paceline.cli.registry_entries import ENTRIES
from tests.cli.test_plan import SCRIPT

END = "-- end --"
COMPILED = Path(__file__).parents[2] / ".pytest_cache" / "optimized"
"""Python's bytecode of torch for ``-OO``: compiling it takes longer than the verbs."""
VERBS = f"""
import json, sys
from paceline.cli import app
if __name__ == "__main__":
    for words in json.loads(sys.argv[1]):
        app(words, standalone_mode=False)
        print({END!r}, flush=True)
"""


@pytest.mark.slow
def test_tables_are_the_same_and_a_plan_has_rows(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "verbs.py").write_text(VERBS)
    options = ("--workers=2", "--json", "--no-html", "--consistency=exact")
    plan = ["plan", "train.py", *options, "--max-work=1e4"]
    commands = [*(["list", kind] for kind in ENTRIES), plan]
    ran = subprocess.run(
        [sys.executable, "-OO", "verbs.py", json.dumps(commands)],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPYCACHEPREFIX": str(COMPILED), "PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    *tables, planned, _ = ran.stdout.split(f"{END}\n")
    for kind, table in zip(ENTRIES, tables, strict=True):
        for entry in ENTRIES[kind]():
            assert f"\n{entry.name} " in table
            assert plain(entry.summary.purpose) in table
    assert json.loads(planned)["estimates"]
