"""Seconds a step beside PyTorch DDP and its hooks, on the same emulated network.

    python -m benchmarks.measure.ddp_over_emulated_links                  # 8 hosts at 100, 200, 400 and 1000 Mbit/s
    python -m benchmarks.measure.ddp_over_emulated_links --links 400 --rounds 3 --json
    python -m benchmarks.measure.ddp_over_emulated_links --compression    # DDP's hooks, and ours

The model is that of `examples/layers.py`, with square matrices, since PowerSGD sends vectors
as they are: 16 of them, 8 MB of gradients, 0.1 s forward and 0.2 s backward, paced. All
sides live in one job and take turns in short blocks of steps; a ratio
is the median over rounds of neighbouring blocks. The limit for exact dense synchronization
is the measured step without any, or its time to the first gradient plus what a ring puts on
each link over the link's goodput, whichever is larger. fp16 and PowerSGD are not exact.
"""

import argparse
import json
import math
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

from benchmarks.measure import harness, stored
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


RATIOS = {
    "powersgd / DDP's PowerSGD hook": (
        "paceline powersgd:rank=2",
        "DDP, PowerSGD of rank 2",
    ),
    "powersgd / without synchronization": (
        "paceline powersgd:rank=2",
        "without synchronization",
    ),
    "bf16 / DDP's fp16 hook": ("paceline bf16", "DDP, fp16 hook"),
    "int8 / bf16": ("paceline int8", "paceline bf16"),
}


def compare_codes(rows):
    """Ratios of compressors' steps, by name."""
    of = {row["side"]: row["seconds"] for row in rows}
    return {name: of[side] / of[other] for name, (side, other) in RATIOS.items()}


# ---- figures of docs ----

LINKS = (100, 200, 400, 1000)
COLUMNS = {"seconds": "s", "spread": "", "to_ddp": "", "bound_ratio": ""}
"""Figures of a side, with their units."""


def benchmark(compression):
    return (
        "ddp_over_emulated_links --compression"
        if compression
        else "ddp_over_emulated_links"
    )


def row_name(what, column, mbit, workers=8):
    return f"{what}, {column}, {workers} hosts at {mbit} Mbit/s"


def keep(store, limit, rows, workers, compression):
    """Adds the figures of one network to a `stored.Store`."""
    mbit = rows[0]["mbit"]
    store.add(row_name("limit", "seconds", mbit, workers), limit, "s")
    for row in rows:
        for column, unit in COLUMNS.items():
            name = row_name(row["side"], column, mbit, workers)
            store.add(name, row[column], unit)
    for name, ratio in compare_codes(rows).items() if compression else ():
        store.add(row_name(name, "ratio", mbit, workers), ratio)


def heads(first):
    return [first, *(f"{mbit} Mbit/s" for mbit in LINKS)]


def exact_table():
    """Rows of the table of exact methods: steps over the limit at each link."""
    figures = stored.Figures(benchmark(compression=False))

    def runs(what, column, mbit):
        return figures.runs(row_name(what, column, mbit))

    def best_cap(mbit):
        """The cap of DDP's fastest side; the default where none was run."""
        steps = {cap: runs(f"DDP, caps of {cap} MiB", "seconds", mbit) for cap in CAPS}
        steps = {cap: statistics.mean(took) for cap, took in steps.items() if took}
        return min(steps, key=steps.get) if steps else CAPS[-1]

    def fastest(mbit):
        return f"DDP, caps of {best_cap(mbit)} MiB"

    def step(side, mbit):
        seconds = figures.text(row_name(side, "seconds", mbit), ".3f")
        return f"{seconds} ({figures.text(row_name(side, 'bound_ratio', mbit))})"

    def steps(side):
        return (step(side, mbit) for mbit in LINKS)

    def ratio(side, other, mbit):
        names = (row_name(name, "seconds", mbit) for name in (side, other))
        return figures.ratio(*names)

    bsp, lossy_ddp = "paceline bsp", "DDP, PowerSGD of rank 2"
    yield [
        "limit",
        *(figures.text(row_name("limit", "seconds", mbit), ".3f") for mbit in LINKS),
    ]
    yield ["PyTorch DDP", *steps("DDP")]
    best = (step(fastest(mbit), mbit) for mbit in LINKS)
    yield ["DDP, best of five bucket caps", *best]
    yield ["cap of the row above, MiB", *(f"{best_cap(mbit):g}" for mbit in LINKS)]
    for side in ("DDP, fp16 hook", lossy_ddp):
        yield [f"{side} (not exact)", *steps(side)]
    yield [f"**{bsp}**", *steps(bsp)]
    for rule in ("ddp", "wfbp"):
        yield [f"{bsp}:buckets={rule}", *steps(f"{bsp}:buckets={rule}")]
    to_ddp = (row_name(bsp, "to_ddp", mbit) for mbit in LINKS)
    yield ["bsp / DDP", *map(figures.text, to_ddp)]
    to_best = (ratio(bsp, fastest(mbit), mbit) for mbit in LINKS)
    yield ["bsp / DDP, best of five bucket caps", *to_best]
    lossy = (ratio(lossy_ddp, bsp, mbit) for mbit in LINKS)
    yield ["DDP, PowerSGD / bsp", *lossy]


def compression_table():
    """Rows of the table of compressors. The fastest step at each link is bold."""
    figures = stored.Figures(benchmark(compression=True))
    alone_side, *sides = (
        *("without synchronization", "DDP", "DDP, fp16 hook"),
        *("DDP, PowerSGD of rank 2", "paceline bsp"),
        *(f"paceline {code}" for code in CODES),
    )

    def step(side, mbit):
        return figures.text(row_name(side, "seconds", mbit), ".3f")

    yield [alone_side, *(step(alone_side, mbit) for mbit in LINKS)]

    def order(side, mbit):
        return min(figures.runs(row_name(side, "seconds", mbit)), default=math.inf)

    fastest = {mbit: min(sides, key=lambda s, m=mbit: order(s, m)) for mbit in LINKS}
    for side in sides:
        texts = ((mbit, step(side, mbit)) for mbit in LINKS)
        yield [side, *(f"**{t}**" if side == fastest[m] else t for m, t in texts)]
    for name in RATIOS:
        rows = (row_name(name, "ratio", mbit) for mbit in LINKS)
        yield [name, *map(figures.text, rows)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--links", type=int, nargs="+", default=list(LINKS))
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--compression", action="store_true")
    parser.add_argument("--json", action="store_true")
    stored.add_option(parser)
    arguments = parser.parse_args()
    with stored.Store(benchmark(arguments.compression), arguments.store) as store:
        compare(arguments, store)


def compare(arguments, store):
    """Measures and prints all networks, and adds their figures to a `stored.Store`."""
    everything = []
    for mbit in arguments.links:
        limit, rows = measure(
            mbit, arguments.workers, arguments.rounds, arguments.compression
        )
        everything += rows
        keep(store, limit, rows, arguments.workers, arguments.compression)
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
            for name, ratio in compare_codes(rows).items():
                print(f"{name}: {ratio:.3f}")
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
