"""README's table is what the demo prints."""

import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
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


class Tables(HTMLParser):
    """Cells of each row of each table of a page."""

    def __init__(self, text):
        super().__init__()
        self.tables = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data):
        if self._in_cell:
            self.tables[-1][-1][-1] += data


def rows_of(page, headings):
    """Those columns of the page's first table."""
    rows = Tables(page).tables[0]
    places = [rows[0].index(heading) for heading in headings]
    return [[row[place] for place in places] for row in rows]


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
            found.append((theirs[1], mine, true))
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
        rows.append(
            [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        )
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
    assert float(said[1]) == pytest.approx(float(steps["lossy"].strip("x")), abs=0.05)


@pytest.mark.slow
def test_readmes_table_is_what_the_demo_prints(tmp_path):
    words = [*command(), "--output", str(tmp_path / "runs")]
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run(
        words, cwd=ROOT, env=own, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    page = (tmp_path / "runs" / "index.html").read_text()
    rows = readme()
    assert not differences(rows, rows_of(page, rows[0]))
