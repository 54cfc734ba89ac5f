"""Rounds on a timeline: a worker's trace under bsp and under local updates.

    python benchmarks/local_timeline.py docs/local_timeline.png

The setting of benchmarks/osp.py at r = 2: eight equal layers, and a ring whose all-reduces
take twice as long as computing. Shown are eight steps of worker 0.
"""

import sys

import matplotlib.pyplot as plt
from timeline import draw, trace

RATIO = 2
METHODS = (
    "bsp",
    "local-sgd:sync_every=4",
    "diloco:sync_every=8",
    "streaming-diloco:sync_every=8,fragments=4,delay=1",
)
STEPS, SHOWN = 24, 8
COLORS = {"computing": "#9aa5b1", "network": "#2f6db5", "waiting": "#c0392b"}


def kind(span):
    names = {"compute": "computing", "wait": "waiting"}
    return names.get(span.row, "network")


def main():
    figure, panels = plt.subplots(
        len(METHODS), 1, figsize=(9, 6.4), sharex=True, constrained_layout=True
    )
    widest = 0.0
    for panel, method in zip(panels, METHODS, strict=True):
        spans, ends = trace(method, RATIO, STEPS)
        width = draw(panel, spans, ends[-1 - SHOWN :], COLORS, kind)
        widest = max(widest, width)
        step = width / SHOWN
        panel.set_title(f"{method}: {step:.3f} s a step", loc="left", fontsize=10)
        print(f"{method}: {step:.4f} s a step")
    panels[-1].set_xlabel("seconds; dotted: step() returns")
    panels[-1].set_xlim(0, widest * 1.01)
    figure.savefig(sys.argv[1], dpi=110)


if __name__ == "__main__":
    main()
