"""Rounds: which steps send what, who counts, how trainings end, and what a method is told.

Most methods here do not meet in every step.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch

import paceline
from paceline.cluster import Cluster, Rack
from paceline.errors import UsageError
from paceline.interfaces import AGREE_EVERY, ON_SERVERS, Rounds
from paceline.interfaces.buckets import stand_in_for
from paceline.methods.bsp import BSP, BSPWorker
from paceline.runtimes.join import join_runtime
from paceline.testing import Case, inspect
from paceline.testing.method_checks import CHECKS
from paceline.testing.problems import Counting, shared_folder
from tests.conformance.plugins.toys.every_fourth import EveryFourth, EveryFourthWorker
from tests.conformance.plugins.toys.pairs import Pairs
from tests.support import training
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


def begin(method, model=None, **options):
    model = model or Counting()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, paceline.distribute(model, inner, method=method, **options)


def one_step(model, optimizer, finishes=True):
    optimizer.zero_grad()
    model().backward()
    if finishes:
        optimizer.step()


def train(method, steps, make=Counting, **options):
    """Each worker's training, of so many *steps*, at a learning rate of 1."""
    return training.train(
        method,
        options.pop("where", len(steps)),
        steps,
        make=make,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        loss=options.pop("loss", lambda model, rank, step: model()),
        **({"buckets": "optimal"} | options),
    )


def applied(parameters):
    """How many gradients are in each parameter."""
    return sorted({-round(value, 4) for value in parameters.tolist()})


def ends(*arguments, **options):
    """How many gradients are in each worker's parameters after `finish`."""
    return [applied(one.end) for one in train(*arguments, **options)]


def refused(words, method, steps, **options):
    with pytest.raises(Exception, match=words) as caught:
        train(method, steps, **options)
    assert isinstance(caught.value.__cause__, UsageError)


# ---- what is sent ----


@pytest.mark.parametrize("make", [Counting, WithStatistics])
def test_steps_between_two_rounds_send_nothing(make):
    """Neither for buffers, nor for the planner, nor for who still trains."""
    for rank, one in enumerate(train(EveryFourth(), (8, 8), make)):
        buffers = 16 if make is WithStatistics and rank == 0 else 0
        assert one.sent == [0, 0, 0, SUM_OF_TWO + buffers] * 2
        if make is WithStatistics:
            assert one.model.seen.tolist() == [0.0] * 4  # shared in rounds


def test_pairs_send_to_one_other_worker_and_meet_all_the_others_rarely():
    steps = 2 * AGREE_EVERY + 1
    for one in train(Pairs(), (steps,) * 4):
        usual = [n for i, n in enumerate(one.sent, 1) if i % AGREE_EVERY]
        # Each parameter is a sum of its own, of 12, 5 and 1 elements.
        assert all(abs(n - SUM_OF_TWO) <= 8 for n in usual)
        agreements = [n for i, n in enumerate(one.sent, 1) if not i % AGREE_EVERY]
        assert all(0 < n - SUM_OF_TWO <= 64 for n in agreements)


def test_averages_of_parameters_that_stand_for_larger_ones_take_their_bytes():
    def make():
        model = Counting()
        for parameter in model.parameters():
            stand_in_for(1000 * parameter.numel(), parameter)
        return model

    for one in train(EveryFourth(), (4, 4), make):
        assert sum(one.sent) == 1000 * ELEMENTS


@dataclass(frozen=True, kw_only=True)
class WarmsUp(EveryFourth):
    """Averages parameters after each of the first five steps, then after every fourth."""

    name: ClassVar[str] = "warms-up"
    rounds: ClassVar[Rounds] = Rounds(every=4, each_until=5)


