"""Tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from paceline.report.result import Result
from paceline.units import show_bytes, show_seconds

_WIDTH_OF_FILES = 120
"""Columns where standard output is no terminal: nothing needs to be folded there."""


def print_results(rows: Sequence[tuple[str, Result]]) -> None:
    """One row per run: its name, where its time goes, its last metrics, and the ratio of
    its step time to the first row's."""
    metrics = list(dict.fromkeys(name for _, r in rows for name in r.metrics))
    first = rows[0][1].step_seconds
    table = Table(title=f"{rows[0][1].workers} workers, {rows[0][1].world} world")
    table.add_column("variant", overflow="fold")
    for heading in ("step", "compute", "exposed", "sent"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in metrics:
        table.add_column(name, justify="right", no_wrap=True)
    if len(rows) > 1:
        table.add_column("ratio", justify="right", no_wrap=True)
    for name, result in rows:
        cells = [
            name,
            _seconds(result.step_seconds),
            _seconds(result.compute_seconds),
            _seconds(result.exposed_communication_seconds),
            "-"
            if result.bytes_sent_per_worker is None
            else show_bytes(result.bytes_sent_per_worker),
        ]
        cells += [
            "-" if (value := result.metrics.get(m)) is None else f"{value:.4g}"
            for m in metrics
        ]
        if len(rows) > 1:
            step = result.step_seconds
            cells.append(f"{step / first:.3f}" if step and first else "-")
        table.add_row(*cells)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_OF_FILES)
    console.print(table)
    console.print("step = compute + exposed (waiting for the network); sent per worker")


def _seconds(value: float | None) -> str:
    return "-" if value is None else show_seconds(value)
