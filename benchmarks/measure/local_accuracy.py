"""What local updates lose over bsp, by the length H of a round (see `accuracy`).

    python -m benchmarks.measure.local_accuracy --processes 2
    python -m benchmarks.measure.local_accuracy --task digits --row slowmo --seeds 2
    python -m benchmarks.measure.local_accuracy --no-training --plot docs/images/local_accuracy.png

All presets have the same inner optimizer and learning rate as bsp, and as many steps in all, so that
H = 64 leaves three rounds. Post-local SGD averages in each step for half of them. DiLoCo has the
paper's outer step, whose gain eta/(1-b) is 7, and a mild one of gain 1; streaming DiLoCo
has its own (gain 4), four fragments, and delays as long as they fit between two of these.
DASO merges what nodes, its racks, have sent an eighth of H later. SelSync has no H: once with
its defaults, whose window of 25 steps begins with as many means, and once with a window of 5.
Racks of `hierarchical-local-sgd` and `daso` are of two workers among four, of four among sixteen. The control is
local SGD whose only mean is the last one.
"""

from pathlib import Path
from typing import Any

from benchmarks.measure.accuracy import Table, draw_means, run
from benchmarks.measure.accuracy_tasks import DIGITS, TASKS

LENGTHS = (4, 16, 64)
MILD = "outer_learning_rate=0.7,outer_momentum=0.3"
DELAYS = {4: 0, 16: 2, 64: 5}
"""Of streaming DiLoCo, in steps: less than a quarter of H, and the paper's at most."""
CONTROL = "local-sgd, one mean at the end (control)"
PRESETS = {
    "local-sgd": "local-sgd:sync_every={}",
    "post-local-sgd": f"post-local-sgd:sync_every={{}},sync_each_step_until={DIGITS.steps // 2}",
    "hierarchical-local-sgd": "hierarchical-local-sgd:sync_every={}",
    "slowmo": "slowmo:sync_every={}",
    "diloco, gain 7": "diloco:sync_every={}",
    "diloco, gain 1": f"diloco:sync_every={{}},{MILD}",
    "streaming-diloco": "streaming-diloco:sync_every={},delay={}",
    "daso": "daso:sync_every={},delay={}",
}
SELECTIVE = {
    "sel-sync": "sel-sync",
    "sel-sync, window = 5": "sel-sync:window=5",
}


def rows(lengths: tuple[int, ...]) -> dict[str, str]:
    named = {
        f"{name}, H = {length}": text.format(
            length, length // 8 if name == "daso" else DELAYS[length]
        )
        for name, text in PRESETS.items()
        for length in lengths
    }
    return named | SELECTIVE | {CONTROL: f"local-sgd:sync_every={DIGITS.steps}"}


TABLES = [
    Table(task="digits", workers=16, rows=rows(LENGTHS)),
    Table(task="bytes_lm", workers=4, rows=rows(LENGTHS)),
    Table(task="digits", workers=4, rows=rows((16, 64))),
    Table(task="bytes_lm", workers=16, rows=rows((16,))),
]


COLOURS = {
    "local-sgd": "#24292f",
    "post-local-sgd": "#0072b2",
    "hierarchical-local-sgd": "#009e73",
    "slowmo": "#cc79a7",
    "diloco, gain 7": "#d55e00",
    "diloco, gain 1": "#e69f00",
    "streaming-diloco": "#56b4e9",
    "daso": "#8c564b",
}
PANELS = (("digits", 16), ("bytes_lm", 4))
LOST = (-1, -0.5, 0, 0.5, 1, 2, 5, 10, 20)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """What each preset loses, against H."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (task, workers) in zip(figure.subplots(1, 2), PANELS, strict=True):
        bound = TASKS[task].bound
        axes.axhspan(-bound, bound, color="#57606a", alpha=0.15, linewidth=0)
        axes.axhline(0, color="#57606a", linewidth=1)
        mine = [row for row in rows if (row["task"], row["workers"]) == (task, workers)]
        for number, (name, colour) in enumerate(COLOURS.items()):
            draw_preset(axes, number, name, colour, mine)
        axes.set_xticks(range(len(LENGTHS)), [f"H = {length}" for length in LENGTHS])
        axes.set_xlim(-0.5, len(LENGTHS) - 0.5)
        axes.grid(axis="y", alpha=0.3)
        axes.set_yscale("symlog", linthresh=1)
        axes.set_yticks(LOST, [f"{lost:g}" for lost in LOST])
        axes.set_title(f"{task}, {workers} workers", fontsize=12)
    left, right = figure.axes
    left.set_ylabel("accuracy less than bsp's, points")
    right.set_ylabel("bits per byte more than bsp's, %")
    handles = {}
    for axes in figure.axes:
        shown, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, shown, strict=True))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4)
    figure.suptitle(
        f"Lost against bsp in {DIGITS.steps} steps: mean and standard error over seeds; "
        "grey: as good as bsp",
        fontsize=12,
    )
    figure.savefig(path, dpi=150)


def draw_preset(axes, number, name, colour, rows):
    """Presets stand side by side at each H. More is worse on both tasks' axes."""
    by_length = {
        row["method"].rpartition(", H = ")[2]: row
        for row in rows
        if row["method"].startswith(f"{name}, H = ")
    }
    points = []
    for place, length in enumerate(LENGTHS):
        if row := by_length.get(str(length)):
            judged = row["judged"]
            sign = 1 if judged == "bits per byte" else -1
            lost = sign * row[f"{judged}, difference"]
            offset = 0.1 * (number - (len(COLOURS) - 1) / 2)
            points.append((place + offset, lost, row[f"{judged}, standard error"]))
    if points:
        places, lost, errors = zip(*points, strict=True)
        draw_means(axes, places, lost, yerr=errors, label=name, color=colour)


if __name__ == "__main__":
    run(TABLES, draw, __doc__)
