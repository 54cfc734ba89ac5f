"""A plan as a report: its tables, why, and the commands."""

import msgspec
import pytest

from paceline.tools.plan.estimates import DDP, Infeasible
from paceline.tools.plan.recommendation import headline
from paceline.tools.plan.report import (
    Question,
    command,
    commands,
    counts,
    plan_report,
    to_json,
)
from paceline.tools.plan.what_if import (
    BreakEven,
    ScalingPoint,
    Suggestions,
)
from paceline.tools.report.html import text_of
from paceline.tools.report.model import Number, Table
from paceline.tools.report.terminal import print_report
from tests.tools.plan.helpers import (
    ASKED,
    NOTHING,
    helped,
    made,
    report,
    section,
    sped,
)


def titles(found):
    return [one.title for one in found.sections]


def test_one_worker_has_an_answer_and_no_tables():
    plan = msgspec.structs.replace(
        made(), baseline=msgspec.structs.replace(made().baseline, workers=1)
    )
    found = plan_report(plan, NOTHING, ASKED)
    assert "1 worker" in found.answer
    assert not found.sections


# ---- tables ----


def test_the_table_begins_with_one_machine_and_ddp():
    table = section(
        report(sped("dear", seconds=0.18), sped(DDP, seconds=0.27)), "Best of each"
    )
    assert table.level == "summary"
    named = [dict(zip(table.headings, cells, strict=True)) for cells in table.rows]
    assert [one["step"].value for one in named] == [0.36, 0.27, 0.18]
    assert [one["vs. 1 machine"].text for one in named] == ["1.00x", "1.33x", "2.00x"]
    assert [one["vs. DDP"].text for one in named] == ["0.75x", "1.00x", "1.50x"]
    assert named[0]["exposed"] is None


def test_summary_and_details_have_the_same_columns():
    found = report(sped("dear", seconds=0.18), sped(DDP, seconds=0.27))
    brief, full = section(found, "Best of each"), section(found, "All 2 candidates")
    assert set(brief.headings) < set(full.headings)
    (mine,) = (cells for cells in brief.rows if cells[1] == "dear")
    (same,) = (cells for cells in full.rows if cells[0] == "dear")
    by_heading = dict(zip(full.headings, same, strict=True))
    for heading, cell in zip(brief.headings[2:], mine[2:], strict=True):
        assert by_heading[heading] == cell


def test_footnotes_say_when_a_figure_holds_and_what_is_estimated():
    found = report(
        sped("bsp", steady_after=6),
        sped("osp", "delayed", 0.08, steady_after=153),
        sped("bsp:compression=int8", "lossy", 0.07, estimated_compression=True),
        sped("asp:compression=int8", "asynchronous", 0.07, estimated_compression=True),
        sped("post-local-sgd", "local", 0.09, steady_after=1000),
    )
    table = section(found, "Best of each")
    marks = {name.split()[0]: name.split()[1:] for _, name, *_ in table.rows[1:]}
    assert marks == {
        "bsp": [],
        "osp": ["[1]"],
        "bsp:compression=int8": ["[2]"],
        "post-local-sgd": ["[3]"],
        "asp:compression=int8": ["[2]"],
    }
    assert "154" in table.notes[0]
    assert "1001" in table.notes[2]
    measure = "paceline profile train.py --compression int8"
    assert table.notes[1].endswith(measure)


def test_each_method_but_ddps_has_a_line_that_says_what_it_does():
    found = report(
        sped("bsp:compression=int4", "lossy", 0.05),
        sped("osp:collective=native", "delayed", 0.09),
        sped("backup:servers=per-node", "asynchronous", 0.04),
        sped(DDP, seconds=0.2),
    )
    osp, int4, backup = section(found, "Methods").lines
    assert "not deferred" in osp
    assert "half a byte per element" in int4
    assert "the fastest wait_for workers" in backup  # 0: found out by itself


def test_candidates_with_equal_figures_share_a_row():
    rows = [sped("bsp"), sped("bsp:buckets=wfbp"), sped("bsp:collective=auto")]
    table = section(report(*rows, sped("dear", seconds=0.12)), "All 4 candidates")
    assert [name for name, *_ in table.rows] == ["bsp and 2 equal variants [1]", "dear"]
    assert table.notes[0].endswith("bsp:buckets=wfbp, bsp:collective=auto")


def test_a_column_without_figures_is_left_out():
    plan = made(sped("bsp"))
    baseline = msgspec.structs.replace(plan.baseline, batch=None)
    unknown = msgspec.structs.replace(plan, baseline=baseline)
    tables = [
        section(plan_report(one, NOTHING, ASKED), "All") for one in (plan, unknown)
    ]
    assert ["samples/s" in table.headings for table in tables] == [True, False]


