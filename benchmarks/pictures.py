"""Pictures of docs that no paper's results make: timelines of methods, and a plan.

`benchmarks.papers` makes the others.

    python -m benchmarks.pictures                    # all, into docs/
    python -m benchmarks.pictures osp_timeline plan

Timelines are of one simulated worker. The setting is that of `papers.osp`: eight equal layers, and a
ring whose all-reduces take so many times as long as computing. *gssp_timeline* has six workers, two
of each speed, 1 : 2 : 3, with a jitter of 10 %, on links on which a gradient takes a tenth of the
fastest step. A bar is a step that is computed; what is red is waiting, of which a little is for
the network. Under gssp a tick on a server's line is a gradient that it applies, and an arrow from
server to server an update. *plan* is the plan of ``make demo``: about a minute of one core.
"""

import argparse
from collections import defaultdict, deque
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import paceline
from benchmarks.papers import osp as setting
from paceline.cluster import Cluster, Rack, ServerHost, uniform_cluster
from paceline.interfaces import CONSISTENCIES, GroupUpdate
from paceline.methods import gssp
from paceline.records import STEP_ROW
from paceline.runtimes.simulated import ComputeModel, Simulation

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"


# ---- one worker's trace, method by method ----

WAITING_COLOR = "#c0392b"


@dataclass(frozen=True)
class Timeline:
    """Methods one below the other.

    *ratio*: of an all-reduce to computing; *shown*: the last steps, of *steps*; *colors*: of kinds,
    the first on top; *kinds*: by row of a trace, what is not there has the second one's.
    """

    methods: dict[str, str]
    ratio: float
    steps: int
    shown: int
    colors: dict[str, str]
    labels: tuple[str, ...] | None = None
    buckets: str = "wfbp"
    size: tuple[float, float] = (9, 4.6)
    dpi: int = 130
    edge: float = 0.0

    def kind(self, row):
        computing, sending, *rest, waiting = self.colors
        if row == "compute":
            return computing
        if row == "wait":
            return waiting
        return rest[0] if rest and "stage 2" in row else sending


TIMELINES = {
    "osp_timeline": Timeline(
        {
            "bsp": "bsp",
            "osp:collective=native": "osp:collective=native,budget=constant,most=1",
        },
        ratio=1,
        steps=60,
        shown=2,
        colors={
            "computing": "#9aa5b1",
            "all-reduce; under osp stage 1": "#2f6db5",
            "stage 2, of the step before": "#e08a1e",
            "waiting": WAITING_COLOR,
        },
        labels=("waiting", "stage 2", "stage 1", "computing"),
        edge=0.6,
    ),
    "local_timeline": Timeline(
        {
            method: method
            for method in (
                "bsp",
                "local-sgd:sync_every=4",
                "diloco:sync_every=8",
                "streaming-diloco:sync_every=8,fragments=4,delay=1",
            )
        },
        ratio=2,
        steps=24,
        shown=8,
        colors={
            "computing": "#9aa5b1",
            "network": "#2f6db5",
            "waiting": WAITING_COLOR,
        },
        size=(9, 6.4),
        dpi=110,
    ),
    "past_backward_timeline": Timeline(
        {method: method for method in ("bsp", "dear", "priority")},
        ratio=1,
        steps=60,
        shown=2,
        colors={
            "computing": "#9aa5b1",
            "sending": "#2f6db5",
            "waiting": WAITING_COLOR,
        },
        buckets="optimal",
        size=(9, 5.2),
        edge=0.3,
    ),
}


def trace(method, ratio, steps, buckets):
    """Spans of worker 0, and the ends of its steps."""
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
    rack = Rack(workers=setting.WORKERS, link=link, latency=setting.LATENCY)
    simulation = Simulation(
        Cluster((rack,)), compute=ComputeModel(workload=setting.EQUAL), trace=True
    )
    outcome = simulation.run(train)
    spans = [span for kept in outcome.kept for span in kept.spans] + outcome.spans
    shown = [span for span in spans if span.worker == 0 and span.row != STEP_ROW]
    return shown, ends


def draw_timeline(timeline, path):
    figure, panels = plt.subplots(
        len(timeline.methods),
        1,
        figsize=timeline.size,
        sharex=True,
        constrained_layout=True,
    )
    widest = 0.0
    for panel, (name, method) in zip(panels, timeline.methods.items(), strict=True):
        spans, ends = trace(method, timeline.ratio, timeline.steps, timeline.buckets)
        width = draw_worker(panel, timeline, spans, ends[-1 - timeline.shown :])
        widest, step = max(widest, width), width / timeline.shown
        panel.set_title(f"{name}: {step:.3f} s a step", loc="left", fontsize=10)
    panels[-1].set_xlabel("seconds; dotted: step() returns")
    panels[-1].set_xlim(0, widest * 1.01)
    figure.savefig(path, dpi=timeline.dpi)


