"""A small version of `benchmarks/measure/agreement.py`, and what the documents say of the large one."""

import importlib.util
import re
import statistics
import sys
from pathlib import Path

import pytest

from tests.runtimes.emulated.conftest import refusal
from tests.support.hanging import eventually

HOUSE = Path(__file__).parent.parent.parent.parent
PATH = HOUSE / "benchmarks" / "measure" / "agreement.py"
ROW = re.compile(r"\| ([\d.]+) % \| ([+-][\d.]+) % \| *(\w*) *\|$", re.MULTILINE)


@pytest.fixture(scope="module")
def agreement():
    spec = importlib.util.spec_from_file_location("agreement", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["agreement"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["agreement"]


PAGE = HOUSE / "docs" / "explanation" / "how-prediction-works.md"
SUMMARY = re.compile(
    r"^\| (?:\[[^|]*\]\(#([\w-]+)\)|\*\*(all)\*\*) \|[^|]*\| \**(\d+)\** \| \**(\d+)\** \| \**(\d+)\** "
    r"\| \**([\d.]+) %\** \| \**([+-][\d.]+) %\** \|$",
    re.MULTILINE,
)


def sections():
    """The tables of cells, by the anchor of their section: spread, error and mark of each row."""
    evidence = PAGE.read_text().split("\n## Evidence\n")[1]
    found = {}
    for part in evidence.split("\n### ")[1:]:
        title = part.split("\n")[0].lower()
        found[re.sub(r"[^\w -]", "", title).replace(" ", "-")] = ROW.findall(part)
    return found


def summary_rows():
    """The rows of the table above the evidence, by the anchor of their section, or "all"."""
    return {
        anchor or every: figures
        for anchor, every, *figures in SUMMARY.findall(PAGE.read_text())
    }


def counted(agreement, rows):
    """How many rows are within the bound, and within it plus the spread; each is marked so."""
    found = [(float(off) / 100, float(spread) / 100) for spread, off, _ in rows]
    judged = [agreement.judge(off, spread) for off, spread in found]
    assert judged == [mark for _, _, mark in rows]
    return judged.count(""), len(judged) - judged.count("off")


SECTIONS = {
    "bsp-servers-and-osp": lambda a: a.CELLS,
    "held-out-networks": lambda a: a.HELD_OUT,
    "parameter-averaging-and-racks": lambda a: a.AVERAGING,
    # The other cells are of a second table, elsewhere.
    "priority-and-dear": lambda a: [
        cell for cell in a.PAST_BACKWARD if cell.name == "past-8-200"
    ],
    "compression": lambda a: a.COMPRESSION,
    "group-servers": lambda a: a.SERVERS_OF_GROUPS,
    "workers-that-share-cores": lambda a: a.SHARED_CORES + a.HELD_OUT_CORES,
}


@pytest.mark.parametrize("anchor", [*SECTIONS, "all"])
def test_the_summary_counts_what_the_tables_hold(agreement, anchor):
    tables = sections()
    if anchor == "all":
        rows = [row for table in tables.values() for row in table]
    else:
        rows = tables[anchor]
        assert len(rows) == len(SECTIONS[anchor](agreement))
    cells, within, enough, middle, worst = summary_rows()[anchor]
    assert int(cells) == len(rows)
    assert (int(within), int(enough)) == counted(agreement, rows)
    errors = [float(off) for _, off, _ in rows]
    assert abs(float(middle) - statistics.median(map(abs, errors))) < 0.1
    assert float(worst) == max(errors, key=abs)


def test_other_text_counts_the_same(agreement):
    tables, page = sections(), PAGE.read_text()
    assert set(tables) == set(SECTIONS)
    assert set(summary_rows()) == {*SECTIONS, "all"}
    cells, within, enough, middle, _ = summary_rows()["all"]
    first = " ".join(page.split("\n## Check")[0].split())
    assert f"of {cells} cells, {within} are within 10 %" in first
    assert f"{enough} within 10 % plus the spread" in first
    assert f"off by {middle} % or less" in first
    cells, within, enough, middle, _ = summary_rows()["bsp-servers-and-osp"]
    _, held_within, held_enough, _, _ = summary_rows()["held-out-networks"]
    table = (HOUSE / "docs" / "reference" / "measurements.md").read_text()
    readme = (HOUSE / "README.md").read_text()
    assert f"{within} of {cells} within 10 %, {enough} within 10 %" in table
    assert f"{held_within} within 10 %, {held_enough} within 10 %" in table
    assert f"{cells} cells | {within} within 10 %" in readme
    for text in (table, readme):
        assert f"median off by {middle} %" in text


def test_every_group_of_cells_has_its_section(agreement):
    in_sections = [cell for cells in SECTIONS.values() for cell in cells(agreement)]
    for name, cells in agreement.GROUPS.items():
        assert any(cell in in_sections for cell in cells), name


@pytest.mark.parametrize(
    ("off", "spread", "judged"),
    [
        (0.10, 0.0, ""),
        (-0.10, 0.5, ""),
        (0.11, 0.0, "off"),
        (-0.11, 0.02, "spread"),
        (0.2, 0.05, "off"),
    ],
)
def test_both_bounds_are_told_apart(agreement, off, spread, judged):
    assert agreement.judge(off, spread) == judged
    rows = [{"off": off, "spread": spread}, {"off": 0.0, "spread": 0.0}]
    within = 1 + (judged == ""), 1 + (judged != "off")
    assert "of 2 cells {} within 10%, {} within".format(*within) in agreement.summary(
        rows
    )


@pytest.mark.slow
@pytest.mark.skipif(bool(refusal()), reason=refusal() or "namespaces are permitted")
def test_predictions_from_probe_and_profile_alone_hold(agreement, tmp_path):
    cells = [
        agreement.Cell(
            "layers-4-200", "layers", (), agreement.equal(4, 200), f"bsp:buckets={rule}"
        )
        for rule in ("ddp", "wfbp")
    ]
    # The benchmark's wider bound: other work on this machine shows in the spread.
    rows = eventually(
        lambda: agreement.run(cells, 3, tmp_path),
        lambda rows: all(row["judged"] != "off" for row in rows),
        tries=4,
    )
    assert len(rows) == 2
    for row in rows:
        assert row["judged"] != "off", row
        # Neither is what computing alone takes: the network was there.
        assert row["predicted_seconds"] > 0.4
        assert min(row["measured_seconds"]) > 0.4
