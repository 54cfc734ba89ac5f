"""The two stages on a timeline: a worker's trace under bsp and under osp, side by side.

    python benchmarks/osp_timeline.py docs/osp_timeline.png

The setting of benchmarks/osp.py at r = 1: eight equal layers, a ring whose all-reduces
take as long as computing. Shown are two steps of worker 0, after the budget has settled.
"""

import sys

import matplotlib.pyplot as plt
from timeline import draw, trace

RATIO = 1
METHODS = {
    "bsp": "bsp",
    "osp:collective=native": "osp:collective=native,budget=constant,most=1",
}
STEPS, SHOWN = 60, 2
COLORS = {
    "computing": "#9aa5b1",
    "all-reduce; under osp stage 1": "#2f6db5",
    "stage 2, of the step before": "#e08a1e",
    "waiting": "#c0392b",
}
LABELS = ["waiting", "stage 2", "stage 1", "computing"]


def kind(span):
    if span.row == "compute":
        return "computing"
    if span.row == "wait":
        return "waiting"
    return (
        "stage 2, of the step before"
        if "stage 2" in span.row
        else "all-reduce; under osp stage 1"
    )


def main():
    figure, panels = plt.subplots(
        2, 1, figsize=(9, 4.6), sharex=True, constrained_layout=True
    )
    widest = 0.0
    for panel, (name, method) in zip(panels, METHODS.items(), strict=True):
        spans, ends = trace(method, RATIO, STEPS)
        bars = {"edgecolor": "white", "linewidth": 0.6}
        width = draw(panel, spans, ends[-1 - SHOWN :], COLORS, kind, LABELS, **bars)
        widest, step = max(widest, width), width / SHOWN
        panel.set_title(f"{name}: {step:.3f} s a step", loc="left", fontsize=10)
    panels[-1].set_xlabel("seconds; dotted: step() returns")
    panels[-1].set_xlim(0, widest * 1.01)
    figure.savefig(sys.argv[1], dpi=130)


if __name__ == "__main__":
    main()
