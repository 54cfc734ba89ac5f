"""Exact methods past the end of backward: what they gain over bsp, and over DDP.

    python -m benchmarks.measure.exact_overlap                    # virtual time: all tables, 10 minutes
    python -m benchmarks.measure.exact_overlap --only layers      # measures what no row has yet
    python -m benchmarks.measure.exact_overlap --only workloads --again    # all rows anew
    python -m benchmarks.measure.exact_overlap --emulated         # 8 hosts, real processes: 10 minutes
    python -m benchmarks.measure.exact_overlap --loopback         # 2 processes: what it costs where nothing is gained

`layers`: 8 workers, the model of examples/layers.py with 16 layers and 16 MB, 78 ms forward
and 157 ms backward, 1 Gbit/s. `ratios`: eight equal layers on links where a ring takes r
times the computing (`papers.osp`). `workloads`: ResNet-50, VGG-16, BERT-base and GoogLeNet at 1, 10 and
25 Gbit/s. Seconds a step, over the last 20 of 80 steps: plans have been made and tried by then. The
limit is computing, or what a ring puts on each link, whichever is longer.

`--emulated`: 8 MB, 0.1 s forward and 0.2 s backward, paced (`measure.ddp_over_emulated_links`); all sides live in one job
and take turns in blocks of steps, and a block ends when all its means are in and applied.
Its rows are stored, too: medians, and how far predictions are off.
The prediction is the same script in virtual time, where `paceline probe` has said what a message
costs this machine's processors.
"""

import argparse
import json
import math
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import paceline
from benchmarks.measure import (
    collectives,
    ddp_over_emulated_links,
    ddp_over_loopback,
    harness,
)
from benchmarks.measure.harness import SETTLING_STEPS, alone, ddp, ours
from benchmarks.papers import osp
from benchmarks.papers.results import Results
from paceline.cluster import Cluster, Rack, Workload, uniform_cluster
from paceline.runtimes.simulated import Simulation

METHODS = ("bsp", "osp:collective=native,budget=constant", "dear", "priority")
STEPS, LAST = 80, 20
GIGABIT = 125e6
LAYERS = (16, 16.0, 0.078, 0.157)
"""Layers, megabytes, and seconds of both passes."""
WORKLOADS = ("resnet50", "vgg16", "bert-base", "googlenet-k80")
LINKS = (1, 10, 25)
RESULTS = harness.ROOT / "benchmarks" / "results" / "exact_overlap.jsonl"
"""Rows in virtual time, and of the emulated hosts: one for each table line and method."""
BLOCK = 10
CAPS = (1, 2, 4)  # MiB


# ---- virtual time ----


def paced(method, link):
    """Seconds of a step of `LAYERS`."""
    ends = []

    def train(rank):
        paceline.init()
        model = harness.example("layers").Layers(*LAYERS)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
        optimizer = paceline.distribute(model, sgd, method=method)
        for _ in range(STEPS):
            optimizer.zero_grad()
            ((model(torch.zeros(())) - 1.0) ** 2).backward()
            optimizer.step()
            if rank == 0:
                ends.append(paceline.now())
        optimizer.finish()

    rack = Rack(workers=osp.WORKERS, link=link, latency=osp.LATENCY)
    Simulation(Cluster((rack,))).run(train)
    return (ends[-1] - ends[-1 - LAST]) / LAST


def row(results, name, compute, wire, seconds):
    """*seconds* gives those of a step under a method; stored rows are not measured again."""
    found = {
        method: results.value(f"{name}, {method}", "s", partial(seconds, method))
        for method in METHODS
    }
    return {"name": name, "limit": max(compute, wire), **found}


def layers(results):
    _, megabytes, forward, backward = LAYERS
    sent = 2 * (osp.WORKERS - 1) / osp.WORKERS * megabytes * 1e6
    yield row(
        results,
        "16 layers, 1 Gbit/s",
        forward + backward,
        sent / GIGABIT,
        lambda method: paced(method, GIGABIT),
    )


def stood_in(results, name, workload, link):
    return row(
        results,
        name,
        osp.compute(workload),
        osp.ring_seconds(workload, link),
        lambda method: osp.seconds(method, workload, link, "optimal", 0, STEPS, LAST),
    )


def ratios(results):
    for r in osp.RATIOS:
        yield stood_in(results, f"r = {r}", osp.EQUAL, osp.ring_link(r))


def workloads(results):
    for name in WORKLOADS:
        for gigabits in LINKS:
            workload = Workload.load(name)
            yield stood_in(
                results, f"{name}, {gigabits} Gbit/s", workload, gigabits * GIGABIT
            )


TABLES = {"layers": layers, "ratios": ratios, "workloads": workloads}


def show(rows):
    """Print each of the rows, and yield it."""
    others = METHODS[1:]
    print("\n| | limit, ms | bsp, ms | " + " | ".join(others) + " | to the limit |")
    print("|---" * (4 + len(others)) + "|")
    for one in rows:
        gains = " | ".join(f"{one['bsp'] / one[method]:.3f}" for method in others)
        print(
            f"| {one['name']} | {1e3 * one['limit']:.4g} | {1e3 * one['bsp']:.4g} | {gains} | "
            f"{one['priority'] / one['limit']:.3f} |",
            flush=True,
        )
        yield one


# ---- real processes ----

ALONE = "without synchronization"
OURS = ("bsp", "dear", "priority")
BEST_DDP = "DDP"
"""With the best of `CAPS`."""
EMULATED_LINKS = (200, 400, 1000)
EMULATED_COMMAND = "python -m benchmarks.measure.exact_overlap --emulated"


