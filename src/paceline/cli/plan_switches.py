"""``paceline plan-switches``: which switches to upgrade first, and what each is worth."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options as o
from paceline.cli.progress import progress
from paceline.cluster import Workload, load_cluster
from paceline.errors import UsageError
from paceline.units import bytes_per_second


def plan_switches(
    cluster: Annotated[
        Path,
        typer.Argument(metavar="CLUSTER", help="A cluster file.", show_default=False),
    ],
    workload: Annotated[
        str,
        typer.Option(
            metavar="WORKLOAD", help="What is trained: a file, or a built-in name."
        ),
    ] = "resnet50",
    rate: Annotated[
        str | None,
        typer.Option(
            help="What an upgraded switch takes in of all its workers together. "
            "\\[default: all that comes]"
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            help="Packets whose sums an upgraded switch has under way. \\[default: enough]"
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path(
        "paceline-runs"
    ),
    no_plots: Annotated[bool, typer.Option("--no-plots", help="Draw nothing.")] = False,
    json: o.Json = False,
) -> None:
    """Rank racks by the gain of an aggregating switch.

    For each number of them: the best order and the throughput of Rina, ATP, a hierarchical
    all-reduce and a ring, predicted.
    """
    described = load_cluster(cluster)
    if slots is not None and slots < 1:
        raise UsageError(f"--slots: expected 1 or more, got {slots}")
    times = Workload.load(workload)
    from paceline.tools.plan.switch_upgrades import Upgrade
    from paceline.tools.plan.switch_upgrades import plan_switches as make_plan
    from paceline.tools.plan.switch_upgrades_report import draw_purchase, print_purchase

    with progress(json, "pricing") as told:
        found = make_plan(
            described,
            times,
            Upgrade(_rate(rate), slots),
            lambda name, switches: told(f"{name}: switch {switches}"),
        )
        picture = None
        if not no_plots:
            picture = draw_purchase(found, output)
    print(f"network: {described.describe()}", file=sys.stderr)
    print(f"compute: {times.source or workload}", file=sys.stderr)
    if json:
        import msgspec

        print(msgspec.json.encode(found).decode())
        return
    print_purchase(found)
    if picture is not None:
        print(f"picture: {picture}")


def _rate(text: str | None) -> float | None:
    """Bytes a second."""
    if text is None:
        return None
    try:
        rate = bytes_per_second(text)
    except UsageError as error:
        raise UsageError(f"--rate: {error}") from None
    if not rate > 0:
        raise UsageError(f"--rate: expected a rate above zero, got {text!r}")
    return rate
