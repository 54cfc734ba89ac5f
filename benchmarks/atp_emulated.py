"""ATP on real packets: emulated racks of which none, one and all aggregate, with a server on a host of
its own and with shards beside workers; predicted in virtual time, and measured.

    python benchmarks/atp_emulated.py
    python benchmarks/atp_emulated.py --workers 2 --mbit 25 --megabytes 1 --json

The server stands in the first rack, and the last racks aggregate first. Uplinks never limit. A
loop times one all-reduce at a time, from a barrier to the last rank's end.
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
from paceline.cluster import Cluster, Rack, ServerHost
from paceline.collectives.communicator import Communicator
from paceline.collectives.registry import attach, make
from paceline.run_options import ScriptJob
from paceline.runtimes.join import join_runtime
from paceline.runtimes.simulated import Simulation

MBIT = 1e6 / 8
RACKS = 2
CASES = [("ring", 0, 0)] + [
    ("atp", aggregators, servers)
    for servers in (1, 0)
    for aggregators in (0, 1, 2)
    if servers or aggregators
]
"""Collective, racks that aggregate, hosts for servers."""


def cluster(aggregators, servers, workers, mbit):
    rack = {"workers": workers, "link": mbit * MBIT, "latency": 50e-6}
    return Cluster(
        tuple(
            Rack(aggregates=number >= RACKS - aggregators, **rack)
            for number in range(RACKS)
        ),
        servers=(ServerHost(rack=0),) * servers,
    )


def measured(row, size, repeats):
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


def predicted(described, row, size):
    found = []

    def body(rank):
        paceline.init()
        times = measured(row, size, 1)
        if rank == 0:
            found.extend(times)

    Simulation(described).run(body)
    return found[0]


def emulated(described, row, size, repeats):
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


def compare(size, workers, mbit, repeats, rounds):
    """Each case in turn, round after round."""
    times = {case: [] for case in CASES}
    for _ in range(rounds):
        for case, found in times.items():
            row, aggregators, servers = case
            described = cluster(aggregators, servers, workers, mbit)
            found += emulated(described, row, size, repeats)
    return [
        {
            "collective": row,
            "aggregators": aggregators,
            "servers": servers,
            "predicted_seconds": predicted(
                cluster(aggregators, servers, workers, mbit), row, size
            ),
            "measured_seconds": statistics.median(times[row, aggregators, servers]),
            "all_seconds": times[row, aggregators, servers],
        }
        for row, aggregators, servers in CASES
    ]


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=4, help="of each rack")
    parser.add_argument("--mbit", type=float, default=100)
    parser.add_argument("--megabytes", type=float, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.work:
        paceline.init()
        found = measured(args.row, args.bytes, args.repeats)
        if paceline.rank() == 0:
            args.work.write_text(json.dumps(found))
        return
    size = int(args.megabytes * 1e6) // 4 * 4
    results = compare(size, args.workers, args.mbit, args.repeats, args.rounds)
    if args.json:
        print(json.dumps(results))
        return
    print("| | aggregators | predicted s | measured s | off by |")
    print("|---|---|---|---|---|")
    for one in results:
        where = {1: ", a server", 0: ", shards"}[one["servers"]]
        name = one["collective"] + where * (one["collective"] == "atp")
        expected, found = one["predicted_seconds"], one["measured_seconds"]
        print(
            f"| {name} | {one['aggregators']} | {expected:.3f} | {found:.3f} | "
            f"{found / expected - 1:+.0%} |"
        )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