def draw_worker(panel, timeline, spans, ends):
    """Spans between the first and the last of *ends*; returns the seconds between these."""
    start, stop = ends[0], ends[-1]
    rows = list(timeline.colors)[::-1]
    edges = {"edgecolor": "white", "linewidth": timeline.edge} if timeline.edge else {}
    for span in spans:
        first, last = max(span.start, start), min(span.end, stop)
        if last - first > 1e-6:
            kind = timeline.kind(span.row)
            panel.barh(
                rows.index(kind),
                last - first,
                left=first - start,
                height=0.7,
                color=timeline.colors[kind],
                **edges,
            )
    for end in ends:
        panel.axvline(end - start, color="black", linewidth=0.8, linestyle=":")
    panel.set_yticks(range(len(rows)), timeline.labels or rows)
    panel.spines[["top", "right"]].set_visible(False)
    return stop - start


# ---- workers of three speeds, and their groups ----

TIMES = (1.0, 1.0, 2.0, 2.0, 3.0, 3.0)
GROUPS = ((0, 1), (2, 3), (4, 5))
STEP = 0.1
FIRST, SHOWN = 3.0, 1.9
"""Seconds from the start, and seconds that are shown."""
GROUPED = {"ssp": "ssp:staleness=3", "gssp": "gssp:members=0-1+2-3+4-5,staleness=3"}
GROUP_COLORS = ("#2f6db5", "#3f9c6b", "#8a63b0")
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


def grouped_trace(method):
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
        link=10 * size / STEP,
        latency=0.0,
        speed=tuple(1 / time for time in TIMES),
    )
    compute = ComputeModel(forward=STEP / 3, backward=2 * STEP / 3, jitter=0.1)
    cluster = Cluster((rack,), servers=(ServerHost(),) * len(GROUPS))
    outcome = Simulation(cluster, compute=compute, trace=True).run(train)
    return [span for kept in outcome.kept for span in kept.spans]


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


def draw_groups(panel, name, spans):
    names, workers, servers = rows_of(name)
    for worker, row in workers.items():
        color = GROUP_COLORS[worker // 2]
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
                    color=GROUP_COLORS[worker // 2],
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
                    "color": GROUP_COLORS[source],
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


def draw_gssp(path):
    gssp.GroupDiscipline = Watched
    figure, panels = plt.subplots(
        2,
        1,
        figsize=(10, 6.4),
        sharex=True,
        constrained_layout=True,
        height_ratios=(6, 9),
    )
    for panel, (name, method) in zip(panels, GROUPED.items(), strict=True):
        spans = grouped_trace(method)
        draw_groups(panel, name, spans)
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
    figure.savefig(path, dpi=130)


# ---- a plan ----

SCRIPT = IMAGES.parents[1] / "examples" / "digits.py"


def draw_plan(path):
    """examples/digits.py on 8 workers at 100 Mbit/s, with passes of 20 and 40 ms."""
    from paceline.cli.progress import progress
    from paceline.cli.script_plan import plan_script
    from paceline.tools.plan.predictor import Predictor
    from paceline.tools.plan.report import bar_chart
    from paceline.tools.report.charts import draw, house_style

    with progress(False) as told:
        made = plan_script(
            SCRIPT,
            [],
            uniform_cluster(8, "100mbit", "50us"),
            forward=0.02,
            backward=0.04,
            allowed=CONSISTENCIES,
            predictor=Predictor(),
            on_progress=told,
        )
    with house_style():
        figure = draw(bar_chart(made.plan))
        figure.savefig(path, dpi=200, metadata={"Software": None})


PICTURES = {
    **{
        name: lambda path, timeline=timeline: draw_timeline(timeline, path)
        for name, timeline in TIMELINES.items()
    },
    "gssp_timeline": draw_gssp,
    "plan": draw_plan,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "pictures", nargs="*", metavar="picture", help=", ".join(PICTURES)
    )
    parser.add_argument("--folder", type=Path, default=IMAGES)
    given = parser.parse_args()
    if unknown := set(given.pictures) - set(PICTURES):
        parser.error(
            f"no picture {', '.join(unknown)}: there are {', '.join(PICTURES)}"
        )
    for name in given.pictures or PICTURES:
        path = given.folder / f"{name}.png"
        PICTURES[name](path)
        print(path)


if __name__ == "__main__":
    main()
