"""Methods that do not meet in every step: what steps between two rounds send, who counts in a
round, and how such trainings end."""

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch

import paceline
from paceline.errors import UsageError
from paceline.interfaces import AGREE_EVERY, ON_SERVERS, Rounds
from paceline.interfaces.buckets import stand_in_for
from paceline.methods.bsp import BSP, BSPWorker
from paceline.runtimes.join import join_runtime
from paceline.testing import inspect
from paceline.testing.problems import Counting
from tests.conformance.plugins.toys.every_fourth import EveryFourth, EveryFourthWorker
from tests.conformance.plugins.toys.pairs import Pairs
from tests.support.training import simulate

ELEMENTS = 18
SUM_OF_TWO = 4 * ELEMENTS
"""Bytes that each of two workers sends to form a sum of the model of `Counting`: half of it there,
and half of it back."""


class WithStatistics(torch.nn.Module):
    """A model with buffers, each different on every rank."""

    def __init__(self):
        super().__init__()
        self.counting = Counting()
        self.register_buffer("seen", torch.full((4,), float(paceline.rank())))

    def forward(self):
        return self.counting()


def train(method, workers, steps, make=Counting, buckets="optimal"):
    """Each worker's bytes in each step, and its model before and after `finish`; *steps*: of
    each worker."""

    def body(rank):
        model = make()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = paceline.distribute(model, inner, method=method, buckets=buckets)
        for _ in range(steps[rank]):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        sent = [record.bytes_sent for record in join_runtime().recorder.steps]
        before = applied(model)
        optimizer.finish()
        return sent, before, applied(model), model

    return simulate(workers, body)


def applied(model):
    """How many gradients are in each parameter."""
    return sorted({-round(v.item(), 4) for p in model.parameters() for v in p.view(-1)})


@pytest.mark.parametrize("make", [Counting, WithStatistics])
def test_steps_between_two_rounds_send_nothing(make):
    """Neither for buffers, nor for the planner, nor for who still trains."""
    results = train(EveryFourth(), 2, (8, 8), make)
    for rank, (sent, *_) in enumerate(results):
        assert sent[:3] == sent[4:7] == [0, 0, 0]
        assert sent[3] == sent[7]
        buffers = 16 if make is WithStatistics and rank == 0 else 0
        assert sent[3] == SUM_OF_TWO + buffers


def test_buffers_are_shared_in_rounds():
    *_, (*_, model) = train(EveryFourth(), 2, (8, 8), WithStatistics)
    assert model.seen.tolist() == [0.0] * 4


def test_who_is_out_of_data_counts_once_more_with_what_it_has_done_since():
    """A round after step 4; then one with 8 and 5 steps; the rest is one worker's own."""
    results = train(EveryFourth(), 2, (10, 5))
    for _, _, after, _ in results:
        assert after == [6.5 + 2]
    assert [before for _, before, _, _ in results] == [[8.5], [5.0]]


def test_who_has_done_nothing_since_the_last_round_does_not_count():
    for _, _, after, _ in train(EveryFourth(), 3, (8, 4, 4)):
        assert after == [8.0]


@pytest.mark.parametrize("steps", [(1, 1), (4, 4), (3, 9), (0, 6)])
def test_all_end_with_one_model(steps):
    first, second = train(EveryFourth(), 2, steps)
    assert first[2] == second[2]


def test_pairs_send_to_one_other_worker_and_meet_all_the_others_rarely():
    steps = 2 * AGREE_EVERY + 1
    for sent, *_ in train(Pairs(), 4, (steps,) * 4):
        usual = [n for i, n in enumerate(sent, 1) if i % AGREE_EVERY]
        # Each parameter is a sum of its own, of 12, 5 and 1 elements.
        assert all(abs(n - SUM_OF_TWO) <= 8 for n in usual)
        agreements = [n for i, n in enumerate(sent, 1) if not i % AGREE_EVERY]
        assert all(0 < n - SUM_OF_TWO <= 64 for n in agreements)


@pytest.mark.parametrize("steps", [(40, 40, 40, 40), (3, 40, 20, 7), (0, 0, 35, 1)])
def test_groups_end_with_the_mean_of_all_models(steps):
    results = train(Pairs(), 4, steps)
    ends = [after for _, _, after, _ in results]
    assert all(end == ends[0] for end in ends)
    assert min(steps) <= ends[0][0] <= max(steps)


class WaitsTooEarlyWorker(EveryFourthWorker):
    def bucket_ready(self, bucket):
        self.run.mean(bucket).wait()


@dataclass(frozen=True, kw_only=True)
class WaitsTooEarly(EveryFourth):
    """Waits for a mean while backward runs."""

    name: ClassVar[str] = "waits-too-early"
    rounds: ClassVar[Rounds] = Rounds()

    def start(self, run):
        return WaitsTooEarlyWorker(run)


