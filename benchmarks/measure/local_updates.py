"""Rounds that come every H steps, and all-reduces in two racks, on an emulated network.

    python -m benchmarks.measure.local_updates                       # both tables: about five minutes
    python -m benchmarks.measure.local_updates --only rounds
    python -m benchmarks.measure.local_updates --only racks --repeats 1 --json racks.json

Eight hosts at 100 Mbit/s, a model of 8 MB in equal layers (examples/layers.py: 0.1 s forward and
0.2 s backward, paced), one bucket that nothing hides.

`rounds`: `local-sgd` and `diloco` with H = 8 send one all-reduce in eight steps, so that a step
should take (compute + all-reduce / H). Compute is what a step takes without paceline, and an
all-reduce what bsp's takes beyond that: on the same hosts, measured in turn with the others.

`racks`: two racks of four, behind uplinks of 25 Mbit/s. A ring sends 1.75 times the model over each,
a hierarchical all-reduce once; the simulated runtime says by how much a step gets shorter.

All sides are trainings of one job, in turn, `--repeats` times; each figure is the median of its
repeats, each of whole rounds, after one that is not counted.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

import paceline
from benchmarks.measure import harness, stored
from paceline.cluster import Cluster, Rack
from paceline.runtimes.simulated import Simulation

MBIT = 1e6 / 8
LAYERS, MEGABYTES = 16, 8.0
FORWARD, BACKWARD = 0.1, 0.2
EVERY = 8
BOUND = 0.05
ALONE = "without paceline"


def racks_of(count, uplink=None):
    rack = Rack(workers=8 // count, link=100 * MBIT, latency=50e-6, uplink=uplink)
    return Cluster((rack,) * count)


RING, HIERARCHICAL = (f"bsp:collective={name}" for name in ("ring", "hierarchical"))
TABLES = {
    "rounds": (
        racks_of(1),
        {
            ALONE: EVERY,
            "bsp": 6,
            f"local-sgd:sync_every={EVERY}": EVERY,
            f"diloco:sync_every={EVERY}": EVERY,
        },
    ),
    "racks": (racks_of(2, uplink=25 * MBIT), {RING: 3, HIERARCHICAL: 3}),
}
"""A network, and the steps of a repeat of each side."""


def seconds(method, steps):
    """Of a step, over so many, of which the last ends with a round. Collective."""
    model = harness.example("layers").Layers(LAYERS, MEGABYTES, FORWARD, BACKWARD)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if method != ALONE:
        spec = method + (":" if ":" not in method else ",") + "buckets=single"
        optimizer = paceline.distribute(model, optimizer, method=spec)
    for step in range(2 * steps):
        if step == steps:
            start = paceline.now()
        optimizer.zero_grad()
        ((model(torch.zeros(())) - 1.0) ** 2).backward()
        optimizer.step()
    took = (paceline.now() - start) / steps
    if method != ALONE:
        optimizer.finish()
    return took


def train(sides, repeats):
    """On each worker: what each side took, repeat by repeat."""
    paceline.init()
    found = {method: [] for method in sides}
    for _ in range(repeats):
        for method, steps in sides.items():
            found[method].append(seconds(method, steps))
    return found


def predicted(name):
    cluster, sides = TABLES[name]
    found = {}

    def body(rank):
        found[rank] = train(sides, 1)

    Simulation(cluster).run(body)
    return {method: took for method, (took,) in found[0].items()}


def measured(name, repeats):
    cluster, sides = TABLES[name]
    return harness.on_emulated_hosts(cluster, train, sides, repeats)


def show_rounds(expected, found):
    """Whether a step takes (compute + all-reduce / H)."""
    pairs = list(zip(found[ALONE], found["bsp"], strict=True))
    compute = statistics.median(found[ALONE])
    all_reduce = statistics.median(both - alone for alone, both in pairs)
    wire = expected["bsp"] - expected[ALONE]
    print(f"\ncompute: {compute:.4f} s measured, {expected[ALONE]:.4f} s predicted")
    print(f"one all-reduce: {all_reduce:.4f} s measured, {wire:.4f} s predicted\n")
    print("| method | seconds a step | spread | (compute + all-reduce / H) | ratio | |")
    print("|---|---|---|---|---|---|")
    rows = []
    for method, times in found.items():
        rows.append(row_of(method, times, expected[method]))
        if method in (ALONE, "bsp"):
            continue
        rows[-1]["should"] = should = compute + all_reduce / EVERY
        rows[-1]["ratio"] = ratio = rows[-1]["seconds"] / should
        print(
            f"| {method} | {rows[-1]['seconds']:.4f} | {rows[-1]['spread']:.1%} | "
            f"{should:.4f} | {ratio:.3f} | {'' if abs(ratio - 1) <= BOUND else 'off'} |"
        )
    return rows


def show_racks(expected, found):
    """Whether hierarchical all-reduces are faster than the ring, and by as much as said."""
    print("\n| method | predicted s a step | measured s | spread | off by |")
    print("|---|---|---|---|---|")
    rows = [row_of(method, found[method], expected[method]) for method in found]
    for row in rows:
        print(
            f"| {row['method']} | {row['predicted']:.3f} | {row['seconds']:.3f} | "
            f"{row['spread']:.1%} | {row['predicted'] / row['seconds'] - 1:+.1%} |"
        )
    said = expected[RING] / expected[HIERARCHICAL]
    each = [a / b for a, b in zip(found[RING], found[HIERARCHICAL], strict=True)]
    shown = ", ".join(f"{ratio:.3f}" for ratio in each)
    print(f"\nring / hierarchical: {said:.3f} predicted, measured in turn {shown}")
    return [*rows, {"predicted_ratio": said, "measured_ratios": each}]


def row_of(method, times, expected):
    middle = statistics.median(times)
    return {
        "method": method,
        "seconds": middle,
        "spread": (max(times) - min(times)) / middle,
        "predicted": expected,
        "measured": times,
    }


def keep(store, table, rows):
    """Adds the figures of a table to a `stored.Store`."""
    for row in rows:
        if "method" not in row:
            store.add(
                f"{table}, ring / hierarchical, predicted", row["predicted_ratio"]
            )
            measured = statistics.median(row["measured_ratios"])
            store.add(f"{table}, ring / hierarchical, measured", measured)
            continue
        units = {"seconds": "s", "spread": "", "predicted": "s", "should": "s"}
        for name, unit in (units | {"ratio": ""}).items():
            if name in row:
                store.add(f"{table}, {row['method']}, {name}", row[name], unit)


def rounds_table():
    """Rows of the table of docs: method, ratio."""
    figures = stored.Figures("local_updates")
    for method in list(TABLES["rounds"][1])[2:]:
        yield [f"`{method}`", figures.text(f"rounds, {method}, ratio", ".3f")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=TABLES)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the figures here")
    stored.add_option(parser)
    args = parser.parse_args()
    rows = {}
    with stored.Store("local_updates", args.store) as store:
        for name, show in (("rounds", show_rounds), ("racks", show_racks)):
            if args.only in (None, name):
                rows[name] = show(predicted(name), measured(name, args.repeats))
                keep(store, name, rows[name])
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
