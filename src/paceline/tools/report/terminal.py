"""Tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cluster.workload import Workload
from paceline.records import StepRecord
from paceline.runtimes.results import FailedRun, Outcome, RunResult
from paceline.tools.compare.goal import Goal
from paceline.tools.report import model
from paceline.units import show_bytes, show_seconds

_WIDTH_OF_FILES = 120
"""Columns where standard output is no terminal: nothing needs to be folded there."""


class Sheet(NamedTuple):
    """A table's text: a cell per heading and row, a *legend* of one or more sentences, and
    the notes that rows refer to as ``[1]``, ``[2]``, ... behind their names."""

    headings: list[str]
    rows: list[list[str]]
    legend: list[str]
    notes: list[str]


def sheet(rows: Sequence[tuple[str, Outcome]]) -> Sheet:
    """A row per run: its name, where its time goes, its last metrics, and the ratio of its
    step time to that of the first run that has one; what is to be known about it, below.
    """
    results = [outcome for _, outcome in rows if isinstance(outcome, RunResult)]
    metrics = list(dict.fromkeys(name for r in results for name in r.metrics))
    first = next((r.step_seconds for r in results if r.step_seconds), None)
    headings = ["variant", "buckets", "settled", "step", "compute", "exposed", "sent"]
    headings += metrics
    if len(rows) > 1:
        headings.append("ratio")
    # What is to be known about all of them needs no mark.
    common = [
        note
        for note in (results[0].notes if len(results) > 1 else ())
        if all(note in result.notes for result in results)
    ]
    numbers: dict[str, int] = {}
    table = []
    for name, outcome in rows:
        marks = [
            numbers.setdefault(note, len(numbers) + 1)
            for note in outcome.notes
            if note not in common
        ]
        label = name + "".join(f" [{number}]" for number in marks)
        if isinstance(outcome, FailedRun):
            cells = ["-", "-", "failed", *["-"] * (len(headings) - 4)]
        else:
            cells = _figures(outcome, metrics)
            if len(rows) > 1:
                step = outcome.step_seconds
                cells.append(f"{step / first:.3f}" if step and first else "-")
        table.append([label, *cells])
    return Sheet(headings, table, [_sum(results), *common], list(numbers))


ADDS_UP = 0.005
"""To this part of a step its figures are seen to add up."""


def _sum(results: Sequence[RunResult]) -> str:
    words = "step = compute + exposed (waiting for the network)"
    for r in results:
        step, compute = r.step_seconds, r.compute_seconds
        exposed = r.exposed_communication_seconds
        if step is None or compute is None or exposed is None:
            continue
        if abs(step - compute - exposed) > ADDS_UP * step:
            words += " in each step, and medians of these need not add up"
            break
    return f"{words}; sent per worker; figures are of settled steps"


def _figures(result: RunResult, metrics: Sequence[str]) -> list[str]:
    sent = result.bytes_sent_per_worker
    values = (result.metrics.get(metric) for metric in metrics)
    first = result.settled_from
    return [
        str(result.buckets),
        "-" if first is None else f"{first} to {result.steps}",
        _seconds(result.step_seconds),
        _seconds(result.compute_seconds),
        _seconds(result.exposed_communication_seconds),
        "-" if sent is None else show_bytes(sent),
        *("-" if value is None else f"{value:.4g}" for value in values),
    ]


def print_results(
    rows: Sequence[tuple[str, Outcome]],
    reached: Sequence[StepRecord | None] = (),
    goal: Goal | None = None,
) -> None:
    """The table of `sheet`, and what its figures were made with. At least one run has a
    result. *reached*: the step with which each came to the *goal*."""
    first = next(outcome for _, outcome in rows if isinstance(outcome, RunResult))
    headings, cells, legend, notes = sheet(rows)
    many = "worker" if first.workers == 1 else "workers"
    table = Table(title=f"{first.workers} {many}, {first.runtime} runtime")
    table.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    if goal is not None:
        table.add_column(f"to {goal}", justify="right", no_wrap=True)
        cells = [
            [*row, "never" if when is None else show_seconds(when.end_seconds)]
            for row, when in zip(cells, reached, strict=True)
        ]
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    console = console_for_tables()
    console.print(table)
    for sentence in legend:
        console.print(Text(sentence))
    if first.runtime == "simulated":
        console.print(
            "all in virtual time: in the script that is paceline.now(), and not time.time()"
        )
    below = Table.grid(padding=(0, 1))
    for number, note in enumerate(notes, start=1):
        below.add_row(Text(f"[{number}]"), Text(note))
    if notes:
        console.print(below)


def _seconds(value: float | None) -> str:
    return "-" if value is None else show_seconds(value)


def print_workload(workload: Workload, rows: int = 12) -> None:
    """A workload's sums, and the tensors whose backward pass takes longest."""
    table = Table(title=workload.source or "workload")
    table.add_column("tensor", overflow="fold")
    for heading in ("gradient", "forward", "backward", "ready at"):
        table.add_column(heading, justify="right", no_wrap=True)
    ready = dict(zip(workload.order, workload.ready_seconds, strict=True))
    count = len(workload.names)
    longest = sorted(range(count), key=workload.backward.__getitem__, reverse=True)
    shown = set(longest[:rows])
    for i in (i for i in workload.order if i in shown):
        table.add_row(
            workload.names[i],
            show_bytes(workload.sizes[i]),
            show_seconds(workload.forward[i]),
            show_seconds(workload.backward[i]),
            show_seconds(ready[i]),
        )
    if count > rows:
        table.add_row(f"... and {count - rows} more", "", "", "", "")
    table.add_section()
    table.add_row(
        f"{count} tensors",
        show_bytes(sum(workload.sizes)),
        show_seconds(workload.forward_seconds),
        show_seconds(workload.backward_seconds),
        f"update {show_seconds(workload.update)}",
    )
    if workload.input:
        table.add_row("between steps", "", show_seconds(workload.input), "", "")
    if workload.overhead:
        table.add_row("hooks", "", "", show_seconds(workload.overhead), "")
    console_for_tables().print(table)


