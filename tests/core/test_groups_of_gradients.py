"""Gradients that are averaged within groups while backward runs: how it ends."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import paceline
from paceline.interfaces import Rounds
from paceline.testing import Case
from paceline.testing.method_checks import CHECKS
from paceline.testing.problems import Counting
from tests.conformance.plugins.toys.every_fourth import EveryFourth, EveryFourthWorker
from tests.core.test_method_rounds import SUM_OF_TWO, train
from tests.support.training import simulate


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Gradients are averaged in groups of *size* workers, drawn anew in each step."""

    name: ClassVar[str] = "groups"
    rounds: ClassVar[Rounds] = Rounds(groups=True)
    updates_on: ClassVar[str] = "worker"
    visible_gradient: ClassVar[str] = "mean"
    clips: ClassVar[str] = "own"

    size: int = 2

    def start(self, run):
        return GroupsWorker(run, self.size)


class GroupsWorker:
    """A step's group, and its means that are under way."""

    def __init__(self, run, size):
        self.run, self.size = run, size
        self.group, self.pending = None, []

    def step_begins(self):
        run = self.run
        draw = torch.Generator().manual_seed(run.step)
        order = torch.randperm(len(run.participants), generator=draw).tolist()
        drawn = [run.participants[place] for place in order]
        self.group = None  # of a worker that all have agreed is gone
        for start in range(0, len(drawn), self.size):
            ranks = drawn[start : start + self.size]
            if run.comm.rank in ranks:
                self.group = run.comm.group(sorted(ranks))

    def bucket_ready(self, bucket):
        if self.group is None:
            return
        self.pending.append(self.run.mean(bucket, among=self.group))

    def backward_ended(self):
        for pending in self.pending:
            pending.wait()
        self.pending.clear()

    def finish(self):
        self.run.participate_until_all_finish()
        for pending in [self.run.average(p) for p in self.run.parameters]:
            pending.wait()


@pytest.mark.parametrize("steps", [(5, 5, 5, 5), (3, 40, 20, 7), (0, 0, 35, 1)])
def test_all_end_with_one_model_whoever_is_out_of_data_when(steps):
    results = train(Groups(), 4, steps)
    ends = [after for _, _, after, _ in results]
    assert all(end == ends[0] for end in ends)
    assert min(steps) <= ends[0][0] <= max(steps)


@pytest.mark.parametrize(
    "law", ["uneven_data_ends", "leaving_after_backward_ends_with_one_model"]
)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_laws_of_ends(law, workers):
    def body(rank):
        paceline.init()
        CHECKS[law](Case(method=Groups()), "ddp")

    simulate(workers, body)


@dataclass(frozen=True, kw_only=True)
class Compressed(EveryFourth):
    """Parameters' means are named: they may be compressed."""

    name: ClassVar[str] = "compressed"

    def start(self, run):
        return CompressedWorker(run)


class CompressedWorker(EveryFourthWorker):
    def after_update(self):
        if self.run.is_round:
            for number, parameter in enumerate(self.run.parameters):
                self.run.average(parameter, name=f"p{number}").wait()


@pytest.mark.parametrize(("code", "part"), [("none", 1), ("bf16", 2)])
def test_a_mean_with_a_name_is_compressed(code, part):
    def body(rank):
        model = Counting()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = paceline.distribute(
            model, inner, method=Compressed(), compression=code
        )
        for _ in range(4):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        sent = paceline.runtimes.join.join_runtime().recorder.steps[-1].bytes_sent
        optimizer.finish()
        return sent, model.scalar.item()

    for sent, scalar in simulate(2, body):
        flag = 0 if code == "none" else 4
        assert abs(sent - SUM_OF_TWO // part - flag) <= 8
        assert scalar == -4.0
