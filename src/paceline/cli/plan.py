"""``paceline plan``: which method is fastest here, of those that promise enough."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.cli import options as o
from paceline.cli.arguments import torchrun_words
from paceline.errors import UsageError, unknown
from paceline.network import load_cluster
from paceline.options import RunOptions
from paceline.worlds.scratch import scratch_folder

if TYPE_CHECKING:
    from paceline.interfaces import Quality
    from paceline.network import Cluster, Workload
    from paceline.plan.facts import Facts
    from paceline.worlds.virtual import ComputeModel

Told = Callable[[str, int | None, int | None], None]


def plan(
    context: typer.Context,
    script: o.Script,
    script_arguments: o.ScriptArguments = None,
    workers: o.Workers = None,
    link: o.Link = None,
    latency: o.Latency = None,
    server_hosts: o.ServerHosts = None,
    cluster: o.ClusterFile = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Measure the network now, as paceline probe does: torchrun's options are "
            "passed through, run the same command on each machine.",
        ),
    ] = False,
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
    until: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC=VALUE",
            help="Train with the best of each class, in virtual time, and rank them by the "
            "time to this value of a logged metric. \\[default: by seconds a step]",
        ),
    ] = None,
    what_if: Annotated[
        bool,
        typer.Option(
            "--what-if",
            help="Predict 1 to 64 workers with links of 0.1 to 25 Gbit/s, too.",
        ),
    ] = False,
    output: Annotated[Path, typer.Option(help="Folder for pictures.")] = Path(
        "paceline-plan"
    ),
    no_plots: Annotated[bool, typer.Option("--no-plots", help="Draw nothing.")] = False,
    json: o.Json = False,
) -> None:
    """Predict every method for SCRIPT on a network, and say which are fastest.

    Each runs in virtual time, with tensors that stand in for the model's.
    """
    o.check_job(script, None)
    if not budget > 0:
        raise UsageError(f"--budget: expected more than zero, got {budget:g}")
    allowed = _classes(quality)
    if probe:
        described = _probed(
            context, workers, cluster or link or latency or server_hosts
        )
        if described is None:
            return  # another machine's rank 0 has it
    else:
        for word in torchrun_words(context)[:1]:
            raise UsageError(f"{word} means nothing without --probe; leave it out")
        described = o.make_cluster(cluster, workers, link, latency, server_hosts)
    from paceline.plan import plan as make_plan
    from paceline.plan import tables
    from paceline.plan.facts import facts_of
    from paceline.plan.help import helps
    from paceline.plan.predict import Job
    from paceline.plan.until import Goal
    from paceline.plan.until import until as train_until
    from paceline.plan.what_if import what_if as make_points

    goal = None if until is None else Goal.read(until)
    arguments = script_arguments or []
    with o.standard_output_for_result(True) as true_output, _progress() as told:
        told(f"running {script}", None, None)
        facts = facts_of(str(script), arguments, o.SCRATCH)
        times, compute = _workload(script, arguments, described, workload, facts)
        found = make_plan(
            described,
            times,
            allowed=allowed,
            budget_seconds=budget,
            optimizer=facts.optimizer,
            refused=facts.refused,
            processes=min(2, os.cpu_count() or 1),
            told=told,
        )
        told("what would help", None, None)
        job = Job(cluster=described, workload=times, optimizer=facts.optimizer)
        more = helps(found, job)
        points = make_points(found, job, told=told) if what_if else []
        reached = []
        if goal is not None:
            best = {q: row.spec for q, row in found.best.items()}
            reached = train_until(
                best, goal, str(script), arguments, described, compute, o.SCRATCH, told
            )
        print(f"network: {described.describe()}", file=sys.stderr)
        print(f"compute: {times.source or workload}", file=sys.stderr)
        if not no_plots:
            from paceline.plan.pictures import (
                write_pictures,  # matplotlib takes a second
            )

            write_pictures(str(output), found, points)
            print(f"pictures: {output}/", file=sys.stderr)
        if json:
            with open(true_output, "w", closefd=False) as stream:
                print(tables.to_json(found, more, points, reached), file=stream)
    if not json:
        tables.print_plan(found, str(script), arguments)
        tables.print_helps(more)
        if points:
            tables.print_points(points)
        if until is not None:
            tables.print_reached(reached, until)


@contextmanager
def _progress() -> Iterator[Told]:
    """What is told is shown on standard error, where that is a terminal."""
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
    with progress:
        task = progress.add_task("", total=None)
        yield lambda what, number, count: progress.update(
            task, description=what, completed=number or 0, total=count
        )


def _classes(wanted: list[str] | None) -> tuple[Quality, ...]:
    from paceline.interfaces import QUALITIES

    for name in wanted or []:
        if name not in QUALITIES:
            raise UsageError(unknown("class for --quality", name, QUALITIES))
    return tuple(q for q in QUALITIES if not wanted or q in wanted)


def _probed(
    context: typer.Context, workers: int | None, described: object
) -> Cluster | None:
    """The network as it is found to be now."""
    if described is not None:
        raise UsageError(
            "--probe measures the network: leave --cluster, --link, --latency and "
            "--server-hosts out"
        )
    from paceline.cli.probe import probe

    with scratch_folder() as folder, o.standard_output_for_result(True):
        file = Path(folder) / "cluster.toml"
        probe(context, world="real", workers=workers, output=file, seconds=0.1)
        return load_cluster(file) if file.exists() else None


def _workload(
    script: Path,
    arguments: list[str],
    cluster: Cluster,
    named: str | None,
    facts: Facts,
) -> tuple[Workload, ComputeModel]:
    """A step's times: from the file that is named, or what the model stands for, or as the script
    paces itself, or measured; and what its training is charged in virtual time."""
    from paceline.cli.measured import profiled
    from paceline.worlds.virtual.profile import paced_workload

    compute = o.make_compute(named, None, None, 0.0, None)
    if compute.workload is not None:
        facts.check(compute.workload, compute.what)
        return compute.workload, compute
    if facts.workload is not None:
        return facts.workload, compute
    options = RunOptions(method="bsp")
    compute = profiled(script, arguments, cluster, compute, options)
    measured = compute.workload or paced_workload(str(script), arguments)
    if measured is None:
        raise UsageError(
            f"{script} trains more than one model, or never calls the model itself: nobody "
            "knows how long a step of it takes. Give --workload FILE (paceline profile SCRIPT)"
        )
    # What compressors take is guessed here, as it was for the plan.
    compute = replace(compute, kept=False)
    return (
        measured if measured.source else replace(measured, source=str(script))
    ), compute
