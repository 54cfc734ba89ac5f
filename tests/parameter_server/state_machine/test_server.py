"""The parameter server's transitions, one by one, its refusals in words, and servers that clip.

What each method's server promises is tried by the conformance kit (`tests.conformance.test_servers`).
"""

from __future__ import annotations

import math
import random
from itertools import permutations
from typing import Any

import msgspec
import pytest
import torch
from msgspec import structs

from paceline.errors import UsageError
from paceline.interfaces import Discipline, Reply, Sender, UpdatesOnServer, Work
from paceline.interfaces.server_messages import (
    BarrierPassed,
    Done,
    EnterBarrier,
    Join,
    Joined,
    Leave,
    Load,
    LoadState,
    LoadUntrained,
    OptimizerState,
    Parameters,
    Pull,
    PullState,
    Push,
    Reduce,
    Reduced,
    Rejected,
    ReplyMessage,
    Request,
    Unit,
)
from paceline.methods.asp import ASP
from paceline.methods.backup import Backup
from paceline.methods.osp import OSP
from paceline.methods.ssp import SSP
from paceline.parameter_server.state_machine.members import STATE_CHANGES, STATES
from paceline.parameter_server.state_machine.server import ParameterServer
from paceline.testing.server_trial import SGD as HOW
from tests.support.server_talk import Refusal

JOIN = Join(
    options="",
    units=[[Unit(0, 0, 2, 0)], [Unit(1, 0, 3, 0)]],
    dtypes=["float64", "float64"],
    optimizer="SGD",
    hyperparameters=HOW,
)
SIZES = [2, 3]


class Case:
    """A server, and workers' requests to it, numbered as they should be."""

    def __init__(self, method: UpdatesOnServer | None = None, workers: int = 2) -> None:
        self.server = ParameterServer(
            workers, lambda _: None if method is None else method.server(workers)
        )
        self.numbers: dict[tuple[int, int], int] = {}

    def sender(self, worker: int, life: int = 0) -> Sender:
        number = self.numbers.get((worker, life), 0)
        self.numbers[worker, life] = number + 1
        return Sender(worker, life, "", number)

    def ask(
        self,
        worker: int,
        message: Request,
        payload: torch.Tensor | None = None,
        life: int = 0,
    ) -> list[Reply]:
        return self.server.on_request(self.sender(worker, life), message, payload, 0.0)

    def answers(
        self, worker: int, message: Request, payload: Any = None
    ) -> list[ReplyMessage]:
        return [answer.message for answer in self.ask(worker, message, payload)]

    def refusal(
        self, worker: int, message: Request, payload: Any = None, life: int = 0
    ) -> str:
        (answer,) = self.ask(worker, message, payload, life)
        assert isinstance(answer.message, Rejected)
        assert answer.to.worker == worker
        return answer.message.reason

    def begin(self, *workers: int, join: Join = JOIN) -> Case:
        """These join, and parameters are loaded: zeros."""
        for worker in workers:
            self.ask(worker, join)
        for bucket, size in enumerate(SIZES):
            self.ask(workers[0], Load(bucket=bucket), zeros(size))
        return self

    def arrive(self, worker: int, **others: Any) -> list[Reply]:
        life = others.pop("life", 0)
        known: dict[str, Any] = {"kind": "load", "brings": True}
        return self.ask(worker, EnterBarrier(**(known | others)), None, life)

    def load(self, worker: int, value: float = 0.0, life: int = 0) -> list[Reply]:
        """All parameters become this."""
        return [
            answer
            for bucket, size in enumerate(SIZES)
            for answer in self.ask(
                worker, Load(bucket=bucket), zeros(size) + value, life
            )
        ]

    def push(self, worker: int, step: int, bucket: int, **others: Any) -> list[Reply]:
        life = others.pop("life", 0)
        value = others.pop("value", 1.0)
        gradient = torch.full((SIZES[bucket],), value, dtype=torch.float64)
        message = pushed(step, bucket, **others)
        return self.ask(worker, message, gradient, life)

    def whole_step(self, worker: int, step: int, **others: Any) -> list[Reply]:
        return [a for b in range(2) for a in self.push(worker, step, b, **others)]

    def parameters(self, worker: int, bucket: int) -> list[float]:
        (answer,) = self.ask(worker, Pull(bucket=bucket))
        assert answer.payload is not None
        return answer.payload.tolist()


def zeros(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.float64)


