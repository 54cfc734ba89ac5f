"""Sums at switches on real packets: two racks of four emulated hosts, predicted in virtual time and
measured. Called by `benchmarks/rina.py --emulated`, or by itself:

    python benchmarks/rina_emulated.py
    python benchmarks/rina_emulated.py --quick     # one round at four rates
    python benchmarks/rina_emulated.py --mbit 25 --megabytes 1 --repeats 3 --json

Rows are the plain ring, rina with an aggregator in one rack and in both, and atp and switchml with
both. Each is measured in turn, round after round: a loop times one all-reduce at a time, from
a barrier to the last rank's end. Where all processes share few cores, these are the limit at high
rates: a lower rate shows the network's own order.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch

import paceline
from paceline.cluster import Cluster, Rack
from paceline.collectives.communicator import Communicator
from paceline.collectives.registry import attach, make
from paceline.run_options import ScriptJob
from paceline.runtimes.join import join_runtime
from paceline.runtimes.simulated import Simulation

MBIT = 1e6 / 8
RACKS, WORKERS = 2, 4
LATENCY = 50e-6
RATES = (50, 100, 200, 400)
NETWORKS = (("ring", 0), ("rina", 1), ("rina", 2), ("atp", 2), ("switchml", 2))
"""A collective, and how many racks have an aggregator."""
MEGABYTES = 2
REPEATS = 5
ROUNDS = 3


def cluster(aggregators, mbit):
    """The first so many racks aggregate; uplinks never limit."""
    return Cluster(
        tuple(
            Rack(
                workers=WORKERS,
                link=mbit * MBIT,
                latency=LATENCY,
                aggregates=number < aggregators,
            )
            for number in range(RACKS)
        )
    )


def measured(size, repeats, row):
    """Seconds of each repeat, the slowest rank's."""
    runtime = join_runtime()
    runtime.connect()
    plain = Communicator(runtime, "barrier")
    comm = attach(make(row), runtime, Communicator(runtime, row))
    buffer = torch.randn(
        size // 4, generator=torch.Generator().manual_seed(runtime.rank)
    )
    times = []
    for repeat in range(repeats + 1):  # the first makes connections
        plain.all_reduce_natively(torch.zeros(1)).wait()
        start = paceline.now()
        comm.all_reduce(buffer, "mean").wait()
        took = torch.tensor([paceline.now() - start], dtype=torch.float64)
        plain.all_reduce_natively(took, "max").wait()
        if repeat:
            times.append(took.item())
    comm.close()
    return times


def predicted(described, size, row):
    found = []

    def body(rank):
        paceline.init()
        times = measured(size, 1, row)
        if rank == 0:
            found.extend(times)

    Simulation(described).run(body)
    return found[0]


def emulated(described, size, repeats, row):
    from paceline.runtimes.emulated.launch import EmulatedJob
    from paceline.runtimes.emulated.network import EmulatedNetwork

    with (
        tempfile.TemporaryDirectory() as scratch,
        EmulatedNetwork(described) as network,
    ):
        output = Path(scratch) / "times.json"
        words = ["--work", str(output), "--row", row, "--bytes", str(size)]
        words += ["--repeats", str(repeats)]
        if EmulatedJob(ScriptJob(__file__, words), network).run():
            sys.exit("the job failed")
        return json.loads(output.read_text())


def compare(mbit, size, repeats, rounds, networks=NETWORKS):
    """Of each network what was predicted and measured, in seconds."""
    described = {count: cluster(count, mbit) for _, count in networks}
    times = {network: [] for network in networks}
    for _ in range(rounds):
        for row, count in networks:
            times[row, count] += emulated(described[count], size, repeats, row)
    return [
        {
            "mbit": mbit,
            "bytes": size,
            "collective": row,
            "aggregators": count,
            "predicted_seconds": predicted(described[count], size, row),
            "measured_seconds": statistics.median(times[row, count]),
            "all_seconds": times[row, count],
        }
        for row, count in networks
    ]


def table(results):
    """Markdown: times, and how they compare to the ring's."""
    print(
        "| rate | collective, aggregators | predicted s | measured s | off by | "
        "ring / this: predicted | measured |"
    )
    print("|---|---|---|---|---|---|---|")
    for one in results:
        (ring,) = (
            other
            for other in results
            if other["mbit"] == one["mbit"] and other["collective"] == "ring"
        )
        expected, found = one["predicted_seconds"], one["measured_seconds"]
        wins = ring["predicted_seconds"] / expected, ring["measured_seconds"] / found
        print(
            f"| {one['mbit']} Mbit/s | {one['collective']}, {one['aggregators']} | "
            f"{expected:.3f} | {found:.3f} | {found / expected - 1:+.0%} | "
            f"{wins[0]:.2f} | {wins[1]:.2f} |"
        )


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mbit", type=int, nargs="+")
    parser.add_argument("--quick", action="store_true", help="one round of four rates")
    parser.add_argument("--megabytes", type=float, default=MEGABYTES)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--row", default="rina", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.work:
        paceline.init()
        found = measured(args.bytes, args.repeats, args.row)
        if paceline.rank() == 0:
            args.work.write_text(json.dumps(found))
        return
    size = int(args.megabytes * 1e6) // 4 * 4
    results = []
    rounds = args.rounds or (1 if args.quick else ROUNDS)
    for mbit in args.mbit or RATES:
        results += compare(mbit, size, args.repeats, rounds)
    if args.json:
        print(json.dumps(results))
    else:
        table(results)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
