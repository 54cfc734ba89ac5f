"""A script's plan, made of what it trains and of what a step of it takes: for the verbs that plan."""

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
    from paceline.tools.plan.prediction_cost import Budget
    from paceline.tools.plan.predictor import Predict
    from paceline.tools.plan.script import ScriptAnalysis

MOST_PROCESSES = 4
FOR_CANDIDATES = 0.75
"""Of the budget; the rest, and what candidates leave of it, is for what codes take, for what would help
and for the page."""


@dataclass(frozen=True)
class Planned:
    """The *plan*, the *job* that it is of, and what a training of the script is charged in virtual
    time (*compute*)."""

    plan: Plan
    job: TrainingJob
    compute: ComputeModel


def classes(wanted: Sequence[str] | None) -> tuple[Consistency, ...]:
    """What ``--consistency`` allows."""
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
    """Predictions that are made at a time: each process has torch, and a cluster's workers, in memory."""
    return min(MOST_PROCESSES, this_machines_cores())


def this_machines_cores() -> int:
    """Those that this process may use."""
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
    budget: Budget,
    told: Callable[[str, int | None, int | None], None],
    predict: Predict | None = None,
) -> Planned:
    """Run *script* for a few steps, find out what a step takes, and plan. Candidates take `FOR_CANDIDATES`
    of *budget*, codes some of the rest; what is left of it is left. *sleeps*: processes will sleep for the
    *workload*'s times, and keep no core busy."""
    from paceline.tools.plan import plan
    from paceline.tools.plan.predict import TrainingJob
    from paceline.tools.plan.script import analyze_script

    compute = o.make_compute(workload, forward, backward, 0.0, None)
    facts = analyze_script(str(script), arguments, o.SCRATCH, allowed, told)
    if facts.file:
        print(
            f"script: as an earlier run found in {facts.file} (delete it to run {script} again)",
            file=sys.stderr,
        )
    told(f"compute times of {script}", None, None)
    if forward is None and backward is None:
        times, compute = _workload(script, arguments, cluster, compute, facts)
    else:
        times = _said(script, compute, facts)
    times = facts.of_script(replace(times, cores=0) if sleeps else times)
    made = plan(
        cluster,
        times,
        allowed=allowed,
        budget_seconds=FOR_CANDIDATES * budget.left,
        optimizer=facts.optimizer,
        refused=facts.refused,
        epoch_steps=facts.epoch_steps,
        processes=processes(),
        predict=predict,
        told=told,
    )
    job = TrainingJob(
        cluster=cluster,
        workload=times,
        optimizer=facts.optimizer,
        epoch_steps=facts.epoch_steps,
    )
    budget.left -= made.spent_seconds
    named = workload is not None or forward is not None or backward is not None
    if not named and facts.workload is None and compute.workload is not None:
        made, job = _with_codes(made, job, script, arguments, budget, told, predict)
        compute = replace(compute, workload=job.workload)
    return Planned(made, job, compute)


def _with_codes(
    plan: Plan,
    job: TrainingJob,
    script: Path,
    arguments: list[str],
    budget: Budget,
    told: Callable[[str, int | None, int | None], None],
    predict: Predict | None,
) -> tuple[Plan, TrainingJob]:
    """The same, with what codes take that are in front: the script was measured on this machine, and
    so are they, the first ones first, as far as *budget* goes. Twice, since what comes next may be another guess."""
    from paceline.runtimes.simulated.checkpoints import redirect_checkpoints
    from paceline.runtimes.simulated.profile_cache import measure_compressors
    from paceline.tools.plan.compression_times import (
        codes_in_front,
        revised,
        seconds_of,
    )
    from paceline.tools.plan.predictor import in_this_process

    cores = _busy_cores(job.cluster)
    for _ in range(2):
        prices = {code: seconds_of(plan, job, [code]) for code in codes_in_front(plan)}
        codes = []
        for code, price in prices.items():
            if not budget.takes(price):
                break
            codes.append(code)
        if not codes:
            break
        told(f"measuring {', '.join(codes)}", None, None)
        with standard_output_for_result(True), redirect_checkpoints(o.SCRATCH):
            coding = measure_compressors(str(script), arguments, codes, cores)
        if not coding:  # nothing is predicted again
            budget.left += sum(prices[code] for code in codes)
            break
        plan, job = revised(plan, job, coding, predict or in_this_process)
    return plan, job


def _busy_cores(cluster: Cluster) -> int:
    """How many of this machine's cores code at the same time in *cluster*: those that its hosts share,
    as far as there are so many; one, where each host has its own."""
    from paceline.tools.plan.predictor import has_rows_of_others

    shared = None if cluster.processor is None else cluster.processor.cores
    if shared is None or has_rows_of_others():
        return 1
    return min(shared, cluster.workers, processes())


def _said(script: Path, compute: ComputeModel, facts: ScriptAnalysis) -> Workload:
    """The times that options say, spread as a training of the script is charged for them."""
    from paceline.cluster import Workload

    if facts.paced or facts.workload is not None:
        raise UsageError(
            f"--forward and --backward: {script} says itself what a step computes "
            "(paceline.pace, or a stand-in's workload); leave them out"
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
    """A step's times: from the file that is named, or what the model stands for, or as the script
    paces itself, or measured; and what its training is charged in virtual time."""
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
            f"{script} trains more than one model, or never calls the model itself: nobody "
            "knows how long a step of it takes. Give --workload FILE (paceline profile SCRIPT)"
        )
    # Compressor times are estimated here, as they were for the plan.
    compute = replace(compute, cached=False)
    return (
        measured if measured.source else replace(measured, source=str(script))
    ), compute