def pushed(step: int = 0, bucket: int = 0, **others: Any) -> Push:
    known: dict[str, Any] = {"weight": 1.0, "used": [True], "hyperparameters": HOW}
    return Push(step=step, bucket=bucket, **(known | others))


# ---- the table, row by row ----


def test_who_is_waited_for_joins_at_step_0_however_late() -> None:
    case = Case(SSP(staleness=0)).begin(0)
    assert case.whole_step(0, 0) == []
    assert case.answers(1, JOIN) == [Joined(step=0, loaded=True)]
    assert len(case.whole_step(1, 0)) == 4


@pytest.mark.parametrize("method", [ASP(), SSP(staleness=2)])
def test_others_begin_with_the_slowest(method: UpdatesOnServer) -> None:
    case = Case(method, 3).begin(0, 1, 2)
    case.server.on_worker_lost(2, 0, 0.0)
    for step in range(2):
        case.whole_step(0, step)
        case.whole_step(1, step)
    case.whole_step(0, 2)
    assert case.ask(2, JOIN, life=1)[0].message == Joined(
        step=2, loaded=True, late_joiner=True
    )


def test_a_newer_life_ends_the_older() -> None:
    case = Case(SSP(staleness=0)).begin(0, 1)
    case.whole_step(0, 0)
    answers = case.ask(1, JOIN, life=1)
    # Nobody waits for the older life's gradient any more.
    assert [type(a.message) for a in answers] == [Parameters, Parameters, Joined]
    assert case.refusal(1, pushed(), zeros(2)).startswith("taken for lost")
    assert case.server.counts["workers lost"] == 1


def test_load_lets_pulls_go() -> None:
    case = Case(ASP())
    assert case.answers(0, JOIN) == [Joined(step=0, loaded=False)]
    case.ask(1, JOIN)
    assert case.ask(1, Pull(bucket=0)) == []
    # Nobody gets a bucket of a model that is not all there: who loads it may die.
    assert case.answers(0, Load(bucket=0), zeros(2) + 7) == [Done()]
    done, parameters = case.ask(0, Load(bucket=1), zeros(3))
    assert done.message == Done()
    assert parameters.to.worker == 1
    assert parameters.message == Parameters(bucket=0, version=0, step=0)
    assert parameters.payload is not None
    assert parameters.payload.tolist() == [7, 7]


def test_a_step_moves_the_clock_with_its_last_bucket() -> None:
    case = Case(ASP()).begin(0, 1)
    (first,) = case.push(0, 0, 1)
    assert first.message == Parameters(bucket=1, version=1, step=0)
    (last,) = case.push(0, 0, 0)
    assert last.message == Parameters(bucket=0, version=1, step=1)
    assert (case.server.shard.clock(0), case.server.shard.clock(1)) == (1, 0)
    assert (
        case.server.shard.slowest_step(),
        case.server.shard.next_unstarted_step(),
    ) == (0, 1)


def test_asp_applies_at_once_at_the_weight() -> None:
    case = Case(ASP()).begin(0, 1)
    (answer,) = case.push(0, 0, 0, weight=0.25)
    assert answer.payload is not None
    assert answer.payload.tolist() == [-0.25, -0.25]


def test_a_gradient_that_is_in_already_changes_nothing_and_is_counted() -> None:
    case = Case(ASP()).begin(0, 1)
    case.server.shard.store.set_applied({0: {0: 1, 1: 1}})
    (answer,) = case.push(0, 0, 0)
    assert answer.payload is not None
    assert answer.payload.tolist() == [0.0, 0.0]
    assert case.server.counts["gradients that were applied before"] == 1
    assert not case.server.counts["gradients applied"]


def test_leaves_are_answered_when_nobody_trains() -> None:
    case = Case(SSP(staleness=0)).begin(0, 1)
    case.whole_step(0, 0)
    answers = case.ask(1, Leave())
    assert [(a.to.worker, type(a.message)) for a in answers] == [(0, Parameters)] * 2
    answers = case.ask(0, Leave())
    assert [(a.to.worker, a.message) for a in answers] == [(1, Done()), (0, Done())]


def test_who_died_before_it_has_left_has_steps_to_do() -> None:
    case = Case(ASP()).begin(0, 1)
    case.server.wait_for_the_lost()
    case.server.on_worker_lost(1, 0, 0.0)
    [answer] = case.ask(1, JOIN, life=1)
    assert isinstance(answer.message, Joined)
    assert not answer.message.over


