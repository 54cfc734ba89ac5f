"""Which messages are planned for the time after backward, tried and adopted: steps that are
driven by hand, in virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import paceline
from paceline.bucketing import tuner as tuner_module
from paceline.bucketing.message_plan import MessagePlan, messages_of, period
from paceline.bucketing.message_search import plan_messages
from paceline.bucketing.rules import plan_buckets
from paceline.bucketing.timeline import finish_time
from paceline.bucketing.tuner import (
    PROFILED_STEPS,
    TRIAL_STEPS,
    BucketTuner,
    Gradients,
    Mode,
    from_numbers,
    to_numbers,
)
from paceline.cluster import Workload
from paceline.collectives.communicator import Communicator
from paceline.interfaces import Message, current_runtime
from paceline.testing import inspect
from tests.bucketing.test_message_plan import random_cases
from tests.bucketing.tunings import (
    UNEVEN,
    Watched,
    ended,
    groups_of,
    on,
    ring_cost,
    sgd,
    train_stand_in,
)
from tests.support.simulations import cluster, rack
from tests.support.tables import crossed

CPU = torch.device("cpu")
SETTLED = 1 + PROFILED_STEPS + 2 * 2 * TRIAL_STEPS
"""Backward passes until both trials are over: against DDP's rule, then past backward."""

ORDER = UNEVEN.order
READY, SIZES = UNEVEN.ready_seconds, UNEVEN.gradient_bytes
USES = [sum(UNEVEN.forward[:index]) for index in ORDER]
"""When tensors are used, in ready order."""


@dataclass
class Steps:
    """Steps of one rank as a method takes them that waits for each bucket where it is used,
    or, where nothing is planned for that, where backward ends."""

    tuner: BucketTuner
    comm: Communicator
    workload: Workload = UNEVEN
    touches_all: bool = False
    """Between a step and the next one's forward pass, as averages of weights do."""
    tells_uses: bool = True
    said: list[str] = field(default_factory=list)
    groups: list[list[list[int]]] = field(default_factory=list)
    sending: list[Sequence[Message] | None] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    _late: dict[int, list[Any]] = field(default_factory=dict)

    def _wait(self, index: int) -> None:
        for pending in self._late.pop(index, []):
            pending.wait()

    def take(self) -> None:
        runtime, tuner, load = current_runtime(), self.tuner, self.workload
        assert runtime is not None
        if self.touches_all:
            for index in range(len(load.sizes)):
                self._wait(index)
        tuner.timer.step_begins()
        for index, seconds in enumerate(load.forward):
            if self.tells_uses:
                tuner.timer.used(index)
            self._wait(index)
            paceline.pace(seconds)
        missing = [len(group) for group in tuner.plan.buckets]
        bucket_of = {i: b for b, group in enumerate(tuner.plan.buckets) for i in group}
        queue = list(
            tuner.plan.messages
            if tuner.plan.messages is not None
            else [Message(bucket) for bucket in range(len(tuner.plan.buckets))]
        )
        for index in load.order:
            paceline.pace(load.backward[index])
            tuner.timer.gradient_ready(index)
            missing[bucket_of[index]] -= 1
            while queue and not missing[queue[0].bucket]:
                self._send(queue.pop(0))
        if tuner.plan.messages is None:
            for index in range(len(load.sizes)):
                self._wait(index)
        self.ends.append(runtime.clock.now())
        tuner.backward_ended()
        self.groups.append(tuner.plan.buckets)
        self.sending.append(tuner.plan.messages)

    def _send(self, message: Message) -> None:
        runtime = current_runtime()
        assert runtime is not None
        if message.half == "gather":
            return
        group = self.tuner.plan.buckets[message.bucket]
        size = sum(self.workload.sizes[index] for index in group)
        part = runtime.blank(round(size * (message.stop - message.start)), CPU)
        pending = self.comm.all_reduce(part, "sum")
        for index in group:
            self._late.setdefault(index, []).append(pending)


def steps_of(
    rule: str, mode: Mode, count: int, every_step: bool = True, **options: Any
) -> Steps:
    runtime = current_runtime()
    assert runtime is not None
    comm, said = Communicator(runtime), []
    workload = options.get("workload", UNEVEN)
    tuner = BucketTuner(
        comm,
        Gradients(workload.sizes, ["float32"] * len(workload.sizes), CPU),
        rule,
        runtime,
        lambda buffer: comm.all_reduce(buffer, "sum"),
        said.append,
        mode=mode,
        every_step=every_step,
    )
    steps = Steps(tuner, comm, said=said, **options)
    for _ in range(count):
        steps.take()
    return steps


def predicted(made: MessagePlan, workers: int, at_once: int) -> float:
    cost = ring_cost(workers, at_once)
    return period(made, SIZES, READY, USES, cost, max_in_flight=at_once)


