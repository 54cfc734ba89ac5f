"""``paceline simulate``: run a script once per worker, in virtual time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options as o
from paceline.cli.progress import describe, progress
from paceline.cli.script_run import check_workers, checked_job, script_run
from paceline.runtimes.progress import WorkerProgress, place
from paceline.tools.report.run_files import write_run

if TYPE_CHECKING:
    from paceline.runtimes.simulated import ComputeModel

SIMULATION = "Simulation"


def simulate(
    script: o.Script,
    script_arguments: o.ScriptArguments = None,
    workers: o.Workers = None,
    link: o.Link = None,
    latency: o.Latency = None,
    dedicated_servers: o.DedicatedServers = None,
    cluster: o.ClusterFile = None,
    method: o.Method = None,
    steps: o.Steps = None,
    seed: o.Seed = None,
    workload: o.WorkloadFile = None,
    forward: o.Forward = None,
    backward: o.Backward = None,
    jitter: o.Jitter = 0.0,
    representatives: Annotated[
        bool,
        typer.Option(
            "--representatives",
            help="Run two workers of each kind for all: for methods whose workers do the same.",
            rich_help_panel=SIMULATION,
        ),
    ] = False,
    patience: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Real seconds without progress before giving up.",
            rich_help_panel=SIMULATION,
        ),
    ] = 20.0,
    output: o.Output = "first",
    scratch: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Folder for the checkpoints of SCRIPT.",
            rich_help_panel=o.OUTPUT,
        ),
    ] = o.SCRATCH,
    records: o.Records = None,
    report_to: o.ReportTo = None,
    json: o.Json = False,
) -> None:
    """Train with simulated workers on a virtual clock, in one process.

    SCRIPT runs once per worker, with real data and gradients. Only time is virtual.
    """
    job = checked_job(
        script,
        script_arguments,
        method=method,
        steps=steps,
        seed=seed,
        records=records,
        report_to=report_to,
    )
    described = o.make_cluster(cluster, workers, link, latency, dedicated_servers)
    check_workers(method, described.workers, described.groups)
    from paceline.runtimes.simulated import Simulation
    from paceline.runtimes.simulated.launch import result_of
    from paceline.runtimes.simulated.profile_cache import profiled, run_or_profile_anew

    there = place()
    compute = o.make_compute(workload, forward, backward, jitter, seed)
    measured = workload is None and forward is None and backward is None
    with script_run(job, json, described) as run:
        with progress(json, "profiling", prints=True) as on_progress:
            if measured:
                compute = profiled(job, described, compute, scratch, patience)

            def make(compute: ComputeModel) -> Simulation:
                def look(now: float) -> None:
                    found = WorkerProgress.of(simulation.runtime_of(0).recorder)
                    on_progress(f"virtual time {now:.3f} s · {describe(found, steps)}")
                    if there is not None:
                        found.write(there)

                simulation = Simulation(
                    described,
                    options=job.options,
                    compute=compute,
                    trace=records is not None,
                    patience=patience,
                    look=look,
                    output=output,
                    workers="classes" if representatives else "all",
                )
                return simulation

            outcome, compute = run_or_profile_anew(
                make, job, described, compute, scratch, patience
            )
        if outcome.paced_by_script and (forward is not None or backward is not None):
            print(
                "compute: --forward and --backward had no effect: the script calls "
                "paceline.pace itself",
                file=sys.stderr,
            )
        run.result = result_of(outcome, described, compute, steps)
        if job.options.records is not None:
            all_steps = [step for kept in outcome.kept for step in kept.steps]
            all_steps.sort(key=lambda record: (record.step, record.worker))
            spans = [span for kept in outcome.kept for span in kept.spans]
            write_run(
                job.options.records,
                "records",
                all_steps,
                lambda: spans + outcome.spans,
            )
