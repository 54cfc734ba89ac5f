"""Options that several commands share.

Brackets in help are escaped, as rich would interpret them as markup and hide them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.cluster import Cluster, Workload, load_cluster, uniform_cluster
from paceline.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from paceline.runtimes.results import RunResult
    from paceline.runtimes.simulated import ComputeModel

SCRATCH = Path("paceline-runs", "scratch")
"""Folder of simulations' checkpoints."""

NETWORK, COMPUTE, TRAINING, OUTPUT = "Network", "Compute times", "Training", "Output"
"""Panels of ``--help``."""
DESCRIBED_WORKERS, REAL_WORKERS = 4, 2
"""Default number of workers: in a described network, and as real processes on this machine (`profile`: one)."""
NODES_VARIABLE = "PET_NNODES"
"""The variable that tells torchrun the number of machines, if its options do not."""

Script = Annotated[
    Path,
    typer.Argument(metavar="SCRIPT", help="A training script.", show_default=False),
]
ScriptArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[--] SCRIPT-ARGS",
        help="The script's own arguments. Put them after -- where options follow SCRIPT.",
        show_default=False,
    ),
]

Workers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help=f"Number of workers. \\[default: {DESCRIBED_WORKERS}]",
        rich_help_panel=NETWORK,
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help=f"Worker processes on this machine. \\[default: {REAL_WORKERS}; with torchrun's "
        "options, what they say or 1]",
        rich_help_panel=NETWORK,
    ),
]
WorkersOrProcesses = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help=f"Number of workers. \\[default: {DESCRIBED_WORKERS}; in the real runtime "
        f"{REAL_WORKERS}, or what torchrun's options say]",
        rich_help_panel=NETWORK,
    ),
]
Link = Annotated[
    str | None,
    typer.Option(
        metavar="RATE",
        help="Bandwidth of each worker's link, per direction. \\[default: 1gbit]",
        rich_help_panel=NETWORK,
    ),
]
Latency = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="One-way latency between workers. \\[default: 50us]",
        rich_help_panel=NETWORK,
    ),
]
DedicatedServers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Extra hosts for parameter servers. \\[default: 0]",
        rich_help_panel=NETWORK,
    ),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="FILE",
        help="Cluster file (TOML), as paceline probe writes it, in place of the options above. "
        "\\[default: none]",
        rich_help_panel=NETWORK,
    ),
]

WorkloadFile = Annotated[
    str | None,
    typer.Option(
        "--workload",
        metavar="FILE",
        help="Workload file of paceline profile, or a built-in model: gpt-10m, resnet50, ... "
        "\\[default: profile SCRIPT once and cache the result]",
        rich_help_panel=COMPUTE,
    ),
]
Forward = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Seconds per forward pass, in place of a workload. \\[default: the workload's]",
        rich_help_panel=COMPUTE,
    ),
]
Backward = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Seconds per backward pass, in place of a workload. \\[default: the workload's]",
        rich_help_panel=COMPUTE,
    ),
]
Jitter = Annotated[
    float,
    typer.Option(
        metavar="X",
        help="Relative standard deviation of each step's compute time.",
        rich_help_panel=COMPUTE,
    ),
]
Pace = Annotated[
    str | None,
    typer.Option(
        metavar="WORKLOAD",
        help="Compute for as long as this workload says: a file, or a built-in model. "
        "\\[default: as long as the processor takes]",
        rich_help_panel=COMPUTE,
    ),
]

Method = Annotated[
    str | None,
    typer.Option(
        metavar="SPEC",
        help="NAME or NAME:key=value,...; overrides the script's. "
        "\\[default: the script's, else bsp]",
        rich_help_panel=TRAINING,
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="End the script in its Nth optimizer.step(): code after the training loop does "
        "not run. \\[default: the script ends by itself]",
        rich_help_panel=TRAINING,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Seed all random generators at the start. \\[default: set by the script]",
        rich_help_panel=TRAINING,
    ),
]

