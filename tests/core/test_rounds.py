"""When rounds are held, whether they wait, and what a method with models of its own is told."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import paceline
from paceline.cluster import Cluster, Rack
from paceline.interfaces import Rounds
from paceline.runtimes.join import join_runtime
from paceline.testing import inspect
from paceline.testing.problems import Counting, shared_folder
from tests.conformance.plugins.toys.every_fourth import EveryFourth, EveryFourthWorker
from tests.core.test_groups_of_gradients import Groups
from tests.core.test_method_rounds import SUM_OF_TWO, train
from tests.support.training import simulate


@dataclass(frozen=True, kw_only=True)
class WarmsUp(EveryFourth):
    """Averages parameters after each of the first five steps, then after every fourth."""

    name: ClassVar[str] = "warms-up"
    rounds: ClassVar[Rounds] = Rounds(every=4, each_until=5)


@dataclass(frozen=True, kw_only=True)
class AfterEach(EveryFourth):
    """Averages parameters after each step."""

    name: ClassVar[str] = "after-each"
    rounds: ClassVar[Rounds] = Rounds(after_update=True)


@dataclass(frozen=True, kw_only=True)
class Later(EveryFourth):
    """Begins to average in each second step, and takes the difference that the mean makes one step
    later."""

    name: ClassVar[str] = "later"
    rounds: ClassVar[Rounds] = Rounds(every=2, agree_every=1)

    def start(self, run):
        return LaterWorker(run)


class LaterWorker:
    def __init__(self, run):
        self.run, self.flights = run, []

    def after_update(self):
        run = self.run
        self._land()
        if run.is_round:
            for parameter in run.parameters:
                before = parameter.detach().clone()
                mean = before.clone()
                pending = run.average(mean, channel="later")
                self.flights.append((parameter, before, mean, pending))

    def finish(self):
        self.run.participate_until_all_finish()
        self._land()
        for parameter in self.run.parameters:
            self.run.average(parameter).wait()

    def _land(self):
        for parameter, before, mean, pending in self.flights:
            pending.wait()
            parameter.data.add_(mean - before)
        self.flights.clear()


def test_rounds_in_each_of_the_first_steps_and_rarer_ones_from_there():
    for sent, *_ in train(WarmsUp(), 2, (13, 13)):
        assert sent == [SUM_OF_TWO] * 5 + [0, 0, 0, SUM_OF_TWO] * 2


@pytest.mark.parametrize("steps", [(7, 7), (9, 4), (3, 5), (0, 6)])
@pytest.mark.parametrize("method", [WarmsUp(), AfterEach(), Later()])
def test_all_end_with_one_model(method, steps):
    results = train(method, 2, steps)
    assert results[0][2] == results[1][2]
    assert min(steps) <= results[0][2][0] <= max(steps)


def test_who_trains_less_is_in_the_last_round_of_steps_that_are_all_rounds():
    """Means of 1, 2 and 3 steps; then one worker's own."""
    for _, _, after, _ in train(AfterEach(), 2, (5, 3)):
        assert after == [5.0]


def test_a_round_with_a_lag_waits_for_nobody():
    """A worker of half the speed has nothing to do with when the other's steps end; where
    rounds are roll calls it has."""
    speeds = Cluster((Rack(workers=2, link=1e9, latency=1e-6, speed=(1.0, 0.5)),))

    def body(rank):
        model = Counting()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = paceline.distribute(model, inner, method=method)
        for _ in range(3):
            paceline.pace(1.0)
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        at = join_runtime().clock.now()
        optimizer.finish()
        return at

    ends = {}
    for method in (Later(), WarmsUp()):
        ends[method.name] = simulate(speeds, body)
    assert ends["later"][0] == pytest.approx(4.0, abs=0.01)  # of the round of step 2
    assert ends["warms-up"][0] == pytest.approx(6.0, abs=0.01)


# ---- what a method is told, and sees ----


@dataclass(frozen=True, kw_only=True)
class Anchored(EveryFourth):
    """Keeps a copy of the parameters, as of the last round."""

    name: ClassVar[str] = "anchored"
    averages_buffers: ClassVar[bool] = True

    def start(self, run):
        return AnchoredWorker(run)


