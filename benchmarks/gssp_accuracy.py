"""Time to a fixed accuracy under GSSP and what it is compared with, by workers of four speeds.

    python benchmarks/gssp_accuracy.py                       # all: two hours on one core
    python benchmarks/gssp_accuracy.py --task digits --processes 2
    python benchmarks/gssp_accuracy.py --no-training         # the tables of what is there

What is trained, and how, is in `gssp_trainings`. A training is over when all workers together have
seen as many samples as under bsp. What counts is the virtual time until the mean of three
evaluations of worker 0's copy reaches the target (96 % of digits, 3.6 bits per byte), and the
figure of the model at the end.

Each row has hyperparameters of its own, from one search that is the same for all: so many pairs of
a learning rate and a momentum (of Adam: the first beta), and two seeds (bytes_lm: one) that are not
used again. Of the pairs that reach the target in 1.1 times the soonest one's time it is the one
that ends best. If it does not get there with one of the test seeds, the next best is taken. SGD's learning rate is searched as what a gradient moves in the end, rate /
(1 - momentum): servers that apply every gradient by itself take momentum over fewer samples.
Rows that only vary another one have its pair. Then five seeds, each paired with ssp's, and with bsp's.

One table is at 100 Mbit/s, where codes count, with the hyperparameters of the first. There
ssp has two hosts for servers, between which digits' model is cut: among four so small a bucket
would go to one as a whole. gssp has four, one for each group. Three more are of digits alone: two of other
speeds, with searches of their own, and one of 16 workers, with the hyperparameters of eight.

Trainings that are done are lines of a file, and are not done again.
"""

import argparse
import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from accuracy import SEEDS, Results, standard_error
from gssp_trainings import (
    AMPLE,
    MIX,
    MIXES,
    SCARCE,
    TASKS,
    WORKERS,
    Training,
    seconds_to,
    train,
)

RESULTS = Path(__file__).parent / "results" / "gssp_accuracy.jsonl"
SEARCHED = {"digits": (100, 101), "bytes_lm": (100,)}
"""Seeds of the search."""
NEAR = 1.1
"""Times the soonest: pairs that come so close are chosen from by what they end with, and of equal ones the
least learning rate."""
EPOCH = 22
"""A worker's steps in a pass over digits, and about an eighth of its steps on bytes_lm."""
CODE = f"compression=gd-top-k,compression.epoch_steps={EPOCH}"
BOTH_WAYS = f"{CODE},replies=deltas"


@dataclass(frozen=True)
class Row:
    """*like*: the row whose hyperparameters it takes; its own by default."""

    spec: str
    shares: bool = False
    link: str = AMPLE
    like: str = ""
    servers: int = 4
    mix: str = MIX
    workers: int = WORKERS


GSSP = "gssp"
BY_HAND = "gssp:members=0-1+2-3+4-5+6-7"
BY_HAND_16 = "gssp:members=0-3+4-7+8-11+12-15"
ROWS = {
    "bsp": Row("bsp"),
    "bsp, shares": Row("bsp", shares=True, like="bsp"),
    "ssp": Row("ssp:staleness=3"),
    "dssp": Row("dssp", like="ssp"),
    "asp": Row("asp"),
    "gssp": Row(GSSP),
    "gssp, by hand": Row(BY_HAND, like="gssp"),
}
CODED = {
    "bsp": Row("bsp", link=SCARCE, like="bsp"),
    "bsp, shares": Row("bsp", shares=True, link=SCARCE, like="bsp"),
    "bsp, shares, bf16": Row(
        "bsp:compression=bf16", shares=True, link=SCARCE, like="bsp"
    ),
    "ssp": Row("ssp:staleness=3", link=SCARCE, like="ssp", servers=2),
    "ssp, gd-top-k": Row(
        f"ssp:staleness=3,{BOTH_WAYS}", link=SCARCE, like="ssp", servers=2
    ),
    "gssp": Row(GSSP, link=SCARCE, like="gssp"),
    "gssp, gd-top-k, dense answers": Row(f"{GSSP}:{CODE}", link=SCARCE, like="gssp"),
    "gssp, gd-top-k, differences": Row(f"{GSSP}:{BOTH_WAYS}", link=SCARCE, like="gssp"),
}


