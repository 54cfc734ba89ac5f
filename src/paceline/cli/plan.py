"""``paceline plan``: which method is fastest here, of those that promise enough."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

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
from paceline.cluster import load_cluster
from paceline.errors import UsageError
from paceline.runtimes.temporary_folder import scratch_folder
from paceline.units import show_age, show_seconds

if TYPE_CHECKING:
    from paceline.cluster import Cluster
    from paceline.interfaces import Consistency
    from paceline.tools.plan.prediction_cost import Budget
    from paceline.tools.plan.predictor import Predict
    from paceline.tools.plan.suggestions import Suggestions
    from paceline.tools.plan.what_if import ScalingPoint


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
            help="Measure the network now, as paceline probe does: torchrun's options are "
            "passed through, run the same command on each machine.",
        ),
    ] = False,
    workload: o.WorkloadFile = None,
    forward: o.Forward = None,
    backward: o.Backward = None,
    consistency: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONSISTENCY",
            help="Only candidates of this class: exact, delayed, lossy, local or asynchronous; "
            "once or more. \\[default: all]",
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="About how many seconds of a core predictions may take, those of the page too, and "
            "without those of --scaling; counted, and not timed, so that equal questions have equal answers. "
            "\\[default: 60, and 8 more for each worker beyond 16]"
        ),
    ] = None,
    scaling: Annotated[
        bool,
        typer.Option(
            "--scaling",
            help="Predict 1 to 64 workers with links of 0.1 to 25 Gbit/s, too.",
        ),
    ] = False,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Print all candidates, and why the others cannot run, too."
        ),
    ] = False,
    output: Annotated[
        Path,
        typer.Option(
            help="Folder for the page and its pictures; those of the plan before are replaced."
        ),
    ] = Path("paceline-plan"),
    no_plots: Annotated[
        bool, typer.Option("--no-plots", help="Draw nothing, and write no page.")
    ] = False,
    json: o.Json = False,
) -> None:
    """Predict the step time of every method on a network and recommend one.

    Each runs in virtual time, with tensors that stand in for the model's.
    """
    o.check_job(script, None)
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
    words = {
        "--cluster": cluster,
        "--workers": workers,
        "--link": link,
        "--latency": latency,
        "--dedicated-servers": dedicated_servers,
    }
    said = [f"{name}={value}" for name, value in words.items() if value is not None]
    asked = _Asked(
        script=script,
        arguments=script_arguments or [],
        cluster=described,
        network=None if probe else said,
        workload=workload,
        forward=forward,
        backward=backward,
        allowed=allowed,
        budget=budget,
        scaling=scaling,
        everything=everything,
        output=None if no_plots else output,
        json=json,
    )
    _answer_question(asked)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What the command line says. *network*: the options that describe it (None: it was probed). *output*:
    the page's folder (None: no page)."""

    script: Path
    arguments: list[str]
    cluster: Cluster
    network: list[str] | None
    workload: str | None
    forward: float | None
    backward: float | None
    allowed: tuple[Consistency, ...]
    budget: float | None
    scaling: bool
    everything: bool
    output: Path | None
    json: bool


@dataclass(frozen=True)
class _Answer:
    """What came of it."""

    made: Planned
    helps: Suggestions
    points: list[ScalingPoint]


def _answer_question(asked: _Asked) -> None:
    """Plan, write the page, and print what was found."""
    began = time.perf_counter()
    from paceline.tools.plan.prediction_cost import Budget, usual_seconds
    from paceline.tools.plan.predictor import in_processes
    from paceline.tools.plan.suggestions import helps

    most = usual_seconds(asked.cluster) if asked.budget is None else asked.budget
    left = Budget(most)
    with (
        o.standard_output_for_result(True) as true_output,
        progress(asked.json) as told,
        in_processes(processes()) as predict,
    ):
        made = plan_script(
            asked.script,
            asked.arguments,
            asked.cluster,
            workload=asked.workload,
            forward=asked.forward,
            backward=asked.backward,
            allowed=asked.allowed,
            budget=left,
            told=told,
            predict=predict,
        )
        told("what would help")
        more = helps(made.plan, made.job, predict, left)
        points = _points(made, told, predict) if asked.scaling else []
        answer = _Answer(made, more, points)
        print(f"network: {asked.cluster.describe()}", file=sys.stderr)
        print(f"compute: {made.job.workload.source}", file=sys.stderr)
        if asked.output is not None:
            before = _page_before(asked.output)
            page = _write_page(asked.output, asked, answer, told, predict, left)
            print(f"page: {page}{before}", file=sys.stderr)
        spent = _spent(began, most, left, more, asked.scaling)
        if asked.json:
            with open(true_output, "w", closefd=False) as stream:
                _print(asked, answer, stream)
    if not asked.json:
        _print(asked, answer)
    print(spent, file=sys.stderr)


