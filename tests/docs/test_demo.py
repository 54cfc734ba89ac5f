"""README's table is what the demo prints."""

import os
import re
import shlex
import subprocess
import sys
from itertools import takewhile

import pytest

from tests.docs.test_docs import ROOT

MARK = "¹"
"""Behind a figure of README's table that another processor's arithmetic changes."""


def command():
    """What ``make demo`` runs, by this Python."""
    recipe = re.search(
        r"^demo: .*\n((?:\t.*\\\n)*\t.*\n)", (ROOT / "Makefile").read_text(), re.M
    )
    assert recipe is not None
    program, *words = shlex.split(recipe[1].replace("\\\n", " "))
    assert program == "$(BIN)/paceline"
    return [sys.executable, "-m", "paceline", *words]


def printed_rows(text):
    """Cells of the table that the demo prints; lines that a narrow column was broken into are one."""
    rows = []
    for line in text.splitlines():
        if line.startswith(("│", "┃")):
            cells = [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]
            if any(cells[2:]):
                rows.append(cells)
            else:
                rows[-1] = [a + b for a, b in zip(rows[-1], cells, strict=True)]
        elif rows and "predicted" in rows[0]:
            if line.startswith("└"):
                return rows
        else:
            rows = []
    raise AssertionError(f"there is no such table in {text!r}")


def differences(said, printed):
    """Cells that are not as *printed*; one that is marked may be any figure.

    An accuracy may differ by 1 %: its last bits are those of one kind of processor.
    """
    assert len(said) == len(printed), (said, printed)
    found = []
    for ours, theirs in zip(said, printed, strict=True):
        for column, mine, true in zip(printed[0], ours, theirs, strict=True):
            if mine == true or (mine.endswith(MARK) and true):
                continue
            if column == "accuracy" and is_near(mine, true):
                continue
            found.append((theirs[0], mine, true))
    return found


def is_near(mine, true):
    try:
        return float(mine) == pytest.approx(float(true), abs=0.01)
    except ValueError:
        return False


def readme():
    """Cells of README's table of the demo."""
    lines = (ROOT / "README.md").read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if "| predicted |" in line)
    rows = []
    for line in takewhile(lambda line: line.startswith("|"), lines[start:]):
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return [rows[0], *rows[2:]]


def test_tables_are_compared_cell_by_cell():
    rows = readme()
    assert rows[0][:4] == ["consistency", "method", "step", "predicted"]
    assert not differences(rows, rows)
    marked = [cell for row in rows for cell in row if cell.endswith(MARK)]
    for place, row in enumerate(rows[1:], 1):
        for column, cell in enumerate(row):
            other = [list(one) for one in rows]
            other[place][column] = "another"
            assert bool(differences(rows, other)) == (not cell.endswith(MARK))
    assert len(marked) < 0.1 * sum(map(len, rows))


def test_who_is_said_to_be_faster_is():
    """README's sentences on the table: times as fast as DDP's rule are of its own columns."""
    names, *rows = readme()
    steps = {row[0]: row[names.index("vs. DDP")] for row in rows}
    text = (ROOT / "README.md").read_text()
    said = re.search(r"gradients a step is ([\d.]+) times as fast as DDP's", text)
    assert said is not None
    assert float(said[1]) == pytest.approx(float(steps["lossy"]), abs=0.05)


@pytest.mark.slow
def test_readmes_table_is_what_the_demo_prints(tmp_path):
    words = [*command(), "--output", str(tmp_path / "runs")]
    ran = subprocess.run(
        words, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert not differences(readme(), printed_rows(ran.stdout))
