"""Time to a fixed accuracy where racks have thin uplinks, or a host is contended.

    python benchmarks/ds_sync.py                             # 8, 16 and 64 workers: an hour
    python benchmarks/ds_sync.py --workers 8 --keep runs.json
    python benchmarks/ds_sync.py --keep runs.json --plot docs/ds_sync.png
    python benchmarks/ds_sync.py --emulated                  # 8 hosts, real processes: 6 minutes

A perceptron learns digits, 64 images a step over all workers, until the mean of its last
three test accuracies, 5 steps apart, is 96 %. On the network it is ResNet-50: 102 MB and 78 ms
of computing a step (see `ds_sync_runs.py`). Hosts have links of 25 Gbit/s, on which a ring
takes about as long as the backward pass.

*Uplink 1/4* is what a rack's uplink gives this job, in parts of **one** host's link, however many
hosts the rack has: a ring in rank order crosses each uplink once, so an uplink that gives a
rack of m hosts a quarter of all their links together (4:1) would not slow it down unless m < 4.
*Slow host*: one rack, in which one host's link gives the job a quarter.

Time to accuracy is steps, a mean over seeds, times the seconds of a step once training has settled.
What is learnt under bsp, local-sgd, hierarchical-local-sgd, diloco and ds-sync does not depend
on how long anything takes, so that each is trained once for all networks (ds-sync: once per
plan), and for bsp also once for any number of workers; the seconds are those of short runs on
each network. asp and ssp do depend on it: these are whole runs on each network; where only their seconds a step
were measured, they are taken to need bsp's steps (marked >, as where a seed does not
reach the accuracy in 200 steps, and counts as 200). All learn at a rate of 0.05, which of 0.02,
0.05 and 0.1 is best for bsp and for local-sgd, and ds-sync takes as it is; asp (with it ssp) and
diloco at their own best of three: found with 8 workers and other seeds.
"""

import argparse
import json
import math
import statistics
import sys
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import ds_sync_emulated
import ds_sync_runs as runs
import torch
from ds_sync_picture import draw
from ds_sync_runs import Cell
from ds_sync_tables import BASE, OURS, TARGET, conclude, show

STEPS = 200
CELLS = {
    cell.name: cell
    for cell in (
        Cell("ample uplinks", racks=2),
        *(
            Cell(f"{n} racks, uplink 1/{part}", racks=n, uplink=1 / part)
            for n in (2, 4)
            for part in (2, 4, 8)
        ),
        Cell("slow host", slow=1 / 4),
    )
}
SEEDS = {8: 5, 16: 3, 64: 2}
SERVER_SEEDS = {8: 2, 16: 0, 64: 0}
"""What fewer seeds, and none, leave out takes hours."""
FEW_CELLS = (
    "2 racks, uplink 1/4",
    "2 racks, uplink 1/8",
    "4 racks, uplink 1/8",
    "slow host",
)
"""With 64 workers, unless others are asked for."""
TUNED_ON = CELLS["2 racks, uplink 1/4"]
TUNING_SEEDS = (100, 101)
RATE = 0.05
SGD_RATES = (0.02, RATE, 0.1)
ADAM_RATES = (0.001, 0.003, 0.01)


@dataclass(frozen=True)
class Way:
    """A method as it is run. *learns*: what another one has in common with it if both learn the
    same; *period*: steps after which times repeat; *racks*: it needs some."""

    name: str
    spec: str
    learns: str
    optimizer: str = "SGD"
    rates: tuple[float, ...] = (RATE,)
    buckets: str = "wfbp"
    servers: str = "auto"
    period: int = 16
    racks: bool = False
    rate: float = math.nan

    @property
    def on_servers(self):
        return self.servers == "dedicated"


ON_SERVERS = {"buckets": "4+4", "servers": "dedicated"}
WAYS = (
    Way(BASE, "bsp", "bsp", rates=SGD_RATES, buckets="optimal", period=6),
    Way(
        "bsp, hierarchical",
        "bsp:collective=hierarchical",
        "bsp",
        rates=SGD_RATES,
        buckets="optimal",
        period=6,
    ),
    Way("asp", "asp", "asp", rates=SGD_RATES, period=4, **ON_SERVERS),
    Way("ssp", "ssp", "ssp", rates=(0.02,), period=4, **ON_SERVERS),
    Way("ds-sync", "ds-sync:overlap=none", "ds-sync", period=24),
    Way("ds-sync, forward", "ds-sync:overlap=forward", "ds-sync", period=24),
    Way("ds-sync, step", "ds-sync:overlap=step", "ds-sync, step", period=24),
    Way(
        "ds-sync, rare",
        "ds-sync:overlap=forward,cross_rack_every=4",
        "ds-sync, rare",
        period=32,
        racks=True,
    ),
    Way("local-sgd", "local-sgd:sync_every=8", "local-sgd", rates=SGD_RATES),
    Way(
        "hierarchical-local-sgd",
        "hierarchical-local-sgd:sync_every=16",
        "hierarchical-local-sgd",
        racks=True,
    ),
    Way(
        "diloco",
        "diloco:sync_every=16,outer_learning_rate=0.3",
        "diloco",
        optimizer="AdamW",
        rates=ADAM_RATES,
    ),
)


