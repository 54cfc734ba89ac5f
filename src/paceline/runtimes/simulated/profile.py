"""A script's compute times, measured in the simulated runtime before it is simulated.

Only one worker runs at a time there, with its own share of the batch and one thread, so
the host's clock tells what that worker computes. Compressors that the script trains with are
timed afterwards, on a gradient of that worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from paceline.cluster.cluster import Cluster
from paceline.cluster.cluster_file import uniform_cluster
from paceline.cluster.profiling import KeptGradients, coding_times, coding_times_of_busy
from paceline.cluster.workload import CodingTimes, Workload
from paceline.compression import make
from paceline.run_options import RunOptions
from paceline.runtimes.simulated.inputs import Shapes
from paceline.runtimes.simulated.script import run_script
from paceline.runtimes.simulated.simulation import Simulation, SimulationResult

PROFILED_STEPS = 7
MAX_WORKERS = 32
"""A larger job is profiled with so many: others would only compute the same once more."""


@dataclass(frozen=True)
class Profile:
    """What was measured, and the shapes of what the model was given, if these are always
    the same."""

    workload: Workload
    inputs: Shapes | None


def profile_script(
    script: str,
    arguments: Sequence[str],
    cluster: Cluster,
    options: RunOptions,
    *,
    patience: float = 20.0,
) -> Profile | None:
    """Worker 0's medians over a few steps; None where the script says itself what it
    computes, trains a stand-in or more than one model, or never calls the model itself."""
    workers = min(cluster.workers, MAX_WORKERS)
    with TemporaryDirectory(prefix="paceline-") as folder:
        kept = KeptGradients(folder, wanted=0)
        simulation = Simulation(
            uniform_cluster(workers, "1gbit", "50us"),
            options=replace(options, steps=PROFILED_STEPS, tells=False),
            profile=True,
            keep=kept,
            patience=patience,
            output="first",
        )
        outcome = run_script(simulation, script, arguments)
        return _profile(outcome, kept, script, workers)


def measured_codes(
    script: str, arguments: Sequence[str], codes: Sequence[str], cores: int = 1
) -> dict[str, CodingTimes]:
    """What each of *codes*, specs of compressors, takes for the script's first gradient, where so
    many *cores* have such work at the same time; nothing where there is none."""
    with TemporaryDirectory(prefix="paceline-") as folder:
        kept = KeptGradients(folder)
        simulation = Simulation(
            uniform_cluster(2, "1gbit", "50us"),
            options=RunOptions(method="bsp", steps=2, tells=False),
            profile=True,
            keep=kept,
            output="first",
        )
        run_script(simulation, script, arguments)
        if not len(kept):
            return {}
        if cores > 1:
            return coding_times_of_busy(codes, folder, cores)
        return coding_times([make(code) for code in codes], kept)


def paced_workload(script: str, arguments: Sequence[str]) -> Workload | None:
    """The times that a script says itself (`paceline.pace`), tensor by tensor; None where it
    trains more than one model, or never calls the model itself."""
    simulation = Simulation(
        uniform_cluster(2, "1gbit", "50us"),
        options=RunOptions(method="bsp", steps=PROFILED_STEPS, tells=False),
        profile=True,
        paced=True,
        output="first",
    )
    outcome = run_script(simulation, script, arguments)
    profilers = outcome.profilers
    if len(profilers) != 1 or not profilers[0].forwards:
        return None
    workload = profilers[0].workload(f"as paced by {Path(script).name}")
    steps = outcome.recorders[0].settled_steps()
    # What is paced outside of the passes, before them as a loader's time is.
    step = median(step.compute_seconds for step in steps)
    more = max(0.0, step - workload.compute_seconds)
    share = more / len(workload.names) / (workload.passes or 1)
    return replace(workload, forward=tuple(one + share for one in workload.forward))


def _profile(
    outcome: SimulationResult, kept: KeptGradients, script: str, workers: int
) -> Profile | None:
    profilers = outcome.profilers
    if outcome.paced_by_script or len(profilers) != 1 or not profilers[0].forwards:
        return None
    profiler = profilers[0]
    workload = profiler.workload(
        f"measured: medians of {len(profiler.forwards)} steps of worker 0 of {workers} "
        f"in {Path(script).name}, CPU, 1 thread"
    )
    if len(kept):
        workload = replace(workload, coding=coding_times(profiler.compressors, kept))
    return Profile(workload, outcome.inputs[0].shapes)
