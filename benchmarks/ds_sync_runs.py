"""What `ds_sync.py` runs: trainings in virtual time, and how long their steps take.

Real images, a small model: a perceptron of eight tensors on digits. On the simulated network
its tensors count as ResNet-50's: each stands for an eighth of that model's bytes, in order, and takes
the time that these take to compute. So what is learnt is real, and what it costs is what
it would cost for 102 MB of gradients and 78 ms of computing a step.
"""

import functools
import itertools
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F

import paceline
from paceline import methods, spec
from paceline.cluster import Cluster, Rack, ServerHost, Workload
from paceline.interfaces.buckets import stand_in_for
from paceline.runtimes.simulated import Simulation

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import digits

BATCH = 64
"""Images a step, over all workers."""
LINK = 25e9 / 8
LATENCY = 25e-6
WIDTHS = (64, 128, 128, 64, 10)
NARROW = 32
SLOWER = 2
"""Between real processes, which share a few cores, everything takes so many times as long."""
MOMENTUM = 0.9
EVERY = 5
"""Steps from one evaluation to the next."""
SMOOTHED = 3
"""Evaluations whose mean is to reach the accuracy."""
SETTLING = 45
"""Steps in which ``buckets="optimal"`` has measured, planned, tried its plan and decided."""


# ---- networks ----


@dataclass(frozen=True)
class Cell:
    """*racks* of equal hosts; *uplink*: what a rack's uplink gives the job, of one host's
    link (None: never the limit); *slow*: what the last host's link is, of the others'."""

    name: str
    racks: int = 1
    uplink: float | None = None
    slow: float = 1.0

    def cluster(self, workers, link=LINK, servers=False):
        hosts, rest = divmod(workers, self.racks)
        assert not rest, f"{workers} workers in {self.racks} racks"
        links = [(link,) * hosts for _ in range(self.racks)]
        links[-1] = (*links[-1][:-1], self.slow * link)
        racks = tuple(
            Rack(
                workers=hosts,
                link=rates,
                latency=LATENCY,
                uplink=None if self.uplink is None else self.uplink * link,
            )
            for rates in links
        )
        if not servers:
            return Cluster(racks)
        count = max(2, self.racks)
        places = tuple(ServerHost(rack=n % self.racks) for n in range(count))
        return Cluster(racks, servers=places)


# ---- what is trained ----


@functools.cache
def data():
    return digits.load_data()


def make_model():
    layers = [torch.nn.Flatten()]
    for inputs, outputs in itertools.pairwise(WIDTHS):
        layer = torch.nn.Linear(inputs, outputs)
        torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        torch.nn.init.zeros_(layer.bias)
        layers += [layer, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def in_parts(workload, names):
    """*workload*, as that of tensors *names*: each is as many of its own, one after the other,
    as come closest to equal bytes."""
    total, parts = sum(workload.sizes), [[] for _ in names]
    before = 0
    for index, size in enumerate(workload.sizes):
        parts[int((before + size / 2) / total * len(names))].append(index)
        before += size
    assert all(parts), "a tensor is too large"

    def summed(values):
        return tuple(sum(values[i] for i in part) for part in parts)

    return Workload(
        names=tuple(names),
        sizes=summed(workload.sizes),
        forward=summed(workload.forward),
        backward=summed(workload.backward),
    )


@functools.cache
def workload():
    names = [name for name, _ in make_model().named_parameters()]
    return in_parts(Workload.load("resnet50"), names)


def model_bytes():
    return sum(workload().sizes)


def compute_seconds():
    return workload().forward_seconds + workload().backward_seconds


def heavy_model():
    """The perceptron, which counts as ResNet-50 on the simulated network."""
    return counted_as_resnet(make_model())


def counted_as_resnet(model):
    names = tuple(name for name, _ in model.named_parameters())
    model.workload = replace(workload(), names=names)
    for parameter, size in zip(model.parameters(), workload().sizes, strict=True):
        stand_in_for(size, parameter)
    return model


def narrow_model():
    """Eight equal tensors, where only time is asked for, which does not depend on what is
    learnt: quick, and with elements enough that 64 workers can share them out evenly."""
    layers = [torch.nn.Linear(NARROW, NARROW, bias=False) for _ in workload().names]
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Unflatten(1, (2, -1)))
    for layer in layers:
        model.append(layer)
    model.append(torch.nn.Flatten())
    return counted_as_resnet(model)


def light_model():
    """The perceptron with its own bytes, and ResNet-50's times, `SLOWER`."""
    model = make_model()
    sizes = [4 * parameter.numel() for parameter in model.parameters()]
    model.workload = replace(
        workload(),
        sizes=tuple(sizes),
        forward=tuple(SLOWER * t for t in workload().forward),
        backward=tuple(SLOWER * t for t in workload().backward),
    )
    return model


