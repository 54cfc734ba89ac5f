"""A plan as tables for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cluster import Cluster
from paceline.tools.plan.estimates import DDP, Estimate, Plan
from paceline.tools.plan.headline import (
    command,
    commands,
    passed_over,
    reasons,
    slow_starts,
    summary,
    verdict,
)
from paceline.tools.plan.suggestions import Suggestions
from paceline.tools.plan.what_if import ScalingPoint
from paceline.tools.report.terminal import console_for_tables
from paceline.units import show_bytes, show_rate, show_seconds

STAND_IN = "examples/workload.py"
"""Trains a workload's tensors, and sleeps where a model computes."""

MEANS = {
    "exact": "DDP's result, to rounding",
    "delayed": "every gradient is applied once, at most a step late",
    "lossy": "codes; what they leave out is sent later, or small",
    "local": "workers' parameters differ between rounds",
    "asynchronous": "nobody waits for all; parameters are stale",
}
"""Each class, in a line."""


def print_plan(
    plan: Plan,
    found: Suggestions,
    cluster: Cluster,
    script: str,
    arguments: Sequence[str] = (),
    *,
    network: Sequence[str] | None = None,
    stand_in: str | None = None,
    everything: bool = False,
) -> None:
    """The verdict and the best of each class first, why and what would help, and last the commands
    that run the best. *network*: options that describe the network, to try one there first; *stand_in*: with
    this workload's stand-in, which takes no processors, where the script would take more than there are.
    *everything*: also all rows, and what was left out and why."""
    console = console_for_tables()
    answer = Text(verdict(plan, found), style="bold")
    console.print(answer)
    console.print(_best(plan))
    console.print(_promises(plan))
    if everything:
        _print_everything(plan, console)
    console.print(_grid(summary(plan, cluster, found)))
    for sentence in _small_print(plan, everything):
        console.print(Text(sentence))
    if everything:
        console.print(answer)
    lines = list(commands(plan, script, arguments).items())
    if lines:
        console.print("run one (on several machines with torchrun's options, on each):")
    width = max((len(consistency) for consistency, _ in lines), default=0)
    for consistency, line in lines:
        console.print(Text(f"  {consistency:{width}}  {line}"), soft_wrap=True)
    if lines and network is not None:
        row = next(iter(plan.recommended.values()))
        where = "on this machine"
        if stand_in is not None:
            script, arguments = STAND_IN, [stand_in, "--steps", "100"]
            where += ", whose cores are too few for the script's own computing"
        trial = command(row.spec, script, arguments, verb="emulate", options=network)
        console.print(Text(f"try one first, {where}: {trial}"), soft_wrap=True)


def _promises(plan: Plan) -> Text:
    return Text(
        "; ".join(
            f"{consistency}: {MEANS[consistency]}" for consistency in plan.fastest
        )
    )


