"""Whether DS-Sync loses accuracy: as many steps as bsp, seed by seed (see `accuracy`).

    python benchmarks/ds_sync_accuracy.py --processes 2
    python benchmarks/ds_sync_accuracy.py --task digits --workers 4 --seeds 2
    python benchmarks/ds_sync_accuracy.py --no-training --plot docs/ds_sync_accuracy.png

Groups are pairs. Under ``overlap=forward`` the means travel beside the next forward pass, which
is to change no number; under ``overlap=step`` beside the whole next step, whose gradients then
belong to parameters that were not averaged. SWA is of the last quarter of all steps.
"""

import math
from pathlib import Path
from typing import Any

from accuracy import Table, draw_means, run
from accuracy_tasks import DIGITS, TASKS

from paceline.cluster import Cluster, Rack
from paceline.collectives import timing as prices
from paceline.collectives.schedules import Ring, hierarchical
from paceline.methods.ds_sync import cost
from paceline.methods.ds_sync.divide import make_plan

SWA_FROM = DIGITS.steps * 3 // 4
ROWS = {
    "digits": "ds-sync:groups=digits",
    "digits, overlap=step": "ds-sync:groups=digits,overlap=step",
    "digits, SWA": f"ds-sync:groups=digits,swa_from={SWA_FROM}",
}
FORWARD = {"digits, overlap=forward": "ds-sync:groups=digits,overlap=forward"}
TOPOLOGY = {"topology": "ds-sync:groups=topology"}
FEWER = {name: ROWS[name] for name in ROWS if name != "digits, SWA"}
"""Where a row takes minutes."""
TABLES = [
    Table(task="digits", workers=4, rows=FORWARD | ROWS),
    Table(task="digits", workers=16, rows=ROWS | TOPOLOGY),
    Table(task="bytes_lm", workers=4, rows=ROWS),
    Table(task="bytes_lm", workers=16, rows=FEWER | TOPOLOGY),
]


# ---- the picture ----

MEGABYTES, UNITS = 100, 1600
PRICED = Rack(workers=4, link=125e6, uplink=31.25e6, latency=50e-6)
"""Four of these: links of 1 Gbit/s, and an uplink of a quarter of that."""
PLANS: dict[str, tuple[dict[str, Any], tuple[int, int], str]] = {
    "topology": ({"groups": "topology"}, (0, 8), "center"),
    "digits": ({"groups": "digits"}, (8, -8), "left"),
    "digits, size=4": ({"groups": "digits", "size": 4}, (0, 8), "center"),
}
"""Options, and where the name stands: points from the dot, and aligned how."""
COLOURS = {4: "#56b4e9", 16: "#d55e00"}
FARTHEST = 1.6
"""Points, or per cent, beyond which a row stands at the edge, with its figure beside."""


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """What a step takes against how far workers stay apart, and what was measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    abouts = {
        "digits": "accuracy against bsp's, points",
        "bytes_lm": "bits per byte against bsp's, %",
    }
    tasks = [task for task in abouts if any(row["task"] == task for row in rows)]
    figure = Figure(figsize=(5 + 4 * len(tasks), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, *others = figure.subplots(1, 1 + len(tasks))
    draw_plans(left)
    for axes, task in zip(others, tasks, strict=True):
        draw_task(axes, task, abouts[task], rows)
        axes.tick_params(labelleft=axes is others[0])
    others[0].legend(fontsize=9, loc="lower right")
    figure.savefig(path, dpi=150)


def draw_plans(axes):
    cluster = Cluster((PRICED,) * 4)
    size, workers = MEGABYTES * 1e6, range(16)
    for name, (options, offset, side) in PLANS.items():
        plan = make_plan(workers, cluster=cluster, bytes=size, **options)
        place = cost.steady_seconds(plan, cluster, size), cost.spread(plan)
        axes.plot(*place, "o", color="#d55e00", markersize=7)
        axes.annotate(
            name, place, offset, textcoords="offset points", ha=side, fontsize=10
        )
    for schedule, name, height in (
        (Ring(16, UNITS), "ring", 0.62),
        (
            hierarchical(UNITS, tuple(worker // 4 for worker in workers)),
            "hierarchical",
            0.35,
        ),
    ):
        seconds = prices.seconds(schedule, cluster, unit=size / UNITS)
        axes.axvline(seconds, color="#24292f", linestyle="--", linewidth=1)
        axes.annotate(
            f"bsp, {name}",
            (seconds, height),
            (4, 0),
            textcoords="offset points",
            fontsize=10,
            color="#24292f",
        )
    axes.set_xlim(0, 23)
    axes.set_ylim(0, 0.95)
    axes.set_xlabel(f"seconds of averaging in a step, {MEGABYTES} MB")
    axes.set_ylabel("spread of workers, of a step's noise")
    axes.set_title("16 workers in 4 racks, 1 Gbit/s, uplinks 0.25", fontsize=11)
    axes.grid(alpha=0.3)


def draw_task(axes, task, about, rows):
    bound = TASKS[task].bound
    names = [*TOPOLOGY, *ROWS]
    axes.axvspan(-bound, bound, color="#57606a", alpha=0.15, linewidth=0)
    axes.axvline(0, color="#57606a", linewidth=1)
    for workers, colour in COLOURS.items():
        label = f"{workers} workers"
        for row in rows:
            is_mine = (row["task"], row["workers"]) == (task, workers)
            if not is_mine or row["method"] not in names:
                continue
            judged = row["judged"]
            off, error = row[f"{judged}, difference"], row[f"{judged}, standard error"]
            height = len(names) - names.index(row["method"])
            height += 0.12 if workers == 4 else -0.12
            if abs(off) > FARTHEST:
                edge = math.copysign(FARTHEST, off)
                axes.plot(edge, height, "<" if off < 0 else ">", color=colour)
                axes.annotate(
                    f"{off:+.1f}",
                    (edge, height),
                    (-8 if off > 0 else 8, 0),
                    textcoords="offset points",
                    va="center",
                    ha="right" if off > 0 else "left",
                    fontsize=9,
                )
                continue
            draw_means(axes, off, height, xerr=error, label=label, color=colour)
            label = None
    axes.set_xlim(-1.1 * FARTHEST, 1.1 * FARTHEST)
    axes.set_yticks(range(len(names), 0, -1), names)
    axes.set_ylim(0.4, len(names) + 0.6)
    axes.set_xlabel(about)
    axes.set_title(f"{task}: mean and standard error", fontsize=11)
    axes.grid(axis="x", alpha=0.3)


if __name__ == "__main__":
    run(TABLES, draw, __doc__)
