"""The server's laws, and disciplines and networks that break one each."""

import pytest
import torch

from paceline import methods
from paceline.errors import UsageError
from paceline.methods.asp import AsynchronousUpdates
from paceline.methods.backup import BackupWorkers
from paceline.methods.osp import OSP
from paceline.methods.osp.measurement import WorkerReport, encode_report
from paceline.methods.osp.parameter_server import (
    TwoStageDiscipline,
    decode_mask,
    encode_mask,
)
from paceline.methods.ssp import BoundedStaleness, RankOrderedRounds
from paceline.parameter_server.state_machine.pushes import PushOrder
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.parameter_server.state_machine.store import Store
from paceline.spec import parse
from paceline.testing import CheckFailedError
from paceline.testing.server_checks import check_server_method
from paceline.testing.server_trial import (
    ANY,
    BUCKETS,
    UNITS,
    ServerLaws,
    ServerTrial,
    Stages,
)
from tests.support.profiles import examples


def report_of_a_step(choose):
    """What a worker under osp may have measured: each step another network."""
    return encode_report(
        WorkerReport(
            ready=[0.5, 1.0][: choose.choice([0, BUCKETS, BUCKETS, BUCKETS])],
            end=1.0,
            start_up=0.0,
            per_byte=choose.choice([0.0, 1e-4, 1e-3, 1e-2]),
            bytes=[choose.randrange(5000) for _ in range(BUCKETS)],
            part=choose.choice([0.0, 0.5, 1.0, 1.0]),
            whole=choose.choice([0.0, 1.0, 1.0, 2.0]),
        )
    )


@pytest.fixture(autouse=True)
def every_step(monkeypatch):
    """osp decides in every step what is deferred."""
    monkeypatch.setattr(OSP, "interval", 1)


ALL_LATE = "osp:defer=most,budget=constant,most=1"
TWO_STAGES = ServerLaws(bound=0, stages=Stages(decode_mask, report_of_a_step))
LAWS = {
    "asp": ANY,
    "ssp:staleness=0": ServerLaws(bound=0),
    "ssp:staleness=1": ServerLaws(bound=1),
    "ssp:staleness=3": ServerLaws(bound=3),
    "dssp:staleness=1,extra=1": ServerLaws(bound=2),
    "dssp:staleness=0,extra=4": ServerLaws(bound=4),
    "r2sp:warmup_steps=2": ANY,
    "sync-switch:bsp_steps=0": ANY,
    "sync-switch:bsp_steps=2": ANY,
    "sync-switch:bsp_steps=100": ServerLaws(bound=0),
    "backup": ServerLaws(bound=0),
    "backup:wait_for=2": ServerLaws(drops=True),
    "gssp:staleness=0,members={members}": ServerLaws(bound=0),
    "gssp:staleness=1,members={members}": ServerLaws(bound=1),
    "gssp:staleness=3,members={members}": ServerLaws(bound=3),
    "osp:defer=nothing": TWO_STAGES,
    "osp:budget=constant,most=1": TWO_STAGES,
    "osp:defer=most,budget=constant,most=0.6,order=importance": TWO_STAGES,
    ALL_LATE: TWO_STAGES,
}
"""By spec, what a method promises; gssp with one group of all workers."""


def check(spec, workers, seeds):
    members = f"0-{workers - 1}" if workers > 1 else "0"

    def make():
        method, _ = methods.make(parse(spec.format(members=members)), set())
        return method.server(workers)

    check_server_method(make, (workers,), LAWS[spec], seeds)


@pytest.mark.parametrize(
    ("spec", "workers"),
    [
        (spec, workers)
        for spec in LAWS
        for workers in (1, 2, 3)
        if "wait_for" not in spec or workers > 2
    ],
)
def test_a_method_keeps_its_servers_laws(spec, workers):
    check(spec, workers, range(2 * workers))


DEFER_LITTLE = ("osp:defer=nothing", "osp:budget=constant,most=1")


@pytest.mark.slow
@pytest.mark.parametrize("spec", [spec for spec in LAWS if spec not in DEFER_LITTLE])
def test_a_method_keeps_its_servers_laws_at_length(spec):
    check(spec, 4, range(examples(30)))
    if "wait_for" not in spec:
        check(spec, 2, range(examples(12)))


@pytest.mark.parametrize(
    "spec", ["ssp:staleness=1", "gssp:staleness=1,members={members}"]
)
def test_who_comes_back_ahead_of_the_bound_waits(spec):
    """A worker that has done 5 steps died while it waited for one that has done 3. It came back
    with its step 5, and was let start it at once."""
    check(spec, 3, [7])


# ---- mutants: each law catches somebody ----


class AppliesAgain(AsynchronousUpdates):
    """Does not look whether a gradient is in the parameters already."""

    def on_push(self, shard, push):
        super().on_push(shard, push._replace(applied=False))


