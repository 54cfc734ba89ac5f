"""MG-WFBP's figure 10a, and what an exact plan makes of it: 4 to 2,048 workers.

    python benchmarks/mg_wfbp_scaling.py              # a table, and docs/mg_wfbp_scaling.png
    python benchmarks/mg_wfbp_scaling.py --workers 4 8 16 --json

GoogLeNet's published trace on a K80 GPU, a ring of 45.25 us a message (times N / (N - 1),
as the authors' script has it) and its constants per byte. Each plan is timed
twice: by the formulas of `paceline.bucketing`, and by training a stand-in with the trace's
tensors in the simulated runtime. The two must agree to 1e-9.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

import paceline
from paceline.bucketing.cost_models import AffineCost
from paceline.bucketing.rules import plan_buckets
from paceline.bucketing.timeline import finish_time
from paceline.cluster import Workload
from paceline.cluster.cluster import Cluster, Rack
from paceline.collectives.schedules import Ring
from paceline.run_options import RunOptions
from paceline.runtimes.simulated import Simulation

WORKERS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
RULES = ("wfbp", "single", "ddp", "mg-wfbp", "optimal")
LATENCY = 45.25e-6  # alpha, seconds a message
TRANSMISSION = 1.2 / (9 * 2**30 / 8)  # beta, seconds a byte
ADDITION = 160 / 64e9  # gamma, seconds a byte
STEPS = 3
PICTURE = Path(__file__).parent.parent / "docs" / "mg_wfbp_scaling.png"


def affine_cost(workers):
    """The authors' script's a = 2 N alpha; b as in the paper's table 2, of a ring."""
    b = (workers - 1) / workers * (2 * TRANSMISSION + ADDITION)
    return AffineCost(2 * workers * LATENCY, b)


def network_of(workers):
    """Links on which a ring all-reduce has that a and b: 2 (N - 1) messages each way."""
    cost = affine_cost(workers)
    messages = 2 * (workers - 1)
    bandwidth = messages / (workers * cost.seconds_per_byte)
    latency = cost.start_up / messages
    return Cluster((Rack(workers=workers, link=bandwidth, latency=latency),))


def exact_cost(cluster):
    """The same with whole bytes in the ring's segments, as the simulated network has them."""
    link, latency = cluster.racks[0].link, cluster.racks[0].latency

    def cost(size):
        ring = Ring(cluster.workers, int(size))
        ((activity,),) = ring.phases()
        return ring.steps * latency + activity.bytes / link

    return cost


def in_virtual_time(cluster, workload, plan):
    """Seconds of a step of the stand-in, sent in *plan*'s buckets."""

    def train(rank):
        paceline.init()
        model = paceline.stand_in(workload)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(
            model, optimizer, buckets="+".join(str(len(bucket)) for bucket in plan)
        )
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.ones(int(workload.batch))).backward()
            optimizer.step()
        optimizer.finish()

    simulation = Simulation(cluster, options=RunOptions(), lanes=1, patience=300)
    recorders = simulation.run(train).recorders
    return max(recorder.steps[-1].step_seconds for recorder in recorders)


def measure(workers, workload, rule):
    cluster = network_of(workers)
    sizes, ready = workload.gradient_bytes, workload.ready_seconds
    affine, exact = affine_cost(workers), exact_cost(cluster)
    plan = plan_buckets(rule, sizes, None, ready, affine)
    start = time.perf_counter()
    virtual = in_virtual_time(cluster, workload, plan)
    took = time.perf_counter() - start
    formula = finish_time(plan, sizes, ready, exact)
    return {
        "workers": workers,
        "rule": rule,
        "buckets": len(plan),
        "affine_seconds": finish_time(plan, sizes, ready, affine),
        "formula_seconds": formula,
        "virtual_seconds": virtual,
        "relative_difference": abs(virtual / formula - 1),
        "efficiency": (workload.forward_seconds + workload.backward_seconds) / virtual,
        "real_seconds": took,
    }


def draw(rows, path):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours = ("#0072b2", "#e69f00", "#999999", "#d55e00", "#009e73")
    for rule, colour in zip(RULES, colours, strict=True):
        mine = [row for row in rows if row["rule"] == rule]
        axes.plot(
            [row["workers"] for row in mine],
            [row["efficiency"] for row in mine],
            marker="o",
            color=colour,
            label=rule,
            linewidth=2 if rule == "optimal" else 1.3,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["workers"] for row in rows if row["rule"] == RULES[0]])
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("workers")
    axes.set_ylabel("scaling efficiency (1: the network costs nothing)")
    axes.set_title("GoogLeNet on K80s, ring all-reduce, in virtual time")
    axes.grid(alpha=0.3)
    axes.legend(title="buckets")
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--picture", type=Path, help="where to draw the plot")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    workload = Workload.load("googlenet-k80")
    rows = []
    if not args.json:
        print("workers  rule      buckets     affine    formula    virtual  difference")
    for workers in args.workers:
        for rule in RULES:
            row = measure(workers, workload, rule)
            rows.append(row)
            if not args.json:
                print(
                    f"{workers:7d}  {rule:8s}  {row['buckets']:7d}  "
                    f"{1e3 * row['affine_seconds']:8.2f}   "
                    f"{1e3 * row['formula_seconds']:8.2f}   "
                    f"{1e3 * row['virtual_seconds']:8.2f}    "
                    f"{row['relative_difference']:.1e}",
                    flush=True,
                )
    if args.json:
        print(json.dumps(rows))
    else:
        print("(milliseconds a step)")
    if args.picture or tuple(args.workers) == WORKERS:
        draw(rows, args.picture or PICTURE)
    worst = max(row["relative_difference"] for row in rows)
    if worst > 1e-9:
        sys.exit(f"formulas and virtual time differ by {worst:.1e}, more than 1e-9")


if __name__ == "__main__":
    main()
