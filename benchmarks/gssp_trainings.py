"""What `gssp_accuracy.py` runs: trainings by workers of four speeds, in virtual time.

Workers in four classes of speed, as many of each, and hosts for servers. Every method
sees the same data and as many samples, and has the same initial model, seed by seed; learning
rates follow the samples that *all* workers have seen, since a worker's own steps say little where
each goes at its own pace. Batches are those of `paceline.Sampler`, with parts that go round where
nobody waits for all, and shares by speed where the row says so.

*digits*: the CNN of examples/digits.py with half its channels, batches of 64 of all workers, 192 of
them, SGD, the learning rate falling linearly to 0. *bytes_lm*: the byte model of
examples/bytes_lm.py with one layer of width 32, batches of 32, 128 of them, AdamW, one cycle.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from accuracy_tasks import (
    bytes_data,
    bytes_lm,
    digits_data,
    evaluate_bytes,
    evaluate_digits,
    half_as_wide,
    loss_of_bytes,
    small_byte_model,
)

import paceline
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


@dataclass(frozen=True)
class Task:
    """*target*: what the *figure* is to reach; *falls*: whether less of it is better.
    *searched*: learning rates and momenta."""

    name: str
    steps: int
    batch: int
    model: Callable[[], torch.nn.Module]
    optimizer: Callable[[Any, float, float], torch.optim.Optimizer]
    schedule: Callable[[float], float]
    data: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[..., torch.Tensor]
    evaluate: Callable[[torch.nn.Module], dict[str, float]]
    figure: str
    target: float
    falls: bool
    searched: tuple[tuple[float, float], ...]


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
    figure="accuracy",
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
    figure="bits per byte",
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
    """*curve*: seconds, the part of all samples, and the figure of worker 0's copy, again and
    again; then the figures of the model that all end with, the *seconds* of virtual time that
    it took, and bytes *sent* by all workers."""
    task = TASKS[training.task]
    together = Seen(task.steps * task.batch)
    alike = in_lockstep(training)
    curve: list[tuple[float, float, float]] = []
    result: dict[str, Any] = {"curve": curve}

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
                    curve.append((paceline.now() - start, seen.part, figure))
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
    return result


def smoothed(curve, count=3):
    """Seconds, and the mean of the last *count* figures."""
    return [
        (curve[last - 1][0], sum(row[2] for row in curve[last - count : last]) / count)
        for last in range(count, len(curve) + 1)
    ]


def seconds_to(curve, target, falls):
    """The first moment at which the mean of three evaluations is the *target* or better."""
    for seconds, figure in smoothed(curve):
        if (figure <= target) if falls else (figure >= target):
            return seconds
    return math.inf
