"""Seconds a step beside PyTorch DDP and its hooks, on the same emulated network.

    python benchmarks/peers.py                  # 8 hosts at 100, 200, 400 and 1000 Mbit/s
    python benchmarks/peers.py --links 400 --rounds 3 --json
    python benchmarks/peers.py --compression    # DDP's hooks, and ours

The model is that of `examples/layers.py`, with square matrices, since PowerSGD sends vectors
as they are: 16 of them, 8 MB of gradients, 0.1 s forward and 0.2 s backward, paced. All
sides live in one job and take turns in short blocks of steps; a ratio
is the median over rounds of neighbouring blocks. The limit for exact dense synchronization
is the measured step without any, or its time to the first gradient plus what a ring puts on
each link over the link's goodput, whichever is larger. fp16 and PowerSGD are not exact.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import overhead
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.cluster import uniform_cluster
from paceline.run_options import ScriptJob

LAYERS, SIDE, FORWARD, BACKWARD = 16, 354, 0.1, 0.2
BYTES = LAYERS * SIDE * SIDE * 4
CAPS = (0.5, 1, 2, 4, 25)  # MiB
BLOCK = 3
EXACT = ("DDP", *(f"DDP, caps of {cap} MiB" for cap in CAPS))


def make_model():
    layers = overhead.example("layers")
    return layers.Layers(LAYERS, BYTES / 1e6, FORWARD, BACKWARD, square=True)


class Side:
    """One way to train the model."""

    def __init__(self, name, wrap, settling=5):
        self.name, self.settling = name, settling
        torch.manual_seed(0)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.model, self.optimizer = wrap(model, optimizer)

    def step(self):
        self.optimizer.zero_grad()
        ((self.model(torch.zeros(())) - 1.0) ** 2).backward()
        self.optimizer.step()

    def block(self, steps=BLOCK):
        """Seconds a step, the same on all ranks.

        What a method leaves under way is waited for in its next step: so one step goes before those
        that count, and what the last one leaves is waited for afterwards, and is not the next side's.
        """
        dist.barrier()
        self.step()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        took = torch.tensor([(time.perf_counter() - start) / steps])
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.sum()
        dist.barrier()
        dist.all_reduce(took)
        return took.item() / dist.get_world_size()


def ddp(cap=None, hook=None):
    def wrap(model, optimizer):
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=cap, gradient_as_bucket_view=True
        )
        if hook == "fp16":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif hook == "PowerSGD":
            state = power_sgd.PowerSGDState(
                None, matrix_approximation_rank=2, start_powerSGD_iter=2
            )
            wrapped.register_comm_hook(state, power_sgd.powerSGD_hook)
        return wrapped, optimizer

    return wrap


def ours(buckets, compression="none"):
    def wrap(model, optimizer):
        return model, paceline.distribute(
            model, optimizer, buckets=buckets, compression=compression
        )

    return wrap


def alone(model, optimizer):
    return model, optimizer


CODES = (
    *("bf16", "int8", "int4", "top-k:density=0.01"),
    "powersgd:rank=2",
)


def make_sides(compression):
    if compression:
        return [
            Side("without synchronization", alone),
            Side("DDP", ddp()),
            Side("DDP, fp16 hook", ddp(hook="fp16")),
            Side("DDP, PowerSGD of rank 2", ddp(25, hook="PowerSGD")),
            Side("paceline bsp", ours("optimal"), overhead.SETTLING_STEPS),
            *(
                Side(
                    f"paceline {code}",
                    ours(
                        "optimal", f"{code}{',' if ':' in code else ':'}warmup_steps=0"
                    ),
                    overhead.SETTLING_STEPS,
                )
                for code in CODES
            ),
        ]
    return [
        Side("without synchronization", alone),
        Side("DDP", ddp()),
        *(Side(f"DDP, caps of {cap} MiB", ddp(cap)) for cap in CAPS),
        Side("DDP, fp16 hook", ddp(hook="fp16")),
        # In one bucket: PowerSGD chains all-reduces, and with two buckets ranks may issue
        # them in different orders, on which gloo hangs (seen at 200 Mbit/s).
        Side("DDP, PowerSGD of rank 2", ddp(25, hook="PowerSGD")),
        Side("paceline bsp", ours("optimal"), overhead.SETTLING_STEPS),
        Side("paceline bsp:buckets=ddp", ours("ddp")),
        Side("paceline bsp:buckets=wfbp", ours("wfbp")),
    ]


def time_to_first_gradient():
    """Seconds from the start of a step to its first gradient, without synchronization."""
    model = make_model()
    times = []
    model.weights[-1].register_post_accumulate_grad_hook(
        lambda _: times.append(time.perf_counter())
    )
    took = []
    for _ in range(5):
        start = time.perf_counter()
        ((model(torch.zeros(())) - 1.0) ** 2).backward()
        took.append(times[-1] - start)
    return statistics.median(took)


def work(arguments):
    paceline.init()
    sides = make_sides(arguments.compression)
    for side in sides:
        side.block(side.settling)
    times = {side.name: [] for side in sides}
    for turn in range(arguments.rounds):
        first = turn % len(sides)
        for side in sides[first:] + sides[:first]:
            times[side.name].append(side.block())
    first_gradient = time_to_first_gradient()
    if dist.get_rank() == 0:
        result = {"times": times, "first_gradient_seconds": first_gradient}
        Path(arguments.output).write_text(json.dumps(result))
    for side in sides:
        if isinstance(side.optimizer, paceline.DistributedOptimizer):
            side.optimizer.finish()


def measure(mbit, workers, rounds, compression):
    from paceline.runtimes.emulated.launch import EmulatedJob
    from paceline.runtimes.emulated.network import EmulatedNetwork

    cluster = uniform_cluster(workers, f"{mbit} Mbit/s", "50 us")
    with tempfile.TemporaryDirectory() as scratch, EmulatedNetwork(cluster) as network:
        output = Path(scratch) / "times.json"
        words = ["--work", "--output", str(output), "--rounds", str(rounds)]
        words += ["--compression"] if compression else []
        if EmulatedJob(ScriptJob(__file__, words), network).run():
            sys.exit("the job failed")
        found = json.loads(output.read_text())
    times = found["times"]
    sent = 2 * (workers - 1) / workers * BYTES
    wire = found["first_gradient_seconds"] + sent / (mbit * 1e6 / 8)
    limit = max(statistics.median(times["without synchronization"]), wire)
    rows = []
    for name, mine in times.items():
        pairs = zip(mine, times["DDP"], strict=True)
        rows.append(
            {
                "mbit": mbit,
                "side": name,
                "seconds": statistics.median(mine),
                "spread": (max(mine) - min(mine)) / statistics.median(mine),
                "to_ddp": statistics.median(a / b for a, b in pairs),
                "bound_ratio": statistics.median(mine) / limit,
            }
        )
    return limit, rows


def compare_codes(rows):
    """What the peers' hooks are held against."""
    of = {row["side"]: row["seconds"] for row in rows}
    theirs, none = of["DDP, PowerSGD of rank 2"], of["without synchronization"]
    mine = of["paceline powersgd:rank=2"]
    print(
        f"powersgd: {mine / theirs:.3f} of PyTorch's hook, "
        f"{mine / none:.3f} of no communication"
    )
    print(f"bf16: {of['paceline bf16'] / of['DDP, fp16 hook']:.3f} of DDP's fp16 hook")
    print(f"int8: {of['paceline int8'] / of['paceline bf16']:.3f} of bf16")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--links", type=int, nargs="+", default=[100, 200, 400, 1000])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--compression", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments)
        return
    everything = []
    for mbit in arguments.links:
        limit, rows = measure(
            mbit, arguments.workers, arguments.rounds, arguments.compression
        )
        everything += rows
        if arguments.json:
            continue
        print(f"\n{mbit} Mbit/s, {arguments.workers} hosts; limit {limit:.3f} s\n")
        print("| side | seconds a step | spread | to DDP | to the limit |")
        print("|---|---|---|---|---|")
        for row in rows:
            print(
                f"| {row['side']} | {row['seconds']:.3f} | {row['spread']:.0%} | "
                f"{row['to_ddp']:.3f} | {row['bound_ratio']:.3f} |",
                flush=True,
            )
        if arguments.compression:
            compare_codes(rows)
            continue
        best = min(rows, key=lambda r: r["seconds"] if r["side"] in EXACT else 1e9)
        mine = next(r for r in rows if r["side"] == "paceline bsp")
        print(
            f"\npaceline bsp against DDP at its best ({best['side']}): "
            f"{mine['seconds'] / best['seconds']:.3f}"
        )
        lossy = next(r for r in rows if "PowerSGD" in r["side"])
        print(
            f"PowerSGD against paceline bsp: {lossy['seconds'] / mine['seconds']:.3f}"
        )
    if arguments.json:
        print(json.dumps(everything))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
