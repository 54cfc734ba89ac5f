"""``paceline probe``: measure a network, and write it down as a cluster."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from paceline.cli import options as o
from paceline.cli.arguments import torchrun_words
from paceline.cli.progress import progress, status_lines
from paceline.cluster import ServerHost, cluster_toml
from paceline.errors import UsageError
from paceline.run_options import CLUSTER_VARIABLE, ScriptJob
from paceline.runtimes.results import standard_output_for_result
from paceline.runtimes.temporary_folder import scratch_folder
from paceline.tools.report.run_files import make_folder

if TYPE_CHECKING:
    from paceline.runtimes.simulated import Simulation

SCRIPT = str(Path(__file__).parent.parent / "cluster" / "probe" / "__main__.py")


def probe(
    context: typer.Context,
    runtime: Annotated[
        Literal["real", "emulated", "simulated"],
        typer.Option(help="Network to measure.", rich_help_panel=o.NETWORK),
    ] = "real",
    workers: o.WorkersOrProcesses = None,
    link: o.Link = None,
    latency: o.Latency = None,
    dedicated_servers: o.DedicatedServers = None,
    cluster: o.ClusterFile = None,
    seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Duration per pair of hosts and direction.",
            rich_help_panel=o.NETWORK,
        ),
    ] = 0.1,
    output: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Cluster file to write.", rich_help_panel=o.OUTPUT
        ),
    ] = Path("cluster.toml"),
    json: o.Json = False,
) -> None:
    """Measure bandwidth and latency between hosts; write a cluster file.

    It also measures all-reduces and processors. In the real runtime torchrun's options are passed
    through: run the same command on each machine. simulate, emulate and plan read the file
    with --cluster.
    """
    from paceline.cluster.probe import ProbeResult, infer_cluster
    from paceline.cluster.probe.tables import comment_on, print_findings
    from paceline.runtimes.emulated.launch import EmulatedJob
    from paceline.runtimes.emulated.network import EmulatedNetwork
    from paceline.runtimes.real.launch import launch
    from paceline.runtimes.simulated import Simulation

    make_folder(str(output.resolve().parent), "the cluster")
    if not seconds > 0:
        raise UsageError(f"--seconds: expected more than zero, got {seconds:g}")
    with (
        scratch_folder() as scratch,
        standard_output_for_result(json) as true_output,
    ):
        found = Path(scratch) / "findings.json"
        words = (f"--output={found}", f"--seconds-per-pair={seconds}")
        job = ScriptJob(SCRIPT, words)
        servers = 0
        if runtime == "real":
            for name, value in (
                ("--link", link),
                ("--latency", latency),
                ("--cluster", cluster),
                ("--dedicated-servers", dedicated_servers),
            ):
                if value is not None:
                    raise UsageError(
                        f"{name} describes a network, and probe measures one in the real runtime: leave it out"
                    )
            torchrun_options = torchrun_words(context)
            os.environ.pop(CLUSTER_VARIABLE, None)  # The cluster is to be measured.
            workers = o.real_workers(workers, torchrun_options)
            with status_lines(json, "measuring the network"):
                status = launch(job, workers, torchrun_options)
        elif torchrun_words(context):
            raise UsageError(
                f"{torchrun_words(context)[0]} means nothing in the {runtime} runtime"
            )
        else:
            described = o.make_cluster(
                cluster, workers, link, latency, dedicated_servers
            )
            servers = len(described.servers)
            if runtime == "emulated":
                with EmulatedNetwork(described) as network:
                    for warning in network.warnings:
                        print(f"paceline: {warning}", file=sys.stderr)
                    with status_lines(json, "measuring the network"):
                        status = EmulatedJob(job, network).run()
            else:
                with progress(json, "measuring the network"):
                    status = _in_virtual_time(Simulation(described), found, seconds)
        if status:
            sys.exit(status)
        if not found.exists():
            return  # Rank 0 is on another machine, and has the result.
        findings = msgspec.json.decode(found.read_bytes(), type=ProbeResult)
        inferred = infer_cluster(findings)
        if servers:
            # No worker can measure from there: assume a link like the first rack's.
            inferred = replace(inferred, servers=(ServerHost(),) * servers)
        output.write_text(cluster_toml(inferred, comment_on(findings)))
        if json:
            with open(true_output, "w", closefd=False) as stream:
                print(found.read_text(), file=stream)
        else:
            print_findings(findings)
            print(f"{output}: {inferred.describe()}")


def _in_virtual_time(simulation: Simulation, path: Path, seconds: float) -> int:
    from paceline.cluster.probe import measure
    from paceline.runtimes.join import join_runtime

    def body(rank: int) -> None:
        findings = measure(join_runtime(), seconds_per_pair=seconds)
        if rank == 0:
            path.write_bytes(msgspec.json.encode(findings))

    simulation.run(body)
    return 0
