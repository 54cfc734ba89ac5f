"""A worker's trace on a timeline: what benchmarks that draw one share. Nothing is run from here.

The setting is that of benchmarks/osp.py: eight equal layers, and a ring whose all-reduces take so
many times as long as computing.
"""

import osp as setting
import torch

import paceline
from paceline.cluster import Cluster, Rack
from paceline.runtimes.simulated import ComputeModel, Simulation


def trace(method, ratio, steps, buckets="wfbp"):
    """Spans of worker 0, and the ends of its steps. *ratio*: of an all-reduce to computing."""
    ends = []

    def train(rank):
        paceline.init()
        model = paceline.stand_in(setting.EQUAL)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, sgd, method=method, buckets=buckets)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1)).backward()
            optimizer.step()
            if rank == 0:
                ends.append(paceline.now())
        optimizer.finish()

    link = setting.ring_link(ratio)
    rack = Rack(workers=setting.WORKERS, link=link, latency=50e-6)
    simulation = Simulation(
        Cluster((rack,)), compute=ComputeModel(workload=setting.EQUAL), trace=True
    )
    outcome = simulation.run(train)
    spans = [span for kept in outcome.kept for span in kept.spans]
    return [span for span in spans + outcome.spans if span.worker == 0], ends


def draw(panel, spans, ends, colors, kind, labels=None, **bars):
    """Spans between the first and the last of *ends*, the first of *colors* on top; *kind* says
    which one a span has, *labels* what stands beside, where that is shorter. Returns the
    seconds."""
    start, stop = ends[0], ends[-1]
    rows = list(colors)[::-1]
    for span in spans:
        first, last = max(span.start, start), min(span.end, stop)
        if last - first > 1e-6:
            what = kind(span)
            panel.barh(
                rows.index(what),
                last - first,
                left=first - start,
                height=0.7,
                color=colors[what],
                **bars,
            )
    for end in ends:
        panel.axvline(end - start, color="black", linewidth=0.8, linestyle=":")
    panel.set_yticks(range(len(rows)), labels or rows)
    panel.spines[["top", "right"]].set_visible(False)
    return stop - start