def test_backup_divides_by_who_counts() -> None:
    case = Case(Backup(wait_for=2), 3).begin(0, 1, 2)
    case.whole_step(0, 0, value=1.0, weight=1 / 3)
    case.push(2, 0, 0, value=50.0, weight=1 / 3)
    answers = case.whole_step(1, 0, value=3.0, weight=1 / 3)
    assert sorted(a.to.worker for a in answers) == [0, 0, 1, 1]
    (late, also) = case.push(2, 0, 1, value=50.0, weight=1 / 3)
    assert late.message == Parameters(bucket=0, version=1, step=1, counted=[0, 1])
    assert also.message == Parameters(bucket=1, version=1, step=1, counted=[0, 1])
    assert late.payload is not None
    assert late.payload.tolist() == pytest.approx([-2, -2])
    assert case.server.counts["gradients dropped"] == 2


def test_who_is_late_goes_on_where_the_others_are() -> None:
    case = Case(Backup(wait_for=1), 2).begin(0, 1)
    for step in range(3):
        case.whole_step(0, step)
    answers = case.whole_step(1, 0)
    assert [a.message for a in answers] == [
        Parameters(bucket=0, version=3, step=3, counted=[0]),
        Parameters(bucket=1, version=3, step=3, counted=[0]),
    ]
    assert len(case.whole_step(1, 3)) == 2  # and counts again


def test_the_dead_among_the_fastest_count() -> None:
    case = Case(Backup(wait_for=2), 3).begin(0, 1, 2)
    case.whole_step(2, 0, value=2.0)
    case.server.on_worker_lost(2, 0, 0.0)
    assert len(case.whole_step(0, 0, value=4.0)) == 2
    assert case.parameters(0, 0) == [-3, -3]


def test_a_step_without_samples_is_one() -> None:
    case = Case(Backup()).begin(0, 1)
    case.whole_step(0, 0, weight=0.0)
    answers = case.whole_step(1, 0, weight=0.0)
    assert len(answers) == 4
    assert all(a.message.version == 1 for a in answers)  # type: ignore[union-attr]
    assert case.parameters(0, 0) == [0, 0]


def test_a_later_step_that_another_server_named() -> None:
    case = Case(Backup(), 3).begin(0, 1, 2)
    case.whole_step(0, 0)
    case.whole_step(1, 0)
    assert len(case.whole_step(2, 2)) == 4  # steps 0, of two workers
    assert case.server.shard.active_workers(1) == [0, 1]
    case.whole_step(0, 1)
    assert len(case.whole_step(1, 1)) == 4
    case.whole_step(0, 2)
    answers = case.whole_step(1, 2)
    assert {a.message.version for a in answers} == {3}  # type: ignore[union-attr]


def test_the_state_leaves_and_comes_back() -> None:
    case = Case(ASP()).begin(0, 1)
    with_momentum = [{**HOW[0], "momentum": 0.5}]
    for worker in (0, 1):
        case.whole_step(worker, 0, hyperparameters=with_momentum)
    (answer,) = case.ask(0, PullState(bucket=0))
    assert isinstance(answer.message, OptimizerState)
    assert answer.message.entries == [[("momentum_buffer", 0)]]
    assert answer.payload is not None
    twice = answer.payload * 2
    load = LoadState(bucket=0, entries=answer.message.entries)
    assert "others go on from them" in case.refusal(0, load, twice)
    case.arrive(1)
    assert [a.message for a in case.arrive(0)] == [BarrierPassed(leads=True)]
    assert case.answers(0, load, twice) == [Done()]
    assert case.ask(1, PullState(bucket=0))[0].payload.tolist() == [1.5, 1.5]  # type: ignore[union-attr]
    case.load(0)
    assert case.ask(1, PullState(bucket=0))[0].payload.tolist() == [3, 3]  # type: ignore[union-attr]


def test_who_has_left_and_comes_back_has_no_more_steps() -> None:
    case = Case(ASP()).begin(0, 1)
    case.server.wait_for_the_lost()
    case.whole_step(0, 0)
    case.whole_step(1, 0)
    case.ask(1, Leave())
    case.server.on_worker_lost(1, 0, 0.0)
    [answer] = case.ask(1, JOIN, life=1)
    assert isinstance(answer.message, Joined)
    assert answer.message.over
    assert not case.ask(1, Leave(), life=1), "worker 0 trains"
    answers = case.ask(0, Leave())
    assert {a.to.worker for a in answers} == {0, 1}


