"""Prints a probe's results as tables for the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from paceline.cluster.probe.infer import ProbeResult, fit, infer_cluster
from paceline.units import show_bytes, show_rate, show_seconds

MAX_COLUMNS = 12
"""The most hosts that a matrix shows; the JSON has all of them."""


def print_findings(findings: ProbeResult) -> None:
    """Print matrices of goodput and latency, the all-reduce curve and its fit."""
    console = Console() if Console().is_terminal else Console(width=120)
    leaders = sorted({findings.hosts.index(host) for host in findings.hosts})
    for title, matrix, show in (
        ("goodput, from row to column", findings.goodput, show_rate),
        ("one-way time of an empty message", findings.latency, show_seconds),
    ):
        console.print(_matrix(title, leaders[:MAX_COLUMNS], matrix, show))
    if len(leaders) > MAX_COLUMNS:
        console.print(
            f"(the first {MAX_COLUMNS} of {len(leaders)} hosts; --json has all)"
        )
    curve = Table(title=f"all-reduce of {findings.workers} workers")
    for heading in ("size", "alone", "spread", "two at a time", "processor time"):
        curve.add_column(heading, justify="right")
    for size in findings.all_reduce:
        curve.add_row(
            show_bytes(size.bytes),
            show_seconds(size.seconds),
            show_seconds(size.spread),
            show_seconds(size.pair_seconds),
            show_seconds(size.core_seconds),
        )
    console.print(curve)
    console.print(comment_on(findings))


def comment_on(findings: ProbeResult) -> str:
    """Return the comment above the cluster file: the all-reduce's fit and its range."""
    lines = [
        f"measured by paceline probe: {findings.workers} workers, {findings.runtime} runtime"
    ]
    if findings.all_reduce:
        start_up, slope = fit(findings.all_reduce)
        first, last = findings.all_reduce[0].bytes, findings.all_reduce[-1].bytes
        lines.append(
            f"all-reduce: {show_seconds(start_up)} + {slope:.4g} s a byte, fitted from "
            f"{show_bytes(first)} to {show_bytes(last)}"
        )
        cluster = infer_cluster(findings)
        if cluster.processor is not None:
            lines.append(
                f"a message: {show_seconds(cluster.racks[0].latency)} of latency, "
                f"{cluster.processor.describe()}"
            )
    return "\n".join(lines)


def _matrix(
    title: str,
    leaders: Sequence[int],
    matrix: Sequence[Sequence[float]],
    show: Callable[[float], str],
) -> Table:
    table = Table(title=title)
    table.add_column("worker")
    for j in leaders:
        table.add_column(str(j), justify="right")
    for i in leaders:
        table.add_row(str(i), *("" if i == j else show(matrix[i][j]) for j in leaders))
    return table