def test_rounds_in_each_of_the_first_steps_and_rarer_ones_from_there():
    for one in train(WarmsUp(), (13, 13)):
        assert one.sent == [SUM_OF_TWO] * 5 + [0, 0, 0, SUM_OF_TWO] * 2


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
    for one in train(Compressed(), (4, 4), compression=code):
        flag = 0 if code == "none" else 4
        assert abs(one.sent[-1] - SUM_OF_TWO // part - flag) <= 8
        assert one.model.scalar.item() == -4.0


def test_a_compression_that_was_never_used_is_told(capsys):
    """Averages of parameters are sent as they are, unless they have a name."""
    train(EveryFourth(), (4, 4), compression="bf16")
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
        model, optimizer = begin(method, buckets="ddp")
        for _ in range(6 * period):
            one_step(model, optimizer)
        recorder = join_runtime().recorder
        sent = [record.bytes_sent for record in recorder.steps]
        figure = recorder.stats().bytes_sent
        optimizer.finish()
        return recorder.period, figure, sent

    for found, figure, sent in simulate(4, body):
        assert found == period
        assert figure == sum(sent[-period:]) / period > 0


# ---- who counts, and how trainings end ----


def test_who_is_out_of_data_counts_once_more_with_what_it_has_done_since():
    """A round after step 4; then one with 8 and 5 steps; the rest is one worker's own."""
    first, second = train(EveryFourth(), (10, 5))
    assert applied(first.end) == applied(second.end) == [6.5 + 2]
    assert [applied(one.steps[-1]) for one in (first, second)] == [[8.5], [5.0]]


def test_who_has_done_nothing_since_the_last_round_does_not_count():
    assert ends(EveryFourth(), (8, 4, 4)) == [[8.0]] * 3


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


TWO = [(1, 1), (4, 4), (9, 4), (3, 9), (0, 6)]
FOUR = [(5, 5, 5, 5), (3, 40, 20, 7), (0, 0, 35, 1)]
ROUNDS = (EveryFourth(), WarmsUp(), AfterEach(), Later())


@pytest.mark.parametrize(
    ("method", "steps"),
    [
        *((method, steps) for method in ROUNDS for steps in TWO),
        *((method, steps) for method in (Pairs(), Groups()) for steps in FOUR),
    ],
)
def test_all_end_with_one_model(method, steps):
    first, *others = ends(method, steps)
    assert all(end == first for end in others)
    assert min(steps) <= first[0] <= max(steps)


class Counted(WithStatistics):
    """Its buffer counts forward passes, each worker in its own way."""

    def forward(self):
        self.seen += 1 + paceline.rank()
        return super().forward()


@pytest.mark.parametrize("method", [EveryFourth(), Pairs()])
@pytest.mark.parametrize("steps", [(10, 5), (5, 10), (8, 8), (0, 3)])
def test_all_end_with_the_same_buffers(method, steps):
    """Also with those that the last round has sent."""
    first, second = (one.model.seen.tolist() for one in train(method, steps, Counted))
    assert first == second


def test_who_trains_less_is_in_the_last_round_of_steps_that_are_all_rounds():
    """Means of 1, 2 and 3 steps; then one worker's own."""
    assert ends(AfterEach(), (5, 3)) == [[5.0]] * 2


def test_a_round_with_a_lag_waits_for_nobody():
    """A worker of half the speed has nothing to do with when the other's steps end; where
    rounds are roll calls it has."""
    speeds = Cluster((Rack(workers=2, link=1e9, latency=1e-6, speed=(1.0, 0.5)),))

    def script(rank, step, model, optimizer):
        paceline.pace(1.0)
        one_step(model, optimizer)

    later, meets = (
        train(method, (3, 3), where=speeds, script=script)[0].seconds
        for method in (Later(), WarmsUp())
    )
    assert later == pytest.approx(4.0, abs=0.01)  # of the round of step 2
    assert meets == pytest.approx(6.0, abs=0.01)


@dataclass(frozen=True, kw_only=True)
class AveragesInEachStep(EveryFourth):
    name: ClassVar[str] = "averages-in-each-step"
    rounds: ClassVar[Rounds] = Rounds()


@pytest.mark.parametrize("method", [AveragesInEachStep(), EveryFourth(), Pairs()])
@pytest.mark.parametrize("more", [0, 1, 6])
def test_who_leaves_after_backward_takes_part_in_the_rest_of_that_step(method, more):
    """With the model that it has; all end with one."""

    def body(rank):
        model, optimizer = begin(method)
        for step in range(4 + more * rank):
            leaves = (rank, step) == (0, 3)
            one_step(model, optimizer, not leaves)
            if leaves:
                break
        optimizer.finish()
        return applied(training.flat(model))

    first, second = simulate(2, body)
    assert first == second
    if not isinstance(method, Pairs):
        assert first == [3.5 + more]


def test_a_step_that_one_worker_leaves_out_is_refused():
    """As a GradScaler does with gradients of its own: the others wait for the update."""

    def script(rank, step, model, optimizer):
        one_step(model, optimizer, (rank, step) != (1, 2))

    with pytest.raises(Exception, match="second backward pass"):
        train(AveragesInEachStep(), (4, 4), script=script)


@pytest.mark.parametrize(
    "law", ["uneven_data_ends", "leaving_after_backward_ends_with_one_model"]
)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_laws_of_ends_hold_for_gradients_that_are_averaged_in_groups(law, workers):
    simulate(workers, lambda rank: CHECKS[law](Case(method=Groups()), "ddp"))


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
    found = [applied(one.steps[-1]) for one in train(MeansInGroups(), (40, 6))]
    assert found == [[40.0], [6.0]]


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
    train(method, steps)
    assert len(method.means) > 3 * 4
    for step, mean in method.means:
        assert mean == pytest.approx([float(step < 8)] * len(mean))


def test_a_method_knows_all_through_a_step_whether_it_is_one_of_a_round():
    method = MeanOfEverySecond()
    train(method, (4, 1))
    assert {(step, meets) for _, step, meets in method.meets} == {
        *((0, False), (1, True), (2, False), (3, True), (5, True))
    }
    assert [step for rank, step, _ in method.meets if rank == 1] == [0, 1, 3, 5]


# ---- what is refused ----


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


class MeansTooEarlyWorker(MeanOfEverySecondWorker):
    def backward_ended(self):
        if self.run.is_round:
            self.run.mean(self.run.buckets[0])


@dataclass(frozen=True, kw_only=True)
class MeansTooEarly(MeanOfEverySecond):
    """Asks for a mean in backward, and its rounds are held after the update."""

    name: ClassVar[str] = "means-too-early"

    def start(self, run):
        return MeansTooEarlyWorker(run, self)


@dataclass(frozen=True, kw_only=True)
class KeepsCompanyAtServers(EveryFourth):
    """Waits for rounds that there are not."""

    name: ClassVar[str] = "keeps-company-at-servers"
    rounds: ClassVar[Rounds] = ON_SERVERS


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (WaitsTooEarly(), "before the last bucket"),
        (MeansTooEarly(), "round is held in after_update"),
        (KeepsCompanyAtServers(), "none waits"),
    ],
)
def test_what_no_round_is_for_is_refused(method, words):
    refused(words, method, (3, 3), buckets="wfbp")


