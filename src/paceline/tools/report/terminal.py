"""Reports, results and workloads on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cluster.workload import Workload
from paceline.runtimes.results import RunResult
from paceline.tools.report import model
from paceline.units import show_bytes, show_count, show_rate, show_seconds

if TYPE_CHECKING:
    from paceline.cluster.profiling import CompressorCost, NotApplicable

_WIDTH_OF_FILES = 120
"""Columns if standard output is not a terminal: lines need no folding there."""
ADDS_UP = 0.005
"""Share of a step to which its figures must add up."""
_SHORT = 16
"""Letters up to which a word is not broken into lines, such as a consistency."""


def print_result(result: RunResult) -> None:
    """Print the figures of one run, and below them how they were measured."""
    console = console_for_tables()
    _print_table(console, _table_of(result))
    for note in result.notes:
        console.print(Text(note))


def _table_of(result: RunResult) -> model.Table:
    first, sent = result.steady_from, result.bytes_sent_per_worker
    legend = (
        f"{parts_of_step([result])} Each figure is a median over steady-state steps. "
        "sent: per worker and step."
    )
    if result.runtime == "simulated":
        legend += " All times are virtual: a script reads them with paceline.now(), not with time.time()."
    return model.Table(
        title=f"{show_count(result.workers, 'worker')}, {result.runtime} runtime",
        headings=(
            *(
                "method",
                "buckets",
                "steady state",
                "step",
                "compute",
                "exposed",
                "sent",
            ),
            *result.metrics,
        ),
        rows=[
            (
                result.brief or result.method,
                model.Number(result.buckets, str(result.buckets)),
                None if first is None else f"steps {first} to {result.steps}",
                *map(
                    _seconds,
                    (
                        result.step_seconds,
                        result.compute_seconds,
                        result.exposed_communication_seconds,
                    ),
                ),
                None if sent is None else model.Number(sent, show_bytes(sent)),
                *(
                    None if value is None else model.Number(value, f"{value:.4g}")
                    for value in result.metrics.values()
                ),
            )
        ],
        caption=legend,
    )


def parts_of_step(results: Sequence[RunResult]) -> str:
    """Return the parts of a step, for a table's legend."""
    text = "step = compute + exposed communication"
    for one in results:
        step, compute = one.step_seconds, one.compute_seconds
        exposed = one.exposed_communication_seconds
        if step is None or compute is None or exposed is None:
            continue
        if abs(step - compute - exposed) > ADDS_UP * step:
            return f"{text}, in each step: medians of these need not add up."
    return f"{text}."


def _seconds(value: float | None) -> model.Number | None:
    return None if value is None else model.Number(value, show_seconds(value))


def print_workload(workload: Workload, rows: int = 12) -> None:
    """Print a workload's sums, and the tensors with the longest backward pass."""
    ready = dict(zip(workload.order, workload.ready_seconds, strict=True))
    count = len(workload.names)
    longest = sorted(range(count), key=workload.backward.__getitem__, reverse=True)
    shown = set(longest[:rows])
    lines: list[list[model.Cell]] = [
        [
            workload.names[i],
            model.Number(workload.sizes[i], show_bytes(workload.sizes[i])),
            _seconds(workload.forward[i]),
            _seconds(workload.backward[i]),
            _seconds(ready[i]),
        ]
        for i in workload.order
        if i in shown
    ]
    empty = model.Number(None, "")
    if count > rows:
        lines.append([f"... and {count - rows} more", *[empty] * 4])
    total = sum(workload.sizes)
    lines.append(
        [
            f"all {show_count(count, 'tensor')}",
            model.Number(total, show_bytes(total)),
            _seconds(workload.forward_seconds),
            _seconds(workload.backward_seconds),
            empty,
        ]
    )
    caption = f"Optimizer's update: {show_seconds(workload.update)}."
    if workload.input:
        caption += f" Between steps: {show_seconds(workload.input)}."
    if workload.overhead:
        caption += f" Hooks: {show_seconds(workload.overhead)}."
    table = model.Table(
        title=workload.source or "workload",
        headings=("tensor", "gradient", "forward", "backward", "ready at"),
        rows=lines,
        caption=caption,
    )
    _print_table(console_for_tables(), table)


