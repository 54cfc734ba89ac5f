"""``paceline emulate``: real processes on a shaped network inside this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options as o
from paceline.cli.progress import status_lines, telling
from paceline.cluster import Workload
from paceline.run_options import RunOptions
from paceline.runtimes.temporary_folder import scratch_folder
from paceline.tools.report.run_files import forget_workers, merge_workers

if TYPE_CHECKING:
    from paceline.runtimes.emulated.network import EmulatedNetwork


def emulate(
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
    pace: o.Pace = None,
    check_links: Annotated[
        bool,
        typer.Option("--check-links", help="First measure what the links really give."),
    ] = False,
    output: o.Output = "first",
    records: o.Records = None,
    report_to: o.ReportTo = None,
    json: o.Json = False,
) -> None:
    """Run SCRIPT in real processes, each in a host of a shaped network on this machine.

    Every link has the goodput asked for, both ways; nothing is left behind. Without
    --pace, workers share this machine's cores. paceline check says what it can emulate.
    """
    from paceline.runtimes.emulated.launch import EmulatedJob
    from paceline.runtimes.emulated.network import EmulatedNetwork
    from paceline.runtimes.results import read_result

    o.check_job(script, method)
    o.check_report(report_to)
    described = o.make_cluster(cluster, workers, link, latency, dedicated_servers)
    o.check_workers(method, described.workers, described.groups)
    if pace is not None:
        Workload.load(pace)  # complain here, once
        if Path(pace).exists():
            pace = str(Path(pace).resolve())
    if records is not None:
        forget_workers(str(records))
    with (
        scratch_folder() as scratch,
        o.standard_output_for_result(json) as true_output,
    ):
        result_file = Path(scratch) / "result.json"
        options = RunOptions(
            method=method,
            steps=steps,
            seed=seed,
            report_to=report_to,
            pace=pace,
            json=True,
            result=str(result_file),
            records=None if records is None else str(records.resolve()),
        )
        print(f"network: {described.describe()}", file=sys.stderr)
        with EmulatedNetwork(described) as fabric:
            for warning in fabric.warnings:
                print(f"paceline: {warning}", file=sys.stderr)
            if check_links:
                _check_links(fabric, json)
            job = EmulatedJob(
                fabric, str(script), script_arguments or [], options, output
            )
            with status_lines(json, "starting", steps):
                status = job.run()
        if records is not None:
            merge_workers(str(records), "records")
        result = read_result(result_file)
        if result is not None:
            result.network = described.describe()
            print(f"compute: {result.compute}", file=sys.stderr)
            o.show(result, json, true_output)
    sys.exit(status)


def _check_links(fabric: EmulatedNetwork, json: bool) -> None:
    with telling(json, "measuring the links"):
        report = fabric.measure()
    for link in report.off():
        print(f"paceline: {link}", file=sys.stderr)
    print(f"links: {report.summary()}", file=sys.stderr)
