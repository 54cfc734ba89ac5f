"""Trainings in the simulated runtime, and all of their behaviour that is to stay as it is.

Each row of the conformance table is trained on described networks whose workers differ in
speed, so that its virtual times mean something. The models compute element by element, since
the bits of a sum over many elements are those of one kind of processor. So are those of a
square root: the uneven trainings use Adamax, which takes none. Kernels for processors that
multiply and add in one instruction end with these bits (AVX2 and AVX-512 do).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import torch

import paceline
from paceline.cluster import Cluster, parse_cluster
from paceline.core.optimizer import DistributedOptimizer
from paceline.runtimes.join import join_runtime
from paceline.runtimes.simulated import ComputeModel, Simulation
from paceline.testing import CASES, Case

SHAPES = ((8, 6), (32,), (15,), (), (10, 10), (60,))
"""256 elements: the norm of a gradient of ones is 16, whoever adds up in whatever order."""

RULES = ("wfbp", "single", "2+3+1")
STEPS = 8
MEASURED_STEPS = 40
"""With "optimal": enough to measure, to try both plans, and to take one."""

START = 8.0
"""Seconds at which training begins, whatever setting it up has taken; a power of two, so
that times since then are exact."""
APART = 1 / 64
"""Seconds between one worker's start and the next one's: no two do anything at once."""


class Behaviour(msgspec.Struct, kw_only=True):
    """What one training did: a list holds one entry per worker.

    *parameters* and *buffers* are digests of the bytes that each ends with, *looked* of
    what ``consolidated`` showed on the way; *first* are the first three parameters of
    worker 0. *bytes_sent* and *ended* (seconds) are from the first step to the end of
    ``finish``, and *steps* are the seconds at which each worker's steps ended (of many,
    every fifth).
    """

    run: str
    parameters: list[str]
    first: list[float]
    buffers: list[str]
    looked: list[str]
    bytes_sent: list[int]
    ended: list[float]
    steps: list[list[float]]


@dataclass(frozen=True)
class Run:
    """One training: a row under a bucket rule, on so many workers. *uneven*: workers have
    different numbers of batches, gradients are clipped, and somebody looks in between."""

    case: Case
    rule: str
    workers: int
    uneven: bool = False

    @property
    def name(self) -> str:
        uneven = ", uneven" if self.uneven else ""
        return f"{self.case.name}, workers {self.workers}, buckets {self.rule}{uneven}"


NOT_PORTABLE = ("compression=powersgd",)
"""What is computed by matrix products has the bits of one kind of processor."""


def runs() -> Iterator[Run]:
    """Five of each row, but for those that are not portable: on 1, 2 and 3 workers, each under
    another rule, which one row has where the next one has others; uneven on 2 workers or on 3,
    and on the others under a rule that measures (one alone measures nothing)."""
    for number, case in enumerate(CASES):
        if any(text in case.name for text in NOT_PORTABLE):
            continue
        for workers in (1, 2, 3):
            yield Run(case, RULES[(number + workers) % len(RULES)], workers)
        uneven = 2 + number % 2
        yield Run(case, "wfbp", uneven, uneven=True)
        yield Run(case, "optimal", 5 - uneven)


def behaviour_of(run: Run) -> Behaviour:
    """Train, and tell."""
    found = Behaviour(
        run=run.name,
        parameters=[""] * run.workers,
        first=[],
        buffers=[""] * run.workers,
        looked=[],
        bytes_sent=[0] * run.workers,
        ended=[0.0] * run.workers,
        steps=[[] for _ in range(run.workers)],
    )
    simulation = Simulation(cluster_of(run.workers), compute=ComputeModel())

    def train(rank: int) -> None:
        paceline.init()
        (_train_unevenly if run.uneven else _train)(run, rank, found, simulation)

    simulation.run(train)
    return found


def cluster_of(workers: int) -> Cluster:
    """One worker; two on a network that takes processor time, with a host for a server;
    three in two racks."""
    if workers < 3:
        return parse_cluster(
            f"""
            [[rack]]
            workers = {workers}
            link = "1 Mbit/s"
            latency = "500 us"
            speed = {[1.0, 0.7][:workers]}
            [processor]
            message = "150 us"
            byte = "20 ns"
            [[server]]
            """
        )
    return parse_cluster(
        """
        [[rack]]
        workers = 2
        link = "1 Mbit/s"
        latency = "500 us"
        uplink = "600 kbit/s"
        speed = [1.0, 0.7]
        [[rack]]
        workers = 1
        link = "2 Mbit/s"
        latency = "200 us"
        uplink = "1 Mbit/s"
        uplink_latency = "300 us"
        speed = [1.2]
        """
    )


class Model(torch.nn.Module):
    """Parameters in several shapes; a buffer of numbers, and one that counts."""

    def __init__(self) -> None:
        super().__init__()
        for number, shape in enumerate(SHAPES):
            self.register_parameter(
                f"p{number}", torch.nn.Parameter(torch.zeros(shape))
            )
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, targets: torch.Tensor | None) -> torch.Tensor:
        """Half the squared distance from *targets*; without any, the sum of all elements."""
        if self.training:
            self.count += 1
            self.seen += 1.0 if targets is None else targets[:4]
        loss = torch.zeros(())
        position = 0
        for parameter in self.parameters():
            flat = parameter.reshape(-1)
            if targets is not None:
                own = targets[position : position + flat.numel()]
                flat = (flat - own).square() / 2
            loss = loss + flat.sum()
            position += flat.numel()
        return loss


def _train(run: Run, rank: int, found: Behaviour, simulation: Simulation) -> None:
    model = Model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = paceline.distribute(
        model, plain, method=run.case.method, buckets=run.rule
    )
    sent = _begin(rank, simulation)
    count, every = (MEASURED_STEPS, 5) if run.rule == "optimal" else (STEPS, 1)
    for step in range(count):
        _step(optimizer, model, _targets(rank, step))
        if step % every == 0:
            found.steps[rank].append(paceline.now() - START)
    _end(rank, found, model, optimizer, sent)


def _train_unevenly(
    run: Run, rank: int, found: Behaviour, simulation: Simulation
) -> None:
    model = Model()
    plain = torch.optim.Adamax(model.parameters(), lr=0.01)
    optimizer = paceline.distribute(
        model, plain, method=run.case.method, buckets=run.rule, clip_norm=4.0
    )
    sent = _begin(rank, simulation)
    for step in range(4 + 2 * rank):
        _step(optimizer, model, None)
        found.steps[rank].append(paceline.now() - START)
        if step == 2:
            with optimizer.consolidated():
                found.looked.append(f"{rank}: {_digest(model.parameters())}")
    _end(rank, found, model, optimizer, sent)


def _begin(rank: int, simulation: Simulation) -> list[int]:
    """Wait for this worker's start; returns what counts its bytes from then on."""
    runtime = join_runtime()
    count, sent = runtime.recorder.count_bytes, [0]

    def counted(number: int) -> None:
        sent[0] += number
        count(number)

    simulation.clock.pause(START + APART * rank - paceline.now())
    runtime.recorder.count_bytes = counted
    return sent


def _end(
    rank: int,
    found: Behaviour,
    model: Model,
    optimizer: DistributedOptimizer,
    sent: list[int],
) -> None:
    optimizer.finish()
    found.ended[rank] = paceline.now() - START
    found.bytes_sent[rank] = sent[0]
    found.parameters[rank] = _digest(model.parameters())
    found.buffers[rank] = _digest(model.buffers())
    if rank == 0:
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        found.first = flat[:3].tolist()


def _step(
    optimizer: DistributedOptimizer, model: Model, targets: torch.Tensor | None
) -> None:
    optimizer.zero_grad()
    loss = model(targets)
    loss.backward()
    optimizer.step(loss=loss)


def _targets(rank: int, step: int) -> torch.Tensor:
    """Multiples of 1/64 from -1 to 1: no library's random numbers."""
    elements = torch.arange(256)
    return ((elements * 37 + rank * 101 + step * 59) % 129 - 64).float() / 64


def _digest(tensors: Iterator[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
