"""Reports and results on the terminal."""

from __future__ import annotations

import pytest

from paceline.tools.report.model import (
    Bar,
    BarChart,
    Matrix,
    Number,
    Report,
    Table,
    Text,
    TimelineSection,
)
from paceline.tools.report.terminal import parts_of_step, print_report, print_result
from tests.tools.compare.cases import Comparison

REPORT = Report(
    title="a title",
    answer="2 workers are faster",
    details=["why: no waits"],
    sections=[
        Table(
            title="Methods",
            headings=("method", "step"),
            rows=[("dear[1]", Number(0.1, "100 ms", bad=True)), ("bsp", None)],
            notes=["from step 9 on"],
            level="summary",
        ),
        Text(title="Run", lines=["paceline run " + "x" * 200], kind="code"),
        Text(title="Faults", lines=["slow link\ncheck it"], kind="numbered"),
        Matrix(title="Links", rows=["0"], columns=["to 1"], cells=[[None]]),
        BarChart(title="Bars", parts=["s"], rows=[Bar(name="bar", values=[1.0])]),
        TimelineSection(title="Steps", steps=()),
    ],
)


def test_the_summary_is_printed_and_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_report(REPORT)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["2 workers are faster", "why: no waits"]
    words = [line.split() for line in lines[2:] if line]
    assert words == [
        ["Methods"],
        ["method", "step"],
        ["dear[1]", "100", "ms", "(!)"],
        ["bsp", "-"],
        ["[1]", "from", "step", "9", "on"],
    ]


def test_everything_has_the_other_tables_and_texts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_report(REPORT, everything=True)
    said = capsys.readouterr().out
    assert "\n  paceline run " + "x" * 200 + "\n" in said  # in one line, to be copied
    assert "\n1. slow link\n   check it\n" in said
    assert "from \\ to" in said
    assert "Bars" not in said
    assert "Steps" not in said


def test_the_legend_does_not_add_up_what_does_not() -> None:
    plain, odd = (Comparison().add("bsp", [{}] * 3) for _ in range(2))
    assert odd.step_seconds is not None
    legend = parts_of_step([plain])
    odd.step_seconds *= 1.004  # rounding
    assert parts_of_step([plain, odd]) == legend
    odd.step_seconds *= 1.004
    assert "medians" in parts_of_step([plain, odd])


def test_a_run_is_a_row_with_its_steps_and_metrics(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = Comparison().add("bsp", [{"acc[val]": 0.5}] * 120, workers=2)
    result.steady_from, result.notes = 14, ["fast links"]
    print_result(result)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "2 workers, simulated runtime"
    assert lines[3].split() == [
        *("bsp", "3", "steps", "14", "to", "120"),
        *("40", "ms", "30", "ms", "10", "ms", "1", "MB", "0.5"),
    ]
    assert "acc[val]" in lines[2]
    assert lines[-1] == "fast links"
