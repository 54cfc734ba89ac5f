"""Where a step waits on a timeline: a worker's trace under bsp, dear and priority.

    python benchmarks/past_backward_timeline.py docs/past_backward_timeline.png

The setting of benchmarks/osp.py at r = 1: eight equal layers, a ring whose all-reduces
take as long as computing. Shown are two steps of worker 0, once plans have settled; a step begins
when `step()` returns.
"""

import sys

import matplotlib.pyplot as plt
from timeline import draw, trace

RATIO = 1
METHODS = ("bsp", "dear", "priority")
STEPS, SHOWN = 60, 2
COLORS = {
    "computing": "#9aa5b1",
    "sending": "#2f6db5",
    "waiting": "#c0392b",
}
LABELS = ["waiting", "sending", "computing"]


def kind(span):
    return {"compute": "computing", "wait": "waiting"}.get(span.row, "sending")


def main():
    figure, panels = plt.subplots(
        len(METHODS), 1, figsize=(9, 5.2), sharex=True, constrained_layout=True
    )
    widest = 0.0
    for panel, method in zip(panels, METHODS, strict=True):
        spans, ends = trace(method, RATIO, STEPS, buckets="optimal")
        bars = {"edgecolor": "white", "linewidth": 0.3}
        width = draw(panel, spans, ends[-1 - SHOWN :], COLORS, kind, LABELS, **bars)
        widest, step = max(widest, width), width / SHOWN
        panel.set_title(f"{method}: {step:.3f} s a step", loc="left", fontsize=10)
    panels[-1].set_xlabel("seconds; dotted: step() returns")
    panels[-1].set_xlim(0, widest * 1.01)
    figure.savefig(sys.argv[1], dpi=130)


if __name__ == "__main__":
    main()
