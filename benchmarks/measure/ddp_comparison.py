"""Seconds a step beside PyTorch DDP and its hooks, on the same emulated network.

    python -m benchmarks.measure.ddp_comparison                  # 8 hosts at 100, 200, 400 and 1000 Mbit/s
    python -m benchmarks.measure.ddp_comparison --links 400 --rounds 3 --json
    python -m benchmarks.measure.ddp_comparison --compression    # DDP's hooks, and ours

The model is that of `examples/layers.py`, with square matrices, since PowerSGD sends vectors
as they are: 16 of them, 8 MB of gradients, 0.1 s forward and 0.2 s backward, paced. All
sides live in one job and take turns in short blocks of steps; a ratio
is the median over rounds of neighbouring blocks. The limit for exact dense synchronization
is the measured step without any, or its time to the first gradient plus what a ring puts on
each link over the link's goodput, whichever is larger. fp16 and PowerSGD are not exact.
"""

import argparse
import json
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

from benchmarks.measure import harness
from benchmarks.measure.harness import SETTLING_STEPS, alone, ddp, ours
from paceline.cluster import uniform_cluster

LAYERS, SIDE, FORWARD, BACKWARD = 16, 354, 0.1, 0.2
BYTES = LAYERS * SIDE * SIDE * 4
CAPS = (0.5, 1, 2, 4, 25)  # MiB
BLOCK = 3
EXACT = ("DDP", *(f"DDP, caps of {cap} MiB" for cap in CAPS))


def make_model():
    layers = harness.example("layers")
    return layers.Layers(LAYERS, BYTES / 1e6, FORWARD, BACKWARD, square=True)


def make():
    return make_model(), lambda model: (model(torch.zeros(())) - 1.0) ** 2


class SteadySide(harness.Side):
    """A side whose blocks begin and end within a training that goes on."""

    def block(self, steps):
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


Side = partial(SteadySide, make=make)


def fp16_hook(model, optimizer):
    wrapped, optimizer = ddp()(model, optimizer)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped, optimizer


def power_sgd_hook(cap=None):
    def wrap(model, optimizer):
        wrapped, optimizer = ddp(cap)(model, optimizer)
        state = power_sgd.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2
        )
        wrapped.register_comm_hook(state, power_sgd.powerSGD_hook)
        return wrapped, optimizer

    return wrap


CODES = (
    *("bf16", "int8", "int4", "top-k:density=0.01"),
    "powersgd:rank=2",
)


def make_sides(compression):
    if compression:
        return [
            Side("without synchronization", wrap=alone, settling=5),
            Side("DDP", wrap=ddp(), settling=5),
            Side("DDP, fp16 hook", wrap=fp16_hook, settling=5),
            Side("DDP, PowerSGD of rank 2", wrap=power_sgd_hook(25), settling=5),
            Side("paceline bsp", wrap=ours(buckets="optimal"), settling=SETTLING_STEPS),
            *(
                Side(
                    f"paceline {code}",
                    wrap=ours(
                        buckets="optimal",
                        compression=f"{code}{',' if ':' in code else ':'}warmup_steps=0",
                    ),
                    settling=SETTLING_STEPS,
                )
                for code in CODES
            ),
        ]
    return [
        Side("without synchronization", wrap=alone, settling=5),
        Side("DDP", wrap=ddp(), settling=5),
        *(Side(f"DDP, caps of {cap} MiB", wrap=ddp(cap), settling=5) for cap in CAPS),
        Side("DDP, fp16 hook", wrap=fp16_hook, settling=5),
        # In one bucket: PowerSGD chains all-reduces, and with two buckets ranks may issue
        # them in different orders, on which gloo hangs (seen at 200 Mbit/s).
        Side("DDP, PowerSGD of rank 2", wrap=power_sgd_hook(25), settling=5),
        Side("paceline bsp", wrap=ours(buckets="optimal"), settling=SETTLING_STEPS),
        Side("paceline bsp:buckets=ddp", wrap=ours(buckets="ddp"), settling=5),
        Side("paceline bsp:buckets=wfbp", wrap=ours(buckets="wfbp"), settling=5),
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


def train(compression, rounds):
    """Seconds a step of each side, round by round, and those to the first gradient."""
    sides = make_sides(compression)
    times = harness.take_turns(sides, rounds, BLOCK)
    first_gradient = time_to_first_gradient()
    harness.finish(sides)
    return {"times": times, "first_gradient_seconds": first_gradient}


def measure(mbit, workers, rounds, compression):
    cluster = uniform_cluster(workers, f"{mbit} Mbit/s", "50 us")
    found = harness.on_emulated_hosts(cluster, train, compression, rounds)
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
    arguments = parser.parse_args()
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
    main()
