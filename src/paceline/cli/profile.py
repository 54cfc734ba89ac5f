"""``paceline profile``: measure the compute times of a training step, tensor by tensor."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options as o
from paceline.cli.arguments import torchrun_words
from paceline.cli.progress import progress, status_lines
from paceline.cli.script_run import check_job
from paceline.cluster import Workload
from paceline.errors import UsageError
from paceline.run_options import RunOptions, ScriptJob
from paceline.runtimes.results import standard_output_for_result
from paceline.runtimes.temporary_folder import scratch_folder
from paceline.tools.report.run_files import make_folder


def profile(
    context: typer.Context,
    script: o.Script,
    script_arguments: o.ScriptArguments = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Worker processes on this machine. \\[default: 1]",
            rich_help_panel=o.TRAINING,
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            metavar="N", help="Optimizer steps to run.", rich_help_panel=o.TRAINING
        ),
    ] = 20,
    seed: o.Seed = None,
    compression: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="Also measure this compressor on the model's gradients; repeatable. all: every "
            "one. \\[default: none]",
            rich_help_panel=o.TRAINING,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Workload file to write. \\[default: SCRIPT.workload.json in this folder]",
            rich_help_panel=o.OUTPUT,
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """Measure compute times per tensor, and compressors; write a workload file.

    SCRIPT trains for some steps in real processes. The file has medians over steps, the maximum
    over workers; simulate and plan read it with --workload. With --compression, a table shows what
    each compressor costs and gains on this model. torchrun's options are passed through.
    """
    check_job(script, None)
    from paceline.cluster.profiling import (
        CompressorCost,
        GradientDump,
        NotApplicable,
        coding_times,
        compressor_costs,
    )
    from paceline.compression import COMPRESSORS, NoCompression, make
    from paceline.runtimes.real.launch import launch
    from paceline.tools.report.terminal import print_compressor_costs, print_workload

    specs = compression or []
    if "all" in specs:
        specs = [name for name, cls in COMPRESSORS.items() if cls is not NoCompression]
    for spec in specs:
        make(spec)  # Report a wrong spec before anything runs.
    path = output or Path(f"{script.stem}.workload.json")
    if path.is_dir():
        raise UsageError(f"--output: expected a file, got the folder {path}")
    make_folder(str(path.parent), "the profile")
    with (
        scratch_folder() as scratch,
        standard_output_for_result(json) as true_output,
    ):
        measured = Path(scratch) / "workload.json"
        options = RunOptions(
            steps=steps,
            seed=seed,
            profile=str(measured),
            gradients=scratch if specs else None,
            # Saving a gradient takes time: most steps must be without it, for the medians.
            gradient_steps=max(1, steps // 4),
        )
        job = ScriptJob(str(script), script_arguments or (), options)
        with status_lines(json, "starting", steps):
            status = launch(job, workers, torchrun_words(context))
        if status:
            sys.exit(status)
        if not measured.exists():
            raise UsageError(
                f"{script} ended without a profile: it trained nothing with paceline.distribute. Wrap the "
                "optimizer by it, and train some steps"
            )
        workload = Workload.load(measured)
        rows: list[CompressorCost | NotApplicable] = []
        among = workers if workers is not None and workers > 1 else o.DESCRIBED_WORKERS
        if specs:
            kept = GradientDump(scratch)
            with progress(json) as on_progress:
                begun = itertools.count()

                def tell(spec: str) -> None:
                    on_progress(spec, next(begun), len(specs))

                rows = list(compressor_costs(specs, kept, among, tell))
                on_progress("timing compressors")
                suited = [
                    make(row.compression)
                    for row in rows
                    if isinstance(row, CompressorCost)
                ]
                workload = replace(workload, coding=coding_times(suited, kept))
        workload.save(path)
        if json:
            with open(true_output, "w", closefd=False) as stream:
                stream.write(path.read_text())
        else:
            print_workload(workload)
            if rows:
                print_compressor_costs(rows, among)
        # The command's purpose is the file, so its path is always printed.
        file = sys.stderr if json else sys.stdout
        print(f"Workload file (--workload reads it): {path}", file=file)
