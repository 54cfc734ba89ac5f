"""What methods gain, as a table: over one machine, over DDP, and until a metric is reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from paceline.runtimes.results import FailedRun, Outcome
from paceline.tools.compare.goal import Goal
from paceline.tools.report.terminal import console_for_tables
from paceline.units import show_seconds


@dataclass(frozen=True)
class Gain:
    """One run of *spec*, which is there as *role*: a class, or what stands for it. *planned*: seconds a step
    that were predicted. *reached* and *steps*: training until the goal; None where it never came to
    it, or nobody asked."""

    role: str
    spec: str
    outcome: Outcome
    planned: float | None = None
    reached: float | None = None
    steps: int | None = None


def gains(
    rows: Sequence[Gain], workers: int, one_machine: float, goal: Goal | None
) -> tuple[list[str], list[list[str]]]:
    """Headings, and a cell for each in every row. *one_machine*: seconds in which it takes as many
    samples as one worker in a step. The first row of *rows* is what the others are compared
    with beside it: where it has reached the goal, so has one machine after as many steps, as it
    learns the same."""
    results = [row.outcome for row in rows if not isinstance(row.outcome, FailedRun)]
    metrics = list(dict.fromkeys(name for one in results for name in one.metrics))
    if goal is not None:
        metrics = [goal.metric]
    headings = [
        "consistency",
        "method",
        "step",
        "predicted",
        "vs. 1 machine",
        "vs. DDP",
        *metrics,
    ]
    if goal is not None:
        headings.append(f"to {goal}")
    base = _step(rows[0].outcome)
    one = one_machine * workers
    first = ["-", "one machine", show_seconds(one), "-", "1.00", _over(base, one)]
    table = [[*first, *["-"] * (len(headings) - len(first))]]
    if rows[0].steps is not None:
        table[0][-1] = f"{show_seconds(rows[0].steps * one)} ({rows[0].steps} steps)"
    for row in rows:
        step = _step(row.outcome)
        cells = [
            row.role,
            row.spec,
            "failed" if isinstance(row.outcome, FailedRun) else _seconds(step),
            _seconds(row.planned),
            _over(one, step),
            _over(base, step),
        ]
        if isinstance(row.outcome, FailedRun):
            cells += ["-"] * len(metrics)
        else:
            values = (row.outcome.metrics.get(name) for name in metrics)
            cells += ["-" if value is None else f"{value:.4g}" for value in values]
        if goal is not None:
            failed = isinstance(row.outcome, FailedRun)
            missed = "-" if failed else "never"
            after = missed
            if row.reached is not None:
                after = f"{show_seconds(row.reached)} ({row.steps} steps)"
            cells.append(after)
        table.append(cells)
    return headings, table


def print_gains(
    rows: Sequence[Gain],
    workers: int,
    one_machine: float,
    goal: Goal | None,
    title: str,
) -> None:
    """The table of `gains`, and below it what failed and why, and whose figures tell little."""
    headings, cells = gains(rows, workers, one_machine, goal)
    table = Table(title=title)
    table.add_column(headings[0])
    table.add_column(headings[1], overflow="fold")
    for heading in headings[2:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for line in cells:
        table.add_row(*(Text(cell) for cell in line))
    console = console_for_tables()
    console.print(table)
    console.print(
        "step: time for one global batch, averaged over steady-state steps. One machine is computed: "
        "it processes the same global batch sequentially. predicted: steady-state step time"
    )
    for row in rows:
        for note in row.outcome.cautions:
            console.print(Text(f"{row.spec}: {note}"), soft_wrap=True)


def _step(outcome: Outcome) -> float | None:
    return None if isinstance(outcome, FailedRun) else outcome.step_seconds


def _seconds(value: float | None) -> str:
    return "-" if value is None else show_seconds(value)


def _over(mine: float | None, theirs: float | None) -> str:
    return f"{mine / theirs:.2f}" if mine and theirs else "-"
