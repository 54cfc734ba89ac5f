"""GSSP: groups of similar speed, where compute times differ and no communication counts.

*classes*: 16 workers in four classes of speed, in virtual time, over a network that never is the
limit and with servers that take no time; jitter of 5 %. The figure is steps a second of all
workers together, over those of bsp; measured from the 40th step of the slowest worker to its
100th, so that groups were found and have settled. By the closed form gssp is
t_max * mean(1 / t) times as fast as ssp, where t are the classes' step times: ssp ends at the
slowest worker's pace, and under gssp each group goes at its own. *bsp, shares* is bsp with
``Sampler(shares="speed")``: as many samples as a worker is fast, and the step counted in
samples. *jitter*: the same with 20 %.

*slow-worker*: 8 equal workers, and the same with one at half speed: what is left of the
throughput.

*noise*: eight workers whose steps vary at random (log-normal): after how many steps of each
server 0 decides, and how many of 100 trainings of 200 steps ever form groups where all are
equally fast; beside it the same by medians of 20 steps whose errors are not looked at. And how
many tell 1 from 1.33 at once, and in the end.

*data*: how often each sample was seen after the slowest class made 8 passes and the others as
many more as they are faster: fixed parts, a new shuffle in each pass, parts that go round.

Time to accuracy is in `gssp_accuracy`.
"""

import math
import random
import statistics
from collections import Counter
from dataclasses import dataclass
from functools import partial

import torch

import paceline
from benchmarks.papers import gssp_accuracy
from benchmarks.papers.results import Claim, Paper, Quick, formatted
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


@dataclass(frozen=True)
class Method:
    """A row of the table: the *spec* of a method, and whether batches are cut by speed."""

    spec: str
    shares: bool = False


METHODS = {
    "bsp": Method("bsp"),
    "bsp, shares": Method("bsp", shares=True),
    "ssp": Method("ssp:staleness=3"),
    "dssp": Method("dssp"),
    "asp": Method("asp"),
    "gssp": Method("gssp"),
    "gssp, 4 groups": Method("gssp:number_of_groups=4"),
}
"""`gssp` finds who is in which group, and how many there are. Its staleness is 3, too."""


# ---- throughput ----


