"""``paceline compare``: the same script under several methods, as one table."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from paceline.cli import options as o
from paceline.errors import UsageError
from paceline.options import RunOptions
from paceline.report.files import clear

if TYPE_CHECKING:
    from paceline.report.result import Outcome, Result
    from paceline.report.variants import Variant


def compare(
    script: o.Script,
    script_arguments: o.ScriptArguments = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help="A method's spec; once or more."),
    ] = None,
    world: Annotated[
        Literal["virtual", "emulated", "real"], typer.Option(help="Where to run.")
    ] = "virtual",
    workers: Annotated[
        int | None,
        typer.Option(help="Number of workers. \\[default: 4; in the real world 2]"),
    ] = None,
    link: o.Link = None,
    latency: o.Latency = None,
    server_hosts: o.ServerHosts = None,
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
    """Run SCRIPT under each --variant, in turn; print a table and write records, plots and
    a page.

    A variant that fails has a row that says so, the others go on, and the exit status is 1.
    """
    if not variant:
        raise UsageError("expected at least one --variant SPEC, such as --variant bsp")
    o.check_job(script, *variant)
    network: dict[str, object] = {
        "--cluster": cluster,
        "--link": link,
        "--latency": latency,
        "--server-hosts": server_hosts,
    }
    virtual_only: dict[str, object] = {
        "--workload": workload,
        "--forward": forward,
        "--backward": backward,
        "--jitter": jitter or None,
    }
    foreign: dict[str, dict[str, object]] = {
        "virtual": {"--pace": pace},
        "emulated": virtual_only,
        "real": network | virtual_only | {"--pace": pace},
    }
    for name, value in foreign[world].items():
        if value is not None:
            raise UsageError(f"{name} means nothing in the {world} world; leave it out")
    from paceline.cli.measured import profiled
    from paceline.report.result import Result
    from paceline.report.tables import print_results
    from paceline.report.variants import Variant, to_json

    shared: dict[str, object] = {"--steps": steps, "--seed": seed, "--workers": workers}
    if world == "real":
        shared["--workers"] = workers or 2
    elif world == "emulated":
        o.make_cluster(
            cluster, workers, link, latency, server_hosts
        )  # complain here, once
        shared |= network | {"--pace": pace}
    else:
        # Complain here, once, not in every variant; and profile once for all.
        described = o.make_cluster(cluster, workers, link, latency, server_hosts)
        compute = o.make_compute(workload, forward, backward, jitter, seed)
        if workload is None and forward is None and backward is None:
            compute = profiled(
                script,
                script_arguments or [],
                described,
                compute,
                RunOptions(method="bsp", seed=seed),  # it runs whatever the variants do
            )
            if compute.workload is None:
                shared |= {"--forward": compute.forward, "--backward": compute.backward}
            # else each variant finds the profile that is kept
        shared = network | virtual_only | shared
    arguments = [
        f"{name}={value}" for name, value in shared.items() if value is not None
    ]
    variants = [Variant(i, text) for i, text in enumerate(variant)]
    clear(str(output))  # else what is left of the last comparison looks like this one's
    results = _run_all(
        variants, world, script, script_arguments or [], arguments, output
    )
    ran = [outcome for _, outcome in results if isinstance(outcome, Result)]
    page = None
    if ran and not no_plots:
        title = f"{script}: {len(variants)} variant{'s' * (len(variants) > 1)}"
        page = _write_page(output, title, variants, results, ran[0])
    if json:
        print(to_json(results))
    elif ran:
        print_results(results)
        print(f"records and traces: {output}/ (open a trace in ui.perfetto.dev)")
        if page is not None:
            print(f"page: {page}")
    if len(ran) < len(results):
        sys.exit(1)


def _run_all(
    variants: Sequence[Variant],
    world: str,
    script: Path,
    script_arguments: Sequence[str],
    options: Sequence[str],
    output: Path,
) -> list[tuple[str, Outcome]]:
    """Run each variant; records of those that have not failed are merged in *output*."""
    from paceline.report.result import Result
    from paceline.report.variants import merge_records, run_variant

    results: list[tuple[str, Outcome]] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for item in variants:
            task = progress.add_task(
                f"[{item.number + 1}/{len(variants)}] {item.spec}", total=1
            )
            outcome, errors = run_variant(
                item, world, str(script), script_arguments, options, output
            )
            if not isinstance(outcome, Result):
                words = f"{errors.strip()}\npaceline: variant {item.spec!r} failed"
                progress.console.print(Text(words), soft_wrap=True)
            results.append((item.spec, outcome))
            progress.update(task, completed=1)
    have_run = [
        item
        for item, (_, outcome) in zip(variants, results, strict=True)
        if isinstance(outcome, Result)
    ]
    merge_records(have_run, output)
    return results


def _write_page(
    output: Path,
    title: str,
    variants: Sequence[Variant],
    results: Sequence[tuple[str, Outcome]],
    first: Result,
) -> Path:
    from paceline.report.page import write_report  # matplotlib: only where needed

    notes = [("network", first.network), ("compute", first.compute)]
    return write_report(
        str(output),
        variants,
        results,
        title=title,
        command=shlex.join(["paceline", *sys.argv[1:]]),
        notes=[(name, text) for name, text in notes if text],
    )
