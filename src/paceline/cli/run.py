"""``paceline run``: real worker processes, by torchrun's own launcher."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options as o
from paceline.cli.arguments import torchrun_words
from paceline.cli.progress import status_lines
from paceline.cli.script_run import (
    check_lone_worker,
    check_workers,
    checked_job,
    script_run,
)
from paceline.cluster import load_cluster
from paceline.errors import UsageError

SURVIVING = "Surviving failures"


def run(
    context: typer.Context,
    script: o.Script,
    script_arguments: o.ScriptArguments = None,
    workers: o.Processes = None,
    method: o.Method = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Cluster file of the network that the job runs on: paceline probe writes one. "
            "\\[default: none]",
            rich_help_panel=o.NETWORK,
        ),
    ] = None,
    steps: o.Steps = None,
    seed: o.Seed = None,
    records: o.Records = None,
    report_to: o.ReportTo = None,
    survive: Annotated[
        bool,
        typer.Option(
            "--survive",
            help="Restart workers that die, and go on. For methods whose server updates (see "
            "paceline list methods).",
            rich_help_panel=SURVIVING,
        ),
    ] = False,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --survive: file of the server's parameters, from which it goes on when "
            "it dies. \\[default: a temporary file]",
            rich_help_panel=SURVIVING,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="With --snapshot: go on from the file that is there.",
            rich_help_panel=SURVIVING,
        ),
    ] = False,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="With --survive: run one worker, of the server that `paceline serve --survive` "
            "runs there. A cluster manager may restart this command. \\[default: start server and "
            "workers here]",
            rich_help_panel=SURVIVING,
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --server: number of this worker, from 0. \\[default: from the launcher's "
            "variables]",
            rich_help_panel=SURVIVING,
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """Train in real processes. torchrun's options are passed through.

    For several machines, run the same command on each, with --nnodes, --node-rank, --rdzv-endpoint
    and the others of torchrun. The result says what a step took.
    """
    torchrun_options = torchrun_words(context)
    job = checked_job(
        script,
        script_arguments,
        method=method,
        steps=steps,
        seed=seed,
        records=records,
        report_to=report_to,
        cluster=cluster,
    )
    if server is not None or rank is not None:
        check_lone_worker(survive, server, torchrun_options, snapshot, resume)
        from paceline.runtimes.real.external_worker import exec_as_worker

        job = replace(job, options=replace(job.options, json=json))
        exec_as_worker(job, str(server), rank, workers)
    if survive and torchrun_options:
        raise UsageError(
            f"--survive has a launcher of its own, for one machine: leave out "
            f"{' '.join(torchrun_options)}"
        )
    if not survive and (snapshot is not None or resume):
        raise UsageError(
            "--snapshot and --resume mean nothing without --survive; add --survive, or leave them out"
        )
    described = load_cluster(cluster) if cluster is not None else None
    workers = o.real_workers(workers, torchrun_options)
    if workers and not torchrun_options and o.NODES_VARIABLE not in os.environ:
        groups: tuple[int, ...] = ()
        if described is not None and described.workers == workers:
            groups = described.groups
        check_workers(method, workers, groups)
    from paceline.runtimes.real.launch import launch
    from paceline.runtimes.real.supervisor import Supervisor

    with script_run(job, json) as run:
        if survive:
            supervisor = Supervisor(
                run.job,
                o.REAL_WORKERS if workers is None else workers,
                snapshot,
                resume=resume,
            )
            with status_lines(json, "starting", steps, supervisor.progress):
                run.status = supervisor.run()
        else:
            with status_lines(json, "starting", steps):
                run.status = launch(run.job, workers, torchrun_options)
