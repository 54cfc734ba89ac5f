"""Tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from paceline.network.workload import Workload
from paceline.report.result import Result
from paceline.units import show_bytes, show_seconds

_WIDTH_OF_FILES = 120
"""Columns where standard output is no terminal: nothing needs to be folded there."""


def columns(
    rows: Sequence[tuple[str, Result]],
) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row of cells per run: its name, where its time goes, its last
    metrics, and the ratio of its step time to the first row's."""
    metrics = list(dict.fromkeys(name for _, r in rows for name in r.metrics))
    first = rows[0][1].step_seconds
    headings = ["variant", "buckets", "step", "compute", "exposed", "sent", *metrics]
    if len(rows) > 1:
        headings.append("ratio")
    table = []
    for name, result in rows:
        step, sent = result.step_seconds, result.bytes_sent_per_worker
        cells = [
            name,
            str(result.buckets),
            _seconds(step),
            _seconds(result.compute_seconds),
            _seconds(result.exposed_communication_seconds),
            "-" if sent is None else show_bytes(sent),
        ]
        values = (result.metrics.get(metric) for metric in metrics)
        cells += ["-" if value is None else f"{value:.4g}" for value in values]
        if len(rows) > 1:
            cells.append(f"{step / first:.3f}" if step and first else "-")
        table.append(cells)
    return headings, table


def print_results(rows: Sequence[tuple[str, Result]]) -> None:
    """The table of `columns`, and what its figures were made with."""
    first = rows[0][1]
    headings, cells = columns(rows)
    table = Table(title=f"{first.workers} workers, {first.world} world")
    table.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    console = _console()
    console.print(table)
    console.print("step = compute + exposed (waiting for the network); sent per worker")


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
    _console().print(table)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH_OF_FILES)
