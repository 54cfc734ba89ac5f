"""``paceline compress``: what each compressor costs and gains on a script's own gradients."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options as o
from paceline.cli.live import live_line
from paceline.cli.progress import telling
from paceline.errors import UsageError
from paceline.run_options import RunOptions
from paceline.runtimes.scratch import scratch_folder


def compress(
    script: o.Script,
    script_arguments: o.ScriptArguments = None,
    workers: Annotated[
        int, typer.Option(help="Workers among whom gradients are to be averaged.")
    ] = o.DESCRIBED_WORKERS,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="A compressor; once or more. \\[default: all, as they come]",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(help="Steps of which gradients are taken.")
    ] = 10,
    seed: o.Seed = None,
    json: o.Json = False,
) -> None:
    """Train SCRIPT for some steps in one real process, and code its gradients.

    A table of each compressor: how small its codes are, what coding takes, what is lost, and
    below which bandwidth it pays. The script's own arguments stand after --.
    """
    o.check_job(script, None)
    from paceline.cluster.profiling import (
        WARM_UP_STEPS,
        KeptGradients,
        check_workers,
        price,
    )
    from paceline.compression import COMPRESSORS, Identity, make
    from paceline.runtimes.real.launch import launch
    from paceline.tools.report.compressor_table import prices_as_json, print_prices

    check_workers(workers)
    if steps < 1:
        raise UsageError(f"--steps: expected 1 or more, got {steps}")
    specs = only or [name for name, cls in COMPRESSORS.items() if cls is not Identity]
    for spec in specs:
        make(spec)  # complain before anything is run
    with (
        scratch_folder() as scratch,
        o.standard_output_for_result(json) as true_output,
    ):
        options = RunOptions(
            steps=WARM_UP_STEPS + steps,
            seed=seed,
            profile=str(Path(scratch) / "workload.json"),
            gradients=scratch,
            gradient_steps=steps,
        )
        with live_line(json, "starting", options.steps):
            status = launch(1, [], str(script), script_arguments or [], options)
        if status:
            sys.exit(status)
        if not Path(scratch, "workload.json").exists():
            raise UsageError(
                f"{script} ended without a gradient: it trained nothing with "
                "paceline.distribute"
            )
        with telling(json) as told:
            begun = itertools.count()

            def tell(spec: str) -> None:
                told(spec, next(begun), len(specs))

            rows = list(price(specs, KeptGradients(scratch), workers, tell))
        if json:
            with open(true_output, "w", closefd=False) as stream:
                print(prices_as_json(rows, workers), file=stream)
        else:
            print_prices(rows, workers)
