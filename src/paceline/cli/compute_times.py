"""A script in virtual time, with the times to compute that were measured and kept where
nobody names any."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paceline.cli.options import SCRATCH, standard_output_for_result
from paceline.cluster import Cluster, Workload
from paceline.errors import UsageError, WorkerFailedError
from paceline.run_options import RunOptions
from paceline.runtimes.simulated import ComputeModel, Simulation, SimulationResult
from paceline.runtimes.simulated.checkpoints import redirect_checkpoints
from paceline.runtimes.simulated.compute import StaleProfileError, UnmeasuredCodeError
from paceline.runtimes.simulated.launch import run_script
from paceline.runtimes.simulated.profile_cache import (
    find_profile,
    keep_profile,
    profile_script,
)
from paceline.units import show_age


def profiled(
    script: Path,
    arguments: list[str],
    cluster: Cluster,
    compute: ComputeModel,
    options: RunOptions,
    patience: float = 20.0,
    scratch: Path = SCRATCH,
) -> ComputeModel:
    """*compute* with the script's own times: from the profile that is kept of it, made now
    if there is none, or none that fits. What the script prints meanwhile goes to standard
    error."""
    kept, stale = find_profile(script, arguments, cluster.workers)
    if kept is None:
        return profiled_anew(
            script,
            arguments,
            cluster,
            compute,
            options,
            patience,
            why=stale,
            scratch=scratch,
        )
    if kept.made is None:
        hint = "not made by simulate: delete it to have it made"
    else:
        hint = "of the same script and arguments; delete it to profile again"
    age = show_age(time.time() - kept.path.stat().st_mtime)
    print(f"compute: from {kept.path}, {age} old ({hint})", file=sys.stderr)
    return replace(
        compute,
        workload=kept.workload,
        what=str(kept.path),
        kept=kept.made is not None,
        inputs=None if kept.made is None else kept.made.inputs,
    )


def profiled_anew(
    script: Path,
    arguments: list[str],
    cluster: Cluster,
    compute: ComputeModel,
    options: RunOptions,
    patience: float = 20.0,
    *,
    why: str,
    scratch: Path,
    known: Workload | None = None,
) -> ComputeModel:
    """*compute* with the script's own times, measured now; *why* they are measured again,
    if they are; of what is *known* only compressors' times are. Its checkpoints go to
    *scratch*."""
    if why:
        print(f"compute: profiling again: {why}", file=sys.stderr)
    with standard_output_for_result(True), redirect_checkpoints(scratch):
        profile = profile_script(
            str(script), arguments, cluster, options, patience=patience
        )
    if profile is None:
        return replace(compute, workload=None, what="", kept=False, inputs=None)
    workload, what = profile.workload, "measured now"
    if known is not None:
        workload = replace(known, coding={**known.coding, **workload.coding})
    try:
        kept = keep_profile(
            script, arguments, workload, profile.inputs, cluster.workers
        )
        what = str(kept.path)
        print(f"compute: profiled {script} once: {what}", file=sys.stderr)
    except UsageError as error:
        print(f"compute: profiled {script}, for this time: {error}", file=sys.stderr)
    return replace(compute, workload=workload, what=what, kept=False, inputs=None)


def run_or_profile_anew(
    make: Callable[[ComputeModel], Simulation],
    script: Path,
    arguments: list[str],
    cluster: Cluster,
    compute: ComputeModel,
    options: RunOptions,
    patience: float,
    scratch: Path,
) -> tuple[SimulationResult, ComputeModel]:
    """Run the script; where it turns out that the profile that was kept is not of what is
    trained now, once more with a new one. Returns also what it was charged by."""
    try:
        return _run(make(compute), script, arguments, scratch), compute
    except WorkerFailedError as error:
        cause = error.__cause__
        if not isinstance(cause, StaleProfileError):
            raise
        stale = str(cause)
        # What is known still holds where only a compressor's times are missing.
        known = compute.workload if isinstance(cause, UnmeasuredCodeError) else None
    compute = profiled_anew(
        script,
        arguments,
        cluster,
        compute,
        options,
        patience,
        why=stale,
        scratch=scratch,
        known=known,
    )
    return _run(make(compute), script, arguments, scratch), compute


def _run(
    simulation: Simulation, script: Path, arguments: list[str], scratch: Path
) -> SimulationResult:
    with redirect_checkpoints(scratch) as made:
        outcome = run_script(simulation, str(script), arguments)
    if made:
        words = made[0].name + ", ..." * (len(made) > 1)
        print(
            f"checkpoints: this simulation's are in {scratch} ({words}); what was there "
            "before is as it was",
            file=sys.stderr,
        )
    return outcome
