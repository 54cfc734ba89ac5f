"""Plans a script from its model and measured step, for commands that plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli import options as o
from paceline.errors import UsageError, unknown
from paceline.run_options import RunOptions, ScriptJob
from paceline.runtimes.results import standard_output_for_result

if TYPE_CHECKING:
    from paceline.cluster import Cluster, Workload
    from paceline.interfaces import Consistency
    from paceline.runtimes.simulated import ComputeModel
    from paceline.tools.plan import Plan
    from paceline.tools.plan.predict import TrainingJob
    from paceline.tools.plan.predictor import Predictor
    from paceline.tools.plan.script import ScriptAnalysis

MOST_PROCESSES = 4
FOR_CANDIDATES = 0.75
"""Share of the simulated events that the candidates may take. The rest is for measured compression times, other
ways to gain, and the page's steps."""


@dataclass(frozen=True)
class Planned:
    """The plan of a script.

    Attributes:
        plan: The plan.
        job: The job that it was made from.
        compute: Compute times of the script in the simulated runtime.
    """

    plan: Plan
    job: TrainingJob
    compute: ComputeModel


def classes(wanted: Sequence[str] | None) -> tuple[Consistency, ...]:
    """Return the consistencies that ``--consistency`` allows."""
    from paceline.interfaces import CONSISTENCIES

    for name in wanted or []:
        several = name.split(",")
        if len(several) > 1 and set(several) <= set(CONSISTENCIES):
            options = " ".join(f"--consistency {one}" for one in several)
            raise UsageError(
                f"--consistency {name}: expected one value; give the option once for each: {options}"
            )
        if name not in CONSISTENCIES:
            raise UsageError(unknown("value for --consistency", name, CONSISTENCIES))
    return tuple(q for q in CONSISTENCIES if not wanted or q in wanted)


def processes() -> int:
    """Simultaneous predictions: each process holds torch and a cluster's workers in memory."""
    return min(MOST_PROCESSES, this_machines_cores())


def this_machines_cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def plan_script(
    script: Path,
    arguments: list[str],
    cluster: Cluster,
    *,
    workload: str | None = None,
    sleeps: bool = False,
    forward: float | None = None,
    backward: float | None = None,
    allowed: Collection[Consistency],
    predictor: Predictor,
    on_progress: Callable[[str, int | None, int | None], None],
) -> Planned:
    """Analyze a script, get its compute times, and plan.

    Args:
        script: The script; it runs for a few steps.
        arguments: Its arguments.
        cluster: The network and its workers.
        workload: A workload file or a built-in model, in place of a profile.
        sleeps: Whether processes will sleep for the workload's times, and keep no core busy.
        forward: Seconds of a forward pass.
        backward: Seconds of a backward pass.
        allowed: Consistencies of the candidates.
        predictor: Makes the predictions. Candidates take `FOR_CANDIDATES` of its simulated events,
            compression times some of the rest.
        on_progress: Called before each activity.
    """
    from paceline.tools.plan import plan
    from paceline.tools.plan.predict import TrainingJob
    from paceline.tools.plan.script import analyze_script

    compute = o.make_compute(workload, forward, backward, 0.0, None)
    facts = analyze_script(str(script), arguments, o.SCRATCH, allowed, on_progress)
    if facts.file:
        print(
            f"script: as an earlier run found in {facts.file} (delete it to run {script} again)",
            file=sys.stderr,
        )
    on_progress(f"compute times of {script}", None, None)
    if forward is None and backward is None:
        times, compute = _workload(script, arguments, cluster, compute, facts)
    else:
        times = _workload_from_options(script, compute, facts)
    times = facts.of_script(replace(times, cores=0) if sleeps else times)
    made = plan(
        cluster,
        times,
        allowed=allowed,
        max_events=FOR_CANDIDATES * predictor.events_left,
        optimizer=facts.optimizer,
        refused=facts.refused,
        epoch_steps=facts.epoch_steps,
        predictor=predictor,
        on_progress=on_progress,
    )
    job = TrainingJob(
        cluster=cluster,
        workload=times,
        optimizer=facts.optimizer,
        epoch_steps=facts.epoch_steps,
    )
    named = workload is not None or forward is not None or backward is not None
    if not named and facts.workload is None and compute.workload is not None:
        made, job = _with_measured_compression(
            made, job, script, arguments, predictor, on_progress
        )
        compute = replace(compute, workload=job.workload)
    return Planned(made, job, compute)


