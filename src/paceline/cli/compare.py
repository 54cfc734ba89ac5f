"""``paceline compare``: the same script under several methods, as one table."""

from __future__ import annotations

import shlex
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli import options as o
from paceline.cli.progress import describe, progress, task_rows
from paceline.cli.runtime_options import Given
from paceline.cli.script_plan import classes, plan_script, processes
from paceline.errors import UsageError
from paceline.run_options import RunOptions, ScriptJob
from paceline.runtimes.processes import as_launcher, end_all
from paceline.runtimes.temporary_folder import scratch_folder
from paceline.tools.report.run_files import clear
from paceline.units import show_seconds

if TYPE_CHECKING:
    from paceline.cluster import Cluster
    from paceline.interfaces import Consistency
    from paceline.records import StepRecord
    from paceline.runtimes.results import Outcome, RunResult
    from paceline.runtimes.simulated import ComputeModel
    from paceline.tools.compare.goal import Goal
    from paceline.tools.compare.runner import Variant
    from paceline.tools.plan import Plan

PLAN_PART = 2 / 3
"""Of a plan's usual budget, for the one where no method is named: it draws no page."""
MOST_AT_ONCE = 2
"""Variants: each holds a model for every worker."""
BASELINE = "DDP"


def compare(
    script: o.Script,
    script_arguments: o.ScriptArguments = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="A method's spec; once or more. \\[default: what paceline plan finds to be the "
            "best of each class, and bsp:buckets=ddp, which is what DDP does]",
        ),
    ] = None,
    consistency: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONSISTENCY",
            help="Without --method: only the best of this class; once or more. \\[default: of all]",
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC=VALUE",
            help="Say when each reached this value of a logged metric. \\[default: no column for it]",
        ),
    ] = None,
    runtime: Annotated[
        Literal["simulated", "emulated", "real"], typer.Option(help="Where to run.")
    ] = "simulated",
    workers: o.WorkersOrProcesses = None,
    link: o.Link = None,
    latency: o.Latency = None,
    dedicated_servers: o.DedicatedServers = None,
    cluster: o.ClusterFile = None,
    steps: o.Steps = None,
    seed: o.Seed = None,
    workload: o.WorkloadFile = None,
    forward: o.Forward = None,
    backward: o.Backward = None,
    jitter: o.Jitter = 0.0,
    pace: o.Pace = None,
    output: Annotated[Path, typer.Option(help="Folder for records and traces.")] = Path(
        "paceline-runs"
    ),
    no_plots: Annotated[
        bool, typer.Option("--no-plots", help="Draw nothing, and write no page.")
    ] = False,
    json: o.Json = False,
) -> None:
    """Train with several methods; compare step time, metrics, and time to a target metric.

    Without --method it trains with the best method of each class, as paceline plan finds it.

    A variant that fails has a row that says so, the others go on, and the exit status is 1.
    """
    o.check_job(script, *method or ())
    _check_plan(runtime, method, consistency)
    from paceline.tools.compare.goal import Goal

    goal = None if until is None else Goal.read(until)
    allowed = classes(consistency)
    given = Given(
        network={
            "--cluster": cluster,
            "--link": link,
            "--latency": latency,
            "--dedicated-servers": dedicated_servers,
        },
        times={"--workload": workload, "--forward": forward, "--backward": backward},
        jitter=jitter or None,
        pace=pace,
    )
    given.check(runtime)
    from paceline.runtimes.results import RunResult
    from paceline.tools.compare.runner import Variant

    arguments = script_arguments or []
    shared: dict[str, object] = {"--steps": steps, "--seed": seed, "--workers": workers}
    plan, measures = None, True
    if runtime == "real":
        shared["--workers"] = o.REAL_WORKERS if workers is None else workers
    else:
        # Complain here, once, not in every variant; and profile once for all.
        described = o.make_cluster(cluster, workers, link, latency, dedicated_servers)
        if not method:
            times: dict[str, object] = {
                "workload": pace or workload,
                "sleeps": pace is not None,
                "forward": forward,
                "backward": backward,
            }
            plan = _planned(script, arguments, described, allowed, times, json)
        if runtime == "simulated":
            compute = o.make_compute(workload, forward, backward, jitter, seed)
            measures = not any((workload, forward, backward))
            if measures:
                said = _measured(script, arguments, described, compute, seed)
                measures, shared = not said, shared | said
    variants = [
        Variant(i, spec) for i, spec in enumerate(method or _specs(plan).values())
    ]
    clear(str(output))  # else what is left of the last comparison looks like this one's
    results, reached = _run_all(
        variants,
        runtime,
        script,
        arguments,
        given.options(runtime, shared),
        output,
        goal,
        at_once=1
        if runtime != "simulated" or measures
        else min(MOST_AT_ONCE, processes()),
        json=json,
    )
    ran = [outcome for _, outcome in results if isinstance(outcome, RunResult)]
    page = None
    if ran and not no_plots:
        title = f"{script}: {len(variants)} variant{'s' * (len(variants) > 1)}"
        page = _write_page(output, title, variants, results, ran[0])
    _show(plan, results, reached, goal, output, page, json=json)
    if goal is not None and ran:
        goal.check_logged(ran[0].metrics)
    if len(ran) < len(results):
        sys.exit(1)


