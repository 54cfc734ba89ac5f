"""``paceline compare``: the same script under several methods, as one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from paceline.cli import options as o
from paceline.errors import UsageError
from paceline.report.tables import print_results
from paceline.report.variants import Variant, merge_records, run_variant, to_json


def compare(
    script: o.Script,
    script_arguments: o.ScriptArguments = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help="A method's spec; give it several times."),
    ] = None,
    world: Annotated[
        Literal["virtual", "real"], typer.Option(help="Where to run.")
    ] = "virtual",
    workers: o.Workers = None,
    link: o.Link = None,
    latency: o.Latency = None,
    cluster: o.ClusterFile = None,
    steps: o.Steps = None,
    seed: o.Seed = None,
    forward: o.Forward = None,
    backward: o.Backward = None,
    jitter: o.Jitter = 0.0,
    output: Annotated[Path, typer.Option(help="Folder for records and traces.")] = Path(
        "paceline-runs"
    ),
    json: o.Json = False,
) -> None:
    """Run SCRIPT under each --variant, in turn; print a table and write records."""
    if not variant:
        raise UsageError("expected at least one --variant SPEC, such as --variant bsp")
    o.check_job(script, *variant)
    virtual_only = {
        "--cluster": cluster,
        "--link": link,
        "--latency": latency,
        "--forward": forward,
        "--backward": backward,
        "--jitter": jitter or None,
    }
    shared: dict[str, object] = {"--steps": steps, "--seed": seed, "--workers": workers}
    if world == "real":
        for name, value in virtual_only.items():
            if value is not None:
                raise UsageError(f"{name} describes the virtual world; leave it out")
        shared["--workers"] = workers or 2
    else:
        shared |= virtual_only
        # Complain about an impossible cluster here, once, not in every variant.
        o.make_cluster(cluster, workers, link, latency)
    arguments = [
        f"{name}={value}" for name, value in shared.items() if value is not None
    ]
    variants = [Variant(i, text) for i, text in enumerate(variant)]
    results = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for item in variants:
            task = progress.add_task(
                f"[{item.number + 1}/{len(variants)}] {item.spec}", total=1
            )
            result = run_variant(
                item, world, str(script), script_arguments or [], arguments, output
            )
            results.append((item.spec, result))
            progress.update(task, completed=1)
    merge_records(variants, output)
    if json:
        print(to_json(results))
    else:
        print_results(results)
        print(f"records and traces: {output}/ (open a trace in ui.perfetto.dev)")