def test_only_who_has_steps_to_do_waits_for_the_step_under_way() -> None:
    case = Case(Backup(wait_for=2), 4).begin(0, 1, 2, 3)
    case.server.wait_for_the_lost()
    case.ask(0, Leave())
    case.server.on_worker_lost(0, 0, 0.0)
    case.server.on_worker_lost(3, 0, 0.0)
    case.whole_step(1, 0)
    for worker, over in ((0, True), (3, False)):
        [joined] = case.ask(worker, JOIN, life=1)
        assert isinstance(joined.message, Joined)
        assert (joined.message.step, joined.message.over) == (1, over)
    [answer] = case.ask(0, Pull(bucket=0, step=1), life=1)
    assert isinstance(answer.message, Parameters)
    assert answer.message.version == 0
    assert not case.ask(3, Pull(bucket=0, step=1), life=1)
    answers = case.whole_step(2, 0)
    [given] = [a.message for a in answers if a.to.worker == 3]
    assert isinstance(given, Parameters)
    assert given.version == 1


def test_the_lost_are_not_waited_for_and_told_nothing() -> None:
    case = Case(SSP(staleness=0), 3).begin(0, 1, 2)
    case.whole_step(0, 0)
    case.whole_step(1, 0)
    answers = case.server.on_worker_lost(2, 0, 0.0)
    assert sorted(a.to.worker for a in answers) == [0, 0, 1, 1]
    case.push(0, 1, 0)
    assert case.server.on_worker_lost(0, 0, 0.0) == []
    answers = case.whole_step(1, 1)
    assert [a.to.worker for a in answers] == [1, 1]
    assert case.parameters(1, 0) == [-4, -4]  # what the dead had pushed is in
    assert case.parameters(1, 1) == [-3, -3, -3]
    assert case.server.on_worker_lost(0, 0, 0.0) == []
    assert case.server.counts["workers lost"] == 2


def test_who_is_lost_before_it_joins_is_not_waited_for() -> None:
    case = Case(SSP(staleness=0)).begin(0)
    assert case.whole_step(0, 0) == []
    assert len(case.server.on_worker_lost(1, 0, 0.0)) == 2
    assert case.refusal(1, JOIN).startswith("taken for lost")
    assert case.ask(1, JOIN, life=1)[0].message == Joined(
        step=1, loaded=True, late_joiner=True
    )


def test_who_comes_back_and_is_lost_before_it_joins() -> None:
    case = Case(SSP(staleness=0)).begin(0, 1)
    case.whole_step(0, 0)
    assert (
        len(case.server.on_worker_lost(1, 1, 0.0)) == 2
    )  # its older life is lost as well
    assert case.refusal(1, JOIN, life=1).startswith("taken for lost")
    assert case.server.on_worker_lost(9, 0, 0.0) == []


def test_an_older_life_is_not_lost_again() -> None:
    case = Case(ASP()).begin(0, 1)
    case.ask(1, JOIN, life=1)
    case.server.on_worker_lost(1, 0, 0.0)
    assert case.server.shard.active_workers(0) == [0, 1]


def test_the_work_that_was_done() -> None:
    case = Case(Backup()).begin(0, 1)
    case.server.take_work()
    case.push(0, 0, 0)
    assert case.server.take_work() == Work()
    case.push(1, 0, 0)
    assert case.server.take_work() == Work(added=32, stepped=16)  # sum, and snapshot
    assert case.server.next_deadline() is None
    assert case.server.on_timer(0.0) == []


# ---- reductions ----


@pytest.mark.parametrize("arrivals", list(permutations(range(3))))
def test_sums_have_the_same_bits_in_any_order(arrivals: tuple[int, ...]) -> None:
    parts = [
        torch.randn(99, generator=torch.Generator().manual_seed(r)) for r in range(3)
    ]
    case = Case(workers=3)
    for worker in range(3):
        case.ask(worker, Join(options=""))
    message = Reduce(channel="", number=0, operation="mean")
    got = [case.ask(worker, message, parts[worker].clone()) for worker in arrivals]
    assert got[:2] == [[], []]
    assert [a.to.worker for a in got[2]] == list(arrivals)
    expected = (parts[0] + parts[1] + parts[2]) / 3
    for answer in got[2]:
        assert answer.message == Reduced()
        assert answer.payload is not None
        assert torch.equal(answer.payload, expected)


