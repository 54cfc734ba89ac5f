"""Time per step over loopback against PyTorch DDP, 2 processes, in one job.

    python -m benchmarks.measure.ddp_over_loopback            # both models
    python -m benchmarks.measure.ddp_over_loopback --model layers --pairs 300

Sides take turns in short blocks of steps, so that the machine's moods hit all of them; a
ratio pairs neighbouring blocks. DDP has ``gradient_as_bucket_view=True``. Three comparisons:
default against default (``buckets="optimal"`` once it has settled, and what its settling took);
DDP's bucket sizes against DDP's (1 MiB, then 25 MiB); and best against best: DDP's best of
five bucket caps, paceline's best of its fixed rules, found in the same job. DDP against a second
copy of itself shows the noise.
"""

import argparse
import statistics

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.measure import stored
from benchmarks.measure.harness import (
    SETTLING_STEPS,
    Side,
    ddp,
    example,
    finish,
    on_processes,
    ours,
)
from paceline.bucketing.rules import FIXED

CAPS = (1, 4, 10, 25, 100)  # MiB
PAIRS_A_LIFE = 10


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
    """Blocks of three sides in turn, *mine* and twice *theirs*; prints and returns the ratios to
    the second. Sides are made anew every few pairs: where its memory lies makes one side of a
    pair of equals faster by up to 5 % for as long as it lives. Also said is how much
    longer *mine* takes for its first *warm_up* steps."""
    rows, settling = [], []
    while len(rows) < pairs:
        sides = [Side("", make, wrap) for wrap in (mine, theirs, theirs)]
        first = [warm_up * side.block(warm_up) for side in sides]
        settling.append(first[0] - first[1])
        for turn in range(PAIRS_A_LIFE):
            order = sides[turn % 3 :] + sides[: turn % 3]
            took = {side: side.block(steps) for side in order}
            rows.append([took[side] for side in sides])
        finish(sides)
    ratios = [a / b for a, b, _ in rows]
    same = [c / b for _, b, c in rows]
    found = {
        "ratio": statistics.median(ratios),
        "bound": upper_bound_of_median(ratios),
        "noise": statistics.median(same),
        "noise bound": upper_bound_of_median(same),
        "first steps": statistics.median(settling),
    }
    if dist.get_rank() == 0:
        typical = [
            1e3 * statistics.median(column) for column in zip(*rows, strict=True)
        ]
        print(
            f"{title}: {typical[0]:.2f} against {typical[1]:.2f} ms a step; ratio "
            f"{found['ratio']:.3f}, upper 95 % bound "
            f"{found['bound']:.3f}; {noise} "
            f"{found['noise']:.3f}, upper {found['noise bound']:.3f} "
            f"({len(rows)} pairs of {steps} steps); the first {warm_up} steps took "
            f"{1e3 * found['first steps']:+.0f} ms (median of {len(settling)})",
            flush=True,
        )
    return found


UNITS = {"ratio": "", "bound": "", "noise": "", "noise bound": "", "first steps": "s"}
"""Figures of `compare`."""


def keep(store, title, found):
    """Adds the figures of one comparison to a `stored.Store`."""
    for name, unit in UNITS.items():
        store.add(f"{title}, {name}", found[name], unit)


DEFAULTS, SIZES, BEST = "defaults", "DDP's sizes", "best"
"""Three comparisons."""


def measure(name, pairs, steps):
    """Figures of each comparison."""
    make = MODELS[name]
    title, settled = f"{name}, {DEFAULTS}", SETTLING_STEPS
    planned, as_ddp = ours(buckets="optimal"), ours(buckets="ddp")
    found = {
        DEFAULTS: compare(title, make, planned, ddp(), pairs, steps, warm_up=settled),
        SIZES: compare(f"{name}, {SIZES}", make, as_ddp, ddp(), pairs, steps),
    }
    caps = {cap: Side(f"{cap} MiB", make, ddp(cap)) for cap in CAPS}
    cap = best(caps)
    rules = {rule: Side(rule, make, ours(buckets=rule)) for rule in FIXED}
    rule = best(rules)
    finish(rules.values())
    title = f"{name}, {BEST} ({rule}, {cap} MiB)"
    found[BEST] = compare(title, make, ours(buckets=rule), ddp(cap), pairs, steps)
    return found


NOISE = "largest difference between DDP and a second copy of DDP"
TITLES = {
    "layers": "16 equal layers, 8 MB, nothing to compute",
    "digits": "digits' CNN",
}


def table():
    """Rows of the table of docs: a line for each model and run."""
    figures = stored.Figures("ddp_over_loopback")
    for name in MODELS:
        columns = [
            figures.runs(f"{name}, {what}")
            for what in (
                *(f"{DEFAULTS}, ratio", f"{DEFAULTS}, bound"),
                f"{DEFAULTS}, first steps",
                *(f"{SIZES}, ratio", f"{SIZES}, bound"),
                *(f"{BEST}, ratio", f"{BEST}, bound"),
            )
        ]
        runs = list(zip(*columns, strict=False))
        for number, (ratio, bound, first, *others) in enumerate(runs, 1):
            title = TITLES[name] + (f", run {number}" if len(runs) > 1 else "")
            sizes, sizes_bound, best, best_bound = others
            yield [
                title,
                f"{ratio:.2f} ({bound:.2f})",
                f"{first:+.2f} s",
                f"{sizes:.2f} ({sizes_bound:.2f})",
                f"{best:.2f} ({best_bound:.2f})",
            ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--steps", type=int, default=8, help="steps a block")
    stored.add_option(parser)
    args = parser.parse_args()
    noise = []
    with stored.Store("overhead", args.store) as store:
        for name in args.model or MODELS:
            found = on_processes(2, measure, name, args.pairs, args.steps)
            for what, figures in found.items():
                keep(store, f"{name}, {what}", figures)
                noise.append(abs(figures["noise"] - 1))
        store.add(NOISE, max(noise))


if __name__ == "__main__":
    main()
