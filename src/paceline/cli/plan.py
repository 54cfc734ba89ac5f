"""``paceline plan``: predict every method on a network and recommend one."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options as o
from paceline.cli.arguments import torchrun_words
from paceline.cli.progress import Progress, progress
from paceline.cli.script_plan import (
    Planned,
    classes,
    plan_script,
    processes,
    this_machines_cores,
)
from paceline.cli.script_run import check_job
from paceline.cluster import load_cluster
from paceline.errors import UsageError
from paceline.runtimes.results import standard_output_for_result
from paceline.runtimes.temporary_folder import LauncherInterrupted, scratch_folder
from paceline.units import show_age, show_seconds

if TYPE_CHECKING:
    from paceline.cluster import Cluster
    from paceline.tools.plan.prediction_cost import Budget
    from paceline.tools.plan.predictor import Predict
    from paceline.tools.plan.report import Question
    from paceline.tools.plan.suggestions import Suggestions
    from paceline.tools.plan.what_if import ScalingPoint

SEARCH = "Search"
"""A panel of ``--help``."""


def plan(
    context: typer.Context,
    script: o.Script,
    script_arguments: o.ScriptArguments = None,
    workers: o.Workers = None,
    link: o.Link = None,
    latency: o.Latency = None,
    dedicated_servers: o.DedicatedServers = None,
    cluster: o.ClusterFile = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Measure the network first. Run the same command on every machine, with "
            "torchrun's options.",
            rich_help_panel=o.NETWORK,
        ),
    ] = False,
    workload: o.WorkloadFile = None,
    forward: o.Forward = None,
    backward: o.Backward = None,
    consistency: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS",
            help="exact, delayed, lossy, local or asynchronous; repeatable. \\[default: all]",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Stop after about this many seconds of a core, counted from simulated work. "
            "\\[default: 60, and 8 for each worker beyond 16]",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    scaling: Annotated[
        bool,
        typer.Option(
            "--scaling",
            help="Also predict 1 to 64 workers at 0.1 to 25 Gbit/s.",
            rich_help_panel=SEARCH,
        ),
    ] = False,
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Also print every candidate and why the others are infeasible.",
            rich_help_panel=o.OUTPUT,
        ),
    ] = False,
    output: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Folder for the HTML report.",
            rich_help_panel=o.OUTPUT,
        ),
    ] = Path("paceline-plan"),
    no_html: o.NoHtml = False,
    json: o.Json = False,
) -> None:
    """Predict the step time of every method on a network and recommend one.

    Each method runs in virtual time, with tensors that stand in for the model's.

    Consistency classes: exact = DDP's result up to rounding; delayed = every gradient is applied once,
    at most one step late; lossy = compressed gradients, the error is fed back or small; local =
    parameters are averaged every few steps; asynchronous = workers do not wait for all others.
    """
    began = time.perf_counter()
    check_job(script, None)
    if budget is not None and not budget > 0:
        raise UsageError(f"--budget: expected more than zero, got {budget:g}")
    allowed = classes(consistency)
    if probe:
        described = _probed(
            context, workers, cluster or link or latency or dedicated_servers
        )
        if described is None:
            return  # another machine's rank 0 has it
    else:
        for word in torchrun_words(context)[:1]:
            raise UsageError(f"{word} means nothing without --probe; leave it out")
        described = o.make_cluster(cluster, workers, link, latency, dedicated_servers)
    network = {
        "--cluster": cluster,
        "--workers": workers,
        "--link": link,
        "--latency": latency,
        "--dedicated-servers": dedicated_servers,
    }
    compute = {"--workload": workload, "--forward": forward, "--backward": backward}
    arguments = script_arguments or []
    from paceline.tools.plan.prediction_cost import Budget, usual_seconds
    from paceline.tools.plan.predictor import in_processes
    from paceline.tools.plan.report import Question, plan_report, to_json
    from paceline.tools.plan.suggestions import helps

    most = usual_seconds(described) if budget is None else budget
    left = Budget(most)
    page = ""
    with (
        _says_what_ended(script),
        standard_output_for_result(True) as true_output,
        progress(json) as told,
        in_processes(processes()) as predict,
    ):
        made = plan_script(
            script,
            arguments,
            described,
            workload=workload,
            forward=forward,
            backward=backward,
            allowed=allowed,
            budget=left,
            told=told,
            predict=predict,
        )
        question = Question(
            cluster=described,
            workload=made.job.workload,
            script=str(script),
            arguments=arguments,
            command=shlex.join(["paceline", *sys.argv[1:]]),
            network=None if probe else _options(network),
            compute=_options(compute),
            stand_in=_stand_in(described, workload, made),
        )
        told("other ways to gain")
        answer = _Answer(
            question,
            made,
            helps(made.plan, made.job, predict, left),
            _points(made, told, predict) if scaling else [],
        )
        print(f"compute: {made.job.workload.source}", file=sys.stderr)
        if not no_html:
            page = _write_page(output, answer, told, predict, left)
        if json:
            text = to_json(made.plan, answer.suggestions, question, answer.points)
            with open(true_output, "w", closefd=False) as stream:
                print(text, file=stream)
    if not json:
        from paceline.tools.report.terminal import print_report

        print(question, end="\n\n")
        report = plan_report(
            made.plan, answer.suggestions, question, points=answer.points
        )
        print_report(report, everything=everything)
    _print_counts(made, page, json=json)
    print(_spent(began, most, left, scaling=scaling), file=sys.stderr)


@contextmanager
def _says_what_ended(script: Path) -> Iterator[None]:
    """Within it, a signal to end is answered at once: predictions take seconds to end."""
    try:
        yield
    except LauncherInterrupted:
        print(
            f"paceline: the plan of {script} was ended; no report is written",
            file=sys.stderr,
        )
        raise


@dataclass(frozen=True)
class _Answer:
    """What was asked, and what came of it."""

    question: Question
    made: Planned
    suggestions: Suggestions
    points: list[ScalingPoint]


def _options(values: Mapping[str, object]) -> list[str]:
    return [f"{name}={value}" for name, value in values.items() if value is not None]


def _stand_in(cluster: Cluster, workload: str | None, made: Planned) -> str | None:
    """The workload to emulate instead of the script, where this machine has fewer cores than
    workers would compute on; None where it has enough, or there is none by that name."""
    if cluster.workers <= this_machines_cores() or made.compute.workload is None:
        return None
    what = made.compute.what
    return what if what == workload or Path(what).exists() else None


def _print_counts(made: Planned, page: str, *, json: bool) -> None:
    """How many candidates there were, and where the page is: the result's last line."""
    from paceline.tools.plan.report import counts

    texts = [counts(made.plan)] if made.plan.estimates else []
    if page:
        texts.append(f"Page: {page}")
    if texts and json:
        print(" ".join(texts), file=sys.stderr)
    elif texts:
        print(f"\n{' '.join(texts)}")