def test_counts_tell_short_runs_from_rejected_and_skipped_candidates():
    plan = made(
        sped("bsp"),
        sped("priority", seconds=0.11, fidelity="short"),
        sped("slow", seconds=0.5, fidelity="short", rejected=True),
        sped("slower", seconds=0.6, fidelity="short", rejected=True),
    )
    outs = tuple(
        Infeasible(spec=f"x{i}", consistency="delayed", reason=reason)
        for i, reason in enumerate(("needs a switch", "it clips", "it clips"))
    )
    plan = msgspec.structs.replace(plan, skipped=5, infeasible=outs)
    text = counts(plan)
    for part in (
        "4 candidates",
        "3 infeasible",
        " 2 predicted roughly",
        " 1 predicted roughly",
        " 5 not predicted",
        "--max-work",
    ):
        assert part in text
    table = section(plan_report(plan, NOTHING, ASKED), "3 infeasible")
    assert [tuple(cells) for cells in table.rows] == [
        ("it clips", "x1, x2"),
        ("needs a switch", "x0"),
    ]
    step = section(plan_report(plan, NOTHING, ASKED), "All").rows[1][2]
    assert step.text == "~ 110 ms"


def test_bars_of_one_machine_are_of_the_global_batch():
    bars = section(report(sped("bsp"), sped(DDP, seconds=0.2)), "Where a step")
    assert [sum(bar.values) for bar in bars.rows] == pytest.approx([0.36, 0.2, 0.1])
    assert bars.limit == 0.2


def test_of_what_loses_something_the_one_that_sends_most_is_advised():
    plan = made(
        sped("random", "lossy", 0.100, sent=1e3),
        sped("int4", "lossy", 0.114, sent=5e5),
        sped("int8", "lossy", 0.121, sent=9e5),
        sped("ef-sign", "lossy", 0.116, sent=5.2e5),
        sped("int4:collective=tree", "lossy", 0.115, sent=1e3),
        sped("int4:buckets=wfbp", "lossy", 0.119, sent=9e5),
        sped("delayed", "delayed", 0.1, sent=1e3),
        sped("later", "delayed", 0.101, sent=9e5),
        sped("cut", "lossy", 0.110, sent=9e9, rejected=True),
    )
    assert plan.fastest["lossy"].spec == "random"
    assert plan.recommended["lossy"].spec == "int4"
    assert plan.recommended["delayed"].spec == "delayed"
    only = made(
        sped("cut", "lossy", rejected=True),
        sped("too", "lossy", 0.11, 9e9, rejected=True),
    )
    assert only.recommended["lossy"].spec == "too"


# ---- why, and what else ----


def test_why_is_what_the_network_takes_and_what_backward_hides():
    lines = section(report(sped("bsp", seconds=0.15), sped(DDP, seconds=0.2)), "Why")
    # 80 ms on the wire, of which 60 are exposed
    text = lines.lines[0]
    assert "1 MB per step: 80 ms at 100 Mbit/s, 20 ms of it hidden" in text
    assert "200 ms" in lines.lines[1]


@pytest.mark.parametrize(
    ("rates", "figures"),
    [
        ((2.6e6, 2.5e6), ["20 Mbit/s", "bsp", "21 Mbit/s"]),
        ((None, 2.5e6), ["20 Mbit/s", "bsp", "DDP: no link"]),
        ((2.6e6, None), ["bsp: no link", "DDP: 21 Mbit/s"]),
    ],
)
def test_break_even_is_of_the_recommended_method_and_of_ddp(rates, figures):
    even = [
        BreakEven(spec=spec, rate=rate, words="no link helps")
        for spec, rate in zip((DDP, "bsp"), rates, strict=True)
    ]
    found = report(
        sped("bsp"), suggestions=Suggestions(break_even=tuple(even), helps=())
    )
    text = " ".join(section(found, "Break-even").lines)
    assert all(figure in text for figure in figures)


def test_of_other_ways_to_gain_the_smallest_of_each_kind_is_in_the_summary():
    helps = [
        helped("16x larger batches", 7.9),
        helped("gradient accumulation over 16 batches", 7.4),
        helped("4x larger batches", 6.5),
    ]
    found = report(
        sped("bsp"), suggestions=Suggestions(break_even=(), helps=tuple(helps))
    )
    (line,) = section(found, "Also").lines
    assert "4x larger batches 6.50x" in line
    assert "16 batches 7.40x" in line
    assert "16x" not in line
    assert len(section(found, "Other ways").rows) == 3
    tried = report(
        sped("bsp"),
        suggestions=Suggestions(break_even=(), helps=(), tried=5, untried=2),
    )
    first, second = section(tried, "Also").lines
    assert "5" in first
    assert "2" in second
    assert "Also" not in titles(report(sped("bsp")))


