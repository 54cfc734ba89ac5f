"""What the planner's choice loses: its step over the best of all candidates, run at length.

    python -m benchmarks.measure.regret                    # all cells that have no result yet
    python -m benchmarks.measure.regret --cell layers-8-100mbit
    python -m benchmarks.measure.regret --table

24 cells in virtual time: models, links, racks, a slow link, a slow host. For each a plan is made
as ``paceline plan`` makes it. Then candidates run at length: without what makes predictions brief,
with `LONGER` times the steps. Of the rows that the plan ran in full those within `NEAR` of
the best of their class; of those that it cut after a short run all within `BEYOND`. Per class the
regret is the step that the chosen one takes then, over the shortest that any one
takes. Results are kept cell by cell in benchmarks/results/regret.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from statistics import median

import torch

from paceline.cluster import Cluster, Rack, Workload, uniform_cluster
from paceline.interfaces import CONSISTENCIES
from paceline.tools.plan import plan
from paceline.tools.plan.estimates import Estimate
from paceline.tools.plan.predict import STEADY_STEPS, TrainingJob, predict
from paceline.units import bytes_per_second

RESULTS = Path(__file__).parents[1] / "results" / "regret.json"
LONGER = 3
NEAR, BEYOND = 1.3, 2.0
"""The plan itself cuts those above 1.5."""


def layers(count: int = 16, megabytes: float = 8.0) -> Workload:
    """examples/layers.py as it is by default."""
    size = round(megabytes * 1e6 / 4 / count) * 4
    return Workload(
        names=tuple(f"weights.{i}" for i in range(count)),
        sizes=(size,) * count,
        forward=(0.1 / count,) * count,
        backward=(0.2 / count,) * count,
        batch=32.0,
        source="16 equal layers",
    )


def racks(workers: int, link: str, uplink: str) -> Cluster:
    """Two of so many workers each."""
    rate, up = bytes_per_second(link), bytes_per_second(uplink)
    return Cluster((Rack(workers=workers, link=rate, latency=50e-6, uplink=up),) * 2)


def slow_link(workers: int, link: str, slow: str) -> Cluster:
    """The last host's."""
    rates = (bytes_per_second(link),) * (workers - 1) + (bytes_per_second(slow),)
    return Cluster((Rack(workers=workers, link=rates, latency=50e-6),))


def slow_host(workers: int, link: str) -> Cluster:
    """The last one is half as fast."""
    speeds = (1.0,) * (workers - 1) + (0.5,)
    rate = bytes_per_second(link)
    return Cluster((Rack(workers=workers, link=rate, latency=50e-6, speed=speeds),))


def one_rack(workers: int, link: str) -> Cluster:
    return uniform_cluster(workers, link, "50us")


CELLS: dict[str, tuple[str, Cluster]] = {
    "layers-8-100mbit": ("layers", one_rack(8, "100mbit")),
    "layers-8-400mbit": ("layers", one_rack(8, "400mbit")),
    "layers-8-1gbit": ("layers", one_rack(8, "1gbit")),
    "layers-8-racks": ("layers", racks(4, "400mbit", "400mbit")),
    "layers-8-slow-link": ("layers", slow_link(8, "400mbit", "100mbit")),
    "layers-8-slow-host": ("layers", slow_host(8, "400mbit")),
    "layers-4-200mbit": ("layers", one_rack(4, "200mbit")),
    "layers-16-1gbit": ("layers", one_rack(16, "1gbit")),
    "layers-32-2.5gbit": ("layers", one_rack(32, "2.5gbit")),
    "layers-64-1gbit": ("layers", one_rack(64, "1gbit")),
    "vgg16-4-1gbit": ("vgg16", one_rack(4, "1gbit")),
    "vgg16-4-10gbit": ("vgg16", one_rack(4, "10gbit")),
    "vgg16-8-25gbit": ("vgg16", one_rack(8, "25gbit")),
    "vgg16-8-racks": ("vgg16", racks(4, "10gbit", "10gbit")),
    "vgg16-8-slow-link": ("vgg16", slow_link(8, "10gbit", "1gbit")),
    "resnet50-4-1gbit": ("resnet50", one_rack(4, "1gbit")),
    "resnet50-8-10gbit": ("resnet50", one_rack(8, "10gbit")),
    "resnet50-8-slow-host": ("resnet50", slow_host(8, "2.5gbit")),
    "resnet50-16-racks": ("resnet50", racks(8, "10gbit", "10gbit")),
    "resnet50-4-100mbit": ("resnet50", one_rack(4, "100mbit")),
    "bert-base-4-1gbit": ("bert-base", one_rack(4, "1gbit")),
    "bert-base-4-10gbit": ("bert-base", one_rack(4, "10gbit")),
    "bert-base-8-25gbit": ("bert-base", one_rack(8, "25gbit")),
    "bert-base-8-racks": ("bert-base", racks(4, "10gbit", "10gbit")),
}