def elsewhere(mix, workers):
    """The rows among other workers."""
    return {
        name: replace(
            row,
            spec=BY_HAND_16 if workers == 16 and row.spec == BY_HAND else row.spec,
            mix=mix,
            workers=workers,
        )
        for name, row in ROWS.items()
    }


TABLES = {"rows": (f"{AMPLE}, {MIX}", ROWS), "coded": (f"{SCARCE}, {MIX}", CODED)}
TABLES |= {
    part: (f"{AMPLE}, {mix}, {workers} workers", elsewhere(mix, workers))
    for part, mix, workers in (
        ("mild", next(iter(MIXES)), WORKERS),
        ("wide", list(MIXES)[-1], WORKERS),
        ("sixteen", MIX, 16),
    )
}
ONLY_DIGITS = ("mild", "wide", "sixteen")


# ---- which hyperparameters ----


def grid(task, row):
    """Trainings of the search, by what is searched."""
    return {
        (rate, momentum): [
            Training(
                task=task.name,
                spec=row.spec,
                seed=seed,
                rate=rate,
                momentum=momentum,
                shares=row.shares,
                link=row.link,
                servers=row.servers,
                mix=row.mix,
            )
            for seed in SEARCHED[task.name]
        ]
        for rate, momentum in task.searched
    }


def merit(task, results, trainings):
    """Smaller is better: mean seconds to the target, then what it ends with."""
    found = [results.get(one) for one in trainings]
    if not all(found):
        return None
    seconds = [seconds_to(one["curve"], task.target, task.falls) for one in found]
    end = statistics.fmean(one[task.figure] for one in found)
    if math.isnan(end):
        end = math.inf
    return statistics.fmean(seconds), end if task.falls else -end


def chosen(task, results, name, row):
    """The rate and the momentum of a row; None while its search is not done."""
    trainings = grid(task, replace(ROWS[row.like or name], mix=row.mix))
    merits = {pair: merit(task, results, its) for pair, its in trainings.items()}
    if None in merits.values():
        return None
    near = NEAR * min(time for time, _ in merits.values())

    def rank(pair):
        time, end = merits[pair]
        if time > near:
            return 1, time, end
        return 0, end, pair[0] * (1 - pair[1])

    for pair in sorted(merits, key=rank):
        any_of = replace(trainings[pair][0], workers=row.workers)
        tests = [replace(any_of, seed=seed) for seed in range(SEEDS)]
        if all(math.isfinite(seconds(task, f)) for f in map(results.get, tests) if f):
            return pair
    return None


def trainings_of(task, results, name, row, seeds):
    pair = chosen(task, results, name, row)
    if pair is None:
        return []
    any_of = replace(grid(task, row)[pair][0], workers=row.workers)
    return [replace(any_of, seed=seed) for seed in range(seeds)]


# ---- tables ----


def described(task, results, rows, seeds):
    """A row for each method of which two seeds are there."""
    found = {}
    for name, row in rows.items():
        trainings = trainings_of(task, results, name, row, seeds)
        figures = {one.seed: results.get(one) for one in trainings}
        found[name] = {seed: one for seed, one in figures.items() if one}
    for name, mine in found.items():
        if len(mine) < 2:
            continue
        row = {"method": name, "seeds": len(mine)}
        row["rate"], row["momentum"] = chosen(task, results, name, rows[name])
        row["seconds"] = mean_of(seconds(task, one) for one in mine.values())
        row["whole"] = mean_of(one["seconds"] for one in mine.values())
        row["sent"] = mean_of(one["sent"] for one in mine.values())
        row[task.figure] = mean_of(one[task.figure] for one in mine.values())
        for base in ("ssp", "bsp"):
            pairs = [(mine[s], found[base][s]) for s in mine if s in found[base]]
            faster = [seconds(task, b) / seconds(task, m) for m, b in pairs]
            reached = all(math.isfinite(seconds(task, m)) for m, _ in pairs)
            row[f"faster than {base}"] = with_error(faster if reached else [])
            off = [m[task.figure] - b[task.figure] for m, b in pairs]
            if task.falls:
                off = [
                    100 * d / b[task.figure]
                    for d, (_, b) in zip(off, pairs, strict=True)
                ]
            row[f"against {base}"] = with_error(off)
        yield row


