"""Means in two halves, as a method forms them: a law of all runtimes; and what methods are told where
they cannot be formed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import UsageError
from paceline.interfaces import Pending, ReduceScatter
from paceline.methods.bsp import BSP, BSPWorker
from paceline.runtimes.join import join_runtime
from paceline.testing.problems import Counting
from tests.support.tables import sampled
from tests.support.training import simulate


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


@pytest.mark.parametrize("workers", sampled(2, [2, 4]))
def test_halves_train_as_the_whole_on_more_and_fewer_workers(workers):
    simulate(workers, lambda rank: halves_train_as_the_whole())


def refusal(method, **options):
    """What is said to one of two workers, and in which call."""

    def body(rank):
        model = Counting()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        options.setdefault("buckets", "wfbp")
        try:
            optimizer = paceline.distribute(model, inner, method=method, **options)
        except UsageError as error:
            return "distribute", str(error)
        try:
            model().backward()
        except UsageError as error:
            return "backward", str(error)
        finally:
            optimizer.finish()
        return None

    return simulate(2, body)[0]


@dataclass(frozen=True, kw_only=True)
class Undeclared(Halved):
    """Does not say beforehand that it forms means in halves."""

    name: ClassVar[str] = "undeclared"
    sends_halves: ClassVar[bool] = False


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compression": "bf16"}, "in two halves"),
        ({"collective": "parameter-server"}, "'ring'"),
    ],
)
def test_what_cannot_be_halved_is_refused(options, words):
    for method, call in ((Halved(), "distribute"), (Undeclared(), "backward")):
        where, said = refusal(method, **options)
        assert where == call
        assert words in said


class OneByOneWorker(HalvedWorker):
    def backward_ended(self):
        for one in self.scattered[:: -1 if self.method.reverse else 1]:
            one.gather().wait()
        self.scattered.clear()


@dataclass(frozen=True, kw_only=True)
class OneByOne(Halved):
    """Gathers a bucket and waits for it before it gathers the next, in ready order."""

    name: ClassVar[str] = "one-by-one"
    reverse: bool = False

    def start(self, run):
        return OneByOneWorker(run, self)


def test_who_takes_part_travels_in_the_gather_of_the_last_bucket():
    where, said = refusal(OneByOne())
    assert where == "backward"
    assert "last bucket of its step was gathered" in said
    assert refusal(replace(OneByOne(), reverse=True)) is None


class TwiceWorker(HalvedWorker):
    def backward_ended(self):
        self.scattered.append(self.scattered[0])
        super().backward_ended()


@dataclass(frozen=True, kw_only=True)
class Twice(Halved):
    """Gathers what it has gathered."""

    name: ClassVar[str] = "twice"

    def start(self, run):
        return TwiceWorker(run, self)


def test_a_mean_is_gathered_once():
    where, said = refusal(Twice())
    assert where == "backward"
    assert "was called twice" in said
