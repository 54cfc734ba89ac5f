"""Whether DS-Sync loses accuracy: as many steps as bsp, seed by seed (see `measure.accuracy`).

Groups are pairs. Under ``overlap=forward`` the means travel beside the next forward pass, which
is to change no number. Under ``overlap=step`` they travel beside the whole next step, whose
gradients then belong to parameters that were not averaged. SWA is of the last quarter of all
steps.
"""

import math
from typing import Any

from benchmarks.measure import accuracy
from benchmarks.measure.accuracy_tasks import TASKS
from paceline.cluster import Cluster, Rack
from paceline.collectives import timing
from paceline.collectives.schedules import Ring, hierarchical
from paceline.methods.ds_sync import cost
from paceline.methods.ds_sync.divide import make_plan

SWA_FROM = TASKS["digits"].steps * 3 // 4
ROWS = {
    "bsp": "bsp",
    "digits": "ds-sync:groups=digits",
    "digits, overlap=step": "ds-sync:groups=digits,overlap=step",
    "digits, SWA": f"ds-sync:groups=digits,swa_from={SWA_FROM}",
}
OVERLAP = {"digits, overlap=forward": "ds-sync:groups=digits,overlap=forward"}
TOPOLOGY = {"topology": "ds-sync:groups=topology"}
FEWER = {name: ROWS[name] for name in ROWS if name != "digits, SWA"}
"""Where a row takes minutes."""
ACCURACY = {
    ("digits", 4): (ROWS | OVERLAP, 5),
    ("digits", 16): (ROWS | TOPOLOGY, 5),
    ("bytes_lm", 4): (ROWS, 5),
    ("bytes_lm", 16): (FEWER | TOPOLOGY, 2),
}
"""By task and workers: methods, and seeds."""


def accuracy_figures(results, task, workers, text, seed):
    training = accuracy.Training(task=task, workers=workers, spec=text, seed=seed)
    return results.values(
        f"accuracy, {task}, {workers} workers, {text}, seed {seed}",
        TASKS[task].figures | {"sent": "bytes", "apart": ""},
        lambda: accuracy.train(training),
    )


def accuracy_rows(results):
    """Rows as `measure.accuracy` makes them, of all tasks and numbers of workers."""
    for (task, workers), (named, seeds) in ACCURACY.items():
        found = {
            name: [
                accuracy_figures(results, task, workers, text, seed)
                for seed in range(seeds)
            ]
            for name, text in named.items()
        }
        for name, mine in found.items():
            pairs = list(zip(mine, found["bsp"], strict=True))
            row = accuracy.row_of(TASKS[task], name, named[name], pairs)
            yield row | {"task": task, "workers": workers}


def accuracy_table(results):
    """Points of accuracy, or per cent of bits per byte, against bsp's."""
    rows = list(accuracy_rows(results))
    for name in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == name]
        cells = {f"{r['task']}, {r['workers']} workers": accuracy.cell(r) for r in mine}
        yield {"method": name, "sends": f"{mine[0]['sent']:.1%}", **cells}


# ---- the picture ----

MEGABYTES, PIECES = 100, 1600
PRICED = Rack(workers=4, link=125e6, uplink=31.25e6, latency=50e-6)
"""Four of these: links of 1 Gbit/s, and an uplink of a quarter of that."""
PLANS: dict[str, tuple[dict[str, Any], tuple[int, int], str]] = {
    "topology": ({"groups": "topology"}, (0, 8), "center"),
    "digits": ({"groups": "digits"}, (8, -8), "left"),
    "digits, size=4": ({"groups": "digits", "size": 4}, (0, 8), "center"),
}
"""Options, and where the name stands: points from the dot, and aligned how."""
ABOUTS = {
    "digits": "accuracy against bsp's, points",
    "bytes_lm": "bits per byte against bsp's, %",
}
FARTHEST = 1.6
"""Points, or per cent, beyond which a row stands at the edge, with its figure beside."""


def draw_accuracy(results, path):
    """What a step takes against how far workers stay apart, and accuracy as measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(accuracy_rows(results))
    figure = Figure(figsize=(5 + 4 * len(ABOUTS), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, *others = figure.subplots(1, 1 + len(ABOUTS))
    draw_plans(left)
    for axes, (task, about) in zip(others, ABOUTS.items(), strict=True):
        draw_task(axes, task, about, rows)
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
        where = {"textcoords": "offset points", "ha": side, "fontsize": 10}
        axes.annotate(name, place, offset, **where)
    racks = tuple(worker // 4 for worker in workers)
    for schedule, name, height in (
        (Ring(16, PIECES), "ring", 0.62),
        (hierarchical(PIECES, racks), "hierarchical", 0.35),
    ):
        seconds = timing.seconds(schedule, cluster, unit=size / PIECES)
        axes.axvline(seconds, color="#24292f", linestyle="--", linewidth=1)
        where = {"textcoords": "offset points", "fontsize": 10, "color": "#24292f"}
        axes.annotate(f"bsp, {name}", (seconds, height), (4, 0), **where)
    axes.set_xlim(0, 23)
    axes.set_ylim(0, 0.95)
    axes.set_xlabel(f"seconds of averaging in a step, {MEGABYTES} MB")
    axes.set_ylabel("spread of workers, of a step's noise")
    axes.set_title("16 workers in 4 racks, 1 Gbit/s, uplinks 0.25", fontsize=11)
    axes.grid(alpha=0.3)


def draw_task(axes, task, about, rows):
    bound = TASKS[task].bound
    names = [*TOPOLOGY, *(name for name in ROWS if name != "bsp")]
    axes.axvspan(-bound, bound, color="#57606a", alpha=0.15, linewidth=0)
    axes.axvline(0, color="#57606a", linewidth=1)
    for workers, colour in {4: "#56b4e9", 16: "#d55e00"}.items():
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
            bars = {"xerr": error, "label": label, "color": colour}
            accuracy.draw_means(axes, off, height, **bars)
            label = None
    axes.set_xlim(-1.1 * FARTHEST, 1.1 * FARTHEST)
    axes.set_yticks(range(len(names), 0, -1), names)
    axes.set_ylim(0.4, len(names) + 0.6)
    axes.set_xlabel(about)
    axes.set_title(f"{task}: mean and standard error", fontsize=11)
    axes.grid(axis="x", alpha=0.3)
