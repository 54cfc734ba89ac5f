"""How long it takes to plan in which pieces the gradient travels.

    python -m benchmarks.measure.planning_time           # a table
    python -m benchmarks.measure.planning_time --json    # an object a line, for programs

Rule "optimal" over random models of 100, 1,000 and 3,000 tensors whose backward pass takes
about as long as their all-reduces: the least of several tries, and how far its plan ends
above the bound that no plan can beat. Bounds that this project keeps on a 2-core machine,
1,000 tensors, one all-reduce at a time: 0.1 s with an affine cost, 0.3 s with a measured curve.
"""

import argparse
import itertools
import json
import random
import time

from benchmarks.measure import stored
from paceline.bucketing.cost_models import AffineCost, MeasuredCost
from paceline.bucketing.rules import lower_bound, plan_buckets
from paceline.bucketing.timeline import finish_time

COUNTS = (100, 1_000, 3_000)
MAX_IN_FLIGHT = (1, 2)
START_UP, BANDWIDTH = 1e-3, 1.25e8
"""Seconds, and bytes per second."""


def step(count):
    """Sizes in bytes over four decades, and ready times in seconds."""
    draw = random.Random(0)
    sizes = [4 * int(10 ** draw.uniform(2, 6)) for _ in range(count)]
    mean = sum(sizes) / count / BANDWIDTH
    ready = itertools.accumulate(draw.expovariate(1 / mean) for _ in sizes)
    return sizes, list(ready)


def costs():
    """The same network twice: as a formula, and as a curve of 40 points that bends."""
    affine = AffineCost(START_UP, 1 / BANDWIDTH)
    sizes = [4 * 1.5**i for i in range(40)]
    seconds = [affine(size) + START_UP * (size > 2**16) for size in sizes]
    curve = MeasuredCost(sizes, seconds, START_UP)
    return {"affine": affine, "table": curve}


def measure(count, cost, max_in_flight, tries):
    sizes, ready = step(count)
    seconds = []
    for _ in range(tries):
        start = time.perf_counter()
        plan = plan_buckets(
            "optimal", sizes, None, ready, cost, max_in_flight=max_in_flight
        )
        seconds.append(time.perf_counter() - start)
    end = finish_time(plan, sizes, ready, cost, max_in_flight=max_in_flight)
    least = end  # one at a time: exact
    if max_in_flight > 1:
        least = lower_bound(sizes, ready, cost, [0] * count)
    return {
        "tensors": count,
        "max_in_flight": max_in_flight,
        "plan_seconds": min(seconds),
        "buckets": len(plan),
        "above_bound": end / least - 1,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="an object a line")
    parser.add_argument("--tries", type=int, default=3)
    stored.add_option(parser)
    args = parser.parse_args()
    with stored.Store("planning_time", args.store) as store:
        compare(args, store)


def row_name(count, name, max_in_flight):
    return f"{count:,} tensors, {name}, {max_in_flight} in flight"


def table():
    """Rows of the table of docs: what, figure, command."""
    figures = stored.Figures("planning_time")
    names = (f"{row_name(1000, name, 1)}, plan" for name in ("affine", "table"))
    texts = (
        stored.span([1e3 * seconds for seconds in figures.runs(name)], ".0f") + " ms"
        for name in names
    )
    yield [
        "planning the buckets of 1,000 tensors exactly: affine cost; measured curve",
        "; ".join(texts),
        "`python -m benchmarks.measure.planning_time`",
    ]


def compare(args, store):
    """Measures and prints all models, and adds their figures to a `stored.Store`."""
    if not args.json:
        print("tensors  cost    in flight  plan ms  buckets  ends above the bound")
    for count, (name, cost), max_in_flight in itertools.product(
        COUNTS, costs().items(), MAX_IN_FLIGHT
    ):
        row = {"cost": name} | measure(count, cost, max_in_flight, args.tries)
        title = row_name(count, name, max_in_flight)
        store.add(f"{title}, plan", row["plan_seconds"], "s")
        store.add(f"{title}, buckets", row["buckets"])
        store.add(f"{title}, above the bound", row["above_bound"])
        if args.json:
            print(json.dumps(row), flush=True)
            continue
        above = "exact" if max_in_flight == 1 else f"{row['above_bound']:.2%}"
        print(
            f"{count:7,d}  {name:6s}  {max_in_flight:9d}  {1000 * row['plan_seconds']:7.1f}"
            f"  {row['buckets']:7d}  {above:>20s}",
            flush=True,
        )


if __name__ == "__main__":
    main()
