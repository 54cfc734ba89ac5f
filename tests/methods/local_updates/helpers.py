"""Small trainings of local updates in the simulated runtime, and the same in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.cluster import Cluster
from tests.support import training
from tests.support.training import Trained, flat, loss_of, network

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


def train(
    method: Any, where: int | Cluster, steps: int | Sequence[int], **options: Any
) -> list[Trained]:
    """`training.train`, in double precision and with momentum and decay."""
    options = {"make": double, "optimizer": momentum} | options
    return training.train(method, where, steps, **options)


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
