"""A comparison's headline, its table, its notes, and what its charts show."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest

from paceline.bucketing.tuner import IN_A_TRIAL
from paceline.interfaces import CONSISTENCIES
from paceline.tools.compare.report import (
    KEYS,
    Curve,
    metric_curves,
    thinned,
    to_json,
)
from paceline.tools.compare.runner import Goal
from paceline.tools.report.model import (
    GREY,
    BarChart,
    LineChart,
    Number,
    Report,
    Table,
    Text,
)
from paceline.tools.report.terminal import print_report
from tests.tools.compare.cases import (
    FAILED,
    Comparison,
    falling,
    plan_of,
    record,
    three,
)

GOAL = Goal("accuracy", 0.15)


def table_of(report: Report) -> list[dict[str, str]]:
    table, details = (one for one in report.sections if isinstance(one, Table))
    assert (table.level, details.level) == ("summary", "details")
    rows = [
        [cell.text if isinstance(cell, Number) else cell or "-" for cell in row]
        for row in table.rows
    ]
    return [dict(zip(table.headings, row, strict=True)) for row in rows]


def charts_of(report: Report) -> dict[str, LineChart]:
    return {one.title: one for one in report.sections if isinstance(one, LineChart)}


def notes_of(report: Report) -> Sequence[str]:
    return lines_of(report, "Notes")


def lines_of(report: Report, title: str) -> Sequence[str]:
    texts = [one for one in report.sections if isinstance(one, Text)]
    return next((one.lines for one in texts if one.title == title), [])


def planned() -> Comparison:
    """As a plan has them run: DDP first, then the best of each consistency, one that fails."""
    comparison = Comparison()
    comparison.add(
        "bsp:buckets=ddp", falling(), goal=GOAL, exposed=0.05, predicted=0.08
    )
    comparison.add("dear", falling(), goal=GOAL, exposed=0.03, predicted=0.06)
    comparison.add("int4", falling(), goal=GOAL, exposed=0.0, consistency="lossy")
    comparison.add("backup", falling(9), goal=GOAL, consistency="asynchronous")
    comparison.end("local-sgd", consistency="local")
    return comparison


# ---- headline, table and notes ----


def test_a_plans_methods_are_compared_with_ddp_and_with_one_machine() -> None:
    rows = table_of(planned().report(one_machine=0.32))
    assert [row["method"] for row in rows] == [
        "one machine, same global batch",
        "DDP (bsp:buckets=ddp)",
        *("dear", "int4", "backup", "local-sgd"),
    ]
    assert [row["vs. DDP"] for row in rows] == [
        *("0.25x", "1.00x", "1.33x", "2.67x", "2.00x", "-"),
    ]
    assert [row["vs. 1 machine"] for row in rows] == [
        *("1.00x", "4.00x", "5.33x", "10.67x", "8.00x", "-"),
    ]
    assert [row["predicted"] for row in rows] == ["-", "80 ms", "60 ms", *["-"] * 3]
    assert [row["step"] for row in rows][-1] == "failed"
    assert rows[1]["consistency"] == "exact"


def test_times_to_the_goal_are_the_headline_and_a_column() -> None:
    report = planned().report(goal=GOAL, one_machine=0.32)
    assert report.answer == (
        "accuracy 0.15: int4 600 ms, dear 1.2 s, DDP 1.6 s, one machine 6.4 s (virtual time). "
        "backup did not reach it."
    )
    rows = table_of(report)
    assert "loss" not in rows[0]
    assert [row["to accuracy=0.15"] for row in rows] == [
        *("6.4 s", "1.6 s (20 steps)", "1.2 s (20 steps)", "600 ms (20 steps)"),
        *("never", "-"),
    ]
    dotted = charts_of(report)["accuracy over time"].panels[0].dotted
    assert dotted is not None
    assert dotted[0] == pytest.approx([0.0, 0.6, 0.6])
    assert dotted[1] == pytest.approx([0.15, 0.15, 0.1])


def test_nobody_reaches_the_goal() -> None:
    comparison = Comparison()
    comparison.add("bsp", falling(9), goal=GOAL)
    assert "no method" in comparison.report(goal=GOAL).answer


def test_methods_that_somebody_named_are_compared_with_the_first() -> None:
    report = three().report()
    rows = table_of(report)
    assert [row["vs. first"] for row in rows] == ["1.00x", "0.75x", "0.60x"]
    assert {"predicted", "vs. 1 machine"}.isdisjoint(rows[0])
    assert report.answer == "Shortest step: bsp, 30 ms (1.00x bsp)."
    assert rows[0] | {"loss": "0.1", "accuracy": "0.9"} == rows[0]


def test_the_headline_also_has_the_best_exact_method() -> None:
    answer = planned().report().answer
    assert answer == (
        "Shortest step: int4, 30 ms (2.67x DDP). Shortest exact step: dear, 60 ms (1.33x DDP). "
        "int4 after 20 steps: loss 0.1 (DDP 0.1), accuracy 0.2 (DDP 0.2)."
    )


def test_one_method_has_nothing_to_be_compared_with() -> None:
    comparison = Comparison()
    comparison.add("bsp", [{}] * 3)
    report = comparison.report()
    assert report.answer == "bsp: 40 ms per step."
    assert list(table_of(report)[0]) == [
        *("consistency", "method", "step", "exposed"),
    ]
    assert charts_of(report) == {}


def test_a_metric_may_have_the_name_of_a_column() -> None:
    comparison = Comparison()
    comparison.add("bsp", [{"step": 7.0}] * 3)
    tables = [one for one in comparison.report().sections if isinstance(one, Table)]
    for table in tables:
        (row,) = table.rows
        cells = list(zip(table.headings, row, strict=True))
        steps = [cell for heading, cell in cells if heading == "step"]
        assert [one.value for one in steps if isinstance(one, Number)] == [0.04, 7.0]


def test_no_run_took_a_step_and_one_logged() -> None:
    comparison = Comparison()
    comparison.add("bsp", last={"accuracy": 0.8}, goal=Goal("accuracy", 0.9))
    assert comparison.report(goal=Goal("accuracy", 0.9)).sections


def test_a_run_without_steps() -> None:
    comparison = Comparison()
    comparison.add("bsp")
    report = comparison.report()
    assert report.answer == "No step was taken."
    assert table_of(report)[0]["step"] == "-"


def test_equal_notes_stand_once_with_their_methods() -> None:
    comparison = Comparison()
    for spec, notes in (("a", ["x", "fast"]), ("b", ["x"]), ("c", ["x", "fast"])):
        comparison.add(spec, [{}] * 3).notes = notes
    assert notes_of(comparison.report()) == ["x", "a, c: fast"]
    comparison.end("d")
    assert notes_of(comparison.report()) == [
        *("a, b, c: x", "a, c: fast"),
        "d: failed: worker 0 raised GradientError: clipped",
    ]


def test_a_spec_that_is_given_twice_is_numbered() -> None:
    comparison = Comparison()
    comparison.add("bsp", [{"loss": 1.0}])
    comparison.end("bsp")
    report = comparison.report()
    names = ["bsp (number 1)", "bsp (number 2)"]
    assert [row["method"] for row in table_of(report)] == names
    assert [
        one.name for one in charts_of(report)["loss over time"].panels[0].series
    ] == (names[:1])


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """``[val]`` would be a style, ``[/val]`` an error, and ``:key:`` a picture."""
    comparison = Comparison()
    names = ("acc[val]", "acc[/val]", "loss:key:")
    comparison.add("bsp", [dict.fromkeys(names, 0.5)])
    print_report(comparison.report())
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)


def test_trials_of_buckets_are_no_notes_of_the_table() -> None:
    trial = f"bucketing: 4 buckets, 1 s a pass {IN_A_TRIAL}(one forward)"
    comparison = Comparison()
    for spec in ("dear", "bsp"):
        comparison.add(spec, [{}] * 3).notes = [trial, "slow"]
    report = comparison.report()
    assert notes_of(report) == ["slow"]
    assert lines_of(report, "Trials of buckets") == [trial]


def test_each_method_but_ddps_has_a_line_that_says_what_it_does() -> None:
    comparison = Comparison()
    for spec in ("bsp:buckets=ddp", "dear", "local-sgd:sync_every=5"):
        comparison.add(spec, [{}] * 3)
    comparison.end("osp")
    dear, local = lines_of(comparison.report(), "Methods")
    assert dear.startswith("dear: waits for every worker")
    assert "in every 5-th step" in local


# ---- JSON ----


@pytest.mark.parametrize("one_machine", [None, 0.32])
def test_json_has_the_columns_of_both_tables(one_machine: float | None) -> None:
    comparison = planned() if one_machine else three()
    goal = GOAL if one_machine else None
    plan = None if one_machine is None else plan_of(one_machine)
    report = comparison.report(goal=goal, one_machine=one_machine)
    content = json.loads(to_json(comparison.runs, goal, plan))
    assert set(content) == {"variants"} | ({"plan", "one_machine"} if plan else set())
    tables = [one for one in report.sections if isinstance(one, Table)]
    compared = 0
    for table in tables:
        rows = list(table.rows)
        found = content["variants"][: len(rows)]
        if len(rows) > len(found):
            found = [content["one_machine"], *found]
        for row, mine in zip(rows, found, strict=True):
            for heading, cell in zip(table.headings, row, strict=True):
                if (
                    heading in KEYS
                    and isinstance(cell, Number)
                    and "failed" not in mine
                ):
                    assert mine[KEYS[heading]] == cell.value, heading
                    compared += 1
        metrics = {
            name for one in content["variants"] for name in one.get("metrics", ())
        }
        assert set(table.headings) <= KEYS.keys() | metrics | {f"to {goal}"}
    assert compared > 15
    assert "steady_from" in content["variants"][0]


def test_json_says_why_a_variant_has_no_figures() -> None:
    comparison = Comparison()
    comparison.end("asp", consistency="asynchronous")
    failed = json.loads(to_json(comparison.runs))["variants"]
    comparison.add("bsp", falling(20), goal=GOAL, predicted=0.05)
    content = json.loads(to_json(comparison.runs, GOAL))
    first, second = content["variants"]
    assert failed == [first]
    assert first == {
        "variant": "asp",
        "consistency": "asynchronous",
        "failed": FAILED.failed,
        "exit_status": 1,
    }
    assert second["predicted_seconds"] == 0.05
    assert second["first_speedup"] == 1.0
    assert (second["reached_step"], second["reached_seconds"]) == (20, 0.8)


# ---- charts ----


def test_colour_is_consistency_and_marker_is_method() -> None:
    report = planned().report(one_machine=0.32)
    place = {name: number for number, name in enumerate(CONSISTENCIES)}
    ran = [place[name] for name in ("exact", "exact", "lossy", "asynchronous")]
    lines = charts_of(report)["loss over time"].panels[0].series
    assert [one.colour for one in lines] == ran
    assert [one.marker for one in lines] == [0, 1, 2, 3]
    (bars,) = (one for one in report.sections if isinstance(one, BarChart))
    assert [bar.colour for bar in bars.rows] == ran
    assert list(bars.rows[0].values) == pytest.approx([0.03, 0.05])
    table, details = (one for one in report.sections if isinstance(one, Table))
    assert (table.level, details.level) == ("summary", "details")
    assert table.colours == [GREY, *ran, place["local"]]


def test_a_metric_over_many_decades_has_a_logarithmic_axis() -> None:
    comparison = Comparison()
    comparison.add("bsp", [{"loss": 10.0**i, "accuracy": 0.1} for i in range(5)])
    charts = charts_of(comparison.report())
    assert [chart.log for chart in charts.values()] == ["y", ""]


def test_long_runs_are_drawn_in_few_points() -> None:
    comparison = Comparison()
    comparison.add("bsp", [{"loss": math.sin(i)} for i in range(20_000)])
    chart = charts_of(comparison.report())["loss over time"]
    assert len(chart.panels[0].series[0].xs) <= 300
    assert "neighbouring" in chart.caption


def test_a_point_is_the_mean_over_the_workers_of_its_step() -> None:
    comparison = Comparison()
    steps = [
        record(0, 1, 1.0, {"loss": 4.0}),
        record(1, 1, 3.0, {"loss": 2.0}),
        record(2, 1, 9.0, {}),  # this worker logged nothing
        record(0, 2, 4.0, {"loss": 1.0}),
    ]
    result = comparison.add("other", [{"loss": 0.0}, {"loss": 0.0}])
    comparison.runs.clear()
    comparison.end("bsp", result, steps)
    assert metric_curves(comparison.runs) == {"loss": [Curve([2.0, 4.0], [3.0, 1.0])]}


def test_what_is_no_number_leaves_a_gap() -> None:
    comparison = Comparison()
    logged = [{"loss": 4.0}, {}, {"loss": None}, {"loss": -1e308}, {"loss": 1.0}]
    comparison.add("bsp", logged)
    (curve,) = metric_curves(comparison.runs)["loss"]
    assert curve.seconds == pytest.approx([0.04, 0.12, 0.16, 0.2])
    assert curve.values == pytest.approx([4.0, math.nan, math.nan, 1.0], nan_ok=True)


def test_what_is_logged_now_and_then_also_counts_after_the_last_step() -> None:
    comparison = Comparison()
    last = {"accuracy": 0.9, "loss": 0.5, "end": 7.0}
    comparison.add("bsp", falling(20), last=last)
    curves = metric_curves(comparison.runs)
    (accuracy,), (loss,), (end,) = curves["accuracy"], curves["loss"], curves["end"]
    assert accuracy.values == [0.1, 0.2, 0.9]
    assert accuracy.seconds == pytest.approx([0.4, 0.8, 0.8])
    assert len(loss.values) == 20  # logged in every step: one more adds nothing
    assert end == Curve([accuracy.seconds[-1]], [7.0])


def test_a_last_value_that_is_recorded_is_no_further_point() -> None:
    comparison = Comparison()
    comparison.add("bsp", [{}, {"accuracy": 0.5}, {}, {}])
    (curve,) = metric_curves(comparison.runs)["accuracy"]
    assert curve.values == [0.5]


def test_a_variant_that_does_not_log_a_metric_has_an_empty_line() -> None:
    comparison = Comparison()
    comparison.add("bsp", [{"loss": 2.0}])
    comparison.add("ssp", [{"loss": 3.0, "staleness": 1.0}])
    assert metric_curves(comparison.runs)["staleness"][0] == Curve()


def test_in_few_points_one_that_is_no_number_hides_no_others() -> None:
    values = [1.0, math.nan, 3.0, math.nan, math.nan, math.nan, 5.0, 7.0, 6.0]
    few = thinned(Curve([float(i) for i in range(9)], values), most=3)
    assert few.seconds == [1.0, 4.0, 7.0]
    assert few.values == pytest.approx([2.0, math.nan, 6.0], nan_ok=True)