# ---- commands ----


def test_commands_quote_what_a_shell_would_split():
    plan = made(sped("bsp"), sped("local-sgd", "local"))
    assert commands(plan, "my train.py", ["--lr", "1"]) == {
        "exact": "paceline run 'my train.py' --method bsp -- --lr 1",
        "local": "paceline run 'my train.py' --method local-sgd -- --lr 1",
    }
    assert command("bsp", "x.py", verb="emulate", options=["--workers=2"]) == (
        "paceline emulate x.py --workers=2 --method bsp"
    )


def test_a_plan_with_weaker_classes_proposes_to_train_and_compare():
    found = report(sped("bsp"), sped("int8", "lossy", 0.05))
    assert section(found, "Step time is not").lines == [
        "paceline compare train.py --workers=4 --link=100mbit --until accuracy=0.95"
    ]
    assert not any("not training" in one for one in titles(report(sped("bsp"))))


def test_a_trial_runs_the_stand_in_where_cores_are_too_few():
    line = "paceline emulate train.py --workers=4 --link=100mbit --method bsp"
    assert section(report(sped("bsp")), "Try").lines == [line]
    few = Question(
        cluster=ASKED.cluster,
        workload=ASKED.workload,
        network=ASKED.network,
        stand_in="t.json",
    )
    (line,) = section(report(sped("bsp"), question=few), "Try").lines
    assert line == (
        "paceline emulate examples/workload.py --workers=4 --link=100mbit --method bsp "
        "-- t.json --steps 100"
    )
    probed = Question(cluster=ASKED.cluster, workload=ASKED.workload)
    assert "Try one first on this machine" not in titles(
        report(sped("bsp"), question=probed)
    )


# ---- outputs ----


def test_the_terminal_prints_the_answer_first_and_all_candidates_only_on_request(
    capsys,
):
    found = report(sped("bsp"), sped(DDP, seconds=0.2))
    print_report(found)
    text = capsys.readouterr().out
    assert text.startswith(found.answer)
    assert "All 2 candidates" not in text
    assert "--method bsp" in text
    print_report(found, everything=True)
    assert "All 2 candidates" in capsys.readouterr().out


def test_scaling_is_a_table_on_the_terminal_and_a_chart_on_the_page(capsys):
    points = [
        ScalingPoint(
            workers=workers,
            rate=125e6,
            consistency="exact",
            spec="bsp",
            step_seconds=0.1,
            speedup=0.9 * workers,
            efficiency=0.9,
        )
        for workers in (2, 4)
    ]
    found = report(sped("bsp"), points=points)
    print_report(found)
    assert "3.60x (90%)" in capsys.readouterr().out
    assert "Efficiency" in text_of(found)


def test_every_section_has_a_page():
    question = Question(cluster=ASKED.cluster, workload=ASKED.workload, script="<b>")
    found = report(sped("bsp"), sped("int8", "lossy", 0.05), question=question)
    text = text_of(found)
    assert "&lt;b&gt;" in text
    assert "<b>:" not in text
    assert all(
        isinstance(cell, str | Number | None)
        for one in found.sections
        if isinstance(one, Table)
        for cells in one.rows
        for cell in cells
    )


def test_the_first_line_is_the_network_and_what_a_worker_computes():
    assert str(ASKED) == (
        "4 workers, 100 Mbit/s, 50 us latency; 30 ms forward + 60 ms backward per worker"
    )


def test_json_has_the_keys_of_the_plan_and_commands():
    plan = made(sped("dear", seconds=0.178), sped(DDP, seconds=0.18))
    content = msgspec.json.decode(to_json(plan, NOTHING, ASKED))
    assert set(msgspec.to_builtins(plan)) < set(content)
    first = content["estimates"][0]
    assert first["step_seconds"] == 0.178
    assert first["speedup"] == pytest.approx(0.36 / 0.178)
    assert first["ddp_speedup"] == pytest.approx(0.18 / 0.178)
    table = section(plan_report(plan, NOTHING, ASKED), "All 2 candidates")
    figures = {cell.value for cell in table.rows[0] if isinstance(cell, Number)}
    assert len(table.headings) == 10
    assert figures <= {value for value in first.values() if type(value) in (int, float)}
    assert first["bound_ratio"] == pytest.approx(0.178 / 0.2)
    assert first["samples_per_second"] == pytest.approx(32 / 0.178)
    assert content["fastest"] == {"exact": "dear"}
    assert content["recommended"] == {"exact": DDP}
    assert content["commands"]["exact"].endswith(f"--method {DDP}")
    assert content["headline"] == headline(plan)
    assert content["scaling"] == []
