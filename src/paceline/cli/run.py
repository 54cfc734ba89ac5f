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
from paceline.cli.script_run import checked_job, script_run
from paceline.cluster import load_cluster
from paceline.errors import UsageError


def run(
    context: typer.Context,
    script: o.Script,
    script_arguments: o.ScriptArguments = None,
    workers: o.Processes = None,
    method: o.Method = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            help="The network that the job is on, as a cluster file: paceline probe measures "
            "one. \\[default: nothing is known of it]"
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
            help="Go on when a worker dies: it is started again. For methods whose server "
            "updates (see paceline list methods).",
        ),
    ] = False,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            help="With --survive: where the server keeps its parameters, to go on from "
            "when it dies. \\[default: a file of this job's own, which goes with it]"
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="With --snapshot: go on from the file that is there."
        ),
    ] = False,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="With --survive: be one worker of the server that `paceline serve --survive` has "
            "started there, so that whatever started this command may start it again. "
            "\\[default: server and workers are started here]",
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            help="With --server: which worker, from 0. \\[default: what the launcher's "
            "variables say]"
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """Run a script in real processes, and print what a step took.

    All of torchrun's options are passed through (--nnodes, --node-rank, --rdzv-endpoint,
    ...): for several machines, run the same command on each.
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
        o.check_lone_worker(survive, server, torchrun_options, snapshot, resume)
        from paceline.runtimes.real.external_worker import exec_as_worker

        job = replace(job, options=replace(job.options, json=json))
        exec_as_worker(job, str(server), rank, workers)
    if survive and torchrun_options:
        raise UsageError(
            f"--survive has a launcher of its own, for one machine: leave out "
            f"{' '.join(torchrun_options)}"
        )
    if not survive and (snapshot is not None or resume):
        raise UsageError("--snapshot and --resume mean nothing without --survive")
    described = load_cluster(cluster) if cluster is not None else None
    workers = o.real_workers(workers, torchrun_options)
    if workers and not torchrun_options and o.NODES_VARIABLE not in os.environ:
        groups: tuple[int, ...] = ()
        if described is not None and described.workers == workers:
            groups = described.groups
        o.check_workers(method, workers, groups)
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
