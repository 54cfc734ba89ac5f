"""The two stages on a timeline: a worker's trace under bsp and under osp, side by side.

    python benchmarks/osp_timeline.py docs/osp_timeline.png

The setting of benchmarks/osp.py at r = 1: eight equal layers, a ring whose all-reduces
take as long as computing. Shown are two steps of worker 0, after the budget has settled.
"""

import sys

import matplotlib.pyplot as plt
import torch

import osp as setting
import paceline
from paceline.network import Cluster, Rack
from paceline.worlds.virtual import ComputeModel, Simulation

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


def trace(method):
    """Spans of worker 0, and the ends of its steps."""
    ends = []

    def train(rank):
        paceline.init()
        model = paceline.stand_in(setting.EQUAL)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, sgd, method=method, fusion="wfbp")
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.ones(1)).backward()
            optimizer.step()
            if rank == 0:
                ends.append(paceline.now())
        optimizer.finish()

    rack = Rack(workers=setting.WORKERS, link=setting.ring_link(1), latency=50e-6)
    simulation = Simulation(
        Cluster((rack,)), compute=ComputeModel(workload=setting.EQUAL), trace=True
    )
    outcome = simulation.run(train)
    spans = [span for kept in outcome.kept for span in kept.spans]
    return [span for span in spans + outcome.spans if span.worker == 0], ends


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


ROWS = {
    "computing": 3,
    "all-reduce; under osp stage 1": 2,
    "stage 2, of the step before": 1,
    "waiting": 0,
}
LABELS = ["waiting", "stage 2", "stage 1", "computing"]


def main():
    figure, panels = plt.subplots(
        2, 1, figsize=(9, 4.6), sharex=True, constrained_layout=True
    )
    widest = 0.0
    for panel, (name, method) in zip(panels, METHODS.items(), strict=True):
        spans, ends = trace(method)
        start, stop = ends[-1 - SHOWN], ends[-1]
        step = (stop - start) / SHOWN
        widest = max(widest, stop - start)
        for span in spans:
            first, last = max(span.start, start), min(span.end, stop)
            if last - first > 1e-6:
                what = kind(span)
                panel.barh(
                    ROWS[what],
                    last - first,
                    left=first - start,
                    height=0.7,
                    color=COLORS[what],
                    edgecolor="white",
                    linewidth=0.6,
                )
        for end in ends[-1 - SHOWN :]:
            panel.axvline(end - start, color="black", linewidth=0.8, linestyle=":")
        panel.set_yticks(range(4), LABELS)
        panel.set_title(f"{name}: {step:.3f} s a step", loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("seconds; dotted: step() returns")
    panels[-1].set_xlim(0, widest * 1.01)
    figure.savefig(sys.argv[1], dpi=130)


if __name__ == "__main__":
    main()