def last_plan(steps: Steps) -> MessagePlan:
    sending = steps.sending[-1]
    assert sending is not None
    groups = [[ORDER.index(index) for index in group] for group in steps.groups[-1]]
    return MessagePlan(groups, tuple(sending))


def periods(steps: Steps, after: int) -> list[float]:
    return [b - a for a, b in itertools.pairwise(steps.ends[after:])]


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("workers", [2, 4])
def test_a_plan_is_adopted_that_takes_what_it_predicts(
    workers: int, at_once: int
) -> None:
    answers, _ = on(
        workers, lambda rank: steps_of("optimal", "whole", SETTLED + 8), lanes=at_once
    )
    cost = ring_cost(workers, at_once)
    best = plan_messages(
        SIZES, [None] * len(SIZES), READY, USES, cost, max_in_flight=at_once
    )
    for steps in answers:
        assert steps.groups == answers[0].groups
        assert steps.sending == answers[0].sending
        assert steps.sending[: 1 + PROFILED_STEPS] == [None] * (1 + PROFILED_STEPS)
        made = last_plan(steps)
        seconds = predicted(made, workers, at_once)
        assert seconds <= predicted(best, workers, at_once) * (1 + 1e-3)
        for measured in periods(steps, SETTLED + 1):
            assert measured == pytest.approx(seconds, rel=1e-3)
        first, second = steps.said
        assert "DDP's rule" in first
        assert second.endswith(": the plan is used")
        assert f" in {len(made.messages)} messages, " in second
    # What was settled for bsp is longer, and was the other side of the trial.
    groups = plan_buckets("optimal", SIZES, None, READY, cost, max_in_flight=at_once)
    end = finish_time(groups, SIZES, READY, cost, max_in_flight=at_once)
    assert seconds < 0.99 * end
    assert f", {1e3 * end:.4g} ms: " in second


def test_where_weights_are_touched_before_the_forward_pass_nothing_is_gained() -> None:
    """The wait is then outside the forward pass, and counts all the same."""
    answers, _ = on(
        4,
        lambda rank: steps_of(
            "optimal", "whole", SETTLED + 4, touches_all=True, tells_uses=True
        ),
        lanes=1,
    )
    assert answers[0].sending[-1] is None
    assert (
        answers[0]
        .said[-1]
        .endswith("the plan is no faster, and means are waited for where backward ends")
    )


@pytest.mark.parametrize(
    ("workers", "rule", "mode", "options"),
    [
        (4, "optimal", "whole", {"tells_uses": False}),  # no use is seen
        (1, "optimal", "whole", {}),
        (1, "wfbp", "whole", {}),
        (2, "optimal", "whole", {"every_step": False}),
        (2, "wfbp", "whole", {"every_step": False}),
        *((4, rule, "barrier", {}) for rule in ("optimal", "mg-wfbp", "ddp")),
    ],
)
def test_where_nothing_may_go_past_backward_no_messages_are_planned(
    workers: int, rule: str, mode: Mode, options: dict[str, bool]
) -> None:
    answers, _ = on(
        workers, lambda rank: steps_of(rule, mode, SETTLED, **options), lanes=1
    )
    assert set(answers[0].sending) == {None}
    assert len(answers[0].said) <= 1  # the trial against DDP's rule


def test_where_a_network_costs_nothing_means_are_waited_for_where_backward_ends() -> (
    None
):
    """One tensor, whose mean is in at once: no side is faster."""
    one = Workload(names=("a",), sizes=(4000,), forward=(1e-3,), backward=(2e-3,))
    where = cluster(rack(2, link=1e15, latency=0.0))
    answers, _ = on(where, lambda rank: steps_of("optimal", "whole", 30, workload=one))
    assert answers[0].sending[-1] is None


@pytest.mark.parametrize("mode", ["whole", "halves"])
@pytest.mark.parametrize("rule", ["ddp", "wfbp", "single", "3+2+2"])
def test_fixed_rules_go_past_backward_from_the_second_pass_on(
    rule: str, mode: Mode
) -> None:
    answers, _ = on(3, lambda rank: steps_of(rule, mode, 8))
    for steps in answers:
        groups = steps.groups[0]
        assert [index for group in groups for index in group] == list(ORDER)
        expected = messages_of(
            [[ORDER.index(index) for index in group] for group in groups],
            USES,
            halves=mode == "halves",
        )
        assert steps.sending == [expected.messages] * 8
        planned = plan_buckets(rule, SIZES)
        assert groups == [
            [ORDER[position] for position in bucket] for bucket in planned
        ]
        assert not steps.said