class Forgets(AsynchronousUpdates):
    """Answers one push, and does not apply it."""

    def on_push(self, shard, push):
        if (push.worker, push.step, push.bucket) == (1, 3, 1):
            shard.reply(push)
        else:
            super().on_push(shard, push)


class CompletesTooMuch(AsynchronousUpdates):
    """Says in snapshots that all steps have ended that anybody has begun."""

    def completed_step(self, shard):
        return shard.next_unstarted_step()


class WritesTornSnapshots(RankOrderedRounds):
    """Has snapshots also while a step has ended for some buckets only."""

    def completed_step(self, shard):
        return max(self._ended[bucket] for bucket in shard.buckets)


class ForgetsTheDead(RankOrderedRounds):
    """Drops the gradients of workers that are lost."""

    def on_change(self, shard):
        for (step, _), pushes in self._rounds.items():
            here = shard.active_workers(step)
            pushes[:] = [push for push in pushes if push.worker in here]
        super().on_change(shard)


class AnswersTooEarly(BoundedStaleness):
    """Looks at the step that was pushed, and not at the one that its answer starts."""

    def __init__(self):
        super().__init__(1)

    def _release(self, shard):
        waiting, self._waiting = self._waiting, []
        for push in waiting:
            if push.step <= shard.slowest_step() + self._staleness:
                shard.reply(push)
            else:
                self._waiting.append(push)


class AdmitsTooEarly(BoundedStaleness):
    """Lets who comes back go on at once."""

    def __init__(self):
        super().__init__(1)

    def may_pull(self, shard, step, bucket):
        return True


class AdmitsTooFar(AsynchronousUpdates):
    """Lets who comes back leave out more steps than the others have done."""

    def first_step(self, shard):
        return shard.next_unstarted_step() + 1


class AppliesAfterItsReply(BoundedStaleness):
    """Answers those that wait with parameters that lack the gradient that they have waited for."""

    def __init__(self):
        super().__init__(0)

    def on_push(self, shard, push):
        self._waiting.append(push)
        self._release(shard)
        shard.apply(push)


class NeverAnswers(AsynchronousUpdates):
    """Applies one push, and does not answer it."""

    def on_push(self, shard, push):
        if (push.worker, push.step) == (1, 3):
            shard.apply(push)
        else:
            super().on_push(shard, push)


class WaitsForTheDead(RankOrderedRounds):
    """Does not look again when a worker has left, or is lost."""

    def on_change(self, shard):
        pass


class CountsWhatItRefuses(AsynchronousUpdates):
    """Takes no reports, and is changed by each."""

    reports = 0

    def decode_report(self, shard, report):
        self.reports += 1
        raise UsageError("no reports")

    def notice(self, bucket):
        return b""


def rounds_that_drop():
    return BackupWorkers(2, is_partial=True)


class Staged(TwoStageDiscipline):
    """Defers other units in each step."""

    def __init__(self):
        method = OSP(defer="most", budget="constant", most=0.6, order="importance")
        super().__init__(method)


class IgnoresOrder(Staged):
    """Applies a unit's update before the one of the step before."""

    def _may_end(self, shard, key):
        here = {push.worker for push in self.rounds[key]}
        return here.issuperset(shard.active_workers(key[0]))


class ForgetsWhatIsLate(Staged):
    """Answers what was deferred, and does not apply it."""

    def on_push(self, shard, push):
        if push.late and push.step == 3:
            push = push._replace(gradient=torch.zeros_like(push.gradient))
        super().on_push(shard, push)


class WaitsForNoSecondStage(Staged):
    """Has snapshots also while what was deferred is under way."""

    def completed_step(self, shard):
        return max(v for bucket in shard.buckets for v in self._of(shard, bucket))


class LetsInTooEarly(Staged):
    """Does not wait for what was deferred before the step of who comes back."""

    def may_pull(self, shard, step, bucket):
        return True


class WaitsForTheDeadsUnits(Staged):
    """Does not go on without what all who were to send it have deferred."""

    def _skip(self, shard):
        return False


class ForgetsTheDeadsUnits(Staged):
    """Drops what workers that are lost have sent late."""

    def on_change(self, shard):
        for (step, late, _), pushes in self.rounds.items():
            here = shard.active_workers(step)
            pushes[:] = [p for p in pushes if p.worker in here or not late] or pushes
        super().on_change(shard)


class SaysNoMaskAtFirst(Staged):
    """Does not tell who pulls what its first step defers."""

    def may_pull(self, shard, step, bucket):
        may = super().may_pull(shard, step, bucket)
        self.is_silent = may
        return may

    def on_push(self, shard, push):
        self.is_silent = False
        super().on_push(shard, push)

    def notice(self, bucket):
        return b"" if getattr(self, "is_silent", False) else super().notice(bucket)


class SaysAnotherMask(Staged):
    """Tells each bucket's workers in turn that they defer something."""

    def notice(self, bucket):
        self.said = getattr(self, "said", 0) + 1
        return encode_mask([self.said % UNITS])