def _check_plan(
    runtime: str, method: Sequence[str] | None, consistency: Sequence[str] | None
) -> None:
    """Raises `UsageError` where a plan is asked for that cannot be made, or that nobody needs."""
    if method and consistency:
        raise UsageError(
            "--consistency is for the plan, which --method replaces: leave it out"
        )
    if runtime == "real" and not method:
        raise UsageError(
            "in the real runtime nobody knows the network: give one --method SPEC or more "
            "(paceline plan SCRIPT --probe measures it, and says which are fastest)"
        )


def _planned(
    script: Path,
    arguments: list[str],
    cluster: Cluster,
    allowed: Collection[Consistency],
    times: Mapping[str, Any],
    json: bool,
) -> Plan:
    """The plan; says which will run, and why, on standard error."""
    from paceline.tools.plan.prediction_cost import Budget, usual_seconds
    from paceline.tools.plan.report import faster_but_not_recommended, headline

    with o.standard_output_for_result(True), progress(json) as told:
        made = plan_script(
            script,
            arguments,
            cluster,
            **times,
            allowed=allowed,
            budget=Budget(PLAN_PART * usual_seconds(cluster)),
            told=told,
        )
        plan = made.plan
        if plan.baseline.workers == 1:
            raise UsageError(
                "one worker has nothing to compare: give --workers 2 or more"
            )
        told.say(f"plan: {' '.join(headline(plan))}")
        for role, spec in _specs(plan).items():
            row = plan.estimate(spec)
            if row is None:
                told.say(f"  {role}: {spec}")
            else:
                among = sum(
                    one.consistency == row.consistency for one in plan.estimates
                )
                told.say(
                    f"  {role}: {spec}, {show_seconds(row.step_seconds)} a step"
                    + f", the best of {among}" * (role == row.consistency)
                )
        if faster := faster_but_not_recommended(plan):
            told.say(f"  {faster}")
    return plan


def _specs(plan: Plan | None) -> dict[str, str]:
    """What a plan has run, by what it is there for: DDP's rule, then the best of each class."""
    from paceline.tools.plan.estimates import DDP

    best = {} if plan is None else plan.recommended
    return {BASELINE: DDP} | {
        consistency: row.spec for consistency, row in best.items() if row.spec != DDP
    }


def _measured(
    script: Path,
    arguments: list[str],
    cluster: Cluster,
    compute: ComputeModel,
    seed: int | None,
) -> dict[str, object]:
    """Profile the script, if need be, for all variants, which find what is kept. Options for them
    where there is nothing to measure, as the script says what it computes."""
    from paceline.cli.compute_times import profiled

    # It runs whatever the variants do.
    job = ScriptJob(str(script), arguments, RunOptions(method="bsp", seed=seed))
    compute = profiled(job, cluster, compute)
    if compute.workload is not None:
        return {}
    return {"--forward": compute.forward, "--backward": compute.backward}