def tables_of(task):
    """By part: where it is trained, and rows."""
    every = task.name == "digits"
    return [
        (part, table)
        for part, table in TABLES.items()
        if every or part not in ONLY_DIGITS
    ]


def seconds(task, figures):
    return seconds_to(figures["curve"], task.target, task.falls)


def mean_of(values):
    return statistics.fmean(values)


def with_error(values):
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return [math.nan, math.nan]
    return [statistics.fmean(values), standard_error(values)]


def show(title, task, rows):
    unit = "%" if task.falls else "points"
    head = ["method", "rate", "momentum", f"s to {task.target:g}", "s of all"]
    head += ["MB sent", "over ssp", "over bsp", task.figure]
    head += [f"against ssp, {unit}", f"against bsp, {unit}"]
    print(f"\n## {title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        reached = math.isfinite(row["seconds"])
        cells = [row["method"], f"{row['rate']:g}", f"{row['momentum']:g}"]
        cells += [f"{row['seconds']:.2f}" if reached else "not by all"]
        cells += [f"{row['whole']:.2f}", f"{row['sent'] / 1e6:.0f}"]
        cells += [spread(row[f"faster than {base}"], "") for base in ("ssp", "bsp")]
        cells += [
            f"{row[task.figure]:.3f}" if task.falls else f"{row[task.figure]:.2f}"
        ]
        cells += [spread(row[f"against {base}"], "+") for base in ("ssp", "bsp")]
        cells[-1] += "" if row["seeds"] == SEEDS else f" ({row['seeds']} seeds)"
        print(f"| {' | '.join(cells)} |", flush=True)


def spread(pair, sign):
    mean, error = pair
    return "" if math.isnan(mean) else f"{mean:{sign}.2f} ± {error:.2f}"


def show_search(where, task, rows, results):
    pairs = list(grid(task, rows["bsp"]))
    head = " | ".join(f"{rate:g}, {momentum:g}" for rate, momentum in pairs)
    print(f"\n## {task.name}, {where}: seconds to {task.target:g}\n")
    print(f"| rate, momentum | {head} |\n|{'---|' * (len(pairs) + 1)}")
    for name, row in rows.items():
        if row.like:
            continue
        cells = []
        for trainings in grid(task, row).values():
            found = merit(task, results, trainings)
            cells.append("" if found is None else f"{found[0]:.2f}")
        print(f"| {name} | {' | '.join(cells)} |")


# ---- the command line ----


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=sorted(TASKS), help="else both")
    parser.add_argument("--only", nargs="*", default=[], help="rows of these names")
    parser.add_argument("--part", choices=tuple(TABLES), help="else all")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    results = Results(given.results, Training)
    tasks = [TASKS[given.task]] if given.task else list(TASKS.values())
    for task in [] if given.no_training else tasks:
        for part, (_, rows) in tables_of(task):
            if given.part not in (None, part):
                continue
            wanted = {
                name: row
                for name, row in rows.items()
                if not given.only or name in given.only
            }
            to_search = [
                one
                for name, row in wanted.items()
                if not row.like
                for trainings in grid(task, row).values()
                for one in trainings
            ]
            results.train(to_search, given.processes, train)
            of_rows = [
                one
                for name, row in wanted.items()
                for one in trainings_of(task, results, name, row, given.seeds)
            ]
            results.train(of_rows, given.processes, train)
    found = {}
    for task in tasks:
        for part, (where, rows) in tables_of(task):
            title = f"{task.name}, {where}"
            found[title] = list(described(task, results, rows, given.seeds))
            if not given.json:
                if part not in ("coded", "sixteen"):
                    show_search(where, task, rows, results)
                show(title, task, found[title])
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