def by_class(times, workers=WORKERS):
    """Each worker's step time: classes in equal parts, in order of ranks."""
    return tuple(times[rank * len(times) // workers] for rank in range(workers))


def throughput(method, times, jitter, first=FIRST, last=LAST, seed=0):
    """Samples a second of all workers together, in those of a step of one. *times*: of each
    worker's step, in `STEP_SECONDS`."""
    workers, slowest = len(times), max(times) * STEP_SECONDS
    rack = Rack(
        workers=workers, link=1e15, latency=0.0, speed=tuple(1 / t for t in times)
    )
    begin, stop = first * slowest, last * slowest
    rates = [0.0] * workers

    def train(rank):
        paceline.init()
        data = torch.ones(BATCHES * SAMPLES * workers, 2)
        shares = "speed" if method.shares else None
        sampler = paceline.Sampler(data, SAMPLES * workers, shares=shares)
        model = torch.nn.Linear(2, 2)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
        optimizer = paceline.distribute(
            model, sgd, method=method.spec, buckets="single", sampler=sampler
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


def speed(results, name, classes, jitter=0.05, **span):
    """Steps a second of a method among workers of these classes."""
    times = by_class(CLASSES[classes])
    steps = "".join(f", {key} {value}" for key, value in span.items())
    return results.value(
        f"{name}, {classes}, jitter {jitter:g}{steps}",
        "steps/s",
        lambda: throughput(METHODS[name], times, jitter, **span),
    )


def over_ssp(classes, name="gssp, 4 groups", **span):
    def ours(results):
        mine, ssp = (speed(results, one, classes, **span) for one in (name, "ssp"))
        return mine / ssp

    return ours


def classes(results, jitter=0.05):
    """Steps a second by classes of speed, over bsp's; jitter of 5 %."""
    for name, times in CLASSES.items():
        found = {method: speed(results, method, name, jitter) for method in METHODS}
        yield {
            "classes": name,
            **{method: its / found["bsp"] for method, its in found.items()},
            "over ssp": found["gssp, 4 groups"] / found["ssp"],
            "closed form": predicted(times),
        }


def jitter(results):
    """The same with a jitter of 20 %."""
    return classes(results, 0.2)


def slow_worker(results, workers=8):
    """What is left of the throughput where one of eight workers is at half speed."""
    for name, method in METHODS.items():
        if "4 groups" in name:
            continue
        left = []
        for slowest in (1.0, 2.0):
            times = (1.0,) * (workers - 1) + (slowest,)
            row = f"{name}, {workers} workers, the last one takes {slowest:g}"
            measure = partial(throughput, method, times, 0.05)
            left.append(results.value(row, "steps/s", measure))
        yield {"method": name, "left": formatted(left[1] / left[0], ".0%")}


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


def noise(results, trials=100):
    """When groups are decided, and how often wrongly, by how much steps vary."""
    equal, apart = [1.0] * 8, [1.0] * 4 + [1.33] * 4
    parted = tuple(rank // 4 for rank in range(8))

    def measure(sigma):
        alike, blind, thirds = (
            [groups_over(classes, sigma, seed, blind) for seed in range(trials)]
            for classes, blind in ((equal, False), (equal, True), (apart, False))
        )
        return {
            "decides after": statistics.fmean(its[0][0] for its in alike),
            "equal ones ever parted": ever_several(alike),
            "by 20 steps": ever_several(blind),
            "1 and 1.33 apart at once": sum(its[0][1] == parted for its in thirds),
            "after 200 steps": sum(its[-1][1] == parted for its in thirds),
        }

    units = {
        "decides after": "steps",
        "equal ones ever parted": "of 100",
        "by 20 steps": "of 100",
        "1 and 1.33 apart at once": "of 100",
        "after 200 steps": "of 100",
    }
    for sigma in (0.02, 0.05, 0.1, 0.2, 0.3):
        row = f"noise, steps vary by {sigma:g}"
        found = results.values(row, units, partial(measure, sigma))
        yield {"steps vary by": f"{100 * sigma:g} %"} | {
            name: formatted(value, ".3g") for name, value in found.items()
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


def data(results):
    """How often samples were seen, by how parts of the data are dealt out."""
    options = {
        "fixed parts": {"shuffle": False},
        "a new shuffle in each pass": {},
        "rotate=True": {"rotate": True},
    }

    def measure(name, times):
        seen = times_seen(options[name], times)
        mean = statistics.fmean(seen)
        deviation = 100 * statistics.pstdev(seen) / mean
        figures = {"mean": mean, "least": min(seen), "most": max(seen)}
        return figures | {"deviation, %": deviation}

    units = {"mean": "times", "least": "times", "most": "times", "deviation, %": "%"}
    for name in ("1 : 1.5 : 2 : 3", "1 : 2 : 3 : 4"):
        for dealt in options:
            run = partial(measure, dealt, by_class(CLASSES[name]))
            found = results.values(f"data, {name}, {dealt}", units, run)
            yield {"classes": name, "data": dealt} | {
                figure: formatted(value, ".3g") for figure, value in found.items()
            }


# ---- what is claimed ----

SAYS = "46 to 120 % faster"
PAPER = Paper(
    name="gssp",
    title="GSSP with GDTopK: groups of similar speed (IEEE TCC 2022)",
    page="explanation/papers/gssp.md",
    source="the paper's abstract, which does not name its baseline",
    claims=(
        *(
            Claim(
                row=f"steps a second over ssp(3), 16 workers, {name}",
                says=SAYS,
                conditions="four classes of step times, jitter 5 %, no communication",
                ours=over_ssp(name),
                at_least=1.46,
                why_not=f"the upper bound, t_max * mean(1 / t), is {predicted(CLASSES[name]):.2f}",
            )
            for name in ("1 : 1.33 : 1.6 : 2", "1 : 1.5 : 2 : 3", "1 : 2 : 3 : 4")
        ),
        Claim(
            row="time to 96 % of digits over ssp(3), five seeds",
            says=SAYS,
            conditions="8 workers, 1 : 1.5 : 2 : 3, 10 Gbit/s, rates and momenta of one search",
            ours=gssp_accuracy.gain,
            at_least=1.46,
        ),
        Claim(
            row="accuracy at the end against ssp(3), five seeds",
            says="accuracy drop below 1 %",
            conditions="the same trainings as in the row above",
            ours=gssp_accuracy.points,
            at_least=-1.0,
            unit="points",
        ),
    ),
    quick=(
        Quick(
            "16 workers, 1 : 1.5 : 2 : 3: steps a second over ssp(3)",
            over_ssp("1 : 1.5 : 2 : 3", "gssp", first=10, last=30),
            1.7,
        ),
    ),
    tables={
        "classes": classes,
        "jitter": jitter,
        "slow-worker": slow_worker,
        "noise": noise,
        "data": data,
        **gssp_accuracy.TABLES,
    },
)
