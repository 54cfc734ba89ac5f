"""What groups of similar speed gain where compute times differ, and no communication counts.

    python benchmarks/gssp.py                       # the tables: 10 minutes
    python benchmarks/gssp.py --only slow-worker    # classes, jitter, slow-worker, noise or data
    python benchmarks/gssp.py --json

*classes*: 16 workers in four classes of speed, in virtual time, over a network that never is the
limit and with servers that take no time; jitter of 5 %. The figure is steps a second of all
workers together, over those of bsp; measured from the 40th step of the slowest worker to its
100th, so that groups were found and are settled. By the closed form gssp is
t_max * mean(1 / t) times as fast as ssp, where t are the classes' step times: ssp ends at the
slowest worker's pace, and under gssp each group goes at its own. *bsp, shares* is bsp with
``Sampler(shares="speed")``: as many samples as a worker is fast, and the step counted in
samples. *jitter*: the same with 20 %.

*slow-worker*: 8 equal workers, and the same with one at half speed: what is left of the
throughput.

*noise*: eight workers whose steps vary at random (log-normal): after how many steps of each server 0
decides, and how many of 100 trainings of 200 steps ever form groups where all are equally fast;
beside it the same by medians of 20 steps whose errors nobody asks for. And how many tell 1 from 1.33 at once,
and in the end.

*data*: how often each sample was seen after the slowest class made 8 passes and the others as
many more as they are faster: fixed parts, a new shuffle in each pass, parts that go round.
"""

import argparse
import json
import math
import random
import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

import paceline
from paceline.cluster import Cluster, Rack, ServerHost
from paceline.interfaces import Groups
from paceline.methods import GSSP
from paceline.methods.gssp.grouping import (
    DECISIONS,
    MARGIN,
    GroupKnowledge,
    Hysteresis,
    Merging,
    RegroupDecisions,
    Regrouping,
    StepTimes,
    smoothed,
)
from paceline.runtimes.simulated import ComputeModel, Simulation

WORKERS = 16
STEP_SECONDS = 0.1
FIRST, LAST = 40, 100
"""Steps of the slowest worker: what is measured lies between them."""
SAMPLES = 12
"""Of a worker in a step where all have equal shares."""
BATCHES = 20
"""Of an epoch."""
CLASSES = {
    "1 : 1.33 : 1.6 : 2": (1.0, 1.33, 1.6, 2.0),
    "1 : 1.5 : 2 : 3": (1.0, 1.5, 2.0, 3.0),
    "1 : 2 : 3 : 4": (1.0, 2.0, 3.0, 4.0),
    "all equal": (1.0, 1.0, 1.0, 1.0),
}
RESULTS = Path(__file__).parent / "results" / "gssp.json"


@dataclass(frozen=True)
class Way:
    """A row of the table: the *spec* of a method, and whether batches are cut by speed."""

    spec: str
    shares: bool = False


WAYS = {
    "bsp": Way("bsp"),
    "bsp, shares": Way("bsp", shares=True),
    "ssp": Way("ssp:staleness=3"),
    "dssp": Way("dssp"),
    "asp": Way("asp"),
    "gssp": Way("gssp"),
    "gssp, 4 groups": Way("gssp:number_of_groups=4"),
}
"""`gssp` finds who is in which group, and how many there are. Its staleness is 3, too."""
BASE = "bsp"


# ---- throughput ----


