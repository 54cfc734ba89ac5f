"""``paceline compare``: train with several methods, and show them in one table."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli import options as o
from paceline.cli.progress import describe, progress, task_rows
from paceline.cli.script_plan import classes, plan_script, processes
from paceline.cli.script_run import check_job
from paceline.errors import UsageError
from paceline.run_options import RunOptions, ScriptJob
from paceline.runtimes.results import standard_output_for_result
from paceline.tools.report.run_files import clear
from paceline.units import show_count, show_seconds

if TYPE_CHECKING:
    from paceline.cluster import Cluster
    from paceline.interfaces import Consistency
    from paceline.runtimes.simulated import ComputeModel
    from paceline.tools.compare.runner import Goal, Training, Variant, VariantRun
    from paceline.tools.plan import Plan

PLAN_PART = 2 / 3
"""Share of the simulated events of `paceline plan`: here a plan has no page."""


def compare(
    script: o.Script,
    script_arguments: o.ScriptArguments = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="A method to train with; repeatable. \\[default: the best method of each "
            "consistency, as paceline plan finds it, and bsp:buckets=ddp, which is what DDP does]",
        ),
    ] = None,
    consistency: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONSISTENCY",
            help="Without --method: only the best method of this consistency; repeatable. "
            "\\[default: of all]",
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC=VALUE",
            help="Show when each method reaches this value of a logged metric. "
            "\\[default: no column for it]",
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
    output: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Folder for the page, records and traces.",
            rich_help_panel=o.OUTPUT,
        ),
    ] = Path("paceline-runs"),
    no_html: o.NoHtml = False,
    json: o.Json = False,
) -> None:
    """Train with several methods; compare step time, metrics, and time to a target metric.

    The default is the best method of each consistency, as paceline plan finds it.

    A variant that fails has a row that says so, the others go on, and the exit status is 1.
    """
    check_job(script, *method or ())
    _check_plan(runtime, method, consistency)
    from paceline.tools.compare.runner import (
        Goal,
        Training,
        number_at_once,
        run_variants,
    )

    goal = None if until is None else Goal.read(until)
    allowed = classes(consistency)
    given = o.Given(
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
    arguments = script_arguments or []
    shared: dict[str, object] = {"--steps": steps, "--seed": seed, "--workers": workers}
    plan, measures = None, True
    if runtime == "real":
        shared["--workers"] = o.REAL_WORKERS if workers is None else workers
    else:
        # Report errors once here instead of in every variant; profile once for all.
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
                measured = _measured(script, arguments, described, compute, seed)
                measures, shared = not measured, shared | measured
    variants = _variants(method, plan)
    # Otherwise files of the last comparison would seem to belong to this one.
    clear(str(output))
    training = Training(
        script=str(script),
        arguments=arguments,
        runtime=runtime,
        options=given.options(runtime, shared),
        folder=output,
    )
    at_once = number_at_once(runtime, measures=measures, processes=processes())
    with task_rows(json) as shown:

        def begin(name: str, file: Path) -> Callable[[], None]:
            return shown.begin(name, partial(_how_far, file))

        runs = run_variants(
            variants,
            training,
            goal,
            at_once=at_once,
            begin=begin,
            report=shown.report,
        )
    ran = [run.result for run in runs if run.result is not None]
    if json:
        from paceline.tools.compare.report import to_json

        print(to_json(runs, goal, plan))
    if ran and not (json and no_html):
        title = f"{script}: {show_count(len(runs), 'method')}"
        _report(runs, training, title, goal, plan, page=not no_html, json=json)
    if goal is not None and ran:
        goal.check_logged(ran[0].metrics)
    if len(ran) < len(runs):
        sys.exit(1)


def _how_far(file: Path) -> str:
    from paceline.runtimes.progress import read

    found = read(file)
    return "" if found is None else describe(found)


def _report(
    runs: Sequence[VariantRun],
    training: Training,
    title: str,
    goal: Goal | None,
    plan: Plan | None,
    *,
    page: bool,
    json: bool,
) -> None:
    """Write the page, and print its answer and the paths of the files."""
    from paceline.tools.compare.report import comparison_report
    from paceline.tools.report.html import NAME, write_page
    from paceline.tools.report.terminal import print_report

    output = training.folder
    report = comparison_report(
        runs,
        output,
        title=title,
        command=shlex.join(["paceline", *sys.argv[1:]]),
        goal=goal,
        planned=None if plan is None else plan.baseline,
        script=training.script,
        arguments=training.arguments,
    )
    if page:
        write_page(output / NAME, report)
    if json:
        return
    print_report(report)
    print(f"Records and traces: {output}/ (open a trace in ui.perfetto.dev)")
    if page:
        print(f"Page: {output / NAME}")


def _check_plan(
    runtime: str, method: Sequence[str] | None, consistency: Sequence[str] | None
) -> None:
    """Raise `UsageError` if a plan cannot be made, or is not needed."""
    if method and consistency:
        raise UsageError(
            "--consistency selects among planned methods, and --method replaces the plan: leave "
            "one of them out"
        )
    if runtime == "real" and not method:
        raise UsageError(
            "in the real runtime the network is unknown: give one --method SPEC or more "
            "(paceline plan SCRIPT --probe measures the network and recommends methods)"
        )


def _planned(
    script: Path,
    arguments: list[str],
    cluster: Cluster,
    allowed: Collection[Consistency],
    times: Mapping[str, Any],
    json: bool,
) -> Plan:
    """Make the plan; prints on standard error which methods will run."""
    from paceline.tools.plan.predictor import Predictor, usual_events
    from paceline.tools.plan.recommendation import faster_but_not_recommended, headline

    most = PLAN_PART * usual_events(cluster)
    with (
        standard_output_for_result(True),
        progress(json) as on_progress,
        Predictor(processes(), most) as predictor,
    ):
        made = plan_script(
            script,
            arguments,
            cluster,
            **times,
            allowed=allowed,
            predictor=predictor,
            on_progress=on_progress,
        )
        plan = made.plan
        if plan.baseline.workers == 1:
            raise UsageError(
                "with one worker there is nothing to compare: give --workers 2 or more"
            )
        on_progress.report(f"plan: {' '.join(headline(plan))}")
        for variant in _variants(None, plan):
            predicted = variant.predicted
            step = "" if predicted is None else f": {show_seconds(predicted)} per step"
            on_progress.report(f"  {variant.consistency}: {variant.spec}{step}")
        if faster := faster_but_not_recommended(plan):
            on_progress.report(f"  {faster}")
    return plan


def _variants(method: Sequence[str] | None, plan: Plan | None) -> list[Variant]:
    """Return the named methods; by default DDP and the plan's recommendations."""
    from paceline.tools.compare.runner import Variant
    from paceline.tools.plan.estimates import DDP

    specs = list(method or [])
    if plan is not None:
        recommended = [row.spec for row in plan.recommended.values()]
        specs = [DDP, *(spec for spec in recommended if spec != DDP)]
    variants = []
    for number, spec in enumerate(specs):
        row = None if plan is None else plan.estimate(spec)
        predicted = None if row is None else row.step_seconds
        variants.append(Variant(number, spec, _consistency_of(spec), predicted))
    return variants


def _consistency_of(spec: str) -> str:
    """Return the consistency of a spec; empty if the method is chosen during training."""
    from paceline.tools.plan.candidates import candidate

    try:
        return candidate(spec).consistency
    except UsageError:
        return ""


def _measured(
    script: Path,
    arguments: list[str],
    cluster: Cluster,
    compute: ComputeModel,
    seed: int | None,
) -> dict[str, object]:
    """Profile the script once for all variants, unless the profile is cached.

    Returns:
        The variants' options; empty if the script sets its own compute times, as nothing is measured then.
    """
    from paceline.runtimes.simulated.profile_cache import profiled

    # The profile is the same for all variants.
    job = ScriptJob(str(script), arguments, RunOptions(method="bsp", seed=seed))
    compute = profiled(job, cluster, compute, o.SCRATCH)
    if compute.workload is not None:
        return {}
    return {"--forward": compute.forward, "--backward": compute.backward}