def test_reductions_that_do_not_match() -> None:
    case = Case(workers=2)
    for worker in range(2):
        case.ask(worker, Join(options=""))
    mean = Reduce(channel="", number=0, operation="mean")
    case.ask(0, mean, torch.ones(3))
    words = "others sent 3 elements of torch.float32 for their mean, worker 1 sent 4"
    assert words in case.refusal(1, mean, torch.ones(4))
    total = Reduce(channel="", number=0, operation="sum")
    assert "torch.float32 for their sum" in case.refusal(1, total, torch.ones(3))
    assert "worker 0 has sent its part before" in case.refusal(0, mean, torch.ones(3))
    assert "payload, got none" in case.refusal(1, mean)
    other = Reduce(channel="", number=1, operation="mean")
    whole = torch.ones(3, dtype=torch.int64)
    assert "torch.int64" in case.refusal(1, other, whole)
    assert len(case.ask(1, mean, torch.ones(3))) == 2  # nothing of this was done


# ---- refusals ----


def begun(method: UpdatesOnServer | None = None) -> Case:
    """Two workers have parameters."""
    return Case(method or ASP()).begin(0, 1)


def in_step_0() -> Case:
    case = begun(SSP(staleness=0))
    case.push(0, 0, 0)
    case.ask(1, Leave())
    return case


def joined(method: UpdatesOnServer | None = None) -> Case:
    """One worker has joined, and nobody has loaded."""
    case = Case(method)
    case.ask(0, Join(options="") if method is None else JOIN)
    return case


def loading() -> Case:
    """Worker 0 has loaded one bucket of two."""
    case = joined(ASP())
    case.ask(1, JOIN)
    case.ask(0, Load(bucket=0), zeros(2))
    return case


def in_life_3() -> Case:
    case = Case(ASP()).begin(0)
    case.ask(0, JOIN, life=3)
    return case


BAD_PUSHES: list[tuple[Push, torch.Tensor | None, str]] = [
    (pushed(bucket=2), zeros(2), "expected a bucket of [0, 1], got 2"),
    (pushed(), zeros(3), "bucket 0: expected 2 elements of torch.float64, got 3"),
    (pushed(), torch.zeros(2), "expected 2 elements of torch.float64, got 2 of torch.f"),
    (pushed(), None, "push: expected a payload, got none"),
    (pushed(used=[]), zeros(2), "push: expected 1 used bits, got 0"),
    (pushed(weight=-1.0), zeros(2), "push: expected a weight of 0 or more, got -1.0"),
    (pushed(weight=math.nan), zeros(2), "push: expected a weight of 0 or more, got nan"),
    (pushed(weight=math.inf), zeros(2), "push: expected a weight of 0 or more, got inf"),
    (pushed(hyperparameters=[]), zeros(2), "hyperparameters of 1 parameter groups, got 0"),
    (pushed(hyperparameters=[{}]), zeros(2), "hyperparameters without dampening"),
    (pushed(step=-1), zeros(2), "worker 0 has pushed bucket 0 of step -1 before"),
]  # fmt: skip
METHODS: list[UpdatesOnServer] = [ASP(), SSP(staleness=0), Backup()]
BUCKETS_2 = "expected a bucket of [0, 1], got"
REFUSALS = [
    # Pushes that make no sense, under each kind of method.
    *(
        Refusal(lambda method=method: begun(method), push, words, payload=payload)  # type: ignore[misc]
        for method in METHODS
        for push, payload, words in BAD_PUSHES
    ),
    # At another time than theirs.
    Refusal(in_step_0, pushed(), "bucket 0 of step 0 before", payload=zeros(2)),
    Refusal(in_step_0, pushed(step=1), "expected step 0 of worker 0", payload=zeros(2)),
    Refusal(in_step_0, Leave(), "in the middle of a step"),
    Refusal(in_step_0, pushed(), "worker 1 has left", worker=1, payload=zeros(2)),
    Refusal(lambda: joined(ASP()), pushed(), "no parameters", payload=zeros(2)),
    # What does not fit the model.
    *(
        Refusal(lambda: joined(ASP()), message, words, payload=payload)
        for message, payload, words in (
            (Load(bucket=0), None, "expected a payload, got none"),
            (Load(bucket=0), zeros(5), "expected 2 elements"),
            (Load(bucket=9), zeros(2), f"{BUCKETS_2} 9"),
            (Pull(bucket=9), None, f"{BUCKETS_2} 9"),
            (PullState(bucket=9), None, f"{BUCKETS_2} 9"),
            (LoadState(bucket=9, entries=[]), None, f"{BUCKETS_2} 9"),
            (LoadState(bucket=0, entries=[]), None, "the state of 0 units"),
        )
    ),
    *(
        Refusal(loading, message, words, worker=1, payload=payload)
        for message, payload, words in (
            (Load(bucket=0), None, "expected a payload, got none"),
            (LoadState(bucket=0, entries=[]), None, "the state of 0 units"),
            (LoadUntrained(start=5), torch.zeros(1, dtype=torch.uint8), "byte 0"),
        )
    ),
    *(
        Refusal(joined, message, "holds no parameters", payload=zeros(2))
        for message in (pushed(), Pull(bucket=0), Load(bucket=0))
    ),
    # Strangers.
    Refusal(in_life_3, Pull(bucket=0), "join first", worker=1),
    Refusal(in_life_3, Pull(bucket=0), "join first", life=4),
    Refusal(in_life_3, JOIN, "worker 2: ", worker=2),
    Refusal(in_life_3, Pull(bucket=0), "worker -1: ", worker=-1),
    Refusal(in_life_3, JOIN, "join: worker 0", life=3),
    Refusal(in_life_3, JOIN, "taken for lost", life=2),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda one: one.words)
