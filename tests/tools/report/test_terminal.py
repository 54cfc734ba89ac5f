"""A table's rows, and what stands below it."""

from __future__ import annotations

import json

import pytest

from paceline.runtimes.results import FailedRun, Outcome
from paceline.tools.compare.report import table
from paceline.tools.compare.runner import to_json
from paceline.tools.report.terminal import print_results, sheet
from tests.tools.report.cases import three

FAILED = FailedRun(failed="worker 0 raised GradientError: clipped", exit_status=1)


def rows_with_a_failure() -> list[tuple[str, Outcome]]:
    first, second, third = three().results
    return [("asp", FAILED), first, second, third]


def test_a_run_that_failed_keeps_its_row_and_the_reason_stands_below() -> None:
    headings, rows, _, notes = sheet(rows_with_a_failure())
    assert headings[-1] == "ratio"
    assert rows[0] == ["asp [1]", "-", "-", "failed", *["-"] * 6]
    assert [len(row) for row in rows] == [len(headings)] * 4
    # the first that ran is what others are compared with
    assert [row[-1] for row in rows] == ["-", "1.000", "1.333", "1.667"]
    assert notes == ["failed: worker 0 raised GradientError: clipped"]


def test_equal_notes_have_one_number() -> None:
    (_, first), (_, second), (_, third) = three().results
    first.notes = ["fast links", "not settled"]
    third.notes = ["not settled", "small"]
    _, rows, _, notes = sheet([("a", first), ("b", second), ("c", third)])
    assert [row[0] for row in rows] == ["a [1] [2]", "b", "c [2] [3]"]
    assert notes == ["fast links", "not settled", "small"]


def test_what_is_said_of_all_has_no_number() -> None:
    (_, first), (_, second), _ = three().results
    first.notes = ["idle processors", "not settled"]
    second.notes = ["idle processors"]
    _, rows, legend, notes = sheet([("a", first), ("b", second), ("c", FAILED)])
    assert [row[0] for row in rows] == ["a [1]", "b", "c [2]"]
    assert legend[1:] == ["idle processors"]
    assert notes == ["not settled", *FAILED.notes]
    assert sheet([("b", second)]).notes == ["idle processors"]


def test_the_legend_does_not_add_up_what_does_not() -> None:
    plain, (_, odd), _ = three().results
    assert odd.step_seconds is not None
    (legend,) = sheet([plain]).legend
    words = "step = compute + exposed (waiting for the network)"
    assert legend == f"{words}; sent per worker; figures are of settled steps"
    odd.step_seconds *= 1.004  # rounding
    assert sheet([plain, ("odd", odd)]).legend == [legend]
    odd.step_seconds *= 1.004
    assert sheet([plain, ("odd", odd)]).legend == [
        f"{words} in each step, and medians of these need not add up; sent per worker; "
        "figures are of settled steps"
    ]


def test_it_says_of_which_steps_figures_are() -> None:
    (_, first), (_, second), _ = three().results
    first.settled_from, first.steps = 14, 120
    column = [
        row[2] for row in sheet([("a", first), ("b", second), ("c", FAILED)]).rows
    ]
    assert column == ["14 to 120", "-", "-"]


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_results(rows_with_a_failure())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "2 workers, simulated runtime"
    assert lines[-1].rstrip() == "[1] failed: worker 0 raised GradientError: clipped"


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """``[val]`` would be a style, ``[/val]`` an error, and ``:key:`` a picture."""
    (_, result), *_ = three().results
    names = ("acc[val]", "acc[/val]", "loss:key:")
    result.metrics = dict.fromkeys(names, 0.5)
    print_results([("bsp", result)])
    said = capsys.readouterr().out
    assert all(name in said for name in names)


def test_the_page_calls_variants_as_plots_do() -> None:
    (spec, result), *_ = three().results
    labels = [row[0] for row in table([(spec, result), (spec, FAILED)]).rows]
    assert labels == ["bsp (number 1)", "bsp (number 2) [1]"]


def test_a_program_reads_why_a_variant_has_no_figures() -> None:
    first, second, *_ = json.loads(to_json(rows_with_a_failure()))["variants"]
    assert first == {
        "variant": "asp",
        "failed": "worker 0 raised GradientError: clipped",
        "exit_status": 1,
    }
    assert second["variant"] == "bsp"
