"""The kit itself: methods that break one law each must be caught."""

import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from paceline.errors import CollectiveMismatchError, UsageError, WorkerFailedError
from paceline.interfaces import EVERY_STEP, Rounds
from paceline.methods.bsp import BSP, BSPWorker
from paceline.methods.osp import OSP
from paceline.runtimes.simulated import Simulation
from paceline.testing import CASES, CHECKS, Case, CheckFailedError, check_method
from paceline.testing.cases import mean_of_gradients
from paceline.testing.method_checks import checks_of


def bsp_with(worker):
    """Bsp, with another worker, which breaks a law."""

    def start(self, run):
        return worker(run, self)

    return type(worker.__name__, (BSP,), {"start": start})()


@dataclass(frozen=True, kw_only=True)
class NeverAgrees:
    """Sends nothing: every worker trains alone."""

    name: ClassVar[str] = "never-agrees"
    rounds: ClassVar[Rounds] = EVERY_STEP
    updates_on: ClassVar[str] = "worker"
    visible_gradient: ClassVar[str] = "local"
    clips: ClassVar[str] = "own"

    def start(self, run):
        return None


class SumsInsteadOfMean(BSPWorker):
    """Sums gradients; right for one worker only."""

    def backward_ended(self):
        super().backward_ended()
        for bucket in self.run.buckets:
            bucket.buffer.mul_(self.run.comm.size)


class LeavesTheOthersAlone(BSPWorker):
    """A worker out of data just goes."""

    def finish(self):
        pass


class LeavesWithAStepDue(BSPWorker):
    """Whoever has left a step short of the others keeps it to himself."""

    def finish(self):
        self.run.participate_until_all_finish()


class EvaluationLeaks(BSPWorker):
    """What undoes a consolidation leaves the model changed."""

    def consolidate(self):
        def undo():
            with torch.no_grad():
                self.run.buckets[0].parameters[0].add_(0.01)

        return undo


class AlsoScalesAlone(BSPWorker):
    """Changes the gradient of a single worker."""

    def backward_ended(self):
        super().backward_ended()
        for bucket in self.run.buckets:
            bucket.buffer.mul_(1.0 + 1e-6)


@dataclass(frozen=True, kw_only=True)
class ForgetsTheLimit(BSP):
    """Clips neither the mean nor anybody's own gradient."""

    clips: ClassVar[str] = "neither"


class LosesTheLast(BSPWorker):
    """Each step uses the gradients of the one before; the last ones are never used."""

    def __init__(self, run, method):
        super().__init__(run, method)
        self.last = {}

    def backward_ended(self):
        super().backward_ended()
        for bucket in self.run.buckets:
            now = bucket.buffer.clone()
            bucket.buffer.copy_(self.last.get(bucket.index, torch.zeros(())))
            self.last[bucket.index] = now


class LosesWhereOneLooks(BSPWorker):
    """After a look at its result a worker leaves out its next gradient."""

    looked = False

    def consolidate(self):
        self.looked = True
        return lambda: None

    def bucket_ready(self, bucket):
        if self.looked:
            bucket.buffer.zero_()
        super().bucket_ready(bucket)

    def after_update(self):
        self.looked = False


class ForgetsStrides(BSPWorker):
    """Gradients are contiguous, whatever parameters are."""

    def backward_ended(self):
        super().backward_ended()
        for bucket in self.run.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view.contiguous()


