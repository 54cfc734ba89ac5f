"""``paceline doctor``: find the causes of slow steps."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli import options as o
from paceline.cli.arguments import LaunchCommand, torchrun_words
from paceline.cli.progress import progress, status_lines
from paceline.cli.script_plan import processes
from paceline.cli.script_run import check_job, check_workers
from paceline.errors import PacelineError, UsageError
from paceline.run_options import CLUSTER_VARIABLE, RunOptions
from paceline.runtimes.results import standard_output_for_result
from paceline.runtimes.temporary_folder import scratch_folder

if TYPE_CHECKING:
    from paceline.cluster import Cluster
    from paceline.tools.doctor import Evidence
    from paceline.tools.doctor.measure import ExaminedJob
    from paceline.tools.report.model import Report

NO_ANSWER = 2
"""Exit status if doctor itself failed: 0 is healthy, 1 means faults."""


class DoctorCommand(LaunchCommand):
    """Exits with 2 on errors, as 1 means faults."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _no_answer():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _no_answer():
            return super().invoke(ctx)


@contextmanager
def _no_answer() -> Iterator[None]:
    try:
        yield
    except PacelineError as error:
        error.exit_status = NO_ANSWER
        raise


def doctor(
    context: typer.Context,
    script: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SCRIPT]",
            help="A training script. Without one, network and hosts are measured.",
            show_default=False,
        ),
    ] = None,
    script_arguments: o.ScriptArguments = None,
    runtime: Annotated[
        Literal["real", "emulated", "simulated"],
        typer.Option(help="Runtime to examine."),
    ] = "real",
    workers: o.WorkersOrProcesses = None,
    link: o.Link = None,
    latency: o.Latency = None,
    dedicated_servers: o.DedicatedServers = None,
    cluster: o.ClusterFile = None,
    method: o.Method = None,
    steps: Annotated[int, typer.Option(help="Steps of SCRIPT to watch.")] = 24,
    workload: o.WorkloadFile = None,
    seconds: Annotated[
        float, typer.Option(help="Seconds per pair of hosts and direction.")
    ] = 0.1,
    output: Annotated[
        Path, typer.Option(help="Folder for the HTML report.", rich_help_panel=o.OUTPUT)
    ] = Path("paceline-doctor"),
    no_html: o.NoHtml = False,
    json: o.Json = False,
) -> None:
    """Find what slows a job down: network, hosts, input or method.

    In the real runtime torchrun's options are passed through: run the same command on each
    machine. Exit status: 0 healthy, 1 faults, 2 error.
    """
    if not seconds > 0:
        raise UsageError(f"--seconds: expected more than zero, got {seconds:g}")
    if script is not None:
        check_job(script, method)
    from paceline.tools.doctor.measure import ExaminedJob

    job = ExaminedJob(
        script=None if script is None else str(script),
        arguments=script_arguments or [],
        options=RunOptions(method=method, steps=steps, tells=False),
        seconds=seconds,
    )
    network = {
        "--link": link,
        "--latency": latency,
        "--dedicated-servers": dedicated_servers,
        "--cluster": cluster,
        "--workload": workload,
    }
    with standard_output_for_result(True) as true_output:
        if runtime == "real":
            evidence = _real(job, torchrun_words(context), workers, network, json)
        else:
            for word in torchrun_words(context)[:1]:
                raise UsageError(
                    f"{word} means nothing in the {runtime} runtime; leave it out"
                )
            hosts = o.make_cluster(cluster, workers, link, latency, dedicated_servers)
            if hosts.workers < 2:
                raise UsageError(
                    "one worker waits for no other: expected --workers 2, or more"
                )
            check_workers(method, hosts.workers, hosts.groups)
            examine = _emulated if runtime == "emulated" else _simulated
            evidence = examine(job, hosts, workload, json)
        if evidence is None:
            return  # Rank 0 is on another machine, and has the evidence.
        if script is not None and evidence.workers[0].step is None:
            print(
                f"paceline: {script} took no step of an optimizer from paceline.distribute: "
                "only network and hosts were examined",
                file=sys.stderr,
            )
        from paceline.tools.doctor import diagnose
        from paceline.tools.doctor.report import doctor_report, plan_command, to_json
        from paceline.tools.report.terminal import print_report

        with progress(json, "predicting what each fix saves"):
            diagnosis = diagnose(evidence, processes=processes())
        command = shlex.join(["paceline", *sys.argv[1:]])
        following = plan_command(
            evidence, torchrun_words(context), {"--workers": workers, **network}
        )
        report = doctor_report(diagnosis, evidence, command, following)
        with (
            open(true_output, "w", closefd=False) as stream,
            redirect_stdout(stream),
        ):
            if json:
                print(to_json(diagnosis, evidence))
            else:
                print_report(report)
        if not no_html:
            _write_page(output, report)
    sys.exit(0 if diagnosis.healthy else 1)


def _write_page(folder: Path, report: Report) -> None:
    """Write the page; a folder that is not writable is not an error."""
    from paceline.tools.report.html import NAME, write_page

    try:
        page = write_page(folder / NAME, report)
        print(f"page: {page}", file=sys.stderr)
    except UsageError as error:
        print(f"paceline: {error}", file=sys.stderr)


def _real(
    job: ExaminedJob,
    words: Sequence[str],
    workers: int | None,
    network: Mapping[str, object],
    json: bool,
) -> Evidence | None:
    """Measure processes on this machine, or on all machines that torchrun's *words* name."""
    from paceline.runtimes.real.launch import launch

    for name, value in network.items():
        if value is not None:
            raise UsageError(
                f"{name} describes the network, which doctor measures in the real runtime. Leave it out, "
                "or give --runtime emulated or simulated"
            )
    os.environ.pop(CLUSTER_VARIABLE, None)  # The cluster is to be measured.
    workers = o.real_workers(workers, words)
    if workers == 1 and not words and o.NODES_VARIABLE not in os.environ:
        raise UsageError(
            "one worker waits for no other: expected --workers 2 or more on this "
            "machine, or torchrun's options on each of several (--nnodes 2 --node-rank 0 "
            "--master-addr HOST ...); or --runtime emulated or simulated"
        )
    with scratch_folder() as scratch:
        file = Path(scratch) / "evidence.json"
        with status_lines(json, "measuring", job.options.steps):
            status = launch(job.program(file), workers, words)
        return _read(job, file, status)


def _emulated(
    job: ExaminedJob, cluster: Cluster, workload: str | None, json: bool
) -> Evidence | None:
    from paceline.runtimes.emulated.launch import EmulatedJob
    from paceline.runtimes.emulated.network import EmulatedNetwork

    with scratch_folder() as scratch, EmulatedNetwork(cluster) as network:
        file = Path(scratch) / "evidence.json"
        for warning in network.warnings:
            print(f"paceline: {warning}", file=sys.stderr)
        with status_lines(json, "measuring", job.options.steps):
            status = EmulatedJob(job.program(file, workload), network, "first").run()
        return _read(job, file, status)


def _read(job: ExaminedJob, file: Path, status: int) -> Evidence | None:
    """Rank 0's evidence; None if rank 0 is on another machine."""
    if status:
        sys.exit(status if status > 128 else NO_ANSWER)  # Signals keep their status.
    return job.read(file)


def _simulated(
    job: ExaminedJob, cluster: Cluster, workload: str | None, json: bool
) -> Evidence | None:
    compute = o.make_compute(workload, None, None, 0.0, None)
    # A script prints its own progress.
    with nullcontext() if job.script else progress(json, "measuring the links"):
        return job.simulate(cluster, compute, o.SCRATCH)