class AnchoredWorker(EveryFourthWorker):
    def __init__(self, run):
        super().__init__(run)
        self.loads = 0
        self.anchors = [p.detach().clone() for p in run.parameters]

    def parameters_replaced(self):
        self.loads += 1
        self.anchors = [p.detach().clone() for p in self.run.parameters]

    def consolidate(self):
        run = self.run
        before = [p.detach().clone() for p in run.parameters]
        for p, anchor in zip(run.parameters, self.anchors, strict=True):
            p.data.copy_(anchor)

        def undo():
            for p, own in zip(run.parameters, before, strict=True):
                p.data.copy_(own)

        return undo

    def save_state(self):
        return {"anchors": self.anchors}

    def load_state(self, saved):
        self.anchors = list(saved["anchors"])


def begin(method, **options):
    model = Counting()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, paceline.distribute(model, inner, method=method, **options)


def one_step(model, optimizer):
    optimizer.zero_grad()
    model().backward()
    optimizer.step()


def test_what_the_script_loads_a_method_is_told_once_before_its_next_hook():
    def body(rank):
        model, optimizer = begin(Anchored())
        worker = inspect(optimizer).worker
        one_step(model, optimizer)
        values = {key: value + 5 for key, value in model.state_dict().items()}
        assert worker.loads == 0
        model.load_state_dict(values)
        one_step(model, optimizer)
        one_step(model, optimizer)
        loads, anchor = worker.loads, worker.anchors[0].view(-1)[0].item()
        optimizer.finish()
        return loads, anchor

    # One gradient was in it, of -1 times the learning rate.
    assert simulate(2, body) == [(1, 4.0)] * 2


def test_what_is_taken_back_after_an_evaluation_or_comes_from_a_checkpoint_is_no_load():
    def body(rank):
        model, optimizer = begin(Anchored())
        worker = inspect(optimizer).worker
        with shared_folder() as folder:
            one_step(model, optimizer)
            paceline.save(folder / "checkpoint")
            with optimizer.consolidated():
                model.load_state_dict(model.state_dict())
            one_step(model, optimizer)
            paceline.load(folder / "checkpoint")
            one_step(model, optimizer)
        optimizer.finish()
        return worker.loads, worker.anchors[0].view(-1)[0].item()

    assert simulate(2, body) == [(0, 0.0)] * 2


def test_a_method_sees_the_optimizer_the_network_and_the_buffers_it_is_to_average():
    def body(rank):
        seen = []
        for setting in ("rank0", "local"):
            model = torch.nn.BatchNorm1d(2)
            inner = torch.optim.SGD(model.parameters(), lr=0.25)
            optimizer = paceline.distribute(
                model, inner, method=Anchored(), buffers=setting
            )
            see = inspect(optimizer).run
            seen.append((see.optimizer is inner, see.cluster.workers))
            seen.append(len(see.own_buffers))
            optimizer.finish()
        return seen

    assert simulate(2, body) == [[(True, 2), 3, (True, 2), 0]] * 2


def test_buffers_that_the_method_averages_are_sent_by_nobody_else():
    def body(rank):
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
        inner = torch.optim.SGD(model.parameters(), lr=0.25)
        optimizer = paceline.distribute(model, inner, method=Anchored())
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(3, 2) + rank).sum().backward()
            optimizer.step()
        own = model[0].running_mean.clone()
        optimizer.finish()
        return own.tolist()

    first, second = simulate(2, body)
    assert first != second


# ---- gradients within groups ----


class TwoHeads(torch.nn.Module):
    """Each rank uses one of two parameters."""

    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ParameterList(torch.zeros(3) for _ in range(2))

    def forward(self):
        return self.heads[paceline.rank() % 2].sum()


def test_a_tensor_that_only_the_partner_used_has_a_gradient_in_the_group():
    def body(rank):
        model = TwoHeads()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = paceline.distribute(model, inner, method=Groups())
        model().backward()
        gradients = [head.grad.tolist() for head in model.heads]
        optimizer.step()
        optimizer.finish()
        return gradients

    assert simulate(2, body) == [[[0.5] * 3] * 2] * 2


def test_samples_weigh_in_a_group():
    """Worker 1 has a third of the samples of worker 0."""
    data = torch.utils.data.TensorDataset(torch.arange(8.0))

    def body(rank):
        model = torch.nn.Linear(1, 1, bias=False)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        sampler = paceline.Sampler(data, 8, shuffle=False, shares=[3, 1])
        optimizer = paceline.distribute(model, inner, method=Groups(), sampler=sampler)
        (batch,) = sampler
        model(data.tensors[0][list(batch)].unsqueeze(1)).mean().backward()
        gradient = model.weight.grad.item()
        optimizer.step()
        optimizer.finish()
        return gradient

    assert simulate(2, body) == pytest.approx([3.5, 3.5])