@pytest.mark.parametrize("mode", ["whole", "halves"])
def test_mg_wfbps_buckets_are_measured_for_and_then_fixed(mode: Mode) -> None:
    answers, _ = on(4, lambda rank: steps_of("mg-wfbp", mode, 12))
    for steps in answers:
        assert steps.sending[:PROFILED_STEPS] == [None] * PROFILED_STEPS
        plan = last_plan(steps)
        assert plan == messages_of(plan.buckets, USES, halves=mode == "halves")
        assert steps.groups[-1] == answers[0].groups[-1]
        assert len(steps.groups[-1]) > 1


def test_a_change_for_good_is_measured_where_backward_ends(monkeypatch: Any) -> None:
    monkeypatch.setattr(tuner_module.watch, "every", 12)
    monkeypatch.setattr(tuner_module.watch, "steps", 4)
    slower = Workload(
        names=UNEVEN.names,
        sizes=UNEVEN.sizes,
        forward=tuple(3 * seconds for seconds in UNEVEN.forward),
        backward=tuple(3 * seconds for seconds in UNEVEN.backward),
        order=ORDER,
    )

    def body(rank: int) -> tuple[Steps, int]:
        steps = steps_of("optimal", "whole", SETTLED + 14)
        before = len(steps.ends)
        assert steps.sending[-1] is not None
        steps.workload = slower
        for _ in range(36 + SETTLED):
            steps.take()
        return steps, before

    answers, _ = on(4, body, lanes=1)
    steps, before = answers[0]
    again = steps.sending[before:]
    assert again[0] is not None
    first_none = again.index(None)
    assert again[first_none : first_none + PROFILED_STEPS] == [None] * PROFILED_STEPS
    assert steps.said[2].endswith("measuring again")
    assert steps.sending == answers[1][0].sending


def test_changed_messages_of_the_same_buckets_are_a_change() -> None:
    def body(rank: int) -> tuple[bool, bool]:
        runtime = current_runtime()
        assert runtime is not None
        comm = Communicator(runtime)
        tuner = BucketTuner(
            comm,
            Gradients([4000, 4000], ["a", "a"], CPU),
            "wfbp",
            runtime,
            lambda buffer: comm.all_reduce(buffer, "sum"),
            lambda text: None,
            mode="whole",
        )
        changes, groups = [], tuner.plan.buckets
        for _ in range(2):
            tuner.timer.step_begins()
            for index in (1, 0):
                tuner.timer.gradient_ready(index)
            changes.append(tuner.backward_ended())
        assert tuner.plan.buckets == groups
        return changes[0], changes[1]

    answers, _ = on(2, body)
    assert answers == [(True, False)] * 2


def test_plans_survive_as_whole_numbers() -> None:
    for case in random_cases(11, 40, 10, kinds=True):
        for halves in (False, True):
            made = case.plan(halves=halves)
            assert from_numbers(to_numbers(made), len(case.uses)) == made


# ---- methods that follow the plan ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "at_once"), crossed(2, ["priority", "dear"], [1, 2])
)
def test_methods_take_what_is_predicted(method: str, at_once: int) -> None:
    """Each pass of backward and forward, in turn with what its plan predicts; and never
    longer than bsp's."""

    def body(rank: int) -> tuple[Watched, list[Message] | None, list[str]]:
        model = paceline.stand_in(UNEVEN)
        optimizer = sgd(model, method=method)
        watched = Watched()
        for _ in range(SETTLED + 10):
            optimizer.zero_grad()
            model(torch.ones(4)).backward()
            optimizer.step()
            watched.groups.append(groups_of(optimizer))  # looks at no parameter
        sending = inspect(optimizer).run.messages
        return (
            ended(watched, optimizer),
            sending,
            list(inspect(optimizer).recorder.notes),
        )

    answers, _ = on(4, body, lanes=at_once)
    watched, sending, said = answers[0]
    assert watched.settled_after == SETTLED
    assert sending is not None
    assert said[-1].endswith("the plan is used")
    assert all(other.groups == watched.groups for other, _, _ in answers)
    place = {UNEVEN.names[index]: position for position, index in enumerate(ORDER)}
    groups = [[place[name] for name in group] for group in watched.plan]
    seconds = predicted(MessagePlan(groups, tuple(sending)), 4, at_once)
    # The optimizer runs bucket by bucket within the next forward pass.
    after = watched.step_seconds[SETTLED + 2 : -1]
    assert len(after) == 7
    for measured in after:
        assert (
            seconds * (1 - 1e-3) <= measured <= (seconds + UNEVEN.update) * (1 + 1e-3)
        )
    bsp, _ = on(4, lambda rank: train_stand_in(UNEVEN, 30), lanes=at_once)
    assert after[-1] < 0.99 * bsp[0].step_seconds[-1]
