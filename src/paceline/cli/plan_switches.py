"""``paceline plan-switches``: rank racks by the gain of an aggregating switch."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options as o
from paceline.cli.progress import progress
from paceline.cluster import Workload, load_cluster
from paceline.errors import UsageError
from paceline.units import bytes_per_second

SWITCHES = "Upgraded switches"
"""A panel of ``--help``."""


def plan_switches(
    cluster: Annotated[
        Path,
        typer.Argument(metavar="CLUSTER", help="A cluster file.", show_default=False),
    ],
    workload: Annotated[
        str,
        typer.Option(
            metavar="WORKLOAD",
            help="What is trained: a workload file, or a built-in model.",
            rich_help_panel=o.COMPUTE,
        ),
    ] = "resnet50",
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="What an upgraded switch takes in of all its workers together. "
            "\\[default: no limit]",
            rich_help_panel=SWITCHES,
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Packets whose sums an upgraded switch holds. \\[default: no limit]",
            rich_help_panel=SWITCHES,
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Folder for the HTML report.",
            rich_help_panel=o.OUTPUT,
        ),
    ] = Path("paceline-switches"),
    no_html: o.NoHtml = False,
    json: o.Json = False,
) -> None:
    """Rank racks by the gain of an aggregating switch.

    For each number of upgraded switches: the best order, and the predicted throughput of Rina, ATP, a
    hierarchical all-reduce and a ring.
    """
    described = load_cluster(cluster)
    if slots is not None and slots < 1:
        raise UsageError(f"--slots: expected 1 or more, got {slots}")
    times = Workload.load(workload)
    upgrade_rate = _rate(rate)
    from paceline.tools.plan.switch_upgrades import (
        Upgrade,
        plan_upgrades,
        upgrade_report,
    )
    from paceline.tools.report.html import NAME, write_page
    from paceline.tools.report.terminal import print_report

    with progress(json, "predicting") as on_progress:
        found = plan_upgrades(
            described,
            times,
            Upgrade(upgrade_rate, slots),
            lambda name, switches: on_progress(f"{name}: switch {switches}"),
        )
    report = upgrade_report(
        found,
        described,
        title=str(cluster),
        command=shlex.join(["paceline", *sys.argv[1:]]),
    )
    print(f"network: {described.describe()}", file=sys.stderr)
    print(f"compute: {times.source or workload}", file=sys.stderr)
    if not no_html:
        page = write_page(output / NAME, report)
        print(f"page: {page}", file=sys.stderr)
    if json:
        import msgspec

        print(msgspec.json.encode(found).decode())
        return
    print_report(report)


def _rate(text: str | None) -> float | None:
    """Parse a rate in bytes per second."""
    if text is None:
        return None
    try:
        rate = bytes_per_second(text)
    except UsageError as error:
        raise UsageError(f"--rate: {error}") from None
    if not rate > 0:
        raise UsageError(f"--rate: expected a rate above zero, got {text!r}")
    return rate