class SkipsSteps(AsynchronousUpdates):
    """Lets a worker leave out a step, without having said that it may."""

    def on_push(self, shard, push):
        shard.apply(push)
        if push.step == 2 and shard.clock(push.worker) > 2:
            shard.skip_to(push.worker, 4)
        shard.reply(push)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "laws", "law", "words"),
    [
        (AppliesAgain, ANY, "faults_of_all_kinds", r"2\.000 times"),
        (Forgets, ANY, "without_faults", r"0\.000 times"),
        (CompletesTooMuch, ANY, "faults_of_all_kinds", r"0\.000 times"),
        (WritesTornSnapshots, ANY, "faults_of_all_kinds", r"0\.000 times"),
        (ForgetsTheDead, ANY, "workers_that_die", r"0\.000 times"),
        (rounds_that_drop, ANY, "without_faults", "is to skip|0.000 times"),
        (SkipsSteps, ANY, "without_faults", "is to skip steps"),
        (AnswersTooEarly, ServerLaws(1), "without_faults", "expected at most 1 ahead"),
        (AdmitsTooEarly, ServerLaws(1), "faults_of_all_kinds", "at most 1 ahead"),
        (AsynchronousUpdates, ServerLaws(2), "without_faults", "2 ahead|3 without"),
        (
            AppliesAfterItsReply,
            ServerLaws(0),
            "without_faults",
            "starts step 1 without",
        ),
        (AdmitsTooFar, ANY, "faults_of_all_kinds", "is to begin with step"),
        (NeverAnswers, ANY, "without_faults", "waits forever"),
        (WaitsForTheDead, ANY, "without_faults", "waits forever"),
        (
            CountsWhatItRefuses,
            ANY,
            "refused_changes_nothing",
            "refused requests .*Push",
        ),
        (IgnoresOrder, TWO_STAGES, "without_faults", "starts step . with"),
        (ForgetsWhatIsLate, TWO_STAGES, "without_faults", "without|0.000 times"),
        (WaitsForNoSecondStage, TWO_STAGES, "all_kinds", "without|0.000 times"),
        (LetsInTooEarly, TWO_STAGES, "all_kinds", "starts step . without"),
        (WaitsForTheDeadsUnits, TWO_STAGES, "all_kinds", "waits forever"),
        (ForgetsTheDeadsUnits, TWO_STAGES, "all_kinds", "without|0.000 times"),
        (SaysNoMaskAtFirst, TWO_STAGES, "all_kinds", "must be equal|refuses"),
        (SaysAnotherMask, TWO_STAGES, "without_faults", "must be equal"),
    ],
)
def test_a_discipline_that_breaks_a_law_is_caught(mutant, laws, law, words):
    with pytest.raises(CheckFailedError, match=words) as caught:
        check_server_method(mutant, (1, 3) if laws.stages else (3,), laws)
    [note] = caught.value.__notes__
    assert law in note


# ---- networks and servers that break one ----


def hears_of_no_loss(server, worker, incarnation, now):
    return []


def has_applied_nothing(store, worker, step, bucket):
    return False


def parameters_themselves(store, bucket, units=None):
    return store.flats[bucket]


def delivers_twice(trial, worker, deliver=ServerTrial.deliver_request):
    worker.requests.appendleft(worker.requests[0])
    deliver(trial, worker)
    deliver(trial, worker)


def loses_a_request(trial, worker, deliver=ServerTrial.deliver_request):
    if len(worker.requests) > 1 and worker.step == 3:
        worker.requests.pop()
    deliver(trial, worker)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "name", "mutant", "spec", "law", "words"),
    [
        *[
            (ParameterServer, "on_worker_lost", hears_of_no_loss, spec, *what)
            for spec in ("ssp:staleness=0", "ssp:staleness=1", "backup", ALL_LATE)
            for what in [("workers_that_die", "waits forever")]
        ],
        (Store, "has_applied", has_applied_nothing, "asp", "all_kinds", "2.000 times"),
        (
            Store,
            "parameters",
            parameters_themselves,
            "asp",
            "without_faults",
            "has changed the payload",
        ),
        *(
            (PushOrder, name, lambda *_: None, ALL_LATE, "refused", "expected Rejected")
            for name in ("_check_is_left", "check_late_units")
        ),
        (ServerTrial, "deliver_request", delivers_twice, "asp", "", "refuses"),
        (ServerTrial, "deliver_request", loses_a_request, "asp", "", "waits forever"),
    ],
)
def test_a_network_or_server_that_breaks_a_law_is_caught(
    where, name, mutant, spec, law, words, monkeypatch
):
    monkeypatch.setattr(where, name, mutant)
    with pytest.raises(CheckFailedError, match=words) as caught:
        check(spec, 3, range(12))
    [note] = caught.value.__notes__
    assert law in note