def _show(
    plan: Plan | None,
    results: Sequence[tuple[str, Outcome]],
    reached: Sequence[StepRecord | None],
    goal: Goal | None,
    output: Path,
    page: Path | None,
    *,
    json: bool,
) -> None:
    """The table, and where the files are; or all of it for programs."""
    from paceline.runtimes.results import RunResult
    from paceline.tools.compare.runner import to_json
    from paceline.tools.report.terminal import print_results

    first = next((one for _, one in results if isinstance(one, RunResult)), None)
    if json:
        print(to_json(results, reached, plan=plan))
    elif first is not None:
        if plan is None:
            print_results(results, reached, goal)
        else:
            _print_gains(plan, results, reached, goal, first)
        print(f"records and traces: {output}/ (open a trace in ui.perfetto.dev)")
        if page is not None:
            print(f"page: {page}")


def _print_gains(
    plan: Plan,
    results: Sequence[tuple[str, Outcome]],
    reached: Sequence[StepRecord | None],
    goal: Goal | None,
    first: RunResult,
) -> None:
    from paceline.tools.compare.gains import Gain, print_gains

    rows = []
    for role, (spec, outcome), when in zip(_specs(plan), results, reached, strict=True):
        row = plan.estimate(spec)
        rows.append(
            Gain(
                role=role,
                spec=spec,
                outcome=outcome,
                planned=None if row is None else row.step_seconds,
                reached=None if when is None else when.end_seconds,
                steps=None if when is None else when.step,
            )
        )
    print_gains(
        rows,
        plan.baseline.workers,
        plan.baseline.single.step_seconds / plan.baseline.workers,
        goal,
        title=f"{plan.cluster}, {first.runtime} runtime",
    )


def _run_all(
    variants: Sequence[Variant],
    runtime: str,
    script: Path,
    script_arguments: Sequence[str],
    options: Sequence[str],
    output: Path,
    goal: Goal | None,
    *,
    at_once: int,
    json: bool,
) -> tuple[list[tuple[str, Outcome]], list[StepRecord | None]]:
    """Run each variant, some *at_once*; records of those that have not failed are merged in
    *output*. Also each one's step that reached the *goal*, if any."""
    from paceline.runtimes.progress import FILE_VARIABLE, read
    from paceline.runtimes.results import RunResult
    from paceline.tools.compare.runner import merge_records, reached, run_variant

    running: list[subprocess.Popen[str]] = []
    interrupted = threading.Event()

    def started(process: subprocess.Popen[str]) -> None:
        running.append(process)
        if interrupted.is_set():
            process.terminate()

    with task_rows(json) as shown, scratch_folder() as folder:

        def run(item: Variant) -> Outcome:
            file = Path(folder) / str(item.number)

            def now() -> str:
                found = read(file)
                return "" if found is None else describe(found)

            end = shown.begin(f"[{item.number + 1}/{len(variants)}] {item.spec}", now)
            outcome, errors = run_variant(
                item,
                runtime,
                str(script),
                script_arguments,
                options,
                output,
                {FILE_VARIABLE: str(file), **as_launcher()},
                started,
            )
            if not isinstance(outcome, RunResult) and not interrupted.is_set():
                shown.say(f"{errors.strip()}\npaceline: variant {item.spec!r} failed")
            end()
            return outcome

        with ThreadPoolExecutor(at_once) as pool:
            try:
                outcomes = list(pool.map(run, variants))
            except BaseException:
                interrupted.set()
                end_all(running)
                raise
    pairs = list(zip(variants, outcomes, strict=True))
    when = [
        reached(goal, item, outcome, output)
        if goal is not None and isinstance(outcome, RunResult)
        else None
        for item, outcome in pairs
    ]
    have_run = [item for item, outcome in pairs if isinstance(outcome, RunResult)]
    merge_records(have_run, output)
    return [(item.spec, outcome) for item, outcome in pairs], when


def _write_page(
    output: Path,
    title: str,
    variants: Sequence[Variant],
    results: Sequence[tuple[str, Outcome]],
    first: RunResult,
) -> Path:
    from paceline.tools.compare.report import (
        write_report,  # matplotlib: only where needed
    )

    notes = [("network", first.network), ("compute", first.compute)]
    return write_report(
        str(output),
        variants,
        results,
        title=title,
        command=shlex.join(["paceline", *sys.argv[1:]]),
        notes=[(name, text) for name, text in notes if text],
        consistencies=[_class_of(spec) for spec, _ in results],
    )


def _class_of(spec: str) -> str:
    """What becomes of a gradient; nothing where that is found out while it trains."""
    from paceline.tools.plan.candidates import candidate

    try:
        return candidate(spec).consistency
    except UsageError:
        return ""