@dataclass(frozen=True, kw_only=True)
class KeepsTheFirstRate(OSP):
    """Steps as its first step was to be done."""

    collective: str = "native"

    def start(self, run):
        worker = super().start(run)
        first = worker.updater.hyperparameters()
        worker.updater.hyperparameters = lambda: first
        return worker


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "law"),
    [
        (KeepsTheFirstRate(), "the learning rates of 6 steps add up to 4.5"),
        (bsp_with(ForgetsStrides), "strides change the result"),
        (NeverAgrees(), "from the optimum"),
        (bsp_with(SumsInsteadOfMean), "from the optimum"),
        (bsp_with(LeavesWithAStepDue), "workers hold different models after finish()"),
        (bsp_with(EvaluationLeaks), "evaluations between steps change the result"),
        (bsp_with(AlsoScalesAlone), "a single worker differs from its reference"),
        (
            ForgetsTheLimit(),
            "5 gradients clipped to norm 0.5 have changed parameters by 21.2",
        ),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_broken_law_is_caught(method, law):
    workers = (1,) if "single worker" in law else (3,)
    with pytest.raises(WorkerFailedError) as caught:
        check_method(Case(method=method), workers)
    assert isinstance(caught.value.__cause__, CheckFailedError)
    assert law in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("method", "law"),
    [
        (
            bsp_with(LosesTheLast),
            "the gradients of 2.000 to 2.000 steps",
        ),
        (
            bsp_with(LosesWhereOneLooks),
            "with evaluations the model has the gradients of 3.667 to",
        ),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_gradient_that_is_lost_is_missed_where_no_bit_can_be_promised(method, law):
    case = Case(method=method, timing_free=False, learning_rate=0.3, steps=150)
    with pytest.raises(WorkerFailedError) as caught:
        check_method(case, workers=(3,))
    assert isinstance(caught.value.__cause__, CheckFailedError)
    assert re.search(law, str(caught.value.__cause__))


# ---- laws of references, scripts, options and memory ----


class AddsAThousandth(BSPWorker):
    """A mean of several gradients is a thousandth too large."""

    def backward_ended(self):
        super().backward_ended()
        for bucket in self.run.buckets:
            bucket.buffer.mul_(1.001 if self.run.comm.size > 1 else 1.0)


class SendsOnceAStep(BSPWorker):
    """What a second backward pass adds before a step stays with its worker."""

    def __init__(self, run, method):
        super().__init__(run, method)
        self.sent = set()

    def bucket_ready(self, bucket):
        if bucket.index not in self.sent:
            self.sent.add(bucket.index)
            super().bucket_ready(bucket)

    def after_update(self):
        self.sent.clear()


class KeepsAMasterCopy(BSPWorker):
    """Adds each step's change to a copy of its own, from which the model is written: what is loaded
    into the model is lost."""

    def __init__(self, run, method):
        super().__init__(run, method)
        self.copies = [p.detach().clone() for p in run.parameters]

    def backward_ended(self):
        super().backward_ended()
        self.before = [p.detach().clone() for p in self.run.parameters]

    def after_update(self):
        with torch.no_grad():
            for parameter, copy, before in zip(
                self.run.parameters, self.copies, self.before, strict=True
            ):
                parameter.copy_(copy.add_(parameter - before))


class KeepsEachGradient(BSPWorker):
    """Notes what it has sent, for ever."""

    def __init__(self, run, method):
        super().__init__(run, method)
        self.noted = []

    def bucket_ready(self, bucket):
        self.noted.append(bucket.buffer.clone())
        super().bucket_ready(bucket)


class HidesInfinities(BSPWorker):
    """Worker 0 sees none, and steps where the others leave out their updates."""

    def backward_ended(self):
        super().backward_ended()
        for bucket in self.run.buckets if self.run.comm.rank == 0 else ():
            bucket.buffer.nan_to_num_(posinf=0.0)


class AveragesOldMemory:
    """Averages parameters where they were when training began."""

    def __init__(self, run):
        self.run, self.memory = run, [p.data for p in run.parameters]

    def after_update(self):
        for values in self.memory:
            self.run.comm.all_reduce(values, "sum").wait()
            values.div_(self.run.comm.size)

    def finish(self):
        self.run.participate_until_all_finish()


@dataclass(frozen=True, kw_only=True)
class RemembersMemory(NeverAgrees):
    """Averages models in each step, as long as they stay where they are."""

    visible_gradient: ClassVar[str] = "local"

    def start(self, run):
        return AveragesOldMemory(run)


@dataclass(frozen=True, kw_only=True)
class TakesOneGroupForAll(OSP):
    """Steps all parameters with the last group's hyperparameters."""

    collective: str = "native"

    def start(self, run):
        worker = super().start(run)
        of_all = worker.updater.hyperparameters

        def of_one():
            return [of_all()[-1]] * len(of_all())

        worker.updater.hyperparameters = of_one
        return worker


@dataclass(frozen=True, kw_only=True)
class ForgetsItsBuffers(BSP):
    """Says that it averages buffers, and does not."""

    averages_buffers: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class TakesAnyPeriod(BSP):
    """Has an option without a range."""

    period: int = 4


@pytest.mark.parametrize(
    ("method", "law", "words"),
    [
        (
            bsp_with(AddsAThousandth),
            "equals_its_reference",
            "after step 1 parameters differ from the reference, by",
        ),
        (
            TakesOneGroupForAll(),
            "workers_with_one_batch_train_as_one",
            "the model differs from plain torch's",
        ),
        (
            bsp_with(HidesInfinities),
            "a_scaler_leaves_out_infinite_gradients",
            "workers hold different models",
        ),
        (
            RemembersMemory(),
            "parameters_may_get_other_memory",
            "new memory for parameters changes the result",
        ),
        (
            bsp_with(SendsOnceAStep),
            "script_idioms",
            "two_backward_passes: the applied gradients differ by",
        ),
        (
            ForgetsItsBuffers(),
            "buffers_follow_the_policy",
            "buffers differ between workers",
        ),
        (bsp_with(KeepsAMasterCopy), "loads_take_effect", "two steps after a load"),
        (TakesAnyPeriod(), "options_are_validated", "period=-999"),
        (bsp_with(KeepsEachGradient), "memory_does_not_grow", "torch.Tensor"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_broken_law_of_scripts_is_caught(method, law, words):
    case = Case(method=method, equals=mean_of_gradients)
    with pytest.raises(WorkerFailedError) as caught:
        Simulation(case.cluster(2)).run(lambda rank: CHECKS[law](case, "ddp"))
    assert isinstance(caught.value.__cause__, CheckFailedError)
    assert words in str(caught.value.__cause__)


def test_a_check_is_run_only_where_its_law_says_something():
    ran = set()
    timed = Case(method="asp", timing_free=False)

    def names(case, rule, workers):
        return {check.name for check in checks_of(case, rule, workers)}

    for case, rule in [(CASES[0], "ddp"), (CASES[0], "optimal"), (timed, "ddp")]:
        ran |= names(case, rule, 1) | names(case, rule, 2)
        assert "one_worker_is_the_reference" not in names(case, rule, 2)
        assert {"a_restart_loses_nothing", "a_checkpoint_loses_nothing"} < names(
            case, rule, 2
        )
    assert ran == set(CHECKS)
    bits = {"state_survives_a_restart", "a_checkpoint_is_a_restart"}
    assert bits < names(CASES[0], "ddp", 3)
    assert bits.isdisjoint(names(CASES[0], "optimal", 3) | names(timed, "ddp", 3))


def test_a_worker_that_leaves_is_an_error_and_not_a_hang():
    with pytest.raises(CollectiveMismatchError, match="worker 0 called all_gather"):
        check_method(Case(method=bsp_with(LeavesTheOthersAlone)), workers=(2,))


@dataclass(frozen=True, kw_only=True)
class ReadsTheNetwork(BSP):
    """Wants two racks, or one."""

    wanted: int = 1

    def __post_init__(self):
        if self.wanted < 1:
            raise UsageError(f"wanted={self.wanted}: expected 1 or 2")

    def start(self, run):
        counts = [
            run.comm.placement.racks.count(r)
            for r in sorted(set(run.comm.placement.racks))
        ]
        assert [rack.workers for rack in run.cluster.racks] == counts
        if counts != {(1, 3): [3], (2, 4): [2, 2]}.get(
            (self.wanted, run.comm.size), [1]
        ):
            raise CheckFailedError(f"{counts} workers in racks")
        return super().start(run)


@pytest.mark.slow
def test_a_case_that_asks_for_racks_is_tried_in_two():
    check_method(Case(method=ReadsTheNetwork()), workers=(3,))
    check_method(Case(method=ReadsTheNetwork(wanted=2), racks=True), workers=(1, 4))
    with pytest.raises(WorkerFailedError, match=r"\[3\] workers in racks"):
        check_method(Case(method=ReadsTheNetwork(wanted=2)), workers=(3,))
