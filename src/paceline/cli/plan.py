"""``paceline plan``: which method is fastest here, of those that promise enough."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.cli import options as o
from paceline.errors import UsageError, unknown
from paceline.options import RunOptions

if TYPE_CHECKING:
    from paceline.interfaces import Quality
    from paceline.network import Cluster, Workload
    from paceline.plan.facts import Facts


def plan(
    script: o.Script,
    script_arguments: o.ScriptArguments = None,
    workers: o.Workers = None,
    link: o.Link = None,
    latency: o.Latency = None,
    server_hosts: o.ServerHosts = None,
    cluster: o.ClusterFile = None,
    workload: o.WorkloadFile = None,
    quality: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS",
            help="Only candidates of this class: exact, late, lossy, local or asynchronous; "
            "once or more. \\[default: all]",
        ),
    ] = None,
    budget: Annotated[
        float,
        typer.Option(
            help="About how many seconds of a core predictions may take; counted, and not "
            "timed, so that equal questions have equal answers."
        ),
    ] = 60.0,
    json: o.Json = False,
) -> None:
    """Predict every method for SCRIPT on a network, and say which are fastest.

    Each runs in virtual time, with tensors that stand in for the model's.
    """
    o.check_job(script, None)
    if not budget > 0:
        raise UsageError(f"--budget: expected more than zero, got {budget:g}")
    allowed = _classes(quality)
    described = o.make_cluster(cluster, workers, link, latency, server_hosts)
    from paceline.plan import plan as make_plan
    from paceline.plan.facts import facts_of
    from paceline.plan.tables import print_plan

    arguments = script_arguments or []
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        disable=not sys.stderr.isatty(),
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with o.standard_output_for_result(True) as true_output:
        with progress:
            task = progress.add_task(f"running {script}", total=None)
            facts = facts_of(str(script), arguments, o.SCRATCH)
            times = _workload(script, arguments, described, workload, facts)

            def told(spec: str, number: int, count: int) -> None:
                progress.update(task, description=spec, completed=number, total=count)

            found = make_plan(
                described,
                times,
                allowed=allowed,
                budget_seconds=budget,
                optimizer=facts.optimizer,
                refused=facts.refused,
                told=told,
            )
        print(f"network: {described.describe()}", file=sys.stderr)
        print(f"compute: {times.source or workload}", file=sys.stderr)
        if json:
            import msgspec

            with open(true_output, "w", closefd=False) as stream:
                print(msgspec.json.encode(found).decode(), file=stream)
    if not json:
        print_plan(found, str(script), arguments)


def _classes(wanted: list[str] | None) -> tuple[Quality, ...]:
    from paceline.interfaces import QUALITIES

    for name in wanted or []:
        if name not in QUALITIES:
            raise UsageError(unknown("class for --quality", name, QUALITIES))
    return tuple(q for q in QUALITIES if not wanted or q in wanted)


def _workload(
    script: Path,
    arguments: list[str],
    cluster: Cluster,
    named: str | None,
    facts: Facts,
) -> Workload:
    """A step's times: from the file that is named, or what the model stands for, or measured."""
    from paceline.cli.measured import profiled
    from paceline.network import Workload
    from paceline.worlds.virtual.profile import paced_workload

    if named is not None:
        found = Workload.load(named)
        facts.check(found, named)
        return found
    if facts.workload is not None:
        return facts.workload
    compute = o.make_compute(None, None, None, 0.0, None)
    options = RunOptions(method="bsp")
    measured = profiled(script, arguments, cluster, compute, options).workload
    if measured is None:
        measured = paced_workload(str(script), arguments)
    if measured is None:
        raise UsageError(
            f"{script} trains more than one model, or never calls the model itself: nobody "
            "knows how long a step of it takes. Give --workload FILE (paceline profile SCRIPT)"
        )
    return measured if measured.source else replace(measured, source=str(script))
