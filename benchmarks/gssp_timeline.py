"""Who waits for whom: workers of three speeds under ssp, and in groups under gssp.

    python benchmarks/gssp_timeline.py docs/gssp_timeline.png

Six workers in virtual time, two of each speed, 1 : 2 : 3, with a jitter of 10 %, on links on which
a gradient takes a tenth of the fastest step. Shown is a part after the start. A bar is a step that
is computed; what is red is waiting, of which a little is for the network. Under gssp a tick on
a server's line is a gradient that it applies, and a line from server to server an update.
"""

import sys
from collections import defaultdict, deque
from itertools import pairwise

import matplotlib.pyplot as plt
import torch

import paceline
from paceline.cluster import Cluster, Rack, ServerHost
from paceline.interfaces import GroupUpdate
from paceline.methods import gssp
from paceline.runtimes.simulated import ComputeModel, Simulation

TIMES = (1.0, 1.0, 2.0, 2.0, 3.0, 3.0)
GROUPS = ((0, 1), (2, 3), (4, 5))
STEP_SECONDS = 0.1
FIRST, SHOWN = 3.0, 1.9
"""Seconds."""
METHODS = {"ssp": "ssp:staleness=3", "gssp": "gssp:members=0-1+2-3+4-5,staleness=3"}
COLORS = ("#2f6db5", "#3f9c6b", "#8a63b0")
WAITING, LINE = "#e8a49c", "#57606a"
FEATURES = 64


SENT: dict[tuple[int, int], deque] = defaultdict(deque)
LINES: list[tuple[int, float, int, float]] = []
"""Updates: from which server when, to which one when."""
TICKS: list[tuple[int, int, float]] = []
"""GradientUpdate: on which server, from which worker, when."""


class Watched(gssp.GroupDiscipline):
    """Notes when updates leave and come, and when gradients are applied."""

    def on_push(self, shard, push):
        TICKS.append((self._known.number, push.worker, shard.now))
        super().on_push(shard, push)

    def take_due_updates(self, shard) -> list[GroupUpdate]:
        updates = super().take_due_updates(shard)
        here = self._known.number
        for _ in updates:
            for other in range(len(GROUPS)):
                SENT[here, other].append(shard.now)
        return updates

    def apply_update(self, shard, source, update):
        here = self._known.number
        LINES.append((source, SENT[source, here].popleft(), here, shard.now))
        super().apply_update(shard, source, update)


def trace(method):
    """Spans of all workers."""
    stop = FIRST + SHOWN + 0.5

    def train(rank):
        torch.manual_seed(0)
        model = torch.nn.Linear(FEATURES, FEATURES)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
        optimizer = paceline.distribute(model, sgd, method=method, buckets="single")
        while paceline.now() < stop:
            optimizer.zero_grad()
            model(torch.ones(1, FEATURES)).sum().backward()
            optimizer.step()
        optimizer.finish()

    size = 4 * (FEATURES + 1) * FEATURES
    rack = Rack(
        workers=len(TIMES),
        link=10 * size / STEP_SECONDS,
        latency=0.0,
        speed=tuple(1 / time for time in TIMES),
    )
    compute = ComputeModel(
        forward=STEP_SECONDS / 3, backward=2 * STEP_SECONDS / 3, jitter=0.1
    )
    cluster = Cluster((rack,), servers=(ServerHost(),) * len(GROUPS))
    outcome = Simulation(cluster, compute=compute, trace=True).run(train)
    return [span for kept in outcome.kept for span in kept.spans]


# ---- the picture ----


def rows_of(name):
    """Names of rows, from above, and where workers and servers are in them."""
    names, workers, servers = [], {}, {}
    for group, members in enumerate(GROUPS):
        for worker in members:
            workers[worker] = len(names)
            names.append(f"worker {worker}")
        if name == "gssp":
            servers[group] = len(names)
            names.append(f"server {group}")
    return names, workers, servers


def steps_of(spans, worker):
    """What it computes, merged: a step's passes follow each other."""
    merged = []
    own = sorted(
        (s for s in spans if s.worker == worker and s.row == "compute"),
        key=lambda span: span.start,
    )
    for span in own:
        if merged and span.start - merged[-1][1] < 1e-9:
            merged[-1][1] = span.end
        else:
            merged.append([span.start, span.end])
    return merged


def draw(panel, name, spans):
    names, workers, servers = rows_of(name)
    for worker, row in workers.items():
        color = COLORS[worker // 2]
        steps = steps_of(spans, worker)
        for begin, end in steps:
            panel.barh(
                row, end - begin, left=begin - FIRST, height=0.62, color=color, zorder=2
            )
        for (_, end), (begin, _) in pairwise(steps):
            panel.barh(
                row, begin - end, left=end - FIRST, height=0.62, color=WAITING, zorder=1
            )
    for server, row in servers.items():
        panel.axhline(row, color=LINE, linewidth=0.8, zorder=1)
        for at, worker, when in TICKS:
            if at == server:
                panel.plot(
                    when - FIRST,
                    row,
                    "|",
                    color=COLORS[worker // 2],
                    markersize=11,
                    markeredgewidth=2,
                )
    for source, left, target, came in LINES:
        if servers and left >= FIRST and came - FIRST <= SHOWN:
            panel.annotate(
                "",
                (came - FIRST, servers[target]),
                (left - FIRST, servers[source]),
                arrowprops={
                    "arrowstyle": "-|>",
                    "color": COLORS[source],
                    "linewidth": 0.9,
                    "shrinkA": 0,
                    "shrinkB": 0,
                },
                zorder=3,
            )
    panel.set_xlim(0, SHOWN)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.set_yticks(range(len(names)), names, fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)


def main():
    gssp.GroupDiscipline = Watched
    figure, panels = plt.subplots(
        2,
        1,
        figsize=(10, 6.4),
        sharex=True,
        constrained_layout=True,
        height_ratios=(6, 9),
    )
    for panel, (name, method) in zip(panels, METHODS.items(), strict=True):
        spans = trace(method)
        draw(panel, name, spans)
        done = [
            sum(FIRST <= end < FIRST + SHOWN for _, end in steps_of(spans, worker))
            for worker in range(len(TIMES))
        ]
        panel.set_title(
            f"{method}: {sum(done)} steps in {SHOWN} s, by worker "
            f"{', '.join(map(str, done))}",
            loc="left",
            fontsize=10,
        )
    panels[-1].set_xlabel("seconds")
    figure.savefig(sys.argv[1], dpi=130)


if __name__ == "__main__":
    main()
