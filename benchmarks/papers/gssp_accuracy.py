"""Time to an accuracy under GSSP and what it is compared with, by workers of four speeds.

Workers in four classes of speed, as many of each, and hosts for servers, in virtual time. Every
method sees the same data and as many samples, and has the same initial model, seed by seed;
learning rates follow the samples that *all* workers have seen, since a worker's own steps say
little where each goes at its own pace. Batches are those of `paceline.Sampler`, with parts that
go round where nobody waits for all, and shares by speed where the row says so. A training is
over when all workers together have seen as many samples as under bsp. What counts is the time
until the mean of three evaluations of worker 0's copy reaches the target (96 % of digits, 3.6
bits per byte), and the figure of the model at the end.

*digits*: the CNN of examples/digits.py with half its channels, batches of 64 of all workers, 192
of them, SGD, the learning rate falling linearly to 0. *bytes_lm*: the byte model of
examples/bytes_lm.py with one layer of width 32, batches of 32, 128 of them, AdamW, one cycle.

Each row has hyperparameters of its own, from one search that is the same for all: pairs of a
learning rate and a momentum (of Adam: the first beta), and two seeds (bytes_lm: one) that are
not used again. Of the pairs that reach the target in 1.1 times the soonest one's time it is the
one that ends best. If it does not get there with one of the test seeds, the next best is taken.
SGD's learning rate is searched as what a gradient moves in the end, rate / (1 - momentum):
servers that apply every gradient by itself take momentum over fewer samples. Rows that only vary
another one have its pair. Then five seeds, each paired with ssp's.

*coded* is at 100 Mbit/s, where compression counts, with the hyperparameters of the first table.
There ssp has two hosts for servers, between which digits' model is cut: among four so small a
bucket would go to one as a whole. gssp has four, one for each group. *mild* and *wide* are of
digits and other speeds, with searches of their own, *sixteen* of 16 workers with the
hyperparameters of eight.
"""

import copy
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

import paceline
from benchmarks.measure.accuracy import SEEDS, standard_error
from benchmarks.measure.accuracy_tasks import (
    bytes_data,
    bytes_lm,
    digits_data,
    evaluate_bytes,
    evaluate_digits,
    half_as_wide,
    loss_of_bytes,
    small_byte_model,
)
from benchmarks.papers.results import formatted
from paceline.cluster import Cluster, Rack, ServerHost
from paceline.runtimes.simulated import ComputeModel, Simulation

MIXES = {
    "1 : 1.33 : 1.6 : 2": (1.0, 1.33, 1.6, 2.0),
    "1 : 1.5 : 2 : 3": (1.0, 1.5, 2.0, 3.0),
    "1 : 2 : 3 : 4": (1.0, 2.0, 3.0, 4.0),
}
"""Times of a step by class, over the fastest one's."""
MIX = "1 : 1.5 : 2 : 3"
WORKERS = 8
STEP_SECONDS = 0.02
JITTER = 0.05
LATENCY = 50e-6
AMPLE, SCARCE = "10 Gbit/s", "100 Mbit/s"
LINKS = {AMPLE: 1.25e9, SCARCE: 12.5e6}
EVALUATIONS = 32
PATIENCE = 900.0


@dataclass(frozen=True, kw_only=True)
class Training:
    """*spec*: of a method; *shares*: whether batches are cut by speed; *rate*: the learning rate
    over 1 - *momentum*, under Adam as it is; *servers*: hosts for them; *mix*: of speeds."""

    task: str
    spec: str
    seed: int
    rate: float
    momentum: float
    shares: bool = False
    link: str = AMPLE
    servers: int = 4
    mix: str = MIX
    workers: int = WORKERS

    @property
    def row(self) -> str:
        """Its name in the results."""
        words = [self.task, self.spec, self.mix, f"{self.workers} workers", self.link]
        words += [f"{self.servers} servers", *(["shares"] if self.shares else [])]
        rate = f"rate {self.rate:g}, momentum {self.momentum:g}"
        return ", ".join([*words, rate, f"seed {self.seed}"])


