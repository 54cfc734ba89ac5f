"""What compression gains in seconds a step: large models and small ones, in virtual time.

    python -m benchmarks.measure.compression                       # what is not kept yet; all tables
    python -m benchmarks.measure.compression --models resnet50 --workers 8
    python -m benchmarks.measure.compression --tables              # of what is kept; nothing is run
    python -m benchmarks.measure.compression --json

Seconds a step of bsp without compression, over those of bsp with it, among 8 and 64 workers in
one rack at 0.1, 1, 10 and 25 Gbit/s, 50 us apart. Two columns for what coding takes:

    core    as measured here, on one core of this machine's processor, with random gradients of
            the model's shapes: what training on CPUs meets
    free    nothing: what its bytes alone gain; an accelerator codes in little more

The large models' own computing is that of the built-in workloads (10 TFLOP/s, 32 samples a
worker), so *core* is their worst case. `layers` is what `measure.ddp_over_emulated_links` trains; `digits` and
`bytes_lm` are the examples, profiled on one core of this machine.

Both sides take DDP's buckets (buckets=ddp), and the second step counts, as it is like every later
one: planning (buckets=optimal) needs twenty steps of each cell. Since buckets are known, each is one
tensor of the simulated model, sent in what the compressor declares for its tensors' shapes: so
64 workers cost seconds. Virtual time repeats exactly, so nothing is run twice. Every cell is
kept as soon as it is there; the next run goes on with what is missing.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

import paceline
from paceline.bucketing.rules import plan_buckets
from paceline.cluster import Cluster, Rack, Workload
from paceline.cluster.profiling import measure_coding
from paceline.cluster.profiling.timers import HostStopwatch
from paceline.cluster.workload import CompressorTimes
from paceline.compression import (
    COMPRESSORS,
    Compressor,
    GradientCompression,
    Leg,
    full_spec,
    make,
)
from paceline.runtimes.simulated import ComputeModel, Simulation

HERE = Path(__file__).parents[1]
RESULTS = HERE / "results" / "compression.jsonl"
LATENCY = 50e-6
LINKS = (0.1, 1, 10, 25)
"""Gbit/s."""
WORKERS = (8, 64)
LARGE = ("resnet50", "bert-base", "vgg16")
SMALL = ("layers", "digits", "bytes_lm")
DENSITIES = (0.001, 0.005, 0.0156, 0.05, 0.125, 0.25)
"""Of the table of sparse codes."""


def workload_of(model):
    if model == "layers":
        return Workload(
            names=tuple(f"weights.{i}" for i in range(16)),
            sizes=(4 * 354 * 354,) * 16,
            forward=(0.1 / 16,) * 16,
            backward=(0.2 / 16,) * 16,
            shapes=((354, 354),) * 16,
        )
    if model in SMALL:
        return Workload.load(HERE / "results" / f"{model}.workload.json")
    return Workload.load(model)


# ---- what is measured ----


def coding_times(workload, text):
    """On one core, of gradients that are random and have the model's shapes."""
    generator = torch.Generator().manual_seed(0)
    named = [
        (
            workload.names[i],
            torch.randn(workload.shapes[i], generator=generator).mul_(1e-3),
        )
        for i in workload.order
    ]
    torch.set_num_threads(1)
    # The thread's own time: others on the machine do not count.
    return measure_coding(make(text), named, HostStopwatch(time.thread_time))


@dataclass(frozen=True, kw_only=True)
class Declared(Compressor):
    """What the compressor *of* declares for a bucket of so many elements."""

    of: str
    legs: tuple[tuple[int, tuple[Leg, ...]], ...] = ()

    name: ClassVar[str] = "declared"
    rounds: ClassVar[int] = 2
    state: ClassVar[str] = "none"

    def memory_passes(self, workers):
        return 0.0, 0.0

    def wire_bytes(self, shapes, dtype, workers):
        return dict(self.legs)[sum(math.prod(shape) for shape in shapes)]


