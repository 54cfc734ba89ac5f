"""A small version of `benchmarks/agreement.py`, and what the documents say of the large one."""

import importlib.util
import re
import statistics
import sys
from pathlib import Path

import pytest

from tests.emulated.conftest import refusal

HOUSE = Path(__file__).parent.parent.parent
PATH = HOUSE / "benchmarks" / "agreement.py"
ROW = re.compile(r"\| ([\d.]+) % \| ([+-][\d.]+) % \| *(\w*) *\|$", re.MULTILINE)


@pytest.fixture(scope="module")
def agreement():
    spec = importlib.util.spec_from_file_location("agreement", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["agreement"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["agreement"]


def test_the_documents_count_what_their_table_holds(agreement):
    page = (HOUSE / "docs" / "agreement.md").read_text().split("# Beside the peers")[0]
    page, _, averaging_page = page.partition("## Methods that average")
    averaging_page, _, past_page = averaging_page.partition("## What goes past")
    everything, held_out = map(ROW.findall, page.split("Held out, that is"))
    averaging = ROW.findall(averaging_page)
    assert len(everything) == len(agreement.CELLS)
    assert len(held_out) == len(agreement.HELD_OUT)
    assert len(averaging) == len(agreement.AVERAGING)
    past_page, _, codes_page = past_page.partition("## Codes")
    past, codes = ROW.findall(past_page), ROW.findall(codes_page)
    assert len(codes) == len(agreement.COMPRESSION)
    assert len(past) == sum(c.name == "past-8-200" for c in agreement.PAST_BACKWARD)
    counts = []
    for rows in (everything, held_out, averaging, past, codes):
        found = [(float(off) / 100, float(spread) / 100) for spread, off, _ in rows]
        judged = [agreement.judge(off, spread) for off, spread in found]
        assert judged == [mark for _, _, mark in rows]
        counts.append((judged.count(""), len(judged) - judged.count("off")))
    middle = statistics.median(abs(float(off)) for _, off, _ in everything)
    readme = (HOUSE / "README.md").read_text()
    (near, near_enough), (held_near, held_enough), *others = counts
    text = "{} of {} within 10 %, {} within 10 % plus the spread"
    pages = ((averaging, averaging_page), (past, past_page), (codes, codes_page))
    for (within, enough), (rows, said) in zip(others, pages, strict=True):
        assert text.format(within, len(rows), enough) in said
    assert (
        f"{near} of {len(everything)} within 10 %, {near_enough} within 10 %" in readme
    )
    assert f"{held_near} within 10 %, {held_enough} within 10 %" in readme
    assert abs(float(re.findall(r"median off by ([\d.]+) %", readme)[0]) - middle) < 0.1
    assert f"**{near} are within 10 %**" in page
    assert f"**{near_enough} within 10 %\nplus the spread**" in page


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
            "layers-4-200", "layers", (), agreement.equal(4, 200), f"bsp:fusion={rule}"
        )
        for rule in ("ddp", "wfbp")
    ]
    rows = agreement.run(cells, 3, tmp_path)
    assert len(rows) == 2
    for row in rows:
        # The benchmark's wider bound: other work on this machine shows in the spread.
        assert row["judged"] != "off", row
        # Neither is what computing alone takes: the network was there.
        assert row["predicted_seconds"] > 0.4
        assert min(row["measured_seconds"]) > 0.4
