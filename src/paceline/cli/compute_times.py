"""A script in virtual time, with compute times that were measured and cached where nobody names any."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paceline.cli.options import SCRATCH, standard_output_for_result
from paceline.cluster import Cluster, Workload
from paceline.errors import UsageError, WorkerFailedError
from paceline.run_options import ScriptJob
from paceline.runtimes.simulated import ComputeModel, Simulation, SimulationResult
from paceline.runtimes.simulated.checkpoints import redirect_checkpoints
from paceline.runtimes.simulated.compute import StaleProfileError, UnmeasuredCodeError
from paceline.runtimes.simulated.launch import run_script
from paceline.runtimes.simulated.profile_cache import CachedProfile, profile_script


def profiled(
    job: ScriptJob,
    cluster: Cluster,
    compute: ComputeModel,
    patience: float = 20.0,
    scratch: Path = SCRATCH,
) -> ComputeModel:
    """*compute* with the script's own times: those that are cached, or else measured now. What the
    script prints meanwhile goes to standard error."""
    cached = CachedProfile.of(job, cluster.workers)
    profile = cached.load()
    if profile is None:
        return _profiled_anew(job, cluster, compute, patience, scratch)
    print(
        f"compute: from {cached.path} (of the same script and arguments; delete it to "
        "profile again)",
        file=sys.stderr,
    )
    return replace(
        compute,
        workload=profile.workload,
        what=str(cached.path),
        cached=True,
        inputs=profile.inputs,
    )


def _profiled_anew(
    job: ScriptJob,
    cluster: Cluster,
    compute: ComputeModel,
    patience: float,
    scratch: Path,
    known: Workload | None = None,
) -> ComputeModel:
    """*compute* with the script's own times, measured now; of what is *known* only compressors'
    times are. Its checkpoints go to *scratch*."""
    # Named before the script runs: it may be edited meanwhile.
    cached = CachedProfile.of(job, cluster.workers)
    with standard_output_for_result(True), redirect_checkpoints(scratch):
        profile = profile_script(job, cluster, patience=patience)
    if profile is None:
        return replace(compute, workload=None, what="", cached=False, inputs=None)
    workload, what = profile.workload, "measured now"
    if known is not None:
        workload = replace(known, coding={**known.coding, **workload.coding})
    try:
        cached.save(replace(profile, workload=workload))
        what = str(cached.path)
        print(f"compute: profiled {job.script} once: {what}", file=sys.stderr)
    except UsageError as error:
        _say_once(f"compute: profiled {job.script}, for this time: {error}")
    return replace(compute, workload=workload, what=what, cached=False, inputs=None)


@functools.cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr)


def run_or_profile_anew(
    make: Callable[[ComputeModel], Simulation],
    job: ScriptJob,
    cluster: Cluster,
    compute: ComputeModel,
    patience: float = 20.0,
    scratch: Path = SCRATCH,
) -> tuple[SimulationResult, ComputeModel]:
    """Run the script; where it turns out that the cached profile is not of what is
    trained now, once more with a new one. Returns also what it was charged by."""
    try:
        return _run(make(compute), job, scratch), compute
    except WorkerFailedError as error:
        cause = error.__cause__
        if not isinstance(cause, StaleProfileError):
            raise
        print(f"compute: profiling again: {cause}", file=sys.stderr)
        # What is known still holds where only a compressor's times are missing.
        known = compute.workload if isinstance(cause, UnmeasuredCodeError) else None
    compute = _profiled_anew(job, cluster, compute, patience, scratch, known)
    return _run(make(compute), job, scratch), compute


def _run(simulation: Simulation, job: ScriptJob, scratch: Path) -> SimulationResult:
    with redirect_checkpoints(scratch) as made:
        outcome = run_script(simulation, job.script, job.arguments)
    if made:
        words = made[0].name + ", ..." * (len(made) > 1)
        print(
            f"checkpoints: this simulation's are in {scratch} ({words}); what was there "
            "before is as it was",
            file=sys.stderr,
        )
    return outcome