def _spent(began: float, most: float, left: Budget, *, scaling: bool) -> str:
    """Time by the clock, and the part of the budget that is used."""
    text = (
        f"took {show_seconds(time.perf_counter() - began)}; simulated work: "
        f"{100 * (most - left.left) / most:.0f} % of --budget {most:g}"
    )
    return text + " (not counting --scaling)" * scaling


def _page_before(output: Path) -> str:
    """That the page of another plan is replaced, where one is there; else nothing."""
    from paceline.tools.report.html import NAME

    try:
        written = (output / NAME).stat().st_mtime
    except OSError:
        return ""
    age = show_age(time.time() - written)
    return f" (replaces the page of a plan that was {age} old; --output keeps both)"


def _write_page(
    output: Path, answer: _Answer, told: Progress, predict: Predict, left: Budget
) -> str:
    """Write the page; returns its path, and whether it replaces another one."""
    from paceline.tools.plan.report import plan_report
    from paceline.tools.plan.traced_step import steps_of
    from paceline.tools.report.html import NAME, write_page

    plan, job = answer.made.plan, answer.made.job
    before = _page_before(output)
    report = plan_report(
        plan,
        answer.suggestions,
        answer.question,
        points=answer.points,
        steps=steps_of(plan, job, told, predict, left),
    )
    return f"{write_page(output / NAME, report)}{before}"


def _points(made: Planned, told: Progress, predict: Predict) -> list[ScalingPoint]:
    """More workers and faster links, after saying how long that takes."""
    from paceline.tools.plan.what_if import seconds_at_most
    from paceline.tools.plan.what_if import what_if as make_points

    seconds = seconds_at_most(made.plan, made.job)
    told.say(f"--scaling takes about {show_seconds(seconds)} of a core at most")
    return make_points(made.plan, made.job, told=told, predict=predict)


def _probed(
    context: typer.Context, workers: int | None, described: object
) -> Cluster | None:
    """The network as measured now."""
    if described is not None:
        raise UsageError(
            "--probe measures the network: leave --cluster, --link, --latency and "
            "--dedicated-servers out"
        )
    from paceline.cli.probe import probe

    with scratch_folder() as folder, standard_output_for_result(True):
        file = Path(folder) / "cluster.toml"
        probe(context, runtime="real", workers=workers, output=file, seconds=0.1)
        return load_cluster(file) if file.exists() else None