class Bench:
    """Runs, each made once; *keep*: a file that later calls go on from."""

    def __init__(self, keep):
        self._file = keep
        self._found = {}
        self._start = time.perf_counter()
        if keep is not None and keep.exists():
            self._found = json.loads(keep.read_text())

    def _get(self, make, *key):
        name = " | ".join(map(str, key))
        if name not in self._found:
            elapsed = time.perf_counter() - self._start
            print(f"[{elapsed:6.0f} s] {name}", file=sys.stderr, flush=True)
            self._found[name] = make()
            if self._file is not None:
                self._file.write_text(json.dumps(self._found, indent=0))
        return self._found[name]

    # ---- learning ----

    def tuned(self, way):
        """*way* at the learning rate at which it reaches the accuracy soonest."""

        def steps(rate):
            one = replace(way, rate=rate)
            found = [self._learn(one, TUNED_ON, 8, seed) for seed in TUNING_SEEDS]
            return statistics.fmean(2 * STEPS if n is None else n for n in found)

        if len(way.rates) == 1:
            return replace(way, rate=way.rates[0])
        return replace(way, rate=min(way.rates, key=steps))

    def steps(self, way, cell, workers):
        """Steps to the accuracy, by seed; None where it is not reached."""
        return [self._learn(way, cell, workers, seed) for seed in range(SEEDS[workers])]

    def _learn(self, way, cell, workers, seed):
        if way.on_servers:
            return self._run(way, cell, workers, seed)["steps"]
        if way.learns == "bsp":
            workers = 8
        key = (way.rate, f"seed {seed}")

        def make():
            # In how many buckets does not matter to what is learnt.
            one = replace(way, buckets="single")
            trained = runs.train(one, cell, workers, seed, STEPS)
            return trained.reached(TARGET)

        return self._get(make, "learn", *self._learns(way, cell, workers), *key)

    def _learns(self, way, cell, workers):
        """What tells one training from another."""
        of = [way.learns, f"{workers} workers"]
        if way.name in OURS:
            of.append(self.plan(way, cell, workers))
        elif way.racks:
            of.append(f"{cell.racks} racks")
        return of

    def plan(self, way, cell, workers):
        """DS-Sync's plan on a network, in short: trainings with the same one are the same."""

        def make():
            plan = runs.plan_of(way, cell, workers)
            text = json.dumps(plan.phases)
            return f"period {len(plan.phases)}, {zlib.crc32(text.encode()):08x}"

        return self._get(make, "plan", way.spec, cell.name, f"{workers} workers")

    # ---- time ----

    def step_seconds(self, way, cell, workers):
        def make():
            return runs.step_seconds(way, cell, workers)

        return self._get(make, "time", way.spec, cell.name, f"{workers} workers")

    def _run(self, way, cell, workers, seed):
        """A whole run over servers."""

        def make():
            trained = runs.train(way, cell, workers, seed, STEPS, until=TARGET)
            step = trained.reached(TARGET)
            steps = trained.ends[0]
            return {
                "steps": step,
                "step_seconds": (steps[-1] - trained.began) / len(steps),
            }

        key = (f"{workers} workers", way.rate, f"seed {seed}")
        return self._get(make, "run", way.spec, cell.name, *key)

    # ---- rows ----

    def row(self, way, cell, workers):
        row = {
            "workers": workers,
            "cell": cell.name,
            "method": way.name,
            "spec": way.spec,
            "learning_rate": way.rate,
            "least": False,
        }
        if way.on_servers and SERVER_SEEDS[workers]:
            seeds = range(SERVER_SEEDS[workers])
            found = [self._run(way, cell, workers, seed) for seed in seeds]
            step_seconds = statistics.fmean(one["step_seconds"] for one in found)
            steps = [one["steps"] for one in found]
        elif way.on_servers:
            step_seconds = self.step_seconds(way, cell, workers)
            bsp = self.tuned(WAYS[0])
            steps, row["least"] = self.steps(bsp, cell, workers), True
        else:
            step_seconds = self.step_seconds(way, cell, workers)
            steps = self.steps(way, cell, workers)
        mean = math.inf
        if any(steps):
            row["least"] |= None in steps
            mean = statistics.fmean(STEPS if n is None else n for n in steps)
        error = 0.0
        if len(steps) > 1 and None not in steps:
            error = statistics.stdev(steps) / math.sqrt(len(steps))
        return row | {
            "steps_by_seed": steps,
            "steps": mean,
            "steps_error": error,
            "step_seconds": step_seconds,
            "seconds": mean * step_seconds,
        }

    def rows(self, workers, cells):
        """Each cell with a row per way, which says how many times as fast it is as others."""
        ways = [self.tuned(way) for way in WAYS]
        for cell in cells:
            mine = [
                self.row(way, cell, workers)
                for way in ways
                if cell.racks > 1 or not way.racks
            ]
            for row in mine:
                row["over"] = {
                    other["method"]: other["seconds"] / row["seconds"]
                    for other in mine
                    if other is not row
                }
            yield cell, mine


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs="+", default=sorted(SEEDS))
    parser.add_argument("--cells", nargs="+", choices=CELLS)
    parser.add_argument("--keep", type=Path, help="go on from, and add to, this file")
    parser.add_argument("--plot", type=Path, help="draw seconds to the accuracy here")
    parser.add_argument("--emulated", action="store_true", help="real processes")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(arguments.keep)
    if arguments.emulated:
        rows = ds_sync_emulated.rows(bench, WAYS, TUNED_ON)
        if arguments.json:
            print(json.dumps(rows))
        return
    found = []
    for workers in arguments.workers:
        cells = arguments.cells or (FEW_CELLS if workers > 16 else CELLS)
        mine = list(bench.rows(workers, [CELLS[name] for name in cells]))
        if not arguments.json:
            show(workers, mine, [way.name for way in WAYS])
        found += [(workers, cell, rows) for cell, rows in mine]
    if arguments.json:
        print(json.dumps([row for *_, rows in found for row in rows]))
    else:
        conclude(found)
    if arguments.plot:
        draw(found, arguments.plot)


if __name__ == "__main__":
    main()