def test_a_mean_that_is_waited_for_too_early_is_refused():
    with pytest.raises(Exception, match="before the last bucket") as caught:
        train(WaitsTooEarly(), 2, (2, 2), buckets="wfbp")
    assert isinstance(caught.value.__cause__, UsageError)


class Counted(WithStatistics):
    """Its buffer counts forward passes, each worker in its own way."""

    def forward(self):
        self.seen += 1 + paceline.rank()
        return super().forward()


@pytest.mark.parametrize("method", [EveryFourth(), Pairs()])
@pytest.mark.parametrize("steps", [(10, 5), (5, 10), (8, 8), (0, 3)])
def test_all_end_with_the_same_buffers(method, steps):
    """Also with those that the last round has sent."""
    models = [model for *_, model in train(method, 2, steps, Counted)]
    assert models[0].seen.tolist() == models[1].seen.tolist()


@dataclass(frozen=True, kw_only=True)
class MeanOfEverySecond(EveryFourth):
    """Forms the mean of every second gradient."""

    name: ClassVar[str] = "mean-of-every-second"
    rounds: ClassVar[Rounds] = Rounds(every=2)
    means: list = field(default_factory=list)
    meets: list = field(default_factory=list)

    def start(self, run):
        return MeanOfEverySecondWorker(run, self)


class MeanOfEverySecondWorker:
    def __init__(self, run, method):
        self.run, self.method = run, method

    def bucket_ready(self, bucket):
        run = self.run
        self.method.meets.append((run.comm.rank, run.step, run.is_round))

    def after_update(self):
        run = self.run
        if not run.is_round:
            return
        for bucket in run.buckets:
            bucket.buffer.mul_(run.weight)
            run.mean(bucket).wait()
            self.method.means.append((run.step, bucket.buffer.tolist()))

    def finish(self):
        self.run.participate_until_all_finish()


@pytest.mark.parametrize("steps", [(8, 4, 4), (8, 3, 3), (8, 0, 5)])
def test_who_is_out_of_data_counts_in_no_mean_of_gradients(steps):
    """Each gradient is 1, and so is each mean of those that somebody still has."""
    method = MeanOfEverySecond()
    train(method, 3, steps)
    assert len(method.means) > 3 * 4
    for step, mean in method.means:
        assert mean == pytest.approx([float(step < 8)] * len(mean))


def test_a_method_knows_all_through_a_step_whether_it_is_one_of_a_round():
    method = MeanOfEverySecond()
    train(method, 2, (4, 1))
    assert {(step, meets) for _, step, meets in method.meets} == {
        *((0, False), (1, True), (2, False), (3, True), (5, True))
    }
    assert [step for rank, step, _ in method.meets if rank == 1] == [0, 1, 3, 5]


@dataclass(frozen=True, kw_only=True)
class MeansTooEarly(MeanOfEverySecond):
    """Asks for a mean in backward, and its rounds are held after the update."""

    name: ClassVar[str] = "means-too-early"

    def start(self, run):
        return MeansTooEarlyWorker(run, self)


class MeansTooEarlyWorker(MeanOfEverySecondWorker):
    def backward_ended(self):
        if self.run.is_round:
            self.run.mean(self.run.buckets[0])


def test_a_mean_before_the_round_is_held_is_refused():
    with pytest.raises(Exception, match="round is held in after_update") as caught:
        train(MeansTooEarly(), 2, (3, 3))
    assert isinstance(caught.value.__cause__, UsageError)


@dataclass(frozen=True, kw_only=True)
class AveragesInEachStep(EveryFourth):
    name: ClassVar[str] = "averages-in-each-step"
    rounds: ClassVar[Rounds] = Rounds()


@pytest.mark.parametrize("method", [AveragesInEachStep(), EveryFourth(), Pairs()])
@pytest.mark.parametrize("more", [0, 1, 6])
def test_who_leaves_after_backward_takes_part_in_the_rest_of_that_step(method, more):
    """With the model that it has; all end with one."""

    def body(rank):
        model = Counting()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = paceline.distribute(model, inner, method=method)
        for step in range(4 + more * rank):
            optimizer.zero_grad()
            model().backward()
            if (rank, step) == (0, 3):
                break
            optimizer.step()
        optimizer.finish()
        return applied(model)

    first, second = simulate(2, body)
    assert first == second
    if not isinstance(method, Pairs):
        assert first == [3.5 + more]


def test_a_step_that_one_worker_leaves_out_is_refused():
    """As a GradScaler does with gradients of its own: the others wait for the update."""

    def body(rank):
        model = Counting()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        method = AveragesInEachStep()
        optimizer = paceline.distribute(model, inner, method=method)
        for step in range(4):
            optimizer.zero_grad()
            model().backward()
            if (rank, step) != (1, 2):
                optimizer.step()

    with pytest.raises(Exception, match="second backward pass"):
        simulate(2, body)