def _print(asked: _Asked, answer: _Answer, stream: TextIO | None = None) -> None:
    """The result: as one object where JSON is asked for, on *stream*, else as tables."""
    from paceline.tools.plan import tables

    plan, more, points = answer.made.plan, answer.helps, answer.points
    script, arguments = str(asked.script), asked.arguments
    if asked.json:
        text = tables.to_json(plan, more, points, script, arguments)
        print(text, file=stream)
        return
    if points:
        tables.print_points(points)
    tables.print_plan(
        plan,
        more,
        asked.cluster,
        script,
        arguments,
        network=asked.network,
        stand_in=_stand_in(asked, answer.made),
        everything=asked.everything,
    )


def _stand_in(asked: _Asked, made: Planned) -> str | None:
    """The workload to emulate instead of the script, where this machine has fewer cores than
    workers would compute on; None where it has enough, or there is none by that name."""
    if asked.cluster.workers <= this_machines_cores() or made.compute.workload is None:
        return None
    what = made.compute.what
    return what if what == asked.workload or Path(what).exists() else None


def _spent(
    began: float, most: float, left: Budget, more: Suggestions, scaling: bool
) -> str:
    """What it took by the clock, and of the budget, which is *most* seconds."""
    text = (
        f"took {show_seconds(time.perf_counter() - began)}; predictions are counted as "
        f"{most - left.left:.1f} s of a core, of {most:g} (--budget, three quarters of it for candidates)"
    )
    if scaling:
        text += ", without those of --scaling"
    if more.untried:
        text += (
            f"; of what might help {more.untried} were not tried, as the rest is spent"
        )
    return text


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
    output: Path,
    asked: _Asked,
    answer: _Answer,
    told: Progress,
    predict: Predict,
    left: Budget,
) -> Path:
    """The page, and its pictures as files beside it."""
    from paceline.tools.plan.pictures import write_pictures  # matplotlib takes a second
    from paceline.tools.plan.report import plan_page
    from paceline.tools.plan.traced_step import steps_of
    from paceline.tools.report.html import NAME, write_page

    made, points = answer.made, answer.points
    steps = steps_of(made.plan, made.job, told, predict, left)
    pictures = write_pictures(str(output), made.plan, points)
    page = plan_page(
        *(made.plan, answer.helps, points, steps),
        cluster=made.job.cluster,
        script=str(asked.script),
        arguments=asked.arguments,
        command=shlex.join(["paceline", *sys.argv[1:]]),
        notes=[
            ("network", made.job.cluster.describe()),
            ("compute", made.job.workload.source),
        ],
        files=[f"{one.name}.{kind}" for one in pictures for kind in ("svg", "png")],
    )
    return write_page(output / NAME, page)


def _points(made: Planned, told: Progress, predict: Predict) -> list[ScalingPoint]:
    """What more workers and faster links would give, after saying how long that takes."""
    from paceline.tools.plan.what_if import seconds_at_most
    from paceline.tools.plan.what_if import what_if as make_points

    seconds = seconds_at_most(made.plan, made.job)
    told.say(f"--scaling takes about {show_seconds(seconds)} of a core at most")
    return make_points(made.plan, made.job, told=told, predict=predict)


def _probed(
    context: typer.Context, workers: int | None, described: object
) -> Cluster | None:
    """The network as it is found to be now."""
    if described is not None:
        raise UsageError(
            "--probe measures the network: leave --cluster, --link, --latency and "
            "--dedicated-servers out"
        )
    from paceline.cli.probe import probe

    with scratch_folder() as folder, o.standard_output_for_result(True):
        file = Path(folder) / "cluster.toml"
        probe(context, runtime="real", workers=workers, output=file, seconds=0.1)
        return load_cluster(file) if file.exists() else None