def test_what_is_refused_changes_nothing(refusal: Refusal) -> None:
    refusal.check()


def test_models_that_differ_in_what_nobody_trains() -> None:
    case = Case(ASP())
    tensors = ["fc.weight float32[2]", "frozen float32[3] frozen"]
    case.ask(0, structs.replace(JOIN, tensors=tensors))
    other = structs.replace(JOIN, tensors=[tensors[0], "frozen float32[4] frozen"])
    refused = case.refusal(1, other)
    assert "'frozen float32[3] frozen'" in refused
    assert "'frozen float32[4] frozen' for worker 1" in refused
    fewer = structs.replace(JOIN, tensors=tensors[:1])
    assert "and 'nothing' for worker 1" in case.refusal(1, fewer)


def test_workers_that_train_different_things() -> None:
    case = Case(ASP()).begin(0)
    other = Join(
        options="others", units=JOIN.units, dtypes=JOIN.dtypes, optimizer="SGD"
    )
    words = "options is '' for who joined first and 'others' for worker 1"
    assert words in case.refusal(1, other)
    units = [JOIN.units[0], [Unit(1, 0, 4, 0)]]
    other = Join(options="", units=units, dtypes=JOIN.dtypes, optimizer="SGD")
    assert "units is [Unit(parameter=1, start=0, stop=3" in case.refusal(1, other)
    other = Join(options="", units=JOIN.units, dtypes=JOIN.dtypes, optimizer="Adam")
    assert "optimizer is 'SGD'" in case.refusal(1, other)
    # It has not joined by that, and may yet.
    assert case.refusal(1, pushed(), zeros(2)) == "join first"
    assert case.server.shard.active_workers(0) == [0, 1]
    assert case.answers(1, JOIN) == [Joined(step=0, loaded=True)]


def test_who_comes_back_with_other_options_is_told_so() -> None:
    case = Case(ASP()).begin(0, 1)
    other = Join(
        options="others", units=JOIN.units, dtypes=JOIN.dtypes, optimizer="SGD"
    )
    assert "workers train different things" in case.refusal(1, other, life=1)
    assert case.ask(1, JOIN, life=1)[0].message == Joined(step=0, loaded=True)


def test_a_first_join_that_makes_no_sense_leaves_nothing() -> None:
    def make(method: str) -> Discipline | None:
        if method not in ("", "asp"):
            raise UsageError(f"unknown method {method!r}")
        return ASP().server(2) if method else None

    case = Case()
    case.server = ParameterServer(2, make)
    assert case.refusal(0, Join(options="", method="none")) == "unknown method 'none'"
    words = "optimizer '' cannot run"
    assert words in case.refusal(0, Join(options="a", method="asp"))
    assert case.answers(1, Join(options="b")) == [Joined(step=0, loaded=False)]
    words = "this server holds no parameters: it only reduces"
    assert case.refusal(1, Pull(bucket=0)) == words


