"""Which collective is the fastest, predicted in virtual time and measured on real processes.

    python -m benchmarks.measure.collectives                    # 8 hosts on one switch, and in two racks
    python -m benchmarks.measure.collectives --only racks --kilobytes 1 1000 --repeats 3 --json

Rows are stored. How many pairs are in the predicted order is stored only of a whole run.

For each network: `paceline probe` measures on the emulated cluster what a message costs this
machine's processors; on a simulated cluster of the described links and that cost, and then on the
emulated one, the same loop times one all-reduce at a time, from a
barrier to the last rank's end. The order of two rows counts where their predictions are
further apart than `CLEAR`. ``auto`` goes by the described cluster in both.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

import paceline
from benchmarks.measure import agreement, harness
from benchmarks.papers.results import Results
from paceline.cluster import Cluster, Rack, cluster_toml, load_cluster
from paceline.collectives.autotune import cheapest
from paceline.collectives.communicator import Communicator
from paceline.collectives.registry import attach, make
from paceline.runtimes.join import join_runtime
from paceline.runtimes.simulated import Simulation

MBIT = 1e6 / 8
SCHEDULED = ("ring", "tree", "halving-doubling", "hierarchical")
ROWS = (*SCHEDULED, "native", "auto")
KILOBYTES = (1, 1_000, 32_000)
MANY, SOME, FEW = 30, 8, 2
"""Repeats below 100 kB, below 10 MB, and beyond."""
CLEAR = 0.15
RESULTS = harness.ROOT / "benchmarks" / "results" / "collectives.jsonl"
COMMAND = "python -m benchmarks.measure.collectives"
PAIRS = {
    "clear": "pairs with clearly different predictions",
    "swapped": "of these measured in the other order",
}


def rack(hosts, mbit, uplink=None):
    uplink = None if uplink is None else uplink * MBIT
    return Rack(workers=hosts, link=mbit * MBIT, latency=200e-6, uplink=uplink)


NETWORKS = {
    "switch": Cluster((rack(8, 400),)),
    "racks": Cluster((rack(4, 400, 100), rack(4, 400, 100))),
}


def measured(sizes, rows, repeats):
    """Seconds of each row at each size: medians over repeats of the slowest rank's."""
    runtime = join_runtime()
    runtime.connect()
    plain = Communicator(runtime, "barrier")
    found = {}
    for name in rows:
        comm = attach(make(name), runtime, Communicator(runtime, name))
        comm.all_reduce(torch.zeros(64), "sum").wait()  # connections are made
        found[name] = []
        for size in sizes:
            buffer = torch.zeros(size // 4)
            times = []
            most = MANY if size < 1e5 else SOME if size < 1e7 else FEW
            for _ in range(min(repeats, most)):
                plain.all_reduce_natively(torch.zeros(1)).wait()
                start = paceline.now()
                comm.all_reduce(buffer, "sum").wait()
                took = torch.tensor([paceline.now() - start], dtype=torch.float64)
                plain.all_reduce_natively(took, "max").wait()
                times.append(took.item())
            found[name].append(statistics.median(times))
    return found


def predicted(described, processor, sizes):
    """The same in virtual time, where repeats are equal."""
    found = {}

    def body(rank):
        paceline.init()
        times = measured(sizes, ROWS[:-1], 1)
        if rank == 0:
            found.update(times)

    Simulation(replace(described, processor=processor)).run(body)
    everybody = tuple(range(described.workers))
    found["auto"] = [
        found[cheapest(described, everybody, 1 << (size - 1).bit_length())][number]
        for number, size in enumerate(sizes)
    ]
    return found


def probe(described):
    """What a message costs."""
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch) / "described.toml", Path(scratch) / "probed.toml"
        source.write_text(cluster_toml(described))
        command = [sys.executable, "-m", "paceline", "probe", "--runtime=emulated"]
        command += [f"--cluster={source}", f"--output={target}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        return load_cluster(target).processor


def same_order(expected, found):
    """Pairs of rows that are clearly apart by their predictions, and of these those that
    were measured the other way round."""
    clear, swapped = 0, []
    for a, b in itertools.permutations(ROWS, 2):
        if expected[a] < (1 - CLEAR) * expected[b]:
            clear += 1
            if found[a] >= found[b]:
                swapped.append((a, b))
    return clear, swapped


def compare(name, sizes, repeats):
    described = NETWORKS[name]
    guesses = predicted(described, probe(described), sizes)
    times = harness.on_emulated_hosts(described, measured, sizes, ROWS, repeats)
    results = []
    for number, size in enumerate(sizes):
        expected = {row: guesses[row][number] for row in ROWS}
        found = {row: times[row][number] for row in ROWS}
        clear, swapped = same_order(expected, found)
        results.append(
            {
                "network": name,
                "bytes": size,
                "predicted_seconds": expected,
                "measured_seconds": found,
                "clear_pairs": clear,
                "swapped": swapped,
            }
        )
    return results


# ---- stored rows ----


def place(network, size):
    return f"{network}, {size // 1000:,} KB"


def ratio_row(network, size, kind):
    return f"{place(network, size)}: ring / hierarchical, {kind}"


def store(results, seconds):
    """Keep the times of each network and size; of a whole run also how many pairs are in order."""
    kept = Results(RESULTS)
    kept.command = COMMAND
    for result in results:
        where = result["network"], result["bytes"]
        expected, found = result["predicted_seconds"], result["measured_seconds"]
        figures = {f"{place(*where)}, {row}": found[row] for row in ROWS}
        for row in ROWS:
            figures[f"{place(*where)}, {row}: predicted"] = expected[row]
        kept.put(figures, "s", seconds)
        ratios = {
            ratio_row(*where, kind): times["ring"] / times["hierarchical"]
            for kind, times in (("predicted", expected), ("measured", found))
        }
        kept.put(ratios, "", seconds)
    if len(results) == len(NETWORKS) * len(KILOBYTES):
        pairs = {
            PAIRS["clear"]: sum(result["clear_pairs"] for result in results),
            PAIRS["swapped"]: sum(len(result["swapped"]) for result in results),
        }
        kept.put(pairs, "pairs", seconds)


SHOWN = {
    "two racks, 1 MB": ("racks", 1_000_000),
    "two racks, 32 MB": ("racks", 32_000_000),
    "one switch, 32 MB": ("switch", 32_000_000),
}


def times_table():
    """Stored seconds of a ring and of `hierarchical`, and those of a step of bsp (`agreement`)."""
    kept = Results(RESULTS, measures=False)
    for name, where in SHOWN.items():
        ring, ours = (
            kept.stored(f"{place(*where)}, {row}") for row in ("ring", "hierarchical")
        )
        ratios = (
            kept.stored(ratio_row(*where, kind)) for kind in ("predicted", "measured")
        )
        yield times_row(name, ring, ours, *ratios)
    steps = {
        row["method"]: row
        for row in agreement.stored()["averaging"]
        if row["cell"] == "hierarchical-8-racks"
    }
    ring, ours = (
        steps[f"bsp:collective={name},buckets=ddp"] for name in ("ring", "hierarchical")
    )
    yield times_row(
        "a step of `bsp`, 8 MB, racks at 400 and 200 Mbit/s",
        *(one["measured_seconds"] for one in (ring, ours)),
        *(ring[key] / ours[key] for key in ("predicted_seconds", "measured_seconds")),
    )


def times_row(name, ring, hierarchical, expected, found):
    return {
        "seconds": name,
        "ring": f"{ring:#.3g}",
        "hierarchical": f"{hierarchical:#.3g}",
        "ring / hierarchical: predicted": f"{expected:.2f}",
        "measured": f"{found:.2f}",
    }


def pairs_table():
    """The stored numbers of pairs."""
    kept = Results(RESULTS, measures=False)
    yield {name: f"{kept.stored(name):.0f}" for name in PAIRS.values()}


def table(results):
    print("| network | bytes | row | predicted ms | measured ms | off by |")
    print("|---|---|---|---|---|---|")
    for result in results:
        expected, found = result["predicted_seconds"], result["measured_seconds"]
        for row in sorted(ROWS, key=expected.__getitem__):
            print(
                f"| {result['network']} | {result['bytes']:,} | {row} | "
                f"{1e3 * expected[row]:.2f} | {1e3 * found[row]:.2f} | "
                f"{expected[row] / found[row] - 1:+.0%} |"
            )
    print()
    for result in results:
        swapped = "; ".join(f"{a} before {b}" for a, b in result["swapped"])
        expected, found = (
            result[key]["ring"] / result[key]["hierarchical"]
            for key in ("predicted_seconds", "measured_seconds")
        )
        print(
            f"{result['network']}, {result['bytes']:,} bytes: "
            f"{result['clear_pairs'] - len(result['swapped'])} of "
            f"{result['clear_pairs']} clear pairs in the predicted order"
            + (f" (not {swapped})" if swapped else "")
            + f"; ring to hierarchical {expected:.2f} predicted, {found:.2f} measured"
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=NETWORKS, help="one of the networks")
    parser.add_argument("--kilobytes", type=int, nargs="+", default=KILOBYTES)
    parser.add_argument("--repeats", type=int, default=MANY, help="at most so many")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sizes = [1000 * number for number in args.kilobytes]
    begin = time.monotonic()
    results = []
    for name in [args.only] if args.only else NETWORKS:
        results += compare(name, sizes, args.repeats)
    store(results, time.monotonic() - begin)
    if args.json:
        print(json.dumps(results))
    else:
        table(results)


if __name__ == "__main__":
    main()
