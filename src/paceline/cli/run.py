"""``paceline run``: real worker processes, by torchrun's own launcher."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options as o
from paceline.cli.arguments import torchrun_words
from paceline.cli.progress import status_lines
from paceline.cluster import load_cluster
from paceline.errors import UsageError
from paceline.run_options import RunOptions
from paceline.runtimes.temporary_folder import scratch_folder
from paceline.tools.report.run_files import forget_workers, merge_workers


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
    arguments = script_arguments or []
    o.check_job(script, method)
    o.check_report(report_to)
    if server is not None or rank is not None:
        o.check_lone_worker(survive, server, torchrun_options, snapshot, resume)
        from paceline.runtimes.real.external_worker import become

        options = RunOptions(
            method=method,
            steps=steps,
            seed=seed,
            report_to=report_to,
            json=json,
            records=None if records is None else str(records.resolve()),
            cluster=None if cluster is None else str(cluster.resolve()),
        )
        become(str(script), arguments, options, str(server), rank, workers)
    described = load_cluster(cluster) if cluster is not None else None
    workers = o.real_workers(workers, torchrun_options)
    if workers and not torchrun_options and o.NODES_VARIABLE not in os.environ:
        groups: tuple[int, ...] = ()
        if described is not None and described.workers == workers:
            groups = described.groups
        o.check_workers(method, workers, groups)
    from paceline.runtimes.real.launch import launch
    from paceline.runtimes.real.supervisor import Supervisor
    from paceline.runtimes.results import read_result

    if records is not None:
        forget_workers(str(records))
    with (
        scratch_folder() as scratch,
        o.standard_output_for_result(json) as output,
    ):
        result_file = Path(scratch) / "result.json"
        options = RunOptions(
            method=method,
            steps=steps,
            seed=seed,
            report_to=report_to,
            json=True,
            records=None if records is None else str(Path(records).resolve()),
            result=str(result_file),
            cluster=None if cluster is None else str(cluster.resolve()),
        )
        if survive:
            if torchrun_options:
                raise UsageError(
                    f"--survive has a launcher of its own, for one machine: leave out "
                    f"{' '.join(torchrun_options)}"
                )
            supervisor = Supervisor(
                o.REAL_WORKERS if workers is None else workers,
                str(script),
                arguments,
                options,
                snapshot,
                resume=resume,
            )
            with status_lines(json, "starting", steps, supervisor.standing):
                status = supervisor.run()
        elif snapshot is not None or resume:
            raise UsageError("--snapshot and --resume mean nothing without --survive")
        else:
            with status_lines(json, "starting", steps):
                status = launch(
                    workers, torchrun_options, str(script), arguments, options
                )
        if records is not None:
            merge_workers(str(records), "records")
        result = read_result(result_file)  # where rank 0 is, if anything was trained
        if result is not None:
            o.show(result, json, output)
    sys.exit(status)