def print_report(report: model.Report, *, everything: bool = False) -> None:
    """Print a report's answer, its details and the summary sections.

    Args:
        report: The report. Charts and timelines are not shown on a terminal.
        everything: Print the tables and texts of the other sections too.
    """
    console = console_for_tables()
    for line in (report.answer, *report.details):
        console.print(Text(line))
    for section in report.sections:
        if everything or section.level == "summary":
            _print_section(console, section)


def print_table(table: model.Table) -> None:
    """Print one table."""
    _print_table(console_for_tables(), table)


def print_lines(lines: Sequence[str]) -> None:
    """Print one line, folded where needed, for each text."""
    console = console_for_tables()
    for line in lines:
        console.print(Text(line))


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
        # Do not wrap commands, so that they can be copied.
        console.print(Text(first + indented), soft_wrap=section.kind == "code")
    if section.caption:
        console.print(Text(section.caption))


def _print_table(console: Console, section: model.Table) -> None:
    numbers = section.number_columns()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    rows = [[_cell(one) for one in row] for row in section.rows]
    for column, heading in enumerate(section.headings):
        # A heading may be wrapped; a number, or a name from a list, may not.
        width = max((len(row[column]) for row in rows), default=0)
        if column in numbers:
            table.add_column(heading, justify="right", min_width=width)
        else:
            least = width if width <= _SHORT else None
            table.add_column(heading, overflow="fold", min_width=least)
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


def print_compressor_costs(
    rows: Sequence[CompressorCost | NotApplicable], workers: int
) -> None:
    """Print a row for each compressor that works for the model, and the reason for each that does not."""
    from paceline.cluster.profiling import CompressorCost, NotApplicable

    measured = [row for row in rows if isinstance(row, CompressorCost)]
    console = console_for_tables()
    if measured:
        first = measured[0]
        table = model.Table(
            title=f"Compression of this model's gradients, {show_count(workers, 'worker')}",
            headings=(
                *("compression", "ratio", "sent", "encode", "decode", "error"),
                *("error of sums", "pays below"),
            ),
            rows=[_cells_of(row) for row in measured],
        )
        _print_table(console, table)
        for sentence in (
            "ratio: bytes of the gradient over those of a worker's own compressed gradient. sent: "
            f"bytes that each worker sends for it; {show_bytes(first.dense_traffic_bytes)} without "
            "compression.",
            "error: norm of the mean's error over the gradient's, at one step; error of sums: the "
            f"same of sums over {first.steps} steps, with error feedback.",
            f"pays below B, where 2(n-1)/n S / B = encode + decode + sent / B: a ring all-reduce of "
            f"S = {show_bytes(first.dense_bytes)} among n = {workers}, against compression without "
            "overlap or start-up times. paceline compare includes both.",
        ):
            console.print(Text(sentence))
    for other in rows:
        if isinstance(other, NotApplicable):
            console.print(Text(f"{other.compression} does not suit: {other.reason}"))


def _cells_of(row: CompressorCost) -> list[model.Cell]:
    below = row.pays_below
    return [
        row.compression,
        model.Number(row.ratio, f"{row.ratio:.3g}"),
        model.Number(row.traffic_bytes, show_bytes(row.traffic_bytes)),
        _seconds(row.encode_seconds),
        _seconds(row.decode_seconds),
        model.Number(row.error, f"{row.error:.2g}"),
        model.Number(row.error_of_sum, f"{row.error_of_sum:.2g}"),
        model.Number(
            below,
            "nowhere" if below is None else show_rate(float(f"{8 * below:.3g}") / 8),
        ),
    ]


def console_for_tables() -> Console:
    """Return a console on standard output, wide enough if it is a file.

    Names of metrics, tensors and files are shown literally: ``acc[val]`` is not markup.
    """
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    return console