def _grid(lines: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, text in lines:
        table.add_row(Text(name), Text(text))
    return table


def _print_everything(plan: Plan, console: Console) -> None:
    console.print(_all(plan))
    console.print(
        "step = compute + exposed communication. vs. bound: over the shortest step of any exact "
        "average. vs. 1 machine: samples per second relative to one machine"
    )
    if plan.infeasible:
        table = Table(title="left out")
        table.add_column("method", overflow="fold")
        table.add_column("why", overflow="fold")
        for why, specs in reasons(plan).items():
            table.add_row(Text(" ".join(specs)), Text(why))
        console.print(table)


def _small_print(plan: Plan, everything: bool) -> list[str]:
    """How many there were, and what of them is a guess."""
    if not plan.estimates:
        return []
    text = f"{len(plan.estimates)} candidates ran"
    if plan.infeasible:
        text += f"; {len(plan.infeasible)} cannot run here"
    said = [text + ("" if everything else ": --all lists each, and why")]
    slow = sum(row.rejected for row in plan.estimates)
    if slow:
        said.append(f"{slow} of them ran briefly (~): too slow in their class")
    hopeful = sum(
        row.fidelity == "short" and not row.rejected for row in plan.estimates
    )
    if hopeful:
        said.append(
            f"{hopeful} of them ran briefly (~): candidates' part of --budget had no time "
            "for more"
        )
    if plan.skipped:
        said.append(
            f"{plan.skipped} more were not looked at: candidates' part of --budget is spent"
        )
    if passed_over(plan):
        said.append(passed_over(plan))
    if slow_starts(plan):
        said.append(slow_starts(plan))
    if any(row.estimated_compression for row in plan.estimates):
        said.append(
            "what codes take is an estimate from bytes where the workload does not say it: "
            "paceline profile SCRIPT --compression NAME measures it"
        )
    return said


def print_points(points: Sequence[ScalingPoint]) -> None:
    """The best of each class by workers and links: times one machine, and what of each worker is left."""
    rates = sorted({point.rate for point in points})
    table = Table(
        title="what if: times one machine (efficiency), the best of each class"
    )
    table.add_column("consistency")
    table.add_column("workers", justify="right")
    for rate in rates:
        table.add_column(show_rate(rate), justify="right", no_wrap=True)
    for consistency in dict.fromkeys(point.consistency for point in points):
        mine = [point for point in points if point.consistency == consistency]
        name: str = consistency
        for workers in sorted({point.workers for point in mine if point.workers > 1}):
            by_rate = {p.rate: p for p in mine if p.workers == workers}
            cells = [
                f"{at.speedup:.2f} ({at.efficiency:.0%})"
                if (at := by_rate.get(rate))
                else "-"
                for rate in rates
            ]
            table.add_row(name, str(workers), *cells)
            name = ""
        table.add_section()
    console = console_for_tables()
    console.print(table)
    console.print(
        "each worker has a batch as here, all stand at one switch; short runs, so that a plan of one "
        "point can be a little faster"
    )


def _best(plan: Plan) -> Table:
    table = Table(title=f"best of each class: {plan.cluster}")
    table.add_column("consistency")
    table.add_column("method", overflow="fold")
    ddp = plan.estimate(DDP)
    headings = ["step", "exposed", "vs. bound", "vs. 1 machine"]
    headings += ["vs. DDP"] if ddp is not None else []
    headings += ["samples/s"] if plan.baseline.batch is not None else []
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row(*_cells(plan.baseline.single, plan, "-"))
    if ddp is not None and ddp is not plan.recommended.get("exact"):
        table.add_row(*_cells(ddp, plan, "DDP"))
    for consistency, row in plan.recommended.items():
        table.add_row(*_cells(row, plan, consistency))
    return table


def _cells(row: Estimate, plan: Plan, consistency: str) -> list[str]:
    alone, ddp = row is plan.baseline.single, plan.estimate(DDP)
    cells = [
        consistency,
        row.spec,
        ("~ " if row.fidelity == "short" else "") + show_seconds(row.step_seconds),
        show_seconds(row.exposed_seconds),
        "-" if alone else f"{plan.baseline.bound_ratio(row):.2f}",
        f"{plan.baseline.speedup(row):.2f}",
    ]
    if ddp is not None:
        over = ddp.step_seconds / row.step_seconds
        cells.append("-" if alone else f"{over:.2f}")
    if plan.baseline.batch is not None:
        cells.append(f"{plan.baseline.samples_per_second(row) or math.nan:.4g}")
    return cells


def _all(plan: Plan) -> Table:
    table = Table(title=f"all {len(plan.estimates)} candidates")
    table.add_column("method", overflow="fold")
    table.add_column("consistency")
    for heading in ("step", "compute", "exposed", "sent", "vs. bound", "vs. 1 machine"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in plan.estimates:
        table.add_row(
            Text(row.spec),
            row.consistency,
            ("~ " if row.fidelity == "short" else "") + show_seconds(row.step_seconds),
            show_seconds(row.compute_seconds),
            show_seconds(row.exposed_seconds),
            show_bytes(row.bytes_sent),
            f"{plan.baseline.bound_ratio(row):.2f}",
            f"{plan.baseline.speedup(row):.2f}",
        )
    return table


def to_json(
    plan: Plan,
    found: Suggestions,
    points: Sequence[ScalingPoint],
    script: str = "SCRIPT",
    arguments: Sequence[str] = (),
) -> str:
    """One object: the plan's fields, the *fastest* spec of each class, the *recommended* one and the *commands* that run it, the
    *verdict*, what would help, and *scaling*, empty where nobody asked. Each estimate has *speedup*, *bound_ratio* and *samples_per_second* with it."""
    content = msgspec.to_builtins(plan)
    for one, estimate in zip(content["estimates"], plan.estimates, strict=True):
        one["speedup"] = plan.baseline.speedup(estimate)
        one["bound_ratio"] = plan.baseline.bound_ratio(estimate)
        one["samples_per_second"] = plan.baseline.samples_per_second(estimate)
    content["verdict"] = verdict(plan, found)
    content["fastest"] = {
        consistency: row.spec for consistency, row in plan.fastest.items()
    }
    content["recommended"] = {
        consistency: row.spec for consistency, row in plan.recommended.items()
    }
    content["commands"] = commands(plan, script, arguments)
    content |= msgspec.to_builtins(found)
    content["scaling"] = msgspec.to_builtins(points)
    return msgspec.json.encode(content).decode()
