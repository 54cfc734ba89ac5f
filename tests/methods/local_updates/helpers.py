"""Small trainings of local updates in the simulated runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from paceline.cluster import Cluster
from tests.support import training
from tests.support.training import Trained, network

CLOSE = 1e-12


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def double() -> nn.Module:
    """The same on every worker."""
    return network(torch.float64)


def count(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The loss of a model that counts."""
    loss: torch.Tensor = model()
    return loss


def train(
    method: Any, where: int | Cluster, steps: int | Sequence[int], **options: Any
) -> list[Trained]:
    """`training.train`, in double precision and with momentum and decay."""
    options = {"make": double, "optimizer": momentum} | options
    return training.train(method, where, steps, **options)


def apart(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """How far tensors are from each other, at most."""
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def spread(trained: Sequence[Trained], step: int) -> float:
    """How far workers are from the first one after a step."""
    return max(apart([one.steps[step]], [trained[0].steps[step]]) for one in trained)


def mean(trained: Sequence[Trained], step: int) -> torch.Tensor:
    """The mean of the workers' parameters after a step."""
    return torch.stack([one.steps[step] for one in trained]).mean(0)