def by_class(times, workers=WORKERS):
    """Each worker's step time: classes in equal parts, in order of ranks."""
    return tuple(times[rank * len(times) // workers] for rank in range(workers))


def throughput(way, times, jitter, seed=0):
    """Samples a second of all workers together, in those of a step of one. *times*: of each
    worker's step, in `STEP_SECONDS`."""
    workers, slowest = len(times), max(times) * STEP_SECONDS
    rack = Rack(
        workers=workers, link=1e15, latency=0.0, speed=tuple(1 / t for t in times)
    )
    begin, stop = FIRST * slowest, LAST * slowest
    rates = [0.0] * workers

    def train(rank):
        paceline.init()
        data = torch.ones(BATCHES * SAMPLES * workers, 2)
        shares = "speed" if way.shares else None
        sampler = paceline.Sampler(data, SAMPLES * workers, shares=shares)
        model = torch.nn.Linear(2, 2)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
        optimizer = paceline.distribute(
            model, sgd, method=way.spec, buckets="single", sampler=sampler
        )
        ends, samples = [], []
        while paceline.now() < stop:
            for batch in sampler:
                optimizer.zero_grad()
                model(data[batch]).sum().backward()
                optimizer.step()
                if begin <= paceline.now():
                    ends.append(paceline.now())
                    samples.append(len(batch))
                if paceline.now() >= stop:
                    break
        rates[rank] = sum(samples[1:]) / SAMPLES / (ends[-1] - ends[0])
        optimizer.finish()

    compute = ComputeModel(
        forward=STEP_SECONDS / 3,
        backward=2 * STEP_SECONDS / 3,
        jitter=jitter,
        seed=seed,
    )
    cluster = Cluster((rack,), servers=(ServerHost(),) * 4)
    Simulation(cluster, compute=compute).run(train)
    return sum(rates)


def predicted(times):
    """Of gssp over ssp: t_max * mean(1 / t)."""
    return max(times) * statistics.fmean(1 / t for t in times)


def class_rows(jitter):
    for name, times in CLASSES.items():
        each = by_class(times)
        figures = {row: throughput(way, each, jitter) for row, way in WAYS.items()}
        base = figures[BASE]
        yield {
            "classes": name,
            "jitter": jitter,
            **{row: value / base for row, value in figures.items()},
            "gssp over ssp": figures["gssp, 4 groups"] / figures["ssp"],
            "predicted": predicted(times),
        }


def slow_worker_rows(workers=8, jitter=0.05):
    for name, way in WAYS.items():
        if "4 groups" in name:
            continue
        whole = throughput(way, (1.0,) * workers, jitter)
        with_slow = throughput(way, (1.0,) * (workers - 1) + (2.0,), jitter)
        yield {"method": name, "left": with_slow / whole}


# ---- noise ----


class Blind:
    """As gssp groups, without asking how well times are known."""

    error = 0.0

    def __init__(self, inner):
        self._inner = inner

    def decide(self, groups, times):
        known = {worker: its._replace(error=0.0) for worker, its in times.items()}
        return self._inner.decide(groups, known)


def groups_over(classes, sigma, seed, blind, steps=200):
    """The groups after each change of them, and after how many steps of each that was."""
    draws, workers = random.Random(seed), range(len(classes))
    method = GSSP()
    regroup = Regrouping(
        0,
        method.most_groups,
        method.ratio,
        Hysteresis(MARGIN, DECISIONS),
        Merging(method.ratio, DECISIONS),
    )
    decisions = RegroupDecisions(Blind(regroup) if blind else regroup)
    known = GroupKnowledge(Groups((0,) * len(classes), method.most_groups))
    times, now, found = StepTimes(method.measure_steps), [0.0] * len(classes), []
    for step in range(1, steps + 1):
        for worker in workers:
            times.begin_step(worker, now[worker])
            now[worker] += classes[worker] * math.exp(draws.gauss(0.0, sigma))
            its = times.end_step(worker, now[worker])
            new = {} if its is None else {worker: its}
            if not new and (error := decisions.needed_error(known.groups)):
                new = times.take_early(workers, error)
            for one, what in new.items():
                known.add_time(one, smoothed(known.times.get(one), what))
            if new and decisions.decide(known, workers):
                found.append((step, known.groups.of))
    return found


def noise_rows(trials=100):
    equal, apart = [1.0] * 8, [1.0] * 4 + [1.33] * 4
    parted = tuple(rank // 4 for rank in range(8))
    for sigma in (0.02, 0.05, 0.1, 0.2, 0.3):
        seeds = range(trials)
        alike, blind, thirds = (
            [groups_over(classes, sigma, seed, blind) for seed in seeds]
            for classes, blind in ((equal, False), (equal, True), (apart, False))
        )
        yield {
            "steps vary by": f"{100 * sigma:g} %",
            "decides after": statistics.fmean(its[0][0] for its in alike),
            "groups of equal ones": ever_several(alike),
            "by 20 steps": ever_several(blind),
            "1 and 1.33 apart at once": sum(its[0][1] == parted for its in thirds),
            "after 200 steps": sum(its[-1][1] == parted for its in thirds),
        }


def ever_several(trainings):
    return sum(any(len(set(of)) > 1 for _, of in found) for found in trainings)


# ---- data ----


def times_seen(options, times, slowest_passes=8, samples=960):
    """How often each sample was seen by anybody, if each worker makes as many passes as it is
    faster."""
    seen = Counter(dict.fromkeys(range(samples), 0))

    def look(rank):
        paceline.init()
        sampler = paceline.Sampler(range(samples), 4 * WORKERS, **options)
        for _ in range(round(slowest_passes * max(times) / times[rank])):
            for batch in sampler:
                seen.update(batch)

    rack = Rack(workers=WORKERS, link=1e15, latency=0.0)
    Simulation(Cluster((rack,))).run(look)
    return list(seen.values())


def data_rows():
    ways = {
        "fixed parts": {"shuffle": False},
        "a new shuffle in each pass": {},
        "rotate=True": {"rotate": True},
    }
    for classes in ("1 : 1.5 : 2 : 3", "1 : 2 : 3 : 4"):
        for name, options in ways.items():
            seen = times_seen(options, by_class(CLASSES[classes]))
            mean = statistics.fmean(seen)
            yield {
                "classes": classes,
                "data": name,
                "mean": mean,
                "least": min(seen),
                "most": max(seen),
                "deviation": statistics.pstdev(seen) / mean,
            }


# ---- tables ----


def cell(value):
    return f"{value:.2f}" if isinstance(value, float) else str(value)


TABLES = {
    "classes": lambda: class_rows(0.05),
    "jitter": lambda: class_rows(0.2),
    "slow-worker": slow_worker_rows,
    "noise": noise_rows,
    "data": data_rows,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=sorted(TABLES))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--no-running", action="store_true", help="show what is in the results"
    )
    arguments = parser.parse_args()
    kept = {}
    if arguments.results.exists():
        kept = json.loads(arguments.results.read_text())
    wanted = (arguments.only,) if arguments.only else tuple(TABLES)
    for name in wanted:
        rows = kept.get(name, []) if arguments.no_running else TABLES[name]()
        found = []
        for row in rows:
            if not found and not arguments.json:
                print(f"\n## {name}\n\n| {' | '.join(row)} |\n|{'---|' * len(row)}")
            found.append(row)
            if not arguments.json:
                print(f"| {' | '.join(map(cell, row.values()))} |", flush=True)
        kept[name] = found
        if not arguments.no_running:
            arguments.results.write_text(json.dumps(kept, indent=1) + "\n")
    if arguments.json:
        json.dump({name: kept[name] for name in wanted}, sys.stdout)


if __name__ == "__main__":
    main()