def print_report(report: model.Report, *, everything: bool = False) -> None:
    """Print a report's answer, its details and the summary sections.

    Args:
        report: What to print. Charts and timelines have no form in a terminal.
        everything: Print the tables and texts of the other sections too.
    """
    console = console_for_tables()
    for line in (report.answer, *report.details):
        console.print(Text(line))
    for section in report.sections:
        if everything or section.level == "summary":
            _print_section(console, section)


def _print_section(console: Console, section: model.Section) -> None:
    match section:
        case model.Text():
            _print_text(console, section)
        case model.Table():
            _print_table(console, section)
        case model.Matrix():
            _print_table(console, _as_table(section))
        case model.LineChart(table=model.Table() as table):
            _print_table(console, table)


def _print_text(console: Console, section: model.Text) -> None:
    console.print()
    if section.title:
        console.print(Text(f"{section.title}:"))
    for number, line in enumerate(section.lines, start=1):
        first = f"{number}. " if section.kind == "numbered" else "  "
        indented = line.replace("\n", "\n   ")
        # A command that is broken into lines cannot be copied.
        console.print(Text(first + indented), soft_wrap=section.kind == "code")
    if section.caption:
        console.print(Text(section.caption))


def _print_table(console: Console, section: model.Table) -> None:
    numbers = section.number_columns()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    rows = [[_cell(one) for one in row] for row in section.rows]
    for column, heading in enumerate(section.headings):
        if column in numbers:
            # A heading may be broken into lines, a number may not.
            width = max(len(row[column]) for row in rows)
            table.add_column(heading, justify="right", min_width=width)
        else:
            table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print()
    if section.title:
        console.print(Text(section.title))
    console.print(table)
    for number, note in enumerate(section.notes, start=1):
        console.print(Text(f"[{number}] {note}"))
    if section.caption:
        console.print(Text(section.caption))


def _as_table(section: model.Matrix) -> model.Table:
    return model.Table(
        title=section.title,
        headings=(section.corner, *section.columns),
        rows=[
            (name, *row) for name, row in zip(section.rows, section.cells, strict=True)
        ],
        caption=section.caption,
    )


def _cell(cell: model.Cell) -> str:
    if isinstance(cell, model.Number):
        return f"{cell.text} (!)" if cell.bad else cell.text
    return "-" if cell is None else cell


def console_for_tables() -> Console:
    """Standard output, wide enough where that is a file. Names of metrics, tensors and files are shown as
    they are: ``acc[val]`` is no markup."""
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    return console
