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


def section(page, title):
    """What stands under a title, up to the next one."""
    return re.split(r"^#+ ", page.split(f"## {title}\n")[1], flags=re.MULTILINE)[0]


def counted(agreement, rows):
    """How many rows are within the bound, and within it plus the spread; each is marked so."""
    found = [(float(off) / 100, float(spread) / 100) for spread, off, _ in rows]
    judged = [agreement.judge(off, spread) for off, spread in found]
    assert judged == [mark for _, _, mark in rows]
    return judged.count(""), len(judged) - judged.count("off")


SECTIONS = {
    "Methods that average parameters, and racks": lambda a: a.AVERAGING,
    # The other cells are of a second table, elsewhere.
    "What goes past backward": lambda a: [
        cell for cell in a.PAST_BACKWARD if cell.name == "past-8-200"
    ],
    "Codes": lambda a: a.COMPRESSION,
    "Groups with a server each": lambda a: a.SERVERS_OF_GROUPS,
    "Workers that share cores": lambda a: a.SHARED_CORES + a.HELD_OUT_CORES,
}


@pytest.mark.parametrize("title", SECTIONS)
def test_a_section_counts_what_its_table_holds(agreement, title):
    said = section(
        (HOUSE / "docs" / "explanation" / "how-prediction-works.md").read_text(), title
    )
    rows = ROW.findall(said)
    assert len(rows) == len(SECTIONS[title](agreement))
    within, enough = counted(agreement, rows)
    text = "{} of {} within 10 %, {} within 10 % plus the spread"
    assert text.format(within, len(rows), enough) in said


def test_the_documents_count_what_the_first_table_holds(agreement):
    page = (
        (HOUSE / "docs" / "explanation" / "how-prediction-works.md")
        .read_text()
        .split("\n## ")[0]
    )
    everything, held_out = map(ROW.findall, page.split("Held out, that is"))
    assert len(everything) == len(agreement.CELLS)
    assert len(held_out) == len(agreement.HELD_OUT)
    near, near_enough = counted(agreement, everything)
    held_near, held_enough = counted(agreement, held_out)
    middle = statistics.median(abs(float(off)) for _, off, _ in everything)
    table = (HOUSE / "docs" / "reference" / "measurements.md").read_text()
    assert (
        f"{near} of {len(everything)} within 10 %, {near_enough} within 10 %" in table
    )
    assert f"{held_near} within 10 %, {held_enough} within 10 %" in table
    readme = (HOUSE / "README.md").read_text()
    assert f"{len(everything)} cells | {near} within 10 %" in readme
    for text in (table, readme):
        off = float(re.findall(r"median off by ([\d.]+) %", text)[0])
        assert abs(off - middle) < 0.1
    assert f"**{near} are within 10 %**" in page
    assert f"**{near_enough} within 10 %\nplus the spread**" in page


def test_every_group_of_cells_has_its_section(agreement):
    in_sections = [cell for cells in SECTIONS.values() for cell in cells(agreement)]
    counted = [*agreement.CELLS, *agreement.HELD_OUT, *in_sections]
    for name, cells in agreement.GROUPS.items():
        assert any(cell in counted for cell in cells), name


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
