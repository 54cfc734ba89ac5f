"""Means in two halves, as a method forms them: a law of all runtimes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

import paceline
from paceline.interfaces import Pending, ReduceScatter
from paceline.methods.bsp import BSP, BSPWorker
from paceline.runtimes.join import join_runtime


@dataclass(frozen=True, kw_only=True)
class Halved(BSP):
    """BSP whose gradients are scattered while backward runs, and gathered where backward ends,
    the last ones first; or (*at_once*) asked for at the same time."""

    name: ClassVar[str] = "halved"
    sends_halves: ClassVar[bool] = True

    at_once: bool = False

    def start(self, run):
        return HalvedWorker(run, self)


class HalvedWorker(BSPWorker):
    """A step's means: those that were scattered, and those that are being gathered."""

    def __init__(self, run, method):
        super().__init__(run, method)
        self.scattered: list[ReduceScatter] = []
        self.gathered: list[Pending] = []

    def bucket_ready(self, bucket):
        scattered = self.run.scatter_mean(bucket)
        if self.method.at_once:
            self.gathered.append(scattered.gather())
        else:
            self.scattered.append(scattered)

    def backward_ended(self):
        self.gathered += [one.gather() for one in reversed(self.scattered)]
        for pending in self.gathered:
            pending.wait()
        self.scattered.clear()
        self.gathered.clear()


class Branches(nn.Module):
    """Which branch is used depends on the caller."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.common = nn.Linear(6, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 2) for _ in range(3))
        self.matrix = nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))

    def forward(self, x, branch):
        y = self.branches[branch](self.common(x))
        return (y.to(torch.complex64) @ self.matrix).abs().square().mean()


def train(method, buckets, steps, collective="ring", branch=None):
    """The parameters and, step by step, the bytes sent of *steps* steps."""
    rank = paceline.rank()
    model = Branches()
    inner = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.3)
    optimizer = paceline.distribute(
        model, inner, method=method, buckets=buckets, collective=collective
    )
    draw = torch.Generator().manual_seed(rank)
    for step in range(steps):
        optimizer.zero_grad()
        used = (rank + step) % 3 if branch is None else branch
        model(torch.randn(4, 6, generator=draw), used).backward()
        optimizer.step()
    sent = [record.bytes_sent for record in join_runtime().recorder.steps]
    optimizer.finish()
    return [p.detach().clone() for p in model.parameters()], sent[len(sent) - steps :]


def halves_train_as_the_whole() -> None:
    """To the bit, and with the same bytes in each step: where tensors are unused, on some
    ranks or on all, and where some ranks end before others."""
    rank, n = paceline.rank(), paceline.world_size()
    for steps in (2 + rank, 3 * (rank == n - 1)):
        for buckets, branch in (("wfbp", None), ("single", None), ("wfbp", 1)):
            expected, sent = train(BSP(), buckets, steps, branch=branch)
            for method in (Halved(), Halved(at_once=True)):
                found, also_sent = train(method, buckets, steps, branch=branch)
                for one, other in zip(found, expected, strict=True):
                    assert torch.equal(one, other), (method, buckets, steps)
                assert also_sent == sent