def light_link():
    """On which its bytes take as long as ResNet-50's on `LINK`, times `SLOWER`."""
    return LINK * sum(light_model().workload.sizes) / model_bytes() / SLOWER


def make_optimizer(parameters, kind, rate):
    if kind == "AdamW":
        return torch.optim.AdamW(parameters, lr=rate)
    return torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM)


def batches(seed, rank, workers):
    """A worker's part of each step's batch: all workers' together do not depend on how many
    they are."""
    (images, labels), _ = data()
    share = BATCH // workers
    order = torch.Generator().manual_seed(seed)
    while True:
        epoch = torch.randperm(len(images), generator=order)
        for whole in epoch[: len(epoch) // BATCH * BATCH].split(BATCH):
            own = whole[rank * share : (rank + 1) * share]
            yield images[own], labels[own]


def accuracy(parameters):
    """Of the model that has these parameters, in per cent of the test images."""
    _, (images, labels) = data()
    model = make_model()
    with torch.no_grad():
        for mine, given in zip(model.parameters(), parameters, strict=True):
            mine.copy_(given)
        return 100 * (model(images).argmax(1) == labels).float().mean().item()


# ---- running ----


@dataclass
class Trained:
    """*accuracies* by step; *began*: the first step, and *ends*: each worker's steps, in virtual
    seconds."""

    accuracies: dict[int, float] = field(default_factory=dict)
    began: float = 0.0
    ends: list[list[float]] = field(default_factory=list)

    def reached(self, target):
        """The first step at which the mean of the last evaluations is *target* or more."""
        steps = sorted(self.accuracies)
        for last in range(SMOOTHED, len(steps) + 1):
            window = steps[last - SMOOTHED : last]
            if statistics.fmean(self.accuracies[s] for s in window) >= target:
                return window[-1]
        return None


class Mean:
    """The mean of all workers' parameters after a step, and who is still missing from it."""

    def __init__(self, workers):
        self._workers = workers
        self._sums = {}
        self._come = defaultdict(int)

    def add(self, step, model):
        """Returns the mean once all workers' models are in it."""
        mine = [p.detach().double() for p in model.parameters()]
        so_far = self._sums.setdefault(step, [torch.zeros_like(p) for p in mine])
        for total, parameter in zip(so_far, mine, strict=True):
            total += parameter
        self._come[step] += 1
        if self._come[step] < self._workers:
            return None
        return [total / self._workers for total in self._sums.pop(step)]


def train(way, cell, workers, seed, steps, make=heavy_model, link=LINK, until=None):
    """Train in virtual time.

    Evaluated is the mean of all workers' models, by the way and in no virtual time; where
    servers hold the parameters, worker 0's copy of them. There workers are not in step:
    all end when worker 0 has done its *steps*, or has reached the accuracy *until*.
    """
    trained = Trained(ends=[[] for _ in range(workers)])
    mean = Mean(workers)
    ended = False

    def note(step, rank, model):
        if way.on_servers:
            whole = list(model.parameters()) if rank == 0 else None
        else:
            whole = mean.add(step, model)
        if whole is not None:
            trained.accuracies[step] = accuracy(whole)

    def body(rank):
        nonlocal ended
        paceline.init()
        torch.manual_seed(seed)
        model = make()
        own = make_optimizer(model.parameters(), way.optimizer, way.rate)
        optimizer = paceline.distribute(
            model, own, method=way.spec, buckets=way.buckets, servers=way.servers
        )
        trained.began = max(trained.began, paceline.now())
        for step, (x, y) in enumerate(batches(seed, rank, workers), 1):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            trained.ends[rank].append(paceline.now())
            if make is not narrow_model and step % EVERY == 0:
                note(step, rank, model)
            if way.on_servers:
                if rank == 0:
                    reached = until is not None and trained.reached(until) is not None
                    ended = reached or step == steps
                if ended:
                    break
            elif step == steps:
                break
        optimizer.finish()

    Simulation(cell.cluster(workers, link, way.on_servers)).run(body)
    return trained


def step_seconds(way, cell, workers):
    """Of a step once the training has settled, all workers together: over whole periods."""
    warm = SETTLING if way.buckets == "optimal" else way.period
    steps = warm + way.period
    ends = train(way, cell, workers, 0, steps, narrow_model).ends
    start = max(mine[warm - 1] if len(mine) >= warm else 0.0 for mine in ends)
    stop = ends[0][-1]
    done = sum(start < end <= stop for mine in ends for end in mine)
    return workers * (stop - start) / done


def plan_of(way, cell, workers):
    """DS-Sync's groups on a network: their number and period, and what tells plans apart."""
    from paceline.methods.ds_sync.divide import make_plan

    method, _ = methods.make(spec.parse(way.spec), set())
    return make_plan(
        range(workers),
        groups=method.groups,
        size=method.size,
        seed=method.seed,
        cluster=cell.cluster(workers),
        bytes=model_bytes(),
        cross_rack_every=method.cross_rack_every,
    )