def in_buckets(workload, text, workers):
    """A tensor for each of DDP's buckets, and what is sent of it."""
    code = make(text).code.steady_state()
    plan = plan_buckets("ddp", workload.gradient_bytes)
    buckets = [[workload.order[position] for position in bucket] for bucket in plan]

    def total(values, bucket):
        return sum(values[i] for i in bucket)

    legs = {}
    for bucket in buckets:
        shapes = [workload.shapes[i] for i in bucket]
        sent = tuple(code.wire_bytes(shapes, torch.float32, workers))
        elements = sum(math.prod(shape) for shape in shapes)
        assert legs.setdefault(elements, sent) == sent, "two buckets of one size"
    buckets = buckets[::-1]  # the last registered is ready first
    merged = Workload(
        names=tuple(f"bucket{i}" for i in range(len(buckets))),
        sizes=tuple(total(workload.sizes, bucket) for bucket in buckets),
        forward=tuple(total(workload.forward, bucket) for bucket in buckets),
        backward=tuple(total(workload.backward, bucket) for bucket in buckets),
        update=workload.update,
        batch=workload.batch,
        shapes=tuple((total(workload.sizes, bucket) // 4,) for bucket in buckets),
    )
    return merged, Declared(of=text, legs=tuple(legs.items()))


def seconds(workload, workers, link, text, times):
    """Of a step of bsp, in virtual time."""
    merged, declared = in_buckets(workload, text, workers)
    free = CompressorTimes(encode=0.0, decode=0.0, decode_per_worker=0.0)
    merged = replace(
        merged, coding={full_spec(GradientCompression(declared)): times or free}
    )
    ends = []

    def train(rank):
        paceline.init()
        model = paceline.stand_in(merged)
        optimizer = paceline.distribute(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            buckets="wfbp",
            compression="none" if text == "none" else declared,
        )
        x = torch.ones(int(merged.batch or 1))
        for _ in range(2):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
            if rank == 0:
                ends.append(paceline.now())
        optimizer.finish()

    rack = Rack(workers=workers, link=link * 1e9 / 8, latency=LATENCY)
    Simulation(Cluster((rack,)), compute=ComputeModel(workload=merged)).run(train)
    first, second = ends
    return second - first


# ---- what is kept ----


class Kept:
    """Cells in a file, a line each; the last of a key counts."""

    def __init__(self, path):
        self._path = path
        self._cells = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(line)
            self._cells[tuple(row["key"])] = row["value"]

    def __contains__(self, key):
        return key in self._cells

    def get(self, *key):
        return self._cells.get(key)

    def add(self, key, value):
        self._cells[key] = value
        with self._path.open("a") as file:
            print(json.dumps({"key": key, "value": value}), file=file, flush=True)


def fill(kept, models, workers, links, compressors, prices):
    """Measure what is missing, the cheapest first."""
    for model in models if "core" in prices else ():
        workload = workload_of(model)
        for text in compressors:
            key = ("coding", model, full_spec(make(text)))
            if text != "none" and key not in kept:
                start = time.perf_counter()
                kept.add(key, asdict(coding_times(workload, text)))
                tell(*key, took=time.perf_counter() - start)
    for count in workers:
        for price in prices:
            for model in models:
                for link in links:
                    for text in compressors:
                        cell(kept, model, count, link, text, price)


def cell(kept, model, workers, link, text, price):
    if text == "none":
        price = "free"
    key = ("seconds", model, workers, link, text, price)
    if key in kept:
        return
    times = None
    if price == "core":
        times = CompressorTimes(**kept.get("coding", model, full_spec(make(text))))
    start = time.perf_counter()
    kept.add(key, seconds(workload_of(model), workers, link, text, times))
    tell(*key, took=time.perf_counter() - start)


def sparse(kept):
    """Where gathers of sparse codes stop paying: among n workers, near n x density = 1."""
    for workers in WORKERS:
        cell(kept, "layers", workers, 1, "none", "free")
        for density in DENSITIES:
            cell(kept, "layers", workers, 1, f"top-k:density={density}", "free")


def tell(*words, took):
    print(f"{' '.join(map(str, words))}: {took:.1f} s", file=sys.stderr, flush=True)


# ---- tables ----


def tables(kept, models, workers, links, compressors):
    for model in models:
        workload = workload_of(model)
        size = sum(workload.sizes) / 1e6
        compute = workload.forward_seconds + workload.backward_seconds
        print(f"\n{model}: {size:.3g} MB of gradients, {compute:.3g} s of computing\n")
        columns = [
            Column(kept, model, n, link, compressors) for n in workers for link in links
        ]
        columns = [column for column in columns if column.dense is not None]
        heads = [column.head for column in columns]
        print(f"| compression | coding, 8 workers | {' | '.join(heads)} |")
        print(f"|---|{'---|' * (len(columns) + 1)}")
        print(f"| none | - | {' | '.join(f'{c.dense:.3g} s' for c in columns)} |")
        for text in compressors:
            if text == "none":
                continue
            times = kept.get("coding", model, full_spec(make(text)))
            takes = "-"
            if times is not None:
                found = CompressorTimes(**times)
                takes = f"{found.encode + found.after(8):.2g} s"
            cells = [column.cell(text) for column in columns]
            print(f"| {text} | {takes} | {' | '.join(cells)} |")


class Column:
    """Gains of one network: core / free, or free alone, where that is all there is."""

    def __init__(self, kept, model, workers, link, compressors):
        def gains(price):
            found = {
                text: kept.get("seconds", model, workers, link, text, price)
                for text in compressors
            }
            return {text: value for text, value in found.items() if value is not None}

        self._free, self._core = gains("free"), gains("core")
        self.dense = self._free.get("none")
        self.head = f"{workers} x {link:g} Gbit/s"
        self.head += "" if self._core else ", free"

    def cell(self, text):
        both = [self._gain(side, text) for side in (self._core, self._free)]
        return " / ".join(both) if self._core else both[1]

    def _gain(self, side, text):
        return f"{self.dense / side[text]:.2f}" if text in side else "-"


def sparse_table(kept):
    print("\ntop-k on `layers` at 1 Gbit/s, coding free: gain by workers x density\n")
    print(
        f"| density |{''.join(f' {n} workers: n x density | gain |' for n in WORKERS)}"
    )
    print(f"|---|{'---|---|' * len(WORKERS)}")
    for density in DENSITIES:
        row = []
        for n in WORKERS:
            dense = kept.get("seconds", "layers", n, 1, "none", "free")
            text = f"top-k:density={density}"
            takes = kept.get("seconds", "layers", n, 1, text, "free")
            gain = "-" if dense is None or takes is None else f"{dense / takes:.2f}"
            row.append(f"{n * density:.3g} | {gain}")
        print(f"| {density:g} | {' | '.join(row)} |")


def as_json(kept, models, workers, links, compressors):
    cells = []
    for model in models:
        for n in workers:
            for link in links:
                for text in compressors:
                    for price in ("free", "core"):
                        found = kept.get("seconds", model, n, link, text, price)
                        if found is not None:
                            cells.append(
                                {
                                    "model": model,
                                    "workers": n,
                                    "gbit": link,
                                    "compression": text,
                                    "coding": price,
                                    "seconds": found,
                                }
                            )
    json.dump(cells, sys.stdout)


def main():
    parser = argparse.ArgumentParser()
    everything = (*LARGE, *SMALL)
    parser.add_argument("--models", nargs="+", choices=everything, default=everything)
    parser.add_argument(
        "--workers", nargs="+", type=int, choices=WORKERS, default=WORKERS
    )
    parser.add_argument("--links", nargs="+", type=float, default=LINKS)
    # fp16 sends, and takes, what bf16 does.
    names = [name for name in COMPRESSORS if name not in ("none", "fp16")]
    parser.add_argument("--compressors", nargs="+", metavar="SPEC", default=names)
    prices = ("free", "core")
    parser.add_argument("--coding", nargs="+", choices=prices, default=prices)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--tables", action="store_true", help="run nothing")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    kept = Kept(arguments.results)
    what = (
        arguments.models,
        list(arguments.workers),
        arguments.links,
        ["none", *arguments.compressors],
    )
    if not arguments.tables:
        fill(kept, *what, arguments.coding)
        if "top-k" in COMPRESSORS and "layers" in arguments.models:
            sparse(kept)
    if arguments.json:
        as_json(kept, *what)
        return
    tables(kept, *what)
    if "layers" in arguments.models:
        sparse_table(kept)


if __name__ == "__main__":
    main()
