"""Figures of benchmarks replace the stored ones of their rows, and tables show all runs."""

import json
import sys

import pytest
from benchmarks.measure import stored
from benchmarks.papers.results import NOT_RUN, Record, Results


@pytest.fixture
def path(tmp_path):
    return tmp_path / "measurements.jsonl"


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """The command line of a benchmark."""
    monkeypatch.setattr(sys, "argv", ["measure/speed.py", "--links", "1", "--store"])


def keep(path, run=1, **figures):
    with stored.Store("speed", run, path) as store:
        for name, value in figures.items():
            store.add(name, value, "s")


def figures(path):
    return {one.row: one.value for one in Results(path).records}


def test_a_measured_figure_replaces_an_imported_one(path):
    old = Record("speed: step", 1.0, "s", "another command", "before", None, None)
    other = Record("scale: step", 3.0, "s", "another command", "before", None, None)
    path.write_text("".join(json.dumps(vars(one)) + "\n" for one in (old, other)))
    keep(path, step=2.0)
    assert figures(path) == {"scale: step": 3.0, "speed: step": 2.0}
    record = Results(path).records[-1]
    assert record.command == "python -m benchmarks.measure.speed --links 1"
    assert record.machine
    assert record.seconds is not None


def test_what_a_command_no_longer_measures_is_gone(path):
    keep(path, step=1.0, renamed=1.0)
    keep(path, step=2.0)
    assert figures(path) == {"speed: step": 2.0}


def test_a_second_run_stands_beside_the_first_until_that_is_measured_anew(path):
    keep(path, step=1.0)
    keep(path, run=2, step=1.5)
    keep(path, run=2, step=1.25)
    shown = stored.Figures("speed", path)
    assert shown.runs("step") == [1.0, 1.25]
    assert shown.text("step") == "1.00 to 1.25"
    assert shown.ratio("step", "step") == "1.00"
    keep(path, step=2.0)
    assert stored.Figures("speed", path).text("step") == "2.00"


@pytest.mark.parametrize(("run", "fails"), [(None, False), (1, True)])
def test_nothing_is_stored_without_the_option_or_if_the_benchmark_fails(
    path, run, fails
):
    def measure():
        with stored.Store("speed", run, path) as store:
            store.add("step", 1.0, "s")
            if fails:
                raise RuntimeError("broken")

    if fails:
        with pytest.raises(RuntimeError):
            measure()
    else:
        measure()
    assert not path.exists()
    assert stored.Figures("speed", path).text("step") == NOT_RUN


@pytest.mark.parametrize("option", [["--store"], ["--store", "2"], ["--store=2"]])
def test_a_command_is_stored_without_the_option(monkeypatch, option):
    monkeypatch.setattr(sys, "argv", ["measure/speed.py", *option, "--rounds", "3"])
    assert stored.command() == "python -m benchmarks.measure.speed --rounds 3"


def test_each_stored_line_has_its_form():
    rows = [one.row for one in Results(stored.RESULTS).records]
    assert len(rows) == len(stored.RESULTS.read_text().splitlines())