def test_unequal_hyperparameters_of_a_step_refuse_all() -> None:
    case = Case(Backup(wait_for=2), 4).begin(0, 1, 2, 3)
    case.server.on_worker_lost(3, 0, 0.0)
    case.push(2, 0, 0)  # does not count, and is refused too
    case.whole_step(0, 0)
    other = [{**HOW[0], "lr": 0.5}]
    assert case.push(1, 0, 0, hyperparameters=other) == []
    case.ask(3, JOIN, life=1)
    assert case.ask(3, Pull(bucket=0), life=1) == []
    answers = case.push(1, 0, 1, hyperparameters=other)
    refused = [a.to.worker for a in answers if isinstance(a.message, Rejected)]
    assert sorted(refused) == [0, 0, 1, 1, 2, 3]
    assert len(answers) == len(refused)
    words = "step 0: worker 0 has hyperparameters [{'lr': 1.0, "
    assert all(words in a.message.reason for a in answers)  # type: ignore[union-attr]
    assert words in case.refusal(2, pushed(bucket=1), zeros(3))
    assert words in case.refusal(3, Pull(bucket=1), life=1)
    assert case.server.counts["gradients applied"] == 0
    assert case.server.shard.version(0) == 0


def test_unequal_hyperparameters_are_equal_where_they_are_of_different_steps() -> None:
    case = Case(Backup()).begin(0, 1)
    for step, rate in enumerate((1.0, 0.5)):
        how = [{**HOW[0], "lr": rate}]
        case.whole_step(0, step, hyperparameters=how)
        assert len(case.whole_step(1, step, hyperparameters=how)) == 4
    assert case.parameters(0, 0) == [-1.5, -1.5]


# ---- a worker's states ----


def test_a_worker_s_states_change_as_they_are_drawn() -> None:
    """By hand, through every arrow of the picture."""
    seen: set[tuple[str, str]] = set()

    def event(replies: list[Reply], worker: int = 1) -> None:
        after = case.server.members.state(worker)
        if (states[worker], after) != (after, after):
            seen.add((states[worker], after))
        states[worker] = after

    case = Case(ASP(), 3)
    states = dict.fromkeys(range(3), "awaited")
    case.begin(0)
    event(case.ask(1, JOIN))
    event(case.server.on_worker_finished(2, 0.0), 2)
    event(case.arrive(1, kind="meet"))
    case.arrive(0, kind="meet")
    event([])
    event(case.server.on_worker_lost(1, 0, 0.0))
    event(case.ask(1, JOIN, life=1))
    event(case.arrive(1, kind="meet", life=1))
    event(case.server.on_worker_lost(1, 1, 0.0))
    event(case.ask(1, JOIN, life=2))
    event(case.ask(1, Leave(), life=2))
    event(case.server.on_worker_lost(1, 2, 0.0))
    event(case.ask(1, JOIN, life=3))
    assert seen == {(before, after) for before, _, after in STATE_CHANGES}
    assert set(states.values()) <= STATES.keys()


ROUNDS = [Backup(), SSP(staleness=0), OSP(defer="nothing")]
SQUARES = float(sum(SIZES))
"""Of a gradient of ones."""
LIMIT = math.sqrt(SQUARES) / 2
HALVED = pytest.approx(-0.5, rel=1e-5)
"""Where a learning rate of 1 leads from 0, by a gradient of ones that is clipped."""


def clipping(method: UpdatesOnServer, workers: int = 2) -> Case:
    """A server with all its workers, whose gradients weigh alike."""
    join = msgspec.structs.replace(JOIN, clip_norm=LIMIT)
    return Case(method, workers).begin(*range(workers), join=join)


def kinds(answers: list[Reply]) -> list[tuple[int, type]]:
    return [(answer.to.worker, type(answer.message)) for answer in answers]


def read(answers: list[Reply]) -> list[float]:
    """All parameters in answers to one step's pushes."""
    values = [answer.payload for answer in answers if answer.payload is not None]
    return torch.cat(values).tolist()


@pytest.mark.parametrize("method", ROUNDS)
def test_nothing_is_applied_before_all_of_it_is_there(method: UpdatesOnServer) -> None:
    case = clipping(method)
    case.whole_step(0, 0, weight=0.5)
    assert case.push(1, 0, 0, weight=0.5) == []  # alone, it would be answered
    answers = case.push(1, 0, 1, weight=0.5)
    assert sorted(kinds(answers)) == [(worker, Parameters) for worker in (0, 0, 1, 1)]
    assert read(answers) == [HALVED] * 2 * sum(SIZES)


@pytest.mark.parametrize("method", ROUNDS)
def test_a_smaller_gradient_stays_as_it_is(method: UpdatesOnServer) -> None:
    case = clipping(method)
    case.whole_step(0, 0, weight=0.5, value=0.25)
    answers = case.whole_step(1, 0, weight=0.5, value=0.25)
    assert read(answers) == [-0.25] * 2 * sum(SIZES)


