"""``paceline plan``: predict every method on a network and recommend one."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options as o
from paceline.cli.arguments import torchrun_words
from paceline.cli.progress import progress
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
from paceline.units import show_age, show_count, show_seconds

if TYPE_CHECKING:
    from paceline.cluster import Cluster
    from paceline.tools.plan import Plan
    from paceline.tools.report.model import Report

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
    max_work: Annotated[
        float | None,
        typer.Option(
            metavar="EVENTS",
            help="Stop after this many simulated events. "
            "\\[default: depends on the number of workers]",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    budget: Annotated[str | None, typer.Option(hidden=True)] = None,
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

    Consistency classes: exact is DDP's result up to rounding. Delayed applies every gradient once, at
    most one step late. Lossy compresses gradients; the error is fed back or small. Local averages
    parameters every few steps. Asynchronous workers do not wait for all others.
    """
    began = time.perf_counter()
    check_job(script, None)
    if budget is not None:
        raise UsageError(
            "--budget is no option of paceline plan any more: --max-work EVENTS limits the "
            "search; leave both out for the default"
        )
    if max_work is not None and not max_work > 0:
        raise UsageError(f"--max-work: expected more than zero, got {max_work:g}")
    allowed = classes(consistency)
    if probe:
        described = _probed(
            context, workers, cluster or link or latency or dedicated_servers
        )
        if described is None:
            return  # Rank 0 is on another machine, and has the result.
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
    from paceline.tools.plan.predictor import Predictor, usual_events
    from paceline.tools.plan.report import Question, plan_report, to_json
    from paceline.tools.plan.search import trace_steps
    from paceline.tools.plan.what_if import scaling_grid, suggestions

    page = ""
    with (
        _says_what_ended(script),
        standard_output_for_result(True) as true_output,
        progress(json) as on_progress,
        Predictor(processes(), max_work or usual_events(described)) as predictor,
    ):
        made = plan_script(
            script,
            arguments,
            described,
            workload=workload,
            forward=forward,
            backward=backward,
            allowed=allowed,
            predictor=predictor,
            on_progress=on_progress,
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
        on_progress("other ways to gain")
        plan, job = made.plan, made.job
        found = suggestions(plan, job, predictor)
        steps = [] if no_html else trace_steps(plan, job, predictor, on_progress)
        points = (
            scaling_grid(plan, job, predictor=predictor, on_progress=on_progress)
            if scaling
            else []
        )
        print(f"compute: {job.workload.source}", file=sys.stderr)
        if not no_html:
            report = plan_report(plan, found, question, points=points, steps=steps)
            page = _write_page(output, report)
        if json:
            text = to_json(plan, found, question, points)
            with open(true_output, "w", closefd=False) as stream:
                print(text, file=stream)
    if not json:
        from paceline.tools.report.terminal import print_report

        print(question, end="\n\n")
        report = plan_report(plan, found, question, points=points)
        print_report(report, everything=everything)
    _print_counts(plan, page, json=json)
    print(_searched(plan, predictor.events, began), file=sys.stderr)


@contextmanager
def _says_what_ended(script: Path) -> Iterator[None]:
    """Answer a signal to end at once, since predictions take seconds to stop."""
    try:
        yield
    except LauncherInterrupted:
        print(
            f"paceline: the plan of {script} was ended; no report is written",
            file=sys.stderr,
        )
        raise


def _options(values: Mapping[str, object]) -> list[str]:
    return [f"{name}={value}" for name, value in values.items() if value is not None]


def _stand_in(cluster: Cluster, workload: str | None, made: Planned) -> str | None:
    """Return the workload to emulate instead of the script.

    None if this machine has a core for each worker, or if there is no workload by that name.
    """
    if cluster.workers <= this_machines_cores() or made.compute.workload is None:
        return None
    what = made.compute.what
    return what if what == workload or Path(what).exists() else None


def _print_counts(plan: Plan, page: str, *, json: bool) -> None:
    """Print the number of candidates, and the path of the page."""
    from paceline.tools.plan.report import counts

    texts = [counts(plan)] if plan.estimates else []
    if page:
        texts.append(f"Page: {page}")
    if texts and json:
        print(" ".join(texts), file=sys.stderr)
    elif texts:
        print(f"\n{' '.join(texts)}")


def _searched(plan: Plan, events: int, began: float) -> str:
    """Number of simulated events, and the time that they took."""
    from paceline.tools.plan.report import show_events

    seconds = show_seconds(time.perf_counter() - began)
    candidates = show_count(len(plan.estimates), "candidate")
    return f"Searched {candidates}: {show_events(events)} in {seconds}"


def _page_before(output: Path) -> str:
    """Return a note that another plan's page is replaced; empty if there is none."""
    from paceline.tools.report.html import NAME

    try:
        written = (output / NAME).stat().st_mtime
    except OSError:
        return ""
    age = show_age(time.time() - written)
    return f" (replaces the page of a plan that was {age} old; --output keeps both)"


def _write_page(output: Path, report: Report) -> str:
    """Write the page; returns its path, and a note if it replaces another one."""
    from paceline.tools.report.html import NAME, write_page

    before = _page_before(output)
    return f"{write_page(output / NAME, report)}{before}"


def _probed(
    context: typer.Context, workers: int | None, described: object
) -> Cluster | None:
    """Measure the network now; returns it."""
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
