"""Figures of papers are measured once, kept with how they were made, and shown where they were run."""

import json
import math
import re
from dataclasses import asdict, fields, replace

import pytest
from benchmarks.measure import collectives, exact_overlap, page_tables
from benchmarks.papers import NAMES, load, osp
from benchmarks.papers import results as kept
from benchmarks.papers.results import (
    NOT_RUN,
    Claim,
    OutOfTimeError,
    Paper,
    Record,
    Results,
    cell,
    claims_table,
    page,
    refreshed,
)

ROOT = kept.ROOT
COMMAND = r"python -m benchmarks\.papers --paper (\w+)((?: --table \S+?)*)(?=[`\s,)])"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "paper.jsonl"


def never():
    raise AssertionError("measured, though it is kept")


def test_a_figure_is_measured_once_and_kept_with_how_it_was_made(path):
    results = Results(path)
    results.command = "make figures"
    assert results.value("a row", "s", lambda: 1.5) == 1.5
    assert Results(path).value("a row", "s", never) == 1.5
    (line,) = path.read_text().splitlines()
    record = json.loads(line)
    assert set(record) == {field.name for field in fields(Record)}
    assert record["command"] == "make figures"
    assert record["commit"] == kept.commit()
    assert record["seconds"] >= 0


def test_a_measured_row_replaces_an_imported_one(path):
    imported = Record("a row", 1.5, "s", "make figures", "before", None, None)
    path.write_text(json.dumps(asdict(imported)) + "\n")
    results = Results(path)
    assert results.stored("a row") == 1.5
    results.put({"a row": 1.6}, "s", 2.0)
    (line,) = path.read_text().splitlines()
    record = json.loads(line)
    assert (record["value"], record["seconds"]) == (1.6, 2.0)
    assert record["machine"] == kept.machine()


def test_a_row_that_is_missing_is_no_number(path):
    results = Results(path)
    assert not results.has("a row")
    assert math.isnan(results.stored("a row"))


def test_a_run_of_collectives_is_what_their_tables_show(path, monkeypatch):
    monkeypatch.setattr(collectives, "RESULTS", path)
    times = dict.fromkeys(collectives.ROWS, 2.0)
    outcomes = [
        {
            "network": network,
            "bytes": 1000 * kilobytes,
            "predicted_seconds": times,
            "measured_seconds": times | {"hierarchical": 1.0},
            "clear_pairs": 3,
            "swapped": [["ring", "tree"]],
        }
        for network in collectives.NETWORKS
        for kilobytes in collectives.KILOBYTES
    ]
    collectives.store(outcomes, 1.0)
    *rows, _ = collectives.times_table()
    assert {row["measured"] for row in rows} == {"2.00"}
    assert {row["ring / hierarchical: predicted"] for row in rows} == {"1.00"}
    (pairs,) = collectives.pairs_table()
    assert list(pairs.values()) == ["18", "6"]


def test_a_run_between_emulated_hosts_is_what_its_table_shows(path, monkeypatch):
    monkeypatch.setattr(exact_overlap, "RESULTS", path)
    caps = {f"DDP, caps of {cap} MiB": [2.0 + cap] for cap in exact_overlap.CAPS}
    found = caps | {method: [1.5] for method in exact_overlap.OURS}
    said = dict.fromkeys(exact_overlap.OURS, 1.2)
    for mbit in exact_overlap.EMULATED_LINKS:
        exact_overlap.store(mbit, found, said, "DDP, caps of 1 MiB", 1.0)
    ddp, *ours = exact_overlap.emulated_table()
    assert ddp["200 Mbit/s"] == "3.000"
    assert {row["200 Mbit/s"] for row in ours} == {"1.500 (0.50), off by -20%"}


def test_trainings_of_all_seeds_replace_an_imported_summary(path):
    task, text = osp.DIGITS, osp.CONSTANT
    results = Results(path)
    summary = f"{osp.summary_row(task, text)}: deferred"
    results.put({summary: 0.5}, "", 1.0)
    assert osp.summary(results, task, text)["deferred"] == 0.5
    for seed in range(osp.SEEDS):
        for method in (osp.BASE, text):
            row = osp.trained_row(task, method, task.rate, seed)
            figures = dict.fromkeys([*task.figures, "deferred", "seconds"], 1.0)
            results.put({f"{row}: {name}": one for name, one in figures.items()}, "", 1)
    assert osp.summary(results, task, text)["deferred"] == 1.0


