"""Rounds on a timeline: a worker's trace under bsp and under local updates.

    python benchmarks/local_timeline.py docs/local_timeline.png

The setting of benchmarks/osp.py at r = 2: eight equal layers, and a ring whose all-reduces
take twice as long as computing. Shown are eight steps of worker 0.
"""

import sys

import matplotlib.pyplot as plt
import torch

import osp as setting
import paceline
from paceline.network import Cluster, Rack
from paceline.worlds.virtual import ComputeModel, Simulation

RATIO = 2
METHODS = (
    "bsp",
    "local-sgd:every=4",
    "diloco:every=8",
    "streaming-diloco:every=8,fragments=4,delay=1",
)
STEPS, SHOWN = 24, 8
COLORS = {"computing": "#9aa5b1", "network": "#2f6db5", "waiting": "#c0392b"}


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

    rack = Rack(workers=setting.WORKERS, link=setting.ring_link(RATIO), latency=50e-6)
    simulation = Simulation(
        Cluster((rack,)), compute=ComputeModel(workload=setting.EQUAL), trace=True
    )
    outcome = simulation.run(train)
    spans = [span for kept in outcome.kept for span in kept.spans]
    return [span for span in spans + outcome.spans if span.worker == 0], ends


def kind(span):
    names = {"compute": "computing", "wait": "waiting"}
    return names.get(span.row, "network")


def main():
    figure, panels = plt.subplots(
        len(METHODS), 1, figsize=(9, 6.4), sharex=True, constrained_layout=True
    )
    widest = 0.0
    for panel, method in zip(panels, METHODS, strict=True):
        spans, ends = trace(method)
        start, stop = ends[-1 - SHOWN], ends[-1]
        widest = max(widest, stop - start)
        for span in spans:
            first, last = max(span.start, start), min(span.end, stop)
            if last - first > 1e-6:
                what = kind(span)
                panel.barh(
                    list(COLORS)[::-1].index(what),
                    last - first,
                    left=first - start,
                    height=0.7,
                    color=COLORS[what],
                )
        for end in ends[-1 - SHOWN :]:
            panel.axvline(end - start, color="black", linewidth=0.8, linestyle=":")
        panel.set_yticks(range(len(COLORS)), list(COLORS)[::-1])
        step = (stop - start) / SHOWN
        panel.set_title(f"{method}: {step:.3f} s a step", loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
        print(f"{method}: {step:.4f} s a step")
    panels[-1].set_xlabel("seconds; dotted: step() returns")
    panels[-1].set_xlim(0, widest * 1.01)
    figure.savefig(sys.argv[1], dpi=110)


if __name__ == "__main__":
    main()