def _with_measured_compression(
    plan: Plan,
    job: TrainingJob,
    script: Path,
    arguments: list[str],
    predictor: Predictor,
    on_progress: Callable[[str, int | None, int | None], None],
) -> tuple[Plan, TrainingJob]:
    """Measure the leading compressors on this machine like the script, and predict again.

    Done twice, since other compressors may lead after the first time.
    """
    from paceline.runtimes.simulated.checkpoints import redirect_checkpoints
    from paceline.runtimes.simulated.profile_cache import measure_compressors
    from paceline.tools.plan.search import leading_compressors, refine_compression_times

    cores = _busy_cores(job.cluster)
    for _ in range(2):
        names = leading_compressors(plan)
        if not names or not predictor.events_left:
            break
        on_progress(f"measuring {', '.join(names)}", None, None)
        with standard_output_for_result(True), redirect_checkpoints(o.SCRATCH):
            times = measure_compressors(str(script), arguments, names, cores)
        if not times:
            break
        plan, job = refine_compression_times(plan, job, times, predictor)
    return plan, job


def _busy_cores(cluster: Cluster) -> int:
    """Cores of this machine that compress at the same time: as many as the hosts of *cluster* share."""
    from paceline.tools.plan.predictor import has_rows_of_others

    shared = None if cluster.processor is None else cluster.processor.cores
    if shared is None or has_rows_of_others():
        return 1
    return min(shared, cluster.workers, processes())


def _workload_from_options(
    script: Path, compute: ComputeModel, facts: ScriptAnalysis
) -> Workload:
    """Return the workload with the times of the options, spread over the script's tensors."""
    from paceline.cluster import Workload

    if facts.paced or facts.workload is not None:
        raise UsageError(
            f"--forward and --backward: {script} sets the compute times itself (paceline.pace, or a "
            "stand-in's workload); leave them out"
        )
    spread = Workload.spread(
        facts.names, facts.sizes, compute.forward, compute.backward
    )
    return replace(spread, source=compute.describe(False))


def _workload(
    script: Path,
    arguments: list[str],
    cluster: Cluster,
    compute: ComputeModel,
    facts: ScriptAnalysis,
) -> tuple[Workload, ComputeModel]:
    """Return a step's compute times, and those of the simulated runtime.

    They come from the named file, the script's built-in model, the script's own pace, or a measurement.
    """
    from paceline.runtimes.simulated.checkpoints import redirect_checkpoints
    from paceline.runtimes.simulated.profile_cache import paced_workload, profiled

    if compute.workload is not None:
        facts.check(compute.workload, compute.what)
        named = compute.workload
        return named if named.source else replace(named, source=compute.what), compute
    if facts.workload is not None:
        return replace(facts.workload, cores=0), compute  # it sleeps
    if not facts.paced:
        job = ScriptJob(str(script), arguments, RunOptions(method="bsp"))
        compute = profiled(job, cluster, compute, o.SCRATCH)
    with standard_output_for_result(True), redirect_checkpoints(o.SCRATCH):
        measured = compute.workload or paced_workload(str(script), arguments)
    if measured is None:
        raise UsageError(
            f"{script} trains more than one model, or never calls the model itself, so its compute times are "
            "unknown. Give --workload FILE (paceline profile SCRIPT)"
        )
    # Compressor times are estimated here, as for the plan.
    compute = replace(compute, cached=False)
    return (
        measured if measured.source else replace(measured, source=str(script))
    ), compute
