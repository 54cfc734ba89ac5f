"""A plan as tables for people."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.plan.found import Plan, Row
from paceline.plan.help import Helps
from paceline.plan.until import Reached
from paceline.plan.what_if import Point
from paceline.report.tables import console_for_tables
from paceline.units import show_bytes, show_rate, show_seconds

MEANS = {
    "exact": "DDP's result, to rounding",
    "late": "every gradient is applied once, at most a step late",
    "lossy": "codes; what they leave out is sent later, or small",
    "local": "workers' parameters differ between rounds",
    "asynchronous": "nobody waits for all; parameters are stale",
}
"""Each class, in a line."""


def print_plan(plan: Plan, script: str, arguments: Sequence[str] = ()) -> None:
    """The best of each class with the command that runs it, then all rows, then what was left
    out and why."""
    console = console_for_tables()
    console.print(_best(plan))
    for spec in (row.spec for row in plan.best.values()):
        console.print(Text(f"  {command(spec, script, arguments)}"), soft_wrap=True)
    console.print(_sentence(plan), soft_wrap=True)
    console.print(_all(plan))
    console.print(
        "step = compute + waits (exposed communication); of limit: over the shortest step of "
        "any exact mean; x one: samples a second over one machine's"
    )
    cut = sum(row.cut for row in plan.rows)
    if cut:
        console.print(
            f"~ {cut} in a short run only: too slow in their class, or --budget is spent"
        )
    if any(row.guessed for row in plan.rows):
        console.print(
            "what codes take is a guess from bytes where the workload does not say it: "
            "paceline profile SCRIPT --compression NAME measures it"
        )
    if plan.unlooked:
        console.print(f"{plan.unlooked} candidates not looked at: --budget is spent")
    _left_out(plan, console)


def print_helps(found: Helps) -> None:
    """What would help beside another method."""
    console = console_for_tables()
    for one in found.break_even:
        console.print(Text(f"{one.spec}: {one.words}"), soft_wrap=True)
    if not found.helps:
        return
    table = Table(title=f"what would help with {found.helps[0].spec}")
    table.add_column("do")
    for heading in ("step", "x one"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in found.helps:
        table.add_row(
            each.what, show_seconds(each.step_seconds), f"{each.speed_up:.2f}"
        )
    console.print(table)


def print_reached(found: Sequence[Reached], goal: str) -> None:
    """When each of the trained ones reached the goal."""
    table = Table(title=f"trained until {goal}, in virtual time")
    table.add_column("class")
    table.add_column("method", overflow="fold")
    for heading in ("after", "steps", "at the end"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        after = "never" if one.seconds is None else show_seconds(one.seconds)
        table.add_row(
            one.quality,
            Text(one.spec),
            "failed" if one.failed else after,
            "-" if one.steps is None else str(one.steps),
            "-" if one.last is None else f"{one.last:.4g}",
        )
    console = console_for_tables()
    console.print(table)
    for one in found:
        if one.failed:
            console.print(Text(f"{one.spec} failed: {one.failed}"), soft_wrap=True)


def print_points(points: Sequence[Point]) -> None:
    """The best of each class by workers and links: times one machine."""
    rates = sorted({point.rate for point in points})
    table = Table(title="times one machine, the best of each class")
    table.add_column("class")
    table.add_column("workers", justify="right")
    for rate in rates:
        table.add_column(show_rate(rate), justify="right", no_wrap=True)
    for quality in dict.fromkeys(point.quality for point in points):
        mine = [point for point in points if point.quality == quality]
        for workers in sorted({point.workers for point in mine if point.workers > 1}):
            by_rate = {p.rate: p.speed_up for p in mine if p.workers == workers}
            cells = [
                f"{by_rate[rate]:.2f}" if rate in by_rate else "-" for rate in rates
            ]
            table.add_row(quality, str(workers), *cells)
    console_for_tables().print(table)


def command(spec: str, script: str, arguments: Sequence[str] = ()) -> str:
    """What trains so."""
    words = ["paceline", "run", script, "--method", spec]
    return shlex.join([*words, *(["--", *arguments] if arguments else [])])


def _best(plan: Plan) -> Table:
    table = Table(title=f"best of each class: {plan.cluster}")
    table.add_column("class")
    table.add_column("method", overflow="fold")
    for heading in ("step", "waits", "of limit", "x one", "samples/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("promises")
    table.add_row(*_cells(plan.one_machine, plan, "-"), "")
    for quality, row in plan.best.items():
        table.add_row(*_cells(row, plan, quality), MEANS[quality])
    return table


def _cells(row: Row, plan: Plan, quality: str) -> list[str]:
    alone = row is plan.one_machine
    rate = row.samples_per_second
    return [
        quality,
        row.spec,
        show_seconds(row.step_seconds),
        show_seconds(row.exposed_seconds),
        "-" if alone else f"{row.to_limit:.2f}",
        f"{row.speed_up:.2f}",
        "-" if rate is None else f"{rate:.4g}",
    ]


def _all(plan: Plan) -> Table:
    table = Table(title=f"all {len(plan.rows)} candidates")
    table.add_column("method", overflow="fold")
    table.add_column("class")
    for heading in ("step", "compute", "waits", "sent", "of limit", "x one"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in plan.rows:
        table.add_row(
            Text(row.spec),
            row.quality,
            ("~ " if row.cut else "") + show_seconds(row.step_seconds),
            show_seconds(row.compute_seconds),
            show_seconds(row.exposed_seconds),
            show_bytes(row.bytes_sent),
            f"{row.to_limit:.2f}",
            f"{row.speed_up:.2f}",
        )
    return table


def _sentence(plan: Plan) -> Text:
    text = f"limit of an exact mean: {show_seconds(plan.limit_seconds)} a step"
    exact = plan.best.get("exact")
    if exact is not None:
        text += f"; one machine: {show_seconds(plan.one_machine.step_seconds)}; "
        text += (
            f"{plan.workers} workers are {exact.speed_up:.2f} of it with exact means"
        )
    return Text(text)


def _left_out(plan: Plan, console: Console) -> None:
    if not plan.left_out:
        return
    table = Table(title="left out")
    table.add_column("method", overflow="fold")
    table.add_column("why", overflow="fold")
    reasons: dict[str, list[str]] = {}
    for one in plan.left_out:
        reasons.setdefault(one.why, []).append(one.spec)
    for why, specs in reasons.items():
        table.add_row(Text(" ".join(specs)), Text(why))
    console.print(table)


def to_json(
    plan: Plan, found: Helps, points: Sequence[Point], reached: Sequence[Reached]
) -> str:
    """One object: the plan's fields, the *best* spec of each class, what would help, and *what_if* and
    *until*, empty where nobody asked."""
    content = msgspec.to_builtins(plan)
    content["best"] = {quality: row.spec for quality, row in plan.best.items()}
    content |= msgspec.to_builtins(found)
    content["what_if"] = msgspec.to_builtins(points)
    content["until"] = msgspec.to_builtins(reached)
    return msgspec.json.encode(content).decode()