@pytest.mark.parametrize("method", ROUNDS)
def test_it_is_the_mean_whose_norm_counts(method: UpdatesOnServer) -> None:
    """Two large gradients that cancel each other but for a little."""
    case = clipping(method)
    case.whole_step(0, 0, weight=0.5, value=100.0)
    answers = case.whole_step(1, 0, weight=0.5, value=-99.5)
    assert read(answers) == [-0.25] * 2 * sum(SIZES)


@pytest.mark.parametrize("method", ROUNDS)
def test_who_is_lost_leaves_what_came_to_be_scaled_by_what_is_here(
    method: UpdatesOnServer,
) -> None:
    case = clipping(method)
    case.push(0, 0, 0, weight=0.5)
    case.push(1, 0, 0, weight=0.5)
    case.server.on_worker_lost(1, 0, 0.0)
    case.server.on_worker_lost(0, 0, 0.0)
    (joined,) = case.ask(0, case_join(), life=1)
    assert isinstance(joined.message, Joined)
    (answer,) = case.ask(0, Pull(bucket=0, step=joined.message.step), life=1)
    assert answer.payload is not None
    # The norm of ones in the first bucket alone is above the limit, too.
    expected = LIMIT / math.sqrt(SIZES[0])
    assert answer.payload.tolist() == [pytest.approx(-expected, rel=1e-5)] * SIZES[0]


def case_join() -> Join:
    return msgspec.structs.replace(JOIN, clip_norm=LIMIT)


@pytest.mark.parametrize("method", ROUNDS)
def test_who_joins_in_between_waits_for_what_is_held(method: UpdatesOnServer) -> None:
    case = clipping(method, workers=3)
    case.server.on_worker_lost(2, 0, 0.0)
    case.whole_step(0, 0, weight=0.5)
    case.push(1, 0, 0, weight=0.5)
    (joined,) = case.ask(2, case_join(), life=1)
    assert joined.message == Joined(step=1, loaded=True, late_joiner=True)
    assert case.ask(2, Pull(bucket=0, step=1), life=1) == []
    assert not case.server.is_quiet()
    assert case.server.snapshot() == {}
    answers = case.push(1, 0, 1, weight=0.5)
    mine = [answer for answer in answers if answer.to.worker == 2]
    assert read(mine) == [HALVED] * SIZES[0]


def test_workers_that_disagree_are_told_once_all_is_there() -> None:
    case = clipping(Backup())
    case.whole_step(0, 0)
    other = [{**HOW[0], "lr": 0.5}]
    answers = case.whole_step(1, 0, hyperparameters=other)
    assert kinds(answers) == [
        (0, Rejected),
        (0, Rejected),
        (1, Rejected),
        (1, Rejected),
    ]


def test_limits_that_make_no_sense_are_refused() -> None:
    wrong = msgspec.structs.replace(JOIN, clip_norm=0.0)
    assert "clip_norm" in Case(Backup()).refusal(0, wrong)
    several = msgspec.structs.replace(case_join(), servers=2)
    assert "take one server" in Case(Backup()).refusal(0, several)
    plain = Case(Backup()).begin(0, 1)
    assert "clip_norm" in plain.refusal(1, case_join(), life=1)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("method", ROUNDS)
def test_whatever_the_order_each_step_is_scaled_once(
    method: UpdatesOnServer, seed: int
) -> None:
    """Three workers in any order, over six steps: the end is that of one process."""
    case, order = clipping(method, workers=3), random.Random(seed)
    values = [[order.uniform(-3, 3) for _ in range(3)] for _ in range(6)]
    expected = 0.0
    todo = {
        worker: [(step, b) for step in range(6) for b in (0, 1)] for worker in range(3)
    }
    open_pushes = dict.fromkeys(range(3), 0)
    while any(todo.values()):
        ready = [
            w for w in todo if todo[w] and (todo[w][0][1] == 1 or not open_pushes[w])
        ]
        worker = order.choice(ready)
        step, bucket = todo[worker].pop(0)
        open_pushes[worker] += 1
        value = values[step][worker]
        for answer in case.push(worker, step, bucket, value=value, weight=1 / 3):
            open_pushes[answer.to.worker] -= 1
    for step in range(6):
        mean = sum(values[step]) / 3
        norm = abs(mean) * math.sqrt(SQUARES)
        expected -= mean * min(1.0, LIMIT / (norm + 1e-6))
    for bucket, size in enumerate(SIZES):
        assert case.parameters(0, bucket) == [pytest.approx(expected, rel=1e-9)] * size
