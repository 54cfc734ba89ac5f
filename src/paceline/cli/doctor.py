"""``paceline doctor``: find what slows a training down."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli import options as o
from paceline.cli.arguments import LaunchCommand, torchrun_words
from paceline.cli.progress import progress, status_lines
from paceline.cli.script_plan import processes
from paceline.errors import PacelineError, UsageError
from paceline.run_options import CLUSTER_VARIABLE, RunOptions, ScriptJob
from paceline.runtimes.temporary_folder import scratch_folder

if TYPE_CHECKING:
    from paceline.cluster import Cluster
    from paceline.tools.doctor import Diagnosis, Evidence
    from paceline.tools.report.model import Report

SCRIPT = str(Path(__file__).parent.parent / "tools" / "doctor" / "__main__.py")
NO_ANSWER = 2
"""Exit status where the examination failed: 0 is healthy, 1 are faults."""


class DoctorCommand(LaunchCommand):
    """Exits with 2 on errors, as 1 means that there are faults."""

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
        o.check_job(script, method)
    job = _Job(
        script=script,
        arguments=script_arguments or [],
        seconds=seconds,
        options=RunOptions(method=method, steps=steps, tells=False),
        json=json,
    )
    with o.standard_output_for_result(True) as true_output:
        if runtime == "real":
            described = (link, latency, dedicated_servers, cluster, workload)
            evidence = job.real(context, workers, described)
        else:
            for word in torchrun_words(context)[:1]:
                raise UsageError(f"{word} means nothing in the {runtime} runtime")
            network = o.make_cluster(cluster, workers, link, latency, dedicated_servers)
            if network.workers < 2:
                raise UsageError(
                    "one worker has nobody to wait for: expected --workers 2, or more"
                )
            o.check_workers(method, network.workers, network.groups)
            run = job.emulated if runtime == "emulated" else job.simulated
            evidence = run(network, workload)
        if evidence is None:
            return  # another machine's rank 0 has it
        if script is not None and evidence.workers[0].step is None:
            print(
                f"paceline: {script} took no step of an optimizer from paceline.distribute: "
                "only network and hosts were examined",
                file=sys.stderr,
            )
        from paceline.tools.doctor import diagnose
        from paceline.tools.doctor.report import doctor_report
        from paceline.tools.report.terminal import print_report

        with progress(json, "predicting what each fix saves"):
            diagnosis = diagnose(evidence, processes=processes())
        command = shlex.join(["paceline", *sys.argv[1:]])
        options = {
            "--workers": workers,
            "--link": link,
            "--latency": latency,
            "--dedicated-servers": dedicated_servers,
            "--cluster": cluster,
            "--workload": workload,
        }
        following = _next_command(evidence, context, options)
        report = doctor_report(diagnosis, evidence, command, following)
        with (
            open(true_output, "w", closefd=False) as stream,
            redirect_stdout(stream),
        ):
            if json:
                print(_json(diagnosis, evidence))
            else:
                print_report(report)
        if not no_html:
            _write_page(output, report)
    sys.exit(0 if diagnosis.healthy else 1)


def _next_command(
    evidence: Evidence, context: typer.Context, options: Mapping[str, object]
) -> str:
    """What to run where nothing is wrong."""
    if not evidence.script:
        return "paceline doctor SCRIPT (it also measures where each step goes)"
    words = ["paceline", "plan", evidence.script]
    if evidence.runtime == "real":
        words += ["--probe", *torchrun_words(context)]
    for name, value in options.items():
        words += [] if value is None else [name, str(value)]
    return shlex.join(
        [*words, *(["--", *evidence.arguments] if evidence.arguments else [])]
    )


def _write_page(folder: Path, report: Report) -> None:
    """Write the page; a folder that cannot be written is no reason to fail."""
    from paceline.tools.report.html import NAME, write_page

    try:
        page = write_page(folder / NAME, report)
        print(f"page: {page}", file=sys.stderr)
    except UsageError as error:
        print(f"paceline: {error}", file=sys.stderr)


def _json(diagnosis: Diagnosis, evidence: Evidence) -> str:
    import msgspec

    everything = msgspec.to_builtins(diagnosis) | {
        "evidence": msgspec.to_builtins(evidence)
    }
    return msgspec.json.encode(everything).decode()


class _Job:
    """The job that is examined, in any runtime."""

    def __init__(
        self,
        script: Path | None,
        arguments: list[str],
        seconds: float,
        options: RunOptions,
        json: bool,
    ) -> None:
        self._script, self._arguments = script, arguments
        self._seconds, self._options = seconds, options
        self._json = json

    def real(
        self, context: Any, workers: int | None, described: tuple[object, ...]
    ) -> Evidence | None:
        from paceline.runtimes.real.launch import launch

        names = (
            "--link",
            "--latency",
            "--dedicated-servers",
            "--cluster",
            "--workload",
        )
        for name, value in zip(names, described, strict=True):
            if value is not None:
                raise UsageError(
                    f"{name} describes what this measures: leave it out, or say --runtime "
                    "emulated or simulated"
                )
        os.environ.pop(CLUSTER_VARIABLE, None)  # the cluster is to be measured
        words = torchrun_words(context)
        workers = o.real_workers(workers, words)
        if workers == 1 and not words and o.NODES_VARIABLE not in os.environ:
            raise UsageError(
                "one worker has nobody to wait for: expected --workers 2 or more on this "
                "machine, or torchrun's options on each of several (--nnodes 2 --node-rank 0 "
                "--master-addr HOST ...); or --runtime emulated or simulated"
            )
        with scratch_folder() as scratch:
            file = Path(scratch) / "evidence.json"
            with self._live():
                status = launch(self._examiner(file), workers, words)
            return self._read(file, status)

    def emulated(self, network: Cluster, workload: str | None) -> Evidence | None:
        from paceline.runtimes.emulated.launch import EmulatedJob
        from paceline.runtimes.emulated.network import EmulatedNetwork

        with scratch_folder() as scratch, EmulatedNetwork(network) as emulated:
            file = Path(scratch) / "evidence.json"
            for warning in emulated.warnings:
                print(f"paceline: {warning}", file=sys.stderr)
            job = EmulatedJob(self._examiner(file, workload), emulated, "first")
            with self._live():
                status = job.run()
            return self._read(file, status)

    def simulated(self, network: Cluster, workload: str | None) -> Evidence | None:
        from paceline.cli.compute_times import profiled, run_or_profile_anew
        from paceline.runtimes.simulated import Simulation
        from paceline.tools.doctor.measure import (
            examine_simulated_network,
            examine_simulation,
        )

        if self._script is None:
            with progress(self._json, "measuring the links"):
                return examine_simulated_network(network, self._seconds)
        compute = o.make_compute(workload, None, None, 0.0, None)
        job = ScriptJob(str(self._script), self._arguments, self._options)
        if workload is None:
            compute = profiled(job, network, compute)
        found: list[Evidence] = []

        def make(compute: Any) -> Simulation:
            simulation = Simulation(
                network, options=self._options, compute=compute, output="first"
            )
            examine_simulation(simulation, found.append, self._seconds)
            return simulation

        run_or_profile_anew(make, job, network, compute)
        return self._named(found[-1])

    def _live(self) -> AbstractContextManager[None]:
        return status_lines(self._json, "measuring", self._options.steps)

    def _examiner(self, file: Path, pace: str | None = None) -> ScriptJob:
        """The program of each worker's process, which runs the script."""
        words = [f"--output={file}", f"--seconds-per-pair={self._seconds}"]
        if self._script is not None:
            words += [str(self._script), *self._arguments]
        return ScriptJob(SCRIPT, words, replace(self._options, pace=pace))

    def _read(self, file: Path, status: int) -> Evidence | None:
        from paceline.tools.doctor import Evidence

        if status:
            sys.exit(status if status > 128 else NO_ANSWER)  # a signal's is its own
        return self._named(Evidence.read(file.read_bytes())) if file.exists() else None

    def _named(self, evidence: Evidence) -> Evidence:
        import msgspec

        return msgspec.structs.replace(
            evidence,
            script="" if self._script is None else str(self._script),
            arguments=tuple(self._arguments),
        )