def test_a_rhythm_that_makes_no_sense_is_refused():
    with pytest.raises(UsageError, match="every=-1 steps: expected 1 or more"):
        Rounds(every=-1)


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
    own = {}

    def watch(rank, step, model, optimizer):
        own[rank] = model[0].running_mean.tolist()

    train(
        Anchored(),
        (4, 4),
        lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(2)),
        loss=lambda model, rank, step: model(torch.randn(3, 2) + rank).sum(),
        watch=watch,
    )
    assert own[0] != own[1]


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
    first, other = (
        inspect(one.optimizer).worker.own
        for one in train(AveragesItsOwn(), (1, 1), collective=collective)
    )
    assert not first.is_contiguous()
    assert other.is_contiguous()
    mean = torch.arange(24.0).view(3, 2, 2, 2) * 1.5
    assert torch.equal(first, mean)
    assert torch.equal(other, mean)


# ---- gradients within groups ----


class TwoHeads(torch.nn.Module):
    """Each rank uses one of two parameters."""

    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ParameterList(torch.zeros(3) for _ in range(2))

    def forward(self):
        return self.heads[paceline.rank() % 2].sum()


def test_a_tensor_that_only_the_partner_used_has_a_gradient_in_the_group():
    gradients = {}

    def watch(rank, step, model, optimizer):
        gradients[rank] = [head.grad.tolist() for head in model.heads]

    train(Groups(), (1, 1), TwoHeads, watch=watch)
    assert gradients == dict.fromkeys((0, 1), [[0.5] * 3] * 2)


def test_samples_weigh_in_a_group():
    """Worker 1 has a third of the samples of worker 0."""
    data = torch.utils.data.TensorDataset(torch.arange(8.0))

    def body(rank):
        sampler = paceline.Sampler(data, 8, shuffle=False, shares=[3, 1])
        model, optimizer = begin(
            Groups(), torch.nn.Linear(1, 1, bias=False), sampler=sampler
        )
        (batch,) = sampler
        model(data.tensors[0][list(batch)].unsqueeze(1)).mean().backward()
        gradient = model.weight.grad.item()
        optimizer.step()
        optimizer.finish()
        return gradient

    assert simulate(2, body) == pytest.approx([3.5, 3.5])