@dataclass(frozen=True)
class Task:
    """*target*: what the first of the *figures* is to reach; *falls*: whether less of it is
    better. *searched*: learning rates and momenta."""

    name: str
    steps: int
    batch: int
    model: Callable[[], torch.nn.Module]
    optimizer: Callable[[Any, float, float], torch.optim.Optimizer]
    schedule: Callable[[float], float]
    data: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[..., torch.Tensor]
    evaluate: Callable[[torch.nn.Module], dict[str, float]]
    figures: dict[str, str]
    target: float
    falls: bool
    searched: tuple[tuple[float, float], ...]

    @property
    def figure(self) -> str:
        return next(iter(self.figures))


@cache
def windows():
    text, _ = bytes_data()
    size = bytes_lm.CONTEXT + 1
    rows = text[: len(text) // size * size].view(-1, size)
    return rows[:, :-1], rows[:, 1:]


def sgd(parameters, rate, momentum):
    rate *= 1 - momentum
    return torch.optim.SGD(parameters, lr=rate, momentum=momentum)


def adamw(parameters, rate, momentum):
    return torch.optim.AdamW(parameters, lr=rate, betas=(momentum, 0.999))


def falling(part):
    return 1 - part


def one_cycle(part):
    """As torch's OneCycleLR without its momenta."""
    first = 0.3
    if part < first:
        return 0.04 + 0.96 * (1 - math.cos(math.pi * part / first)) / 2
    return (1 + math.cos(math.pi * (part - first) / (1 - first))) / 2


DIGITS = Task(
    name="digits",
    steps=192,
    batch=64,
    model=half_as_wide,
    optimizer=sgd,
    schedule=falling,
    data=lambda: digits_data()[0],
    loss=torch.nn.functional.cross_entropy,
    evaluate=evaluate_digits,
    figures={"accuracy": "%", "test loss": ""},
    target=96.0,
    falls=False,
    searched=((0.5, 0), (0.5, 0.5), (0.5, 0.9), (1, 0.5), (1, 0.9)),
)
BYTES = Task(
    name="bytes_lm",
    steps=128,
    batch=32,
    model=small_byte_model,
    optimizer=adamw,
    schedule=one_cycle,
    data=windows,
    loss=loss_of_bytes,
    evaluate=evaluate_bytes,
    figures={"bits per byte": "bits"},
    target=3.6,
    falls=True,
    searched=(
        (0.01, 0.9),
        (0.02, 0.9),
        (0.04, 0.9),
        (0.01, 0.5),
        (0.02, 0.5),
        (0.04, 0.5),
    ),
)
TASKS = {task.name: task for task in (DIGITS, BYTES)}


def cluster(training):
    times, workers = MIXES[training.mix], training.workers
    speeds = tuple(1 / times[rank * len(times) // workers] for rank in range(workers))
    link = LINKS[training.link]
    rack = Rack(workers=workers, link=link, latency=LATENCY, speed=speeds)
    return Cluster((rack,), servers=(ServerHost(),) * training.servers)


class Seen:
    """How many samples were seen of *total*: by all workers together; where they are in lockstep,
    each worker counts for all, so that their learning rates do not differ."""

    def __init__(self, total):
        self.samples, self.total = 0, total

    @property
    def part(self):
        return min(1.0, self.samples / self.total)


def sampler_of(training, task, inputs):
    keys = {"seed": training.seed}
    if training.shares:
        keys["shares"] = "speed"
    elif not in_lockstep(training):
        keys["rotate"] = True
    return paceline.Sampler(inputs, task.batch, drop_last=True, **keys)


def in_lockstep(training):
    return training.spec.split(":")[0] == "bsp"


def train(training: Training) -> dict[str, Any]:
    """The figures of the model that all end with, the *seconds* of virtual time that it took,
    those *to target* (None: not reached), and bytes *sent* by all workers."""
    task = TASKS[training.task]
    together = Seen(task.steps * task.batch)
    alike = in_lockstep(training)
    curve: list[tuple[float, float]] = []
    result: dict[str, Any] = {}

    def body(rank):
        paceline.init()
        torch.manual_seed(training.seed)
        model = task.model()
        to_evaluate = copy.deepcopy(model)  # computing with it takes no virtual time
        seen = Seen(together.total) if alike else together
        inputs, targets = task.data()
        sampler = sampler_of(training, task, inputs)
        own = task.optimizer(model.parameters(), training.rate, training.momentum)

        def evaluate(model):
            to_evaluate.load_state_dict(model.state_dict())
            return task.evaluate(to_evaluate)

        peak = own.param_groups[0]["lr"]
        optimizer = paceline.distribute(
            model, own, method=training.spec, buckets="single", sampler=sampler
        )
        start, due = paceline.now(), 1
        while seen.part < 1:
            for chosen in sampler:
                for group in optimizer.param_groups:
                    group["lr"] = peak * task.schedule(seen.part)
                optimizer.zero_grad()
                task.loss(model(inputs[chosen]), targets[chosen]).backward()
                optimizer.step()
                seen.samples += task.batch if alike else len(chosen)
                if rank == 0 and seen.part >= due / EVALUATIONS:
                    due = int(seen.part * EVALUATIONS) + 1
                    figure = evaluate(model)[task.figure]
                    curve.append((paceline.now() - start, figure))
                if seen.part >= 1:
                    break
        optimizer.finish()
        if rank == 0:
            seconds = paceline.now() - start
            result.update(evaluate(model), seconds=seconds)

    compute = ComputeModel(
        forward=STEP_SECONDS / 3,
        backward=2 * STEP_SECONDS / 3,
        jitter=JITTER,
        seed=training.seed,
    )
    simulation = Simulation(cluster(training), compute=compute, patience=PATIENCE)
    recorders = simulation.run(body).recorders
    result["sent"] = sum(s.bytes_sent for recorder in recorders for s in recorder.steps)
    result["to target"] = seconds_to(curve, task.target, task.falls)
    return result


def seconds_to(curve, target, falls, count=3):
    """The first moment at which the mean of the last *count* evaluations is the *target* or
    better; None where it never is."""
    for last in range(count, len(curve) + 1):
        figure = statistics.fmean(value for _, value in curve[last - count : last])
        if (figure <= target) if falls else (figure >= target):
            return curve[last - 1][0]
    return None


def figures(results, training):
    """Of a training, kept; *to target* is infinite where it was not reached."""
    units = TASKS[training.task].figures | {
        "to target": "s",
        "seconds": "s",
        "sent": "bytes",
    }
    found = results.values(training.row, units, lambda: train(training))
    if found["to target"] is None:
        found["to target"] = math.inf
    return found


# ---- rows ----

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


MILD, WIDE = next(iter(MIXES)), list(MIXES)[-1]


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
    found = [figures(results, one) for one in trainings]
    end = statistics.fmean(one[task.figure] for one in found)
    took = statistics.fmean(one["to target"] for one in found)
    return took, end if task.falls else -end


def chosen(task, results, name, row, seeds=SEEDS):
    """The rate and the momentum of a row; None while its search is not done."""
    trainings = grid(task, replace(ROWS[row.like or name], mix=row.mix))
    merits = {pair: merit(task, results, its) for pair, its in trainings.items()}
    if any(math.isnan(took) for took, _ in merits.values()):
        return None
    near = NEAR * min(took for took, _ in merits.values())

    def rank(pair):
        took, end = merits[pair]
        if took > near:
            return 1, took, end
        return 0, end, pair[0] * (1 - pair[1])

    for pair in sorted(merits, key=rank):
        if all(
            figures(results, one)["to target"] < math.inf
            for one in tests(trainings, pair, row, seeds)
        ):
            return pair
    return None


def tests(trainings, pair, row, seeds):
    """The trainings of a row with a pair of the search."""
    one = replace(trainings[pair][0], workers=row.workers)
    return [replace(one, seed=seed) for seed in range(seeds)]


def runs(task, results, name, row, seeds=SEEDS):
    """Its rate and momentum, and its figures seed by seed; None while its search is not done."""
    # Rows among as many workers as in the search have a pair that holds for all seeds.
    held = SEEDS if row.workers == WORKERS else seeds
    pair = chosen(task, results, name, row, held)
    if pair is None:
        return None
    found = tests(grid(task, row), pair, row, seeds)
    return pair, [figures(results, one) for one in found]


# ---- tables ----


def against(task, mine, base):
    """The mean difference in the judged figure, of Adam's in per cent, and its error."""
    off = [m[task.figure] - b[task.figure] for m, b in zip(mine, base, strict=True)]
    if task.falls:
        off = [100 * d / b[task.figure] for d, b in zip(off, base, strict=True)]
    return statistics.fmean(off), standard_error(off)


def faster(mine, base):
    """How many times as fast the target is reached: the mean over seeds, and its error."""
    ratios = [b["to target"] / m["to target"] for m, b in zip(mine, base, strict=True)]
    return statistics.fmean(ratios), standard_error(ratios)


def table(task, rows, seeds=SEEDS):
    """A table's function: each row against ssp's."""

    def make(results):
        found = {
            name: runs(task, results, name, row, seeds) for name, row in rows.items()
        }
        for name, its in found.items():
            row = {"method": name}
            if its is None or found["ssp"] is None:
                yield row | {"rate, momentum": math.nan}
                continue
            (rate, momentum), mine = its
            rate = rate if task.falls else rate * (1 - momentum)
            row["rate, momentum"] = f"{rate:g}, {momentum:g}"
            row[f"s to {task.target:g}"] = mean(mine, "to target")
            row["s of all"] = mean(mine, "seconds")
            row["MB sent"] = mean(mine, "sent") / 1e6
            row[task.figure] = formatted(mean(mine, task.figure), ".3f")
            _, ssp = found["ssp"]
            row["times as fast as ssp"] = faster(mine, ssp)
            row[f"against ssp, {'%' if task.falls else 'points'}"] = against(
                task, mine, ssp
            )
            yield row

    return make


def mean(runs_of_row, figure):
    return statistics.fmean(one[figure] for one in runs_of_row)


def search(task, rows):
    """A table's function: mean seconds to the target by rate and momentum."""

    def make(results):
        for name, row in rows.items():
            if row.like:
                continue
            found = {"method": name}
            for (rate, momentum), trainings in grid(task, row).items():
                took, _ = merit(task, results, trainings)
                found[f"{rate:g}, {momentum:g}"] = took
            yield found

    return make


def described(make, text):
    make.__doc__ = text
    return make


TABLES = {
    "digits": described(table(DIGITS, ROWS), "Digits: time to 96 %, against ssp."),
    "bytes_lm": described(
        table(BYTES, ROWS), "bytes_lm: time to 3.6 bits, against ssp."
    ),
    "coded": described(table(DIGITS, CODED, 3), "Digits at 100 Mbit/s, compressed."),
    "bytes-coded": described(
        table(BYTES, CODED, 2), "bytes_lm at 100 Mbit/s, compressed."
    ),
    "mild": described(table(DIGITS, elsewhere(MILD, 8)), f"Digits, speeds {MILD}."),
    "wide": described(table(DIGITS, elsewhere(WIDE, 8)), f"Digits, speeds {WIDE}."),
    "sixteen": described(table(DIGITS, elsewhere(MIX, 16), 3), "Digits, 16 workers."),
    "search": described(
        search(DIGITS, ROWS), "Digits: the search of rates and momenta."
    ),
    "bytes-search": described(search(BYTES, ROWS), "bytes_lm: the same."),
}


# ---- what is claimed ----


def against_ssp(compare):
    """A claim's figure of gssp's trainings and ssp's."""

    def ours(results):
        both = [runs(DIGITS, results, name, ROWS[name]) for name in (GSSP, "ssp")]
        if None in both:
            return math.nan
        (_, mine), (_, ssp) = both
        return compare(mine, ssp)

    return ours


gain = against_ssp(faster)
points = against_ssp(lambda mine, ssp: against(DIGITS, mine, ssp))