class CompleteSide(harness.Side):
    """A side whose blocks end when everything has arrived, in any runtime."""

    def block(self, steps):
        dist.barrier()
        start = paceline.now()
        for _ in range(steps):
            self.step()
        for parameter in self.model.parameters():
            parameter.detach()  # whoever looks waits
        dist.barrier()
        took = torch.tensor([(paceline.now() - start) / steps], dtype=torch.float64)
        dist.all_reduce(took)
        return took.item() / dist.get_world_size()


Side = partial(CompleteSide, make=ddp_over_emulated_links.make)


def sides(methods, with_ddp=True):
    yield Side(ALONE, wrap=alone, settling=5)
    for cap in CAPS if with_ddp else ():
        yield Side(f"DDP, caps of {cap} MiB", wrap=ddp(cap), settling=5)
    for method in methods:
        yield Side(method, wrap=ours(method=method), settling=2 * SETTLING_STEPS)


def train(rounds, with_ddp=True):
    """Seconds a step of each side, block by block."""
    mine = list(sides(OURS, with_ddp))
    found = harness.take_turns(mine, rounds, BLOCK)
    harness.finish(mine)
    return found


def predicted(cluster):
    found = {}

    def body(rank):
        paceline.init()
        found[rank] = train(1, with_ddp=False)

    Simulation(cluster).run(body)
    return {name: took for name, (took,) in found[0].items()}


def emulated(links, rounds):
    for mbit in links:
        cluster = uniform_cluster(8, f"{mbit} Mbit/s", "50 us")
        probed = replace(cluster, processor=collectives.probe(cluster))
        said = predicted(probed)
        begin = time.monotonic()
        found = harness.on_emulated_hosts(cluster, train, rounds)
        sent = 2 * 7 / 8 * ddp_over_emulated_links.BYTES / (mbit * 1e6 / 8)
        limit = max(statistics.median(found[ALONE]), sent)
        best = min((n for n in found if "DDP" in n), key=lambda n: sum(found[n]))
        store(mbit, found, said, best, time.monotonic() - begin)
        print(f"\n{mbit} Mbit/s, 8 hosts; limit {limit:.3f} s; of DDP's caps: {best}\n")
        print(
            "| | s a step | spread | predicted | off | to bsp | to DDP | to the limit |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for name, times in found.items():
            middle = statistics.median(times)
            off = "" if name not in said else f"{said[name] / middle - 1:+.1%}"
            print(
                f"| {name} | {middle:.4f} | {(max(times) - min(times)) / middle:.1%} | "
                f"{said.get(name, float('nan')):.4f} | {off} | "
                f"{ratio(times, found['bsp']):.3f} | {ratio(times, found[best]):.3f} | "
                f"{middle / limit:.3f} |",
                flush=True,
            )
        yield {"mbit": mbit, "limit": limit, "predicted": said, "measured": found}


def store(mbit, found, said, best, seconds):
    """Keep the medians of a network, and how far predictions are off."""
    results = Results(RESULTS)
    results.command = EMULATED_COMMAND
    middles = {name: statistics.median(times) for name, times in found.items()}
    middles[BEST_DDP] = middles[best]
    figures = {emulated_row(mbit, name): middle for name, middle in middles.items()}
    results.put(figures, "s", seconds)
    off = {
        f"{emulated_row(mbit, name)}: off": said[name] / middles[name] - 1
        for name in OURS
    }
    results.put(off, "of the measured step", seconds)


def emulated_row(mbit, name):
    return f"emulated, {mbit} Mbit/s, {name}"


def emulated_table():
    """Stored steps between emulated hosts, a line for each side."""
    results = Results(RESULTS, measures=False)
    for name in (BEST_DDP, *OURS):
        row = {"8 hosts, seconds a step (to DDP)": name}
        for mbit in EMULATED_LINKS:
            seconds = results.stored(emulated_row(mbit, name))
            text = f"{seconds:.3f}"
            if name != BEST_DDP:
                ddp_seconds = results.stored(emulated_row(mbit, BEST_DDP))
                text += f" ({seconds / ddp_seconds:.2f})"
            off = results.stored(f"{emulated_row(mbit, name)}: off")
            if not math.isnan(off):
                text += f", off by {off:+.0%}"
            row[f"{mbit} Mbit/s"] = text
        yield row


def ratio(mine, theirs):
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def loopback():
    """Between two processes of this machine, where little is to be gained: priority against
    bsp, in turn."""
    for name, make in ddp_over_loopback.MODELS.items():
        ddp_over_loopback.compare(
            f"{name}, priority against bsp",
            make,
            *(ours(method="priority"), ours(method="bsp")),
            pairs=60,
            steps=8,
            warm_up=2 * SETTLING_STEPS,
            noise="bsp / bsp",
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=TABLES)
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--links", type=int, nargs="+", default=EMULATED_LINKS)
    parser.add_argument(
        "--again", action="store_true", help="also what another commit has measured"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    if arguments.loopback:
        harness.on_processes(2, loopback)
        return
    if arguments.emulated:
        found = list(emulated(arguments.links, arguments.rounds))
    else:
        results = Results(RESULTS, again=arguments.again)
        found = []
        for name in [arguments.only] if arguments.only else TABLES:
            results.command = (
                f"python -m benchmarks.measure.exact_overlap --only {name}"
            )
            found += show(TABLES[name](results))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