def test_figures_of_one_run_are_a_line_each(path):
    units = {"steps": "steps", "seconds": "s"}
    figures = {"steps": 3, "seconds": None}
    assert Results(path).values("a run", units, lambda: figures) == figures
    assert Results(path).values("a run", units, never) == figures
    assert len(path.read_text().splitlines()) == 2


def test_again_measures_what_another_commit_has_measured(path, monkeypatch):
    monkeypatch.setattr(kept, "commit", lambda: "before")
    Results(path).value("a row", "s", lambda: 1.0)
    monkeypatch.setattr(kept, "commit", lambda: "now")
    assert Results(path).value("a row", "s", never) == 1.0
    assert Results(path, again=True).value("a row", "s", lambda: 2.0) == 2.0
    assert Results(path, again=True).value("a row", "s", never) == 2.0


def test_no_row_begins_when_the_time_is_over(path):
    results = Results(path, seconds=-1)
    with pytest.raises(OutOfTimeError):
        results.value("a row", "s", never)


def test_what_was_not_run_is_said_to_be_and_is_no_number():
    results = Results(measures=False)
    assert math.isnan(results.value("a row", "s", never))
    claim = Claim(
        row="speed",
        says="twice as fast",
        conditions="here",
        ours=lambda results: results.value("a row", "", never),
        at_least=2,
    )
    paper = Paper("p", "P", "p.md", "abstract", claims=(claim,))
    (row,) = claims_table(paper, results)
    assert row["ours"] == NOT_RUN
    assert row["reached"] == ""
    measured = replace(claim, ours=lambda results: results.value("a", "", lambda: 3.0))
    (row,) = claims_table(replace(paper, claims=(measured,)), Results())
    assert row["reached"] == "yes"
    assert "3.00" in row["ours"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (math.nan, NOT_RUN),
        (math.inf, "not reached"),
        (1234.5, "1,234"),
        (1.3, "1.30"),
        ((0.5, 0.1), "0.50 ± 0.10"),
        ("text", "text"),
    ],
)
def test_a_cell_shows_a_value(value, shown):
    assert cell(value) == shown


def test_the_page_of_claims_is_made_of_the_kept_figures():
    fresh = page(map(load, NAMES)) == kept.PAGE.read_text()
    assert fresh, "run: python -m benchmarks.papers --show"


@pytest.mark.parametrize("name", NAMES)
def test_tables_of_a_page_are_made_of_the_kept_figures(name):
    text = (ROOT / "docs" / load(name).page).read_text()
    assert refreshed(text, load) == text, "run: python -m benchmarks.papers --show"


@pytest.mark.parametrize("page", page_tables.PAGES, ids=lambda page: page.stem)
def test_tables_of_measurements_are_made_of_stored_ones(page):
    text = page.read_text()
    fresh = page_tables.refreshed(text)
    assert fresh == text, "run: python -m benchmarks.measure.page_tables"


def test_each_table_of_measurements_is_on_a_page():
    text = "".join(page.read_text() for page in page_tables.PAGES)
    shown = [name for _, name in page_tables.PLACE.findall(text)]
    assert sorted(shown) == sorted(page_tables.TABLES)


def test_commands_of_pages_name_papers_and_tables_that_exist():
    commands = [
        found
        for path in page_tables.PAGES
        for found in re.findall(COMMAND, path.read_text())
    ]
    assert {name for name, _ in commands} == set(NAMES)
    for name, tables in commands:
        assert set(re.findall(r"--table (\S+)", tables)) <= set(load(name).tables)


@pytest.mark.parametrize("name", NAMES)
def test_each_kept_line_has_its_form(name):
    path = load(name).path
    for line in path.read_text().splitlines() if path.exists() else ():
        record = Record(**json.loads(line))
        assert record.row
        assert record.commit
        assert record.command.startswith(load(name).command())