def run(name: str, most: float) -> dict[str, object]:
    """One cell: its plan, and what all rows of it take at length; the plan takes at most so many simulated
    events."""
    model, cluster = CELLS[name]
    workload = layers() if model == "layers" else Workload.load(model)
    used = time.process_time()
    made = plan(cluster, workload, max_events=most)
    used = time.process_time() - used
    steady_steps = LONGER * STEADY_STEPS
    job = TrainingJob(
        cluster=cluster, workload=workload, steady_steps=steady_steps, brief=False
    )
    seconds: dict[str, float] = {}
    used_before = time.process_time()
    fastest = {q: row.step_seconds for q, row in made.fastest.items()}
    for row in made.estimates:
        limit = BEYOND if row.fidelity == "short" else NEAR
        if row.step_seconds > limit * fastest[row.consistency]:
            continue
        said = predict(job, row.spec)
        if isinstance(said, Estimate):
            seconds[row.spec] = said.step_seconds
    regrets = {}
    for consistency, chosen in made.fastest.items():
        specs = [r.spec for r in made.estimates if r.consistency == consistency]
        mine = {spec: seconds[spec] for spec in specs if spec in seconds}
        best = min(mine, key=mine.__getitem__)
        regrets[consistency] = {
            "chosen": chosen.spec,
            "best": best,
            "regret": mine[chosen.spec] / mine[best],
        }
    used_at_length = time.process_time() - used_before
    return {
        "candidates": len(made.estimates),
        "at_length": len(seconds),
        "skipped": made.skipped,
        "plan_events": made.events,
        "plan_processor_seconds": used,
        "at_length_processor_seconds": used_at_length,
        "regrets": regrets,
    }


def table(results: dict[str, dict[str, object]]) -> None:
    """Markdown."""
    print(
        "| cell | candidates | plan, simulated events | "
        + " | ".join(CONSISTENCIES)
        + " |"
    )
    print("|---" * (3 + len(CONSISTENCIES)) + "|")
    everything: list[float] = []
    for name, result in results.items():
        regrets: dict[str, dict[str, float]] = result["regrets"]  # type: ignore[assignment]
        values = [
            regrets.get(consistency, {}).get("regret") for consistency in CONSISTENCIES
        ]
        everything += [value for value in values if value is not None]
        cells = ["-" if value is None else f"{value:.3f}" for value in values]
        print(
            f"| {name} | {result['candidates']} | "
            f"{result['plan_events']:,} | {' | '.join(cells)} |"
        )
    if everything:
        print(f"\n{len(results)} cells: worst {max(everything):.3f}, median ", end="")
        print(f"{median(everything):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cell", action="append", choices=CELLS)
    parser.add_argument("--max-work", type=float, default=math.inf, metavar="EVENTS")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wanted = args.cell or [name for name in CELLS if name not in results]
    for name in [] if args.table else wanted:
        results[name] = run(name, args.max_work)
        ordered = {cell: results[cell] for cell in CELLS if cell in results}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
        print(name, json.dumps(results[name]["regrets"]), flush=True)
    table(results)


if __name__ == "__main__":
    main()
