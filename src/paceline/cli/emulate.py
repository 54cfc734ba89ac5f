"""``paceline emulate``: real processes on a shaped network inside this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options as o
from paceline.cli.progress import progress, status_lines
from paceline.cli.script_run import check_workers, checked_job, script_run

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
        typer.Option(
            "--check-links",
            help="First measure what the links really give.",
            rich_help_panel=o.NETWORK,
        ),
    ] = False,
    output: o.Output = "first",
    records: o.Records = None,
    report_to: o.ReportTo = None,
    json: o.Json = False,
) -> None:
    """Train in real processes on an emulated network (Linux network namespaces).

    Each worker has a host of its own, whose link has the given bandwidth in both directions.
    Workers share this machine's cores: --pace sets their compute times. `paceline check` shows what
    this machine can emulate. Nothing is left behind.
    """
    from paceline.runtimes.emulated.launch import EmulatedJob
    from paceline.runtimes.emulated.network import EmulatedNetwork

    job = checked_job(
        script,
        script_arguments,
        method=method,
        steps=steps,
        seed=seed,
        records=records,
        report_to=report_to,
        pace=pace,
    )
    described = o.make_cluster(cluster, workers, link, latency, dedicated_servers)
    check_workers(method, described.workers, described.groups)
    with script_run(job, json, described) as run, EmulatedNetwork(described) as network:
        for warning in network.warnings:
            print(f"paceline: {warning}", file=sys.stderr)
        if check_links:
            _check_links(network, json)
        with status_lines(json, "starting", steps):
            run.status = EmulatedJob(run.job, network, output).run()


def _check_links(network: EmulatedNetwork, json: bool) -> None:
    from paceline.runtimes.emulated.link_check import check_links

    with progress(json, "measuring the links"):
        report = check_links(network)
    for link in report.off():
        print(f"paceline: {link}", file=sys.stderr)
    print(f"links: {report.summary()}", file=sys.stderr)