@dataclass(frozen=True, kw_only=True)
class MeansInGroups(BSP):
    """Averages gradients in one group, of all, while backward runs."""

    name: ClassVar[str] = "means-in-groups"
    rounds: ClassVar[Rounds] = Rounds(groups=True)

    def start(self, run):
        return MeansInGroupsWorker(run, self)


class MeansInGroupsWorker(BSPWorker):
    def bucket_ready(self, bucket):
        everybody = self.run.comm.group(range(self.run.comm.size))
        self.pending.append(self.run.mean(bucket, among=everybody))

    def finish(self):
        self.run.participate_until_all_finish()


def test_who_is_out_of_data_goes_through_the_backward_passes_of_its_groups():
    """The other's gradients count whole from then on, and nobody hangs."""
    first, second = train(MeansInGroups(), 2, (40, 6))
    assert first[1] == [40.0]
    assert second[1] == [6.0]


@dataclass(frozen=True, kw_only=True)
class KeepsCompanyAtServers(EveryFourth):
    """Waits for rounds that there are not."""

    name: ClassVar[str] = "keeps-company-at-servers"
    rounds: ClassVar[Rounds] = ON_SERVERS


def test_company_where_there_are_no_rounds_is_refused():
    with pytest.raises(Exception, match="nobody waits") as caught:
        train(KeepsCompanyAtServers(), 2, (1, 1))
    assert isinstance(caught.value.__cause__, UsageError)


@dataclass(frozen=True, kw_only=True)
class AveragesItsOwn(BSP):
    """Averages one tensor of its own, which lies in memory in another order on each worker."""

    name: ClassVar[str] = "averages-its-own"

    def start(self, run):
        return AveragesItsOwnWorker(run, self)


class AveragesItsOwnWorker(BSPWorker):
    def after_update(self):
        rank = self.run.comm.rank
        layout = (torch.channels_last, torch.contiguous_format)[rank]
        own = torch.arange(24.0).view(3, 2, 2, 2) * (1 + rank)
        own = own.to(memory_format=layout)
        self.run.average(own).wait()
        if self.run.active:
            self.own = own


@pytest.mark.parametrize("collective", ["native", "ring"])
def test_tensors_in_an_order_of_their_own_are_averaged(collective):
    def body(rank):
        model = Counting()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(
            model, inner, method=AveragesItsOwn(), collective=collective
        )
        model().backward()
        optimizer.step()
        optimizer.finish()
        return inspect(optimizer).worker.own

    first, other = simulate(2, body)
    assert not first.is_contiguous()
    assert other.is_contiguous()
    mean = torch.arange(24.0).view(3, 2, 2, 2) * 1.5
    assert torch.equal(first, mean)
    assert torch.equal(other, mean)


def test_averages_of_parameters_that_stand_for_larger_ones_take_their_bytes():
    def make():
        model = Counting()
        for parameter in model.parameters():
            stand_in_for(1000 * parameter.numel(), parameter)
        return model

    for sent, *_ in train(EveryFourth(), 2, (4, 4), make):
        assert sum(sent) == 1000 * ELEMENTS


def test_a_rhythm_that_makes_no_sense_is_refused():
    with pytest.raises(UsageError, match="every=-1 steps: expected 1 or more"):
        Rounds(every=-1)


def test_a_compression_that_was_never_used_is_told(capsys):
    """Averages of parameters are sent as they are, unless they have a name."""

    def body(rank):
        model = Counting()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = paceline.distribute(
            model, inner, method=EveryFourth(), compression="bf16"
        )
        for _ in range(4):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        optimizer.finish()

    simulate(2, body)
    assert capsys.readouterr().err.count("compression=bf16 was never used") == 1


@pytest.mark.parametrize(
    ("method", "period"),
    [
        ("bsp", 1),
        ("asp", 1),
        ("local-sgd:sync_every=4", 4),
        ("diloco:sync_every=6", 6),
        ("streaming-diloco:sync_every=6,fragments=3,delay=1", 6),
        ("ds-sync", 2),
    ],
)
def test_figures_are_of_as_many_steps_as_it_takes_to_repeat(method, period):
    def body(rank):
        model = Counting()
        inner = torch.optim.SGD(model.parameters(), lr=1e-3)
        optimizer = paceline.distribute(model, inner, method=method, buckets="ddp")
        for _ in range(6 * period):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        recorder = join_runtime().recorder
        sent = [record.bytes_sent for record in recorder.steps]
        figure = recorder.stats().bytes_sent
        optimizer.finish()
        return recorder.period, figure, sent

    for found, figure, sent in simulate(4, body):
        assert found == period
        assert figure == sum(sent[-period:]) / period > 0
