"""Small trainings of local updates in the simulated runtime, and the same in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import paceline
from paceline.cluster import Cluster, uniform_cluster
from paceline.runtimes.join import join_runtime
from paceline.runtimes.simulated import Simulation
from tests.methods.osp.helpers import flat, loss_of, network

Make = Callable[[Any], torch.optim.Optimizer]
Loss = Callable[[nn.Module, int, int], torch.Tensor]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def double() -> nn.Module:
    """The same on every worker."""
    return network(torch.float64)


@dataclass
class Trained:
    """One worker's: its parameters after each step, and after `finish`; bytes sent in each
    step; virtual seconds in all."""

    steps: list[torch.Tensor]
    end: torch.Tensor
    sent: list[int]
    seconds: float
    model: nn.Module


def simulate(cluster: int | Cluster, body: Callable[[int], Any]) -> list[Any]:
    """What *body* returned on each worker, in rank order."""
    if isinstance(cluster, int):
        cluster = uniform_cluster(cluster, "1gbit", "50us")
    answers: list[Any] = [None] * cluster.workers

    def main(rank: int) -> None:
        paceline.init()
        answers[rank] = body(rank)

    Simulation(cluster).run(main)
    return answers


def train(
    method: Any,
    cluster: int | Cluster,
    steps: int | Sequence[int],
    *,
    make: Callable[[], nn.Module] = double,
    optimizer: Make = momentum,
    loss: Loss = loss_of,
    rates: Sequence[float] = (),
    pace: float = 0.0,
    watch: Callable[[int, int, nn.Module, Any], None] | None = None,
    **options: Any,
) -> list[Trained]:
    """*rates*: learning rates step by step; *pace*: seconds that each step takes; *watch* is
    called after each with rank, step, model and optimizer."""

    def body(rank: int) -> Trained:
        model = make()
        wrapped = paceline.distribute(
            model,
            optimizer(model.parameters()),
            method=method,
            buckets="wfbp",
            **options,
        )
        seen = []
        began = join_runtime().now()
        for step in range(steps if isinstance(steps, int) else steps[rank]):
            if rates:
                for group in wrapped.param_groups:
                    group["lr"] = rates[step]
            wrapped.zero_grad()
            loss(model, rank, step).backward()
            if pace:
                paceline.pace(pace)
            wrapped.step()
            seen.append(flat(model))
            if watch is not None:
                watch(rank, step, model, wrapped)
        sent = [record.bytes_sent for record in join_runtime().recorder.steps]
        seconds = join_runtime().now() - began
        wrapped.finish()
        return Trained(seen, flat(model), sent, seconds, model)

    return simulate(cluster, body)


def alone(
    every: int,
    workers: int,
    steps: int,
    outer: Callable[[list[torch.Tensor], list[torch.Tensor]], None],
    *,
    make: Callable[[], nn.Module] = double,
    optimizer: Make = momentum,
    loss: Loss = loss_of,
) -> torch.Tensor:
    """The same program in plain torch, in one process: *outer* is given the anchors and the
    mean change of each, and moves the anchors. Returns the first worker's parameters."""
    models = [make() for _ in range(workers)]
    inner = [optimizer(model.parameters()) for model in models]
    anchors = [p.detach().clone() for p in models[0].parameters()]
    for step in range(steps):
        for rank, (model, own) in enumerate(zip(models, inner, strict=True)):
            own.zero_grad()
            loss(model, rank, step).backward()
            own.step()
        if (step + 1) % every:
            continue
        with torch.no_grad():
            changes = []
            for number, anchor in enumerate(anchors):
                theirs = [list(model.parameters())[number] for model in models]
                changes.append(sum((anchor - p) * (1 / workers) for p in theirs))
            outer(anchors, changes)
            for model in models:
                for parameter, anchor in zip(model.parameters(), anchors, strict=True):
                    parameter.copy_(anchor)
    return flat(models[0])


def spread(trained: Sequence[Trained], step: int) -> float:
    """How far workers are from the first one after a step."""
    first = trained[0].steps[step]
    return max((one.steps[step] - first).abs().max().item() for one in trained)


def mean(trained: Sequence[Trained], step: int) -> torch.Tensor:
    """The mean of the workers' parameters after a step."""
    return torch.stack([one.steps[step] for one in trained]).mean(0)
