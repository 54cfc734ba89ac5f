"""The picture of `ds_sync.py`: seconds to the accuracy, method by method, in each cell."""

import math

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = {
    "bsp, ring": "#24292f",
    "bsp, hierarchical": "#7d858e",
    "asp": "#cc79a7",
    "ssp": "#e6b3cf",
    "ds-sync": "#f2c14e",
    "ds-sync, forward": "#e8871e",
    "ds-sync, step": "#c44900",
    "ds-sync, rare": "#7f2704",
    "local-sgd": "#009e73",
    "hierarchical-local-sgd": "#56b4e9",
    "diloco": "#0072b2",
}
MOST = 1.8
"""Times the ring's seconds at which bars are cut off; their ends say what they are."""


def draw(found, path):
    """*found*: workers, a cell, its rows; a panel for each number of workers."""
    sizes = sorted({workers for workers, *_ in found})
    figure = Figure(figsize=(11, 3.1 * len(sizes) + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(sizes), 1, squeeze=False)[:, 0]
    for axes, workers in zip(panels, sizes, strict=True):
        cells = [(cell, rows) for count, cell, rows in found if count == workers]
        panel(axes, workers, cells)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=6, loc="outside upper center", fontsize=9)
    figure.savefig(path, dpi=130)


def panel(axes, workers, cells):
    width = 0.88 / len(COLOURS)
    ring = [next(r for r in rows if r["method"] == "bsp, ring") for _, rows in cells]
    for place, (name, colour) in enumerate(COLOURS.items()):
        heights, ends = [], []
        for (_, rows), base in zip(cells, ring, strict=True):
            row = next((r for r in rows if r["method"] == name), None)
            height = math.nan if row is None else row["seconds"] / base["seconds"]
            heights.append(min(height, MOST))
            text = "not in time" if height == math.inf else f"{height:.2g}"
            ends.append(text if height > MOST else "")
        at = [n + (place + 0.5) * width - 0.44 for n in range(len(cells))]
        axes.bar(at, heights, width, label=name, color=colour)
        for x, height, text in zip(at, heights, ends, strict=True):
            if text:
                axes.annotate(
                    text, (x, height), ha="center", va="bottom", fontsize=7, rotation=90
                )
    axes.axhline(1, color="#24292f", linewidth=0.8, linestyle=":")
    labels = [
        f"{cell.name.replace(', ', chr(10))}\nring: {base['seconds']:.0f} s"
        for (cell, _), base in zip(cells, ring, strict=True)
    ]
    axes.set_xticks(range(len(cells)), labels, fontsize=8)
    axes.set_ylim(0, MOST * 1.25)
    axes.set_title(f"{workers} workers", fontsize=10, loc="left")
    axes.set_ylabel("seconds to 96 %,\nring bsp = 1", fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