Output = Annotated[
    Literal["first", "all"],
    typer.Option(
        help="Show what worker 0 prints, or what all print, each line with its rank.",
        rich_help_panel=OUTPUT,
    ),
]
Records = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder for per-step records (JSON lines) and a trace. \\[default: none]",
        rich_help_panel=OUTPUT,
    ),
]
ReportTo = Annotated[
    str | None,
    typer.Option(
        metavar="PLACE",
        help="Log worker 0's steps while it trains: tensorboard:FOLDER, wandb:PROJECT, "
        "mlflow:EXPERIMENT or csv:FILE. \\[default: none]",
        rich_help_panel=OUTPUT,
    ),
]
NoHtml = Annotated[
    bool,
    typer.Option("--no-html", help="Write no HTML report.", rich_help_panel=OUTPUT),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON object and nothing else.",
        rich_help_panel=OUTPUT,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Given:
    """Options that only some runtimes have, by name; None: not given."""

    network: Mapping[str, object]
    times: Mapping[str, object]
    jitter: float | None
    pace: str | None

    @property
    def _simulated(self) -> dict[str, object]:
        return {**self.times, "--jitter": self.jitter}

    def check(self, runtime: str) -> None:
        """Raise `UsageError` if an option belongs to another runtime."""
        pace: dict[str, object] = {"--pace": self.pace}
        foreign: dict[str, dict[str, object]] = {
            "simulated": pace,
            "emulated": self._simulated,
            "real": {**self.network, **self._simulated, **pace},
        }
        for name, value in foreign[runtime].items():
            if value is not None:
                raise UsageError(
                    f"{name} means nothing in the {runtime} runtime; leave it out"
                )

    def options(self, runtime: str, shared: Mapping[str, object]) -> list[str]:
        """Return the options of a variant's command in *runtime*, as arguments.

        Args:
            runtime: The runtime of the variant.
            shared: Measured values for options that the command line does not set.
        """
        of_runtime: dict[str, Mapping[str, object]] = {
            "simulated": {**self._simulated, **shared, **self.network},
            "emulated": {**shared, **self.network, "--pace": self.pace},
            "real": shared,
        }
        items = of_runtime[runtime].items()
        return [f"{name}={value}" for name, value in items if value is not None]


def make_cluster(
    cluster: Path | None,
    workers: int | None,
    link: str | None,
    latency: str | None,
    dedicated_servers: int | None = None,
) -> Cluster:
    """Return the cluster of ``--cluster FILE``, or of the short options."""
    if cluster is not None:
        for name, value in (
            ("--workers", workers),
            ("--link", link),
            ("--latency", latency),
            ("--dedicated-servers", dedicated_servers),
        ):
            if value is not None:
                raise UsageError(
                    f"{name} and --cluster contradict each other: the file describes the whole network. Leave "
                    "one of them out"
                )
        return load_cluster(cluster)
    try:
        return uniform_cluster(
            DESCRIBED_WORKERS if workers is None else workers,
            link or "1gbit",
            latency or "50us",
            dedicated_servers or 0,
        )
    except ClusterError as error:
        # Rename the file's keys in the message to the options of this command.
        words = re.sub(r"^the short form: key '(\w+)'", r"--\1", str(error))
        raise UsageError(words) from None


def real_workers(workers: int | None, torchrun_words: Sequence[str]) -> int | None:
    """Number of processes to start on this machine; None if torchrun's options or variables set it."""
    if workers is not None or torchrun_words or NODES_VARIABLE in os.environ:
        return workers
    return REAL_WORKERS


def make_compute(
    workload: str | None,
    forward: float | None,
    backward: float | None,
    jitter: float,
    seed: int | None,
) -> ComputeModel:
    """Return the compute model of ``--workload``, ``--forward``, ``--backward`` and ``--jitter``."""
    from paceline.runtimes.simulated import ComputeModel

    given = {"forward": forward, "backward": backward}
    for name, value in given.items():
        if workload is not None and value is not None:
            raise UsageError(
                f"--{name} and --workload contradict each other: a workload has the compute times. Leave "
                "one of them out"
            )
    usual = ComputeModel()
    return ComputeModel(
        forward=usual.forward if forward is None else forward,
        backward=usual.backward if backward is None else backward,
        jitter=jitter,
        seed=seed or 0,
        workload=None if workload is None else Workload.load(workload),
        what=workload or "",
        instead_of_pace=workload is not None,
    )


def show(result: RunResult, json: bool, true_output: int) -> None:
    """Print a result: as *json* to *true_output*, see `standard_output_for_result`."""
    if json:
        with open(true_output, "w", closefd=False) as stream:
            print(result.to_json(), file=stream)
        return
    from paceline.tools.report.terminal import print_result

    print_result(result)
