"""Time per step over loopback against PyTorch DDP, 2 processes, in one job.

    python benchmarks/overhead.py            # both models
    python benchmarks/overhead.py --model layers --pairs 300

Sides take turns in short blocks of steps, so that the machine's moods hit all of them; a
ratio pairs neighbouring blocks. DDP has ``gradient_as_bucket_view=True``. Three comparisons:
default against default (``buckets="optimal"`` once it has settled, and what its settling took);
DDP's bucket sizes against DDP's (1 MiB, then 25 MiB); and best against best: DDP's best of
five bucket caps, paceline's best of its fixed rules, found in the same job. DDP against a second
copy of itself shows the noise.
"""

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.bucketing.rules import FIXED

CAPS = (1, 4, 10, 25, 100)  # MiB
PAIRS_A_LIFE = 10
SETTLING_STEPS = 45
"""In so many ``buckets="optimal"`` has measured, planned, tried its plan, and kept it or not."""
EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_layers():
    model = example("layers").Layers(16, 8.0, 0.0, 0.0)
    x = torch.zeros(())
    return model, lambda model: (model(x) - 1.0) ** 2


def make_digits():
    module = example("digits")
    (images, labels), _ = module.load_data()
    rank = dist.get_rank()
    x, y = images[32 * rank :][:32], labels[32 * rank :][:32]
    return module.make_model(), lambda model: F.cross_entropy(model(x), y)


MODELS = {"layers": make_layers, "digits": make_digits}


class Side:
    """One way to train; `block` runs some steps and returns seconds a step."""

    def __init__(self, make, wrap):
        torch.manual_seed(0)
        model, self.loss = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.model, self.optimizer = wrap(model, optimizer)

    def block(self, steps):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.loss(self.model).backward()
            self.optimizer.step()
        dist.barrier()
        return (time.perf_counter() - start) / steps


def ddp(cap):
    def wrap(model, optimizer):
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=cap, gradient_as_bucket_view=True
        )
        return wrapped, optimizer

    return wrap


def ours(rule):
    def wrap(model, optimizer):
        return model, paceline.distribute(model, optimizer, buckets=rule)

    return wrap


def best(sides):
    """The key of the fastest side, the same on all ranks."""
    times = {key: [] for key in sides}
    for side in sides.values():
        side.block(10)
    for _ in range(12):
        for key, side in sides.items():
            times[key].append(side.block(8))
    means = torch.tensor([statistics.median(times[key]) for key in sides])
    dist.all_reduce(means)
    return list(sides)[int(means.argmin())]


def upper_bound_of_median(ratios):
    """Distribution-free upper 95 % bound: the order statistic that the true median
    exceeds with a probability of at most 5 % (binomial)."""
    ordered, n = sorted(ratios), len(ratios)
    tail, weight = 0.0, 0.5**n
    for k in range(n):
        tail += weight
        if 1 - tail <= 0.05:
            return ordered[min(k + 1, n - 1)]
        weight = weight * (n - k) / (k + 1)
    return ordered[-1]


def compare(title, make, mine, theirs, pairs, steps, warm_up=10, noise="DDP / DDP"):
    """Blocks of three sides in turn, *mine* and twice *theirs*; prints the ratios to the
    second. Sides are made anew every few pairs: where its memory lies makes one side of a
    pair of equals faster by up to 5 % for as long as it lives. Also said is how much
    longer *mine* takes for its first *warm_up* steps."""
    rows, settling = [], []
    while len(rows) < pairs:
        sides = [Side(make, wrap) for wrap in (mine, theirs, theirs)]
        first = [warm_up * side.block(warm_up) for side in sides]
        settling.append(first[0] - first[1])
        for turn in range(PAIRS_A_LIFE):
            order = sides[turn % 3 :] + sides[: turn % 3]
            took = {side: side.block(steps) for side in order}
            rows.append([took[side] for side in sides])
        for side in sides:
            if isinstance(side.optimizer, paceline.DistributedOptimizer):
                side.optimizer.finish()
    if dist.get_rank() == 0:
        ratios = [a / b for a, b, _ in rows]
        same = [c / b for _, b, c in rows]
        typical = [
            1e3 * statistics.median(column) for column in zip(*rows, strict=True)
        ]
        print(
            f"{title}: {typical[0]:.2f} against {typical[1]:.2f} ms a step; ratio "
            f"{statistics.median(ratios):.3f}, upper 95 % bound "
            f"{upper_bound_of_median(ratios):.3f}; {noise} "
            f"{statistics.median(same):.3f}, upper {upper_bound_of_median(same):.3f} "
            f"({len(rows)} pairs of {steps} steps); the first {warm_up} steps took "
            f"{1e3 * statistics.median(settling):+.0f} ms (median of {len(settling)})",
            flush=True,
        )


def measure(name, pairs, steps):
    make = MODELS[name]
    title, settled = f"{name}, defaults", SETTLING_STEPS
    compare(title, make, ours("optimal"), ddp(None), pairs, steps, warm_up=settled)
    compare(f"{name}, DDP's sizes", make, ours("ddp"), ddp(None), pairs, steps)
    caps = {cap: Side(make, ddp(cap)) for cap in CAPS}
    cap = best(caps)
    rules = {rule: Side(make, ours(rule)) for rule in FIXED}
    rule = best(rules)
    for side in rules.values():
        side.optimizer.finish()
    title = f"{name}, best ({rule}, {cap} MiB)"
    compare(title, make, ours(rule), ddp(cap), pairs, steps)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--steps", type=int, default=8, help="steps a block")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", __file__, *sys.argv[1:]]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        sys.exit(subprocess.run(command, env=environment, check=False).returncode)
    dist.init_process_group("gloo")
    paceline.init()
    for name in args.model or MODELS:
        measure(name, args.pairs, args.steps)


if __name__ == "__main__":
    main()
