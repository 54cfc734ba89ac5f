"""osp's server: its transitions, one by one, and its refusals in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pytest
import torch

from paceline.interfaces import (
    Answer,
    Informed,
    InParts,
    Sender,
    ServerJob,
    Timed,
    UpdatesOnServer,
    Work,
)
from paceline.interfaces.buckets import make_buckets
from paceline.interfaces.server_messages import (
    Join,
    Joined,
    Leave,
    Load,
    OptimizerState,
    Parameters,
    Pull,
    PullState,
    Push,
    Refused,
    Reply,
    Request,
    Unit,
)
from paceline.methods.asp import ASP
from paceline.methods.backup import Backup
from paceline.methods.osp import OSP
from paceline.methods.osp.discipline import TwoStages
from paceline.methods.osp.parameter_server import next_deferred
from paceline.methods.osp.reports import Measured, read_mask, written_report
from paceline.methods.ssp import SSP
from paceline.parameter_server.client.remote_model import RemoteParameters
from paceline.parameter_server.state_machine.server import ParameterServer
from tests.parameter_server.state_machine.test_server import HOW, Case

UNITS = [[2, 3, 1], [4, 2]]
"""Elements of each unit, bucket by bucket."""
JOIN = Join(
    options="",
    units=[
        [Unit(10 * b + u, 0, size, 0) for u, size in enumerate(sizes)]
        for b, sizes in enumerate(UNITS)
    ],
    dtypes=["float64"] * len(UNITS),
    optimizer="SGD",
    hyperparameters=HOW,
)
NAMED = Measured(
    ready=[0.1, 0.2], end=0.3, start_up=0.0, per_byte=1e-3, bytes=[48, 48], part=1.0
)


class Talk(Case):
    """A server under osp, and workers' requests to it."""

    def __init__(self, method: UpdatesOnServer | None = None, workers: int = 2) -> None:
        super().__init__(method or OSP(defer="nothing"), workers)

    @property
    def stages(self) -> TwoStages:
        assert isinstance(self.server.shard.discipline, TwoStages)
        return self.server.shard.discipline

    def begin(self, *workers: int) -> Talk:
        for worker in workers:
            self.ask(worker, JOIN)
        for bucket, sizes in enumerate(UNITS):
            zeros = torch.zeros(sum(sizes), dtype=torch.float64)
            self.ask(workers[0], Load(bucket=bucket), zeros)
        return self

    def push(self, worker: int, step: int, bucket: int, **others: Any) -> list[Answer]:
        life, value = others.pop("life", 0), others.pop("value", 1.0)
        message = a_push(step, bucket, **others)
        return self.ask(worker, message, payload(message, value), life)

    def second(self, worker: int, step: int, bucket: int, *units: int, **others: Any) -> list[Answer]:  # fmt: skip
        others |= {"late": True, "units": list(units)}
        return self.push(worker, step, bucket, **others)

    def first(
        self, worker: int, step: int, *units: Sequence[int] | None, **others: Any
    ) -> list[Answer]:
        """All of a first stage: by bucket, what of it is not deferred."""
        return [
            answer
            for bucket in range(2)
            for answer in self.push(
                worker,
                step,
                bucket,
                units=None if not units or units[bucket] is None else units[bucket],
                **others,
            )
        ]


def a_push(step: int = 0, bucket: int = 0, **others: Any) -> Push:
    units, measured = others.get("units"), others.pop("measured", None)
    if measured is not None:
        others["report"] = written_report(measured)
    count = len(UNITS[bucket] if units is None else units)
    known: dict[str, Any] = {
        "weight": 1.0,
        "used": [True] * count,
        "hyperparameters": HOW,
    }
    return Push(step=step, bucket=bucket, **(known | others))


def payload(push: Push, value: float = 1.0) -> torch.Tensor | None:
    """A gradient that fits; none where no unit is pushed."""
    units = range(len(UNITS[push.bucket])) if push.units is None else push.units
    size = sum(UNITS[push.bucket][unit] for unit in units)
    return torch.full((size,), value, dtype=torch.float64) if size else None


def heard(answers: list[Answer]) -> list[tuple[int, int, list[float]]]:
    """Worker, bucket and payload of each answer."""
    found = []
    for answer in answers:
        assert isinstance(answer.message, Parameters), answer.message
        assert answer.payload is not None
        place = (answer.to.worker, answer.message.bucket)
        found.append((*place, answer.payload.tolist()))
    return found


@pytest.fixture
def every_step() -> Iterator[None]:
    """What may wait is decided in every step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OSP, "interval", 1)
        yield


def test_it_defers_and_has_a_time_of_its_own() -> None:
    stages = OSP().server(2)
    assert isinstance(stages, InParts)
    assert isinstance(stages, Informed)
    assert isinstance(stages, Timed)


# ---- parts of a bucket ----


def test_an_answer_carries_the_units_that_were_pushed() -> None:
    case = Talk().begin(0, 1)
    assert case.first(0, 0, [0, 2], [], value=1.0) == []
    answers = case.first(1, 0, [0, 2], [], value=3.0)
    assert heard(answers) == [
        (0, 0, [-2.0, -2.0, -2.0]),
        (1, 0, [-2.0, -2.0, -2.0]),
        (0, 1, []),
        (1, 1, []),
    ]
    assert answers[0].payload is answers[1].payload
    for bucket, units in ((0, [1]), (1, [0, 1])):
        assert case.second(0, 0, bucket, *units, value=2.0) == []
    assert heard(case.second(1, 0, 0, 1, value=4.0)) == [
        (0, 0, [-3.0] * 3),
        (1, 0, [-3.0] * 3),
    ]
    assert heard(case.second(1, 0, 1, 0, 1, value=4.0)) == [
        (0, 1, [-3.0] * 6),
        (1, 1, [-3.0] * 6),
    ]
    assert case.parameters(0, 0) == [-2, -2, -3, -3, -3, -2]


def test_a_round_waits_for_the_step_before_of_its_units_only() -> None:
    case = Talk().begin(0, 1)
    case.first(0, 0, [0, 1], None)
    assert len(case.first(1, 0, [0, 1], None)) == 4
    # Step 1 defers another unit: unit 2 is in no update yet, unit 0 is.
    assert case.first(0, 1, [1, 2], [0]) == []
    (a, b) = case.first(1, 1, [1, 2], [0])
    assert heard([a, b]) == [(0, 1, [-2.0] * 4), (1, 1, [-2.0] * 4)]
    case.second(0, 0, 0, 2, value=5.0)
    answers = case.second(1, 0, 0, 2, value=7.0)
    assert heard(answers) == [
        (0, 0, [-6.0]),
        (1, 0, [-6.0]),
        (0, 0, [-2.0, -2.0, -2.0, -7.0]),
        (1, 0, [-2.0, -2.0, -2.0, -7.0]),
    ]


def test_the_second_stage_may_come_after_all_of_the_next_first() -> None:
    case = Talk(workers=1).begin(0)
    assert len(case.first(0, 0, [0, 1], None)) == 2
    assert len(case.first(0, 1, [0, 1], None)) == 2  # the same is deferred again
    assert heard(case.second(0, 0, 0, 2)) == [(0, 0, [-1.0])]
    assert heard(case.second(0, 1, 0, 2)) == [(0, 0, [-2.0])]


def test_the_work_is_counted_by_units() -> None:
    case = Talk().begin(0, 1)
    case.server.take_work()
    case.push(0, 0, 0, units=[0, 2])
    assert case.server.take_work() == Work()
    case.push(1, 0, 0, units=[0, 2])
    size = 3 * 8
    assert case.server.take_work() == Work(added=size + size, stepped=size)
    case.push(0, 0, 1, units=[])
    case.push(1, 0, 1, units=[])
    assert case.server.take_work() == Work()
    case.push(0, 1, 0, units=[0, 1, 2])
    assert case.server.take_work() == Work()  # unit 1 of step 0 is missing
    case.second(0, 0, 0, 1)
    case.second(1, 0, 0, 1)
    assert case.server.take_work() == Work(added=48, stepped=24)
    case.second(0, 0, 1, 0, 1)
    case.second(1, 0, 1, 0, 1)
    assert case.server.take_work() == Work(added=96, stepped=48)
    assert case.server.shard.unit_bytes(0) == [16, 24, 8]


# ---- what may wait ----


def told(answers: list[Answer]) -> set[tuple[int, tuple[int, ...]]]:
    """By bucket, the units that answers say are to be deferred."""
    found = set()
    for answer in answers:
        assert isinstance(answer.message, Parameters)
        found.add((answer.message.bucket, tuple(read_mask(answer.message.told))))
    return found


@pytest.mark.usefixtures("every_step")
def test_masks_go_out_with_the_answers_to_first_stages() -> None:
    case = Talk(OSP(defer="most", most=1.0, budget="constant")).begin(0, 1)
    case.first(0, 0, measured=NAMED)
    (a, b, c, d) = case.first(1, 0, measured=NAMED)
    assert told([a, b, c, d]) == {(0, ()), (1, ())}
    # Decided with the last bucket of step 0: said with step 1, for step 2.
    case.push(0, 1, 1)
    assert told(case.push(1, 1, 1)) == {(1, (0, 1))}
    case.push(0, 1, 0)
    answers = case.push(1, 1, 0)
    assert [answer.to.worker for answer in answers] == [0, 1]
    assert told(answers) == {(0, (0, 1, 2))}
    case.first(0, 2, [], [])
    assert told(case.first(1, 2, [], [])) == {(0, (0, 1, 2)), (1, (0, 1))}
    # Who pulls is told what the step that begins defers.
    (answer,) = case.ask(0, Pull(bucket=1))
    assert told([answer]) == {(1, (0, 1))}


@pytest.mark.usefixtures("every_step")
def test_a_mask_fits_the_budget_of_the_slowest() -> None:
    case = Talk(OSP(defer="most", most=0.5, order="importance")).begin(0, 1)
    half = Measured(
        **{name: getattr(NAMED, name) for name in NAMED.__struct_fields__ if name != "part"},
        part=0.5,
    )  # fmt: skip
    for step in range(2):
        case.first(0, step, measured=NAMED)
        answers = case.first(1, step, measured=half)
    chosen = dict(told(answers))
    sizes = [UNITS[b][u] for b, units in chosen.items() for u in units]
    assert 0 < sum(sizes) <= 0.25 * 12


@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize("order", ["time", "importance"])
@pytest.mark.parametrize("overlap", [True, False])
def test_importance_is_ranked_when_answers_have_left(
    order: Literal["time", "importance"], overlap: bool
) -> None:
    options = OSP(
        defer="most", most=0.4, budget="constant", order=order, overlap=overlap
    )
    case = Talk(options, 1)
    case.ask(0, JOIN)
    values = [[3.0, 3.0, 1.0, 1.0, 1.0, 5.0], [1.0, 1.0, 1.0, 1.0, 9.0, 9.0]]
    for bucket, loaded in enumerate(values):
        parameters = torch.tensor(loaded, dtype=torch.float64)
        case.ask(0, Load(bucket=bucket), parameters)
    how = [{**HOW[0], "lr": 0.0}]
    assert case.server.next_deadline() is None
    case.first(0, 0, measured=NAMED, hyperparameters=how)
    assert case.server.next_deadline() == 0.0
    assert case.server.on_timer(0.0) == []
    assert case.server.next_deadline() is None
    # |p g|: 6, 3 and 5; 4 and 18. 4 elements may wait, and the second has 3, the third 1.
    expected = {(0, (1, 2)), (1, ())}
    if order == "time" and overlap:
        # Bucket 1 is ready last, and the less important one of its units has 4.
        expected = {(0, ()), (1, (0,))}
    case.first(0, 1, measured=NAMED, hyperparameters=how)
    answers = case.first(0, 2, measured=NAMED, hyperparameters=how)
    assert told(answers) == expected


@pytest.mark.usefixtures("every_step")
def test_nothing_is_deferred_where_that_was_asked_for() -> None:
    case = Talk(OSP(defer="nothing"), 1).begin(0)
    for step in range(4):
        answers = case.first(0, step, measured=NAMED)
        assert told(answers) == {(0, ()), (1, ())}


@pytest.mark.usefixtures("every_step")
def test_who_is_gone_does_not_hold_the_budget_down() -> None:
    case = Talk(OSP(defer="most", most=1.0)).begin(0, 1)
    nothing = Measured(
        ready=[0.1, 0.2], end=0.3, start_up=0.0, per_byte=0.0, bytes=[], part=0.0
    )
    case.first(0, 0, measured=NAMED)
    case.first(1, 0, measured=nothing)
    case.server.on_lost(1, 0, 0.0)
    case.first(0, 1, measured=NAMED)
    assert told(case.first(0, 2, measured=NAMED)) == {(0, (0, 1, 2)), (1, (0, 1))}


# ---- the optimizer's state ----


def test_state_of_some_units_waits_for_their_updates() -> None:
    case = Talk().begin(0, 1)
    how = [{**HOW[0], "momentum": 0.5}]
    case.first(0, 0, [0, 1], None, hyperparameters=how)
    case.first(1, 0, [0, 1], None, hyperparameters=how)
    (answer,) = case.ask(0, PullState(bucket=0, units=[1], step=1))
    assert isinstance(answer.message, OptimizerState)
    assert answer.message.entries == [[("momentum_buffer", 0)]]
    assert answer.payload is not None
    assert answer.payload.tolist() == [1, 1, 1]
    assert case.ask(0, PullState(bucket=0, units=[1, 2], step=1)) == []
    assert case.ask(1, PullState(bucket=0, units=[2], step=2)) == []
    case.second(0, 0, 0, 2, value=3.0, hyperparameters=how)
    answers = case.second(1, 0, 0, 2, value=5.0, hyperparameters=how)
    state = answers.pop()
    assert heard(answers) == [(0, 0, [-4.0]), (1, 0, [-4.0])]
    assert state.to.worker == 0
    assert isinstance(state.message, OptimizerState)
    entries = [[("momentum_buffer", 0)], [("momentum_buffer", 3)]]
    assert state.message.entries == entries
    assert state.payload is not None
    assert state.payload.tolist() == [1, 1, 1, 4]
    # Of whole buckets it is given as it is, at once.
    assert len(case.ask(0, PullState(bucket=0, step=9))) == 1
    # Who is lost is told nothing.
    case.server.on_lost(1, 0, 0.0)
    assert case.server._pulls._states == []


def test_state_of_units_that_are_none() -> None:
    case = Talk().begin(0, 1)
    for units in ([3], [-1], [1, 0], [1, 1]):
        words = f"bucket 0: expected units of its 3, in order, got {units}"
        assert case.refusal(0, PullState(bucket=0, units=units)) == words
    assert case.server._pulls._states == []


def test_state_of_a_step_that_does_not_come_while_its_worker_waits() -> None:
    case = Talk().begin(0, 1)
    for worker in (0, 1):
        case.first(worker, 0)
    assert case.ask(0, PullState(bucket=0, units=[1], step=2)) == []
    for step in (3, 10**9):
        words = (
            "pull-state: expected a step up to 2 of worker 0, whose next step is 1, got "
            f"step {step}"
        )
        assert case.refusal(0, PullState(bucket=0, units=[1], step=step)) == words
    case.first(0, 1)
    answers = case.first(1, 1)
    assert [a.to.worker for a in answers if isinstance(a.message, OptimizerState)] == [
        0
    ]
    # Who goes on with the step that another server named asks as of then.
    case.server.on_lost(1, 0, 0.0)
    case.ask(1, JOIN, life=1)
    assert len(case.ask(1, Pull(bucket=0, step=7), life=1)) == 0
    assert case.ask(1, PullState(bucket=0, units=[1], step=8), life=1) == []
    late = PullState(bucket=0, units=[1], step=9)
    assert "up to 8 of worker 1, whose next step is 7" in case.refusal(1, late, life=1)


def test_state_that_cannot_leave_is_refused_to_who_asked() -> None:
    """Although it is another worker's push that makes it."""
    how: list[dict[str, Any]] = [
        {"lr": 1e-2, "beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0}
        | {"weight_decay": 0.0, "maximize": False}
    ]
    join = Join(
        options="",
        units=[[Unit(0, 0, 6, 0, shape=(2, 3))]],
        dtypes=["float64"],
        optimizer="Adafactor",
        hyperparameters=how,
    )
    case = Talk()
    for worker in (0, 1):
        assert case.ask(worker, join)[0].message == Joined(step=0, loaded=False)
    case.ask(0, Load(bucket=0), torch.zeros(6, dtype=torch.float64))
    assert case.ask(0, PullState(bucket=0, units=[0], step=1)) == []
    push = Push(step=0, bucket=0, used=[True], hyperparameters=how)
    assert case.ask(0, push, torch.ones(6, dtype=torch.float64)) == []
    answers = case.ask(1, push, torch.ones(6, dtype=torch.float64))
    *pushed, refused = answers
    assert [(w, b) for w, b, _ in heard(pushed)] == [(0, 0), (1, 0)]
    assert refused.to.worker == 0
    assert isinstance(refused.message, Refused)
    assert (
        "Adafactor's state 'row_var' cannot leave the server" in refused.message.reason
    )


# ---- refusals ----

SECONDS: list[tuple[Push, str]] = [
    (a_push(1, 0, late=True), "push: late units of step 1 of worker 0, whose next step is 1"),
    (a_push(7, 0, late=True), "push: late units of step 7 of worker 0, whose next step is 1"),
    (a_push(-1, 0, late=True), "push: late units of step -1 of worker 0, whose next step is 1"),
    (a_push(0, 0, late=True, units=[1]), "push: worker 0 has pushed the late units of bucket 0 of step 0 before"),
    (a_push(0, 1, late=True, units=[0, 0]), "bucket 1: expected units of its 2, in order, got [0, 0]"),
]  # fmt: skip


@pytest.mark.parametrize(("push", "words"), SECONDS)
def test_a_second_stage_that_is_refused_changes_nothing(push: Push, words: str) -> None:
    case = Talk().begin(0, 1)
    for worker in (0, 1):
        case.first(worker, 0, [0, 2], [0, 1])
    assert case.second(0, 0, 0, 1) == []
    assert words in case.refusal(0, push, payload(push))
    assert case.server.counts["requests refused"] == 1
    assert [case.server.shard.clock(w) for w in (0, 1)] == [1, 1]
    assert case.server.shard.fastest() == 1
    assert len(case.second(1, 0, 0, 1)) == 2
    for step in (1, 2):
        assert case.first(0, step) == []
        assert len(case.first(1, step)) == 4
    assert case.parameters(0, 0) == [-3] * 6
    assert case.parameters(0, 1) == [-3] * 6


UNKNOWN: list[tuple[Push, torch.Tensor, str]] = [
    (a_push(units=[0, 3], used=[True] * 2), torch.ones(5), "expected units of its 3, in order, got [0, 3]"),
    (a_push(units=[-1], used=[True]), torch.ones(1), "expected units of its 3, in order, got [-1]"),
    (a_push(units=[2, 0], used=[True] * 2), torch.ones(3), "expected units of its 3, in order, got [2, 0]"),
    (a_push(units=[0, 0], used=[True] * 2), torch.ones(4), "expected units of its 3, in order, got [0, 0]"),
    (a_push(units=[0]), torch.ones(3), "bucket 0: expected 2 elements of torch.float64, got 3"),
    (a_push(units=[0], used=[True] * 3), torch.ones(2), "push: expected 1 used bits, got 3"),
    (a_push(units=[], used=[]), torch.ones(2), "bucket 0: expected 0 elements"),
]  # fmt: skip
"""Of which all would do as one of the first stage as well."""


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("push", "gradient", "words"), UNKNOWN)
def test_units_that_are_none(
    push: Push, gradient: torch.Tensor, words: str, late: bool
) -> None:
    case = Talk().begin(0, 1)
    if late:
        for worker in (0, 1):
            case.first(worker, 0, [], [])
    known = {name: getattr(push, name) for name in push.__struct_fields__}
    push = Push(**(known | {"late": late}))
    assert words in case.refusal(0, push, gradient.double())
    for worker in (0, 1):
        if late:
            answers = case.second(worker, 0, 0, 0, 1, 2)
        else:
            answers = case.push(worker, 0, 0)
    assert len(answers) == 2
    assert case.parameters(0, 0) == [-1] * 6


def test_the_second_stage_comes_after_the_first() -> None:
    case = Talk().begin(0, 1)
    words = "push: late units of step 0 of worker 0, whose next step is 0"
    second = a_push(0, 0, late=True, units=[1])
    assert case.refusal(0, second, payload(second)) == words
    case.push(0, 0, 0, units=[0, 2])
    assert case.refusal(0, second, payload(second)) == words
    case.push(0, 0, 1)
    assert case.second(0, 0, 0, 1) == []  # that is all of its first stage


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([0, 2], [0, 1]),
        ([0, 2], None),
        ([0, 2], [0]),
        ([0, 2], []),
        ([0], [2]),
        ([], [0, 1]),
        ([], []),
        (None, [1]),
        (None, None),
        (None, []),
    ],
)
def test_units_come_in_one_stage_of_a_step_only(
    first: list[int] | None, second: list[int] | None
) -> None:
    """What came in both would wait for ever for its update of this step, as what came in
    none would in the next one; and a push of nothing for all others."""
    case = Talk().begin(0, 1)
    assert case.first(0, 0, first, None) == []
    push = a_push(0, 0, late=True, units=second)
    left = [] if first is None else [u for u in range(3) if u not in first]
    expected = f"units {left}, all that worker 0 has left out"
    if not left:
        expected = "none, as worker 0 has left out nothing"
    got = [0, 1, 2] if second is None else second
    words = f"push: late units of step 0, bucket 0: expected {expected}, got {got}"
    assert case.refusal(0, push, payload(push)) == words  # whoever else is in by then
    assert len(case.first(1, 0, first, None)) == 4
    assert case.refusal(0, push, payload(push)) == words
    # Nothing of it was done: what the first stage left out may still come.
    if left:
        assert case.second(0, 0, 0, *left) == []
        assert len(case.second(1, 0, 0, *left)) == 2
    for worker in (0, 1):
        answers = case.first(worker, 1)
    assert len(answers) == 4
    assert case.parameters(0, 0) == [-2] * 6


def test_units_of_the_step_before_may_come_again_in_this_one() -> None:
    case = Talk(workers=1).begin(0)
    case.first(0, 0, [0, 1], None)
    case.first(
        0, 1, [0], None
    )  # unit 2 is not in: step 0 leaves it to its second stage
    push = a_push(0, 0, late=True, units=[1, 2])
    assert "got [1, 2]" in case.refusal(0, push, payload(push))
    assert heard(case.second(0, 0, 0, 2)) == [(0, 0, [-1.0])]
    assert heard(case.second(0, 1, 0, 1, 2)) == [(0, 0, [-2.0] * 4)]


def test_the_second_stage_does_not_come_too_late() -> None:
    case = Talk(workers=1).begin(0)
    case.first(0, 0, [0, 1], [1])
    case.second(0, 0, 1, 0)
    case.first(0, 1, [0, 1], None)
    words = (
        "push: worker 0 has left units [2] of bucket 0 out of its push of step 0: expected "
        "them late before "
    )
    third = a_push(2, 0, units=[0, 1])
    assert case.refusal(0, third, payload(third)) == words + "step 2"
    second = a_push(1, 0, late=True, units=[2])
    assert case.refusal(0, second, payload(second)) == words + "late units of step 1"
    assert case.server.shard.fastest() == 2
    # It is not too late yet.
    assert heard(case.second(0, 0, 0, 2)) == [(0, 0, [-1.0])]
    assert len(case.first(0, 2, [0, 1], None)) == 2
    assert heard(case.second(0, 1, 0, 2)) == [(0, 0, [-2.0])]
    assert heard(case.second(0, 2, 0, 2)) == [(0, 0, [-3.0])]
    second = a_push(0, 0, late=True, units=[2])
    words = "push: late units of step 0 of worker 0, whose next step is 3"
    assert case.refusal(0, second, payload(second)) == words


def test_nobody_has_a_second_stage_of_a_step_before_its_first() -> None:
    case = Talk().begin(0, 1)
    for worker in (0, 1):
        case.first(worker, 0)
    case.server.on_lost(1, 0, 0.0)
    assert case.ask(1, JOIN, life=1)[0].message == Joined(
        step=1, loaded=True, guest=True
    )
    second = a_push(0, 0, late=True, units=[2])
    words = "push: late units of step 0 of worker 1, whose next step is 1"
    assert case.refusal(1, second, payload(second), life=1) == words


def test_who_has_left_has_no_second_stage() -> None:
    case = Talk().begin(0, 1)
    for worker in (0, 1):
        case.first(worker, 0, [0, 2], None)
    case.second(1, 0, 0, 1)
    assert case.ask(1, Leave()) == []
    second = a_push(0, 0, late=True, units=[1])
    assert case.refusal(1, second, payload(second)) == "push: worker 1 has left"


def test_who_leaves_sends_its_second_stage_before() -> None:
    """Its gradients would count for what it did not defer only."""
    case = Talk().begin(0, 1)
    for worker in (0, 1):
        case.first(worker, 0, None, [1])
    words = (
        "leave: worker 1 has left units [0] of bucket 1 out of its push of step 0: expected "
        "them late before it leaves"
    )
    assert case.refusal(1, Leave()) == words
    assert case.second(0, 0, 1, 0, value=3.0) == []
    assert len(case.second(1, 0, 1, 0, value=5.0)) == 2
    assert case.ask(1, Leave()) == []
    assert [a.to.worker for a in case.ask(0, Leave())] == [1, 0]
    assert case.parameters(0, 1) == [-4] * 4 + [-1] * 2
    assert not case.server.counts["updates of units that nobody sent"]


@pytest.mark.parametrize("method", [ASP(), SSP(staleness=0), Backup()])
def test_methods_without_stages(method: Any) -> None:
    case = Talk(method).begin(0, 1)
    second = a_push(0, 0, late=True)
    words = "push: this method takes no late units"
    assert case.refusal(0, second, payload(second)) == words
    some = a_push(0, 0, units=[0])
    words = "push: this method takes whole buckets, got units [0] of bucket 0"
    assert case.refusal(0, some, payload(some)) == words
    assert case.server.shard.fastest() == 0
    case.first(0, 0)
    case.first(1, 0)
    assert case.server.shard.version(0) >= 1


@pytest.mark.parametrize(
    "change",
    [
        {"ready": [0.1]},
        {"ready": [0.1, math.nan]},
        {"ready": [0.1, -1.0]},
        {"end": math.inf},
        {"per_byte": -1.0},
        {"start_up": math.nan},
        {"whole": -1.0},
        {"whole": math.nan},
        {"whole": math.inf},
        {"part": 1.5},
        {"part": -0.5},
        {"bytes": [-1, 4]},
    ],
)
@pytest.mark.usefixtures("every_step")
def test_measurements_that_make_no_sense(change: dict[str, Any]) -> None:
    case = Talk(OSP()).begin(0, 1)
    names = NAMED.__struct_fields__
    measured = Measured(**({name: getattr(NAMED, name) for name in names} | change))
    push = a_push(measured=measured)
    words = "push: measured times, bytes or parts that make no sense"
    assert case.refusal(0, push, payload(push)).startswith(words)
    case.first(0, 0, measured=NAMED)
    assert len(case.first(1, 0, measured=NAMED)) == 4


@pytest.mark.parametrize(
    "report",
    [b"\xc1", b"\x81", b"\x80", b"\x90" * 5000, b"\x01", written_report(NAMED) + b"x"],
)
def test_reports_that_cannot_be_read(report: bytes) -> None:
    case = Talk(OSP()).begin(0, 1)
    push = a_push(report=report)
    words = "push: bytes that osp cannot read: "
    assert case.refusal(0, push, payload(push)).startswith(words)
    assert case.server.shard.fastest() == 0
    case.first(0, 0, measured=NAMED)
    assert len(case.first(1, 0, measured=NAMED)) == 4


@pytest.mark.parametrize("method", [ASP(), SSP(staleness=0), Backup()])
def test_methods_without_reports(method: Any) -> None:
    case = Talk(method).begin(0, 1)
    push = a_push(report=written_report(NAMED))
    assert case.refusal(0, push, payload(push)) == "push: this method takes no reports"
    assert case.server.shard.fastest() == 0
    case.first(0, 0)
    case.first(1, 0)
    assert case.server.shard.version(0) >= 1


def test_units_that_differ_stop_the_training_in_words() -> None:
    case = Talk(workers=3).begin(0, 1, 2)
    assert case.ask(2, PullState(bucket=1, units=[1], step=1)) == []
    case.first(0, 0, [0, 1], None)
    assert case.first(1, 0, [0, 2], None) == []
    assert case.push(2, 0, 1) != []
    answers = case.push(2, 0, 0, units=[0, 1])
    words = (
        "step 0, bucket 0: worker 0 has sent units [0, 1] and worker 1 [0, 2]; one "
        "step's must be equal"
    )
    refused = [a for a in answers if isinstance(a.message, Refused)]
    assert [a.to.worker for a in refused] == [0, 1, 2]
    assert {a.message.reason for a in refused} == {words}  # type: ignore[union-attr]
    assert len(refused) == len(answers)
    assert case.server.counts["gradients applied"] == 3  # of bucket 1
    assert case.server.shard.version(0) == 0
    push = a_push(0, 0, late=True, units=[2])
    assert case.refusal(0, push, payload(push)) == words
    state = PullState(bucket=0, units=[2], step=1)
    assert case.refusal(1, state) == words


def test_units_of_a_second_stage_that_differ() -> None:
    case = Talk().begin(0, 1)
    for worker in (0, 1):
        case.first(worker, 0, [0], None)
    case.second(0, 0, 0, 1, 2)
    second = a_push(0, 0, late=True, units=[1])
    words = (
        "push: late units of step 0, bucket 0: expected units [1, 2], all that worker 1 has "
        "left out, got [1]"
    )
    assert case.refusal(1, second, payload(second)) == words
    # It is said to who made the mistake, and the others are not stopped by it.
    assert len(case.second(1, 0, 0, 1, 2)) == 2
    assert case.parameters(0, 0) == [-1] * 6


def test_units_of_a_first_stage_that_differ_stop_a_second_one_that_waits() -> None:
    case = Talk().begin(0, 1)
    case.first(0, 0, [0], None)
    assert case.second(0, 0, 0, 1, 2) == []
    answers = case.push(1, 0, 0, units=[0, 1])
    words = (
        "step 0, bucket 0: worker 0 has sent units [0] and worker 1 [0, 1]; one step's "
        "must be equal"
    )
    assert [a.message for a in answers] == [Refused(reason=words)] * 4
    assert [a.to.worker for a in answers] == [0, 0, 0, 1]
    push = a_push(0, 1)
    assert case.refusal(1, push, payload(push)) == words


def test_who_waits_for_state_is_told_that_training_stopped() -> None:
    case = Talk(workers=2).begin(0, 1)
    assert case.ask(1, PullState(bucket=1, units=[1], step=1)) == []
    case.push(0, 0, 0, units=[0])
    answers = case.push(1, 0, 0, units=[1])
    assert [a.to.worker for a in answers] == [0, 1, 1]
    assert all(isinstance(a.message, Refused) for a in answers)


# ---- who dies, and who comes back ----


def test_who_dies_between_the_stages_is_not_waited_for() -> None:
    case = Talk().begin(0, 1)
    for worker in (0, 1):
        case.first(worker, 0, [0, 2], None, value=1.0 + 2 * worker)
    assert case.second(0, 0, 0, 1, value=5.0) == []
    assert heard(case.server.on_lost(1, 0, 0.0)) == [(0, 0, [-5.0] * 3)]
    assert case.parameters(0, 0) == [-2, -2, -5, -5, -5, -2]


def test_a_second_stage_of_the_dead_counts() -> None:
    case = Talk().begin(0, 1)
    for worker in (0, 1):
        case.first(worker, 0, [0, 2], None)
    assert case.second(1, 0, 0, 1, value=3.0) == []
    assert case.server.on_lost(1, 0, 0.0) == []
    assert heard(case.second(0, 0, 0, 1, value=5.0)) == [(0, 0, [-4.0] * 3)]


def test_what_all_dead_have_deferred_is_skipped() -> None:
    case = Talk().begin(0, 1)
    for worker in (0, 1):
        case.first(worker, 0, [0, 2], None)
    case.server.on_lost(0, 0, 0.0)
    case.server.on_lost(1, 0, 0.0)
    assert case.server.counts["updates of units that nobody sent"] == 1
    assert case.ask(1, JOIN, life=1)[0].message == Joined(
        step=1, loaded=True, guest=True
    )
    (answer,) = case.ask(1, Pull(bucket=0, step=1), life=1)
    assert heard([answer]) == [(1, 0, [-1.0, -1.0, 0.0, 0.0, 0.0, -1.0])]
    answers = case.first(1, 1, life=1)
    assert heard(answers)[0] == (1, 0, [-2.0, -2.0, -1.0, -1.0, -1.0, -2.0])


def test_rounds_go_on_when_what_they_waited_for_is_skipped() -> None:
    """Unit 1, deferred in step 0, is in the first stage of step 1, which waits for it."""
    case = Talk().begin(0, 1)
    for worker in (0, 1):
        case.first(worker, 0, [0, 2], None)
    assert case.push(0, 1, 0) == []
    case.server.on_lost(1, 0, 0.0)
    case.server.on_lost(0, 0, 0.0)
    assert case.ask(1, JOIN, life=1)[0].message == Joined(
        step=2, loaded=True, guest=True
    )
    (answer,) = case.ask(1, Pull(bucket=0, step=2), life=1)
    assert heard([answer]) == [(1, 0, [-2.0, -2.0, -1.0, -1.0, -1.0, -2.0])]
    (answer,) = case.ask(1, Pull(bucket=1, step=2), life=1)
    assert heard([answer]) == [(1, 1, [-1.0] * 6)]
    assert case.server.counts["updates of units that nobody sent"] == 1 + 2


def test_a_later_step_that_another_server_named() -> None:
    case = Talk(workers=1).begin(0)
    case.first(0, 0, [0, 2], None)
    assert case.push(0, 3, 0) == []
    answers = case.push(0, 3, 1)
    assert heard(answers) == [
        (0, 0, [-2.0, -2.0, -1.0, -1.0, -1.0, -2.0]),
        (0, 1, [-2.0] * 6),
    ] or heard(answers) == [
        (0, 1, [-2.0] * 6),
        (0, 0, [-2.0, -2.0, -1.0, -1.0, -1.0, -2.0]),
    ]


@pytest.mark.usefixtures("every_step")
def test_who_comes_back_is_told_what_its_first_step_defers() -> None:
    case = Talk(OSP(defer="most", most=1.0, budget="constant")).begin(0, 1)
    for step in range(2):
        for worker in (0, 1):
            answers = case.first(worker, step, measured=NAMED)
    assert told(answers) == {(0, (0, 1, 2)), (1, (0, 1))}
    case.server.on_lost(1, 0, 0.0)
    case.ask(1, JOIN, life=1)
    answers = [a for b in range(2) for a in case.ask(1, Pull(bucket=b, step=2), life=1)]
    assert told(answers) == {(0, (0, 1, 2)), (1, (0, 1))}
    case.first(0, 2, [], [])
    assert len(case.first(1, 2, [], [], life=1)) == 4


def test_who_comes_back_waits_for_the_second_stage_before_it() -> None:
    case = Talk().begin(0, 1)
    for worker in (0, 1):
        case.first(worker, 0, [0, 2], None)
    case.server.on_lost(1, 0, 0.0)
    assert case.ask(1, JOIN, life=1)[0].message == Joined(
        step=1, loaded=True, guest=True
    )
    assert case.ask(1, Pull(bucket=0, step=1), life=1) == []
    # It is given all buckets together.
    assert case.ask(1, Pull(bucket=1, step=1), life=1) == []
    answers = case.second(0, 0, 0, 1)
    assert heard(answers) == [
        (0, 0, [-1.0] * 3),
        (1, 0, [-1.0] * 6),
        (1, 1, [-1.0] * 6),
    ]


# ---- what comes again ----


def test_a_second_stage_that_comes_again_is_answered_again_and_not_done() -> None:
    case = Talk(workers=1).begin(0)
    case.first(0, 0, [0, 1], None)
    sender = case.sender(0)._replace(channel="late")
    message = a_push(0, 0, late=True, units=[2])
    (first,) = case.server.on_message(sender, message, payload(message), 0.0)
    (again,) = case.server.on_message(sender, message, payload(message), 0.0)
    assert again == first
    assert again.payload is first.payload
    assert case.parameters(0, 0) == [-1] * 6


# ---- snapshots ----


def test_a_snapshot_waits_for_the_second_stage() -> None:
    case = Talk(workers=1).begin(0)
    case.first(0, 0, [0, 1], None)
    assert case.server.snapshot() == {}
    case.second(0, 0, 0, 2)
    saved = case.server.snapshot()
    assert saved["step"] == 1
    case.first(0, 1)
    other = Talk(workers=1)
    other.server = ParameterServer(1, OSP(defer="nothing").server(1))
    assert other.server.restore(saved) == 1
    assert other.ask(0, JOIN)[0].message == Joined(step=1, loaded=True, guest=True)
    assert other.parameters(0, 0) == [-1] * 6
    assert len(other.first(0, 1, [0, 1], None)) == 2
    assert heard(other.second(0, 1, 0, 2)) == [(0, 0, [-2.0])]


# ---- the worker's end ----


class Direct:
    """An `Endpoint` of a server that has only this worker, which answers at once."""

    name = "server"

    def __init__(self, server: ParameterServer, life: int) -> None:
        self.server, self.life, self.number = server, life, 0

    def request(
        self,
        message: Request,
        payload: torch.Tensor | None = None,
        into: torch.Tensor | None = None,
        channel: str = "",
    ) -> Received:
        sender = Sender(0, self.life, channel, self.number)
        self.number += 1
        sent = None if payload is None else payload.clone()
        (answer,) = self.server.on_message(sender, message, sent, 0.0)
        if into is not None and answer.payload is not None:
            into[: answer.payload.numel()] = answer.payload
        return Received(answer.message)

    def close(self) -> None:
        pass


class Received:
    def __init__(self, message: Reply) -> None:
        self.message = message

    def wait(self) -> Reply:
        return self.message


def test_who_joins_defers_what_servers_say() -> None:
    """Of two servers, each with a half of the first bucket, whose second has the other."""
    sizes = [[40_000, 1000, 30_000], [10, 20]]
    parameters = [torch.nn.Parameter(torch.ones(n)) for group in sizes for n in group]
    named = [(str(n), parameter) for n, parameter in enumerate(parameters)]
    buckets = make_buckets(named, [[0, 1, 2], [3, 4]])
    method = OSP()
    servers = [ParameterServer(1, method.server(1)) for _ in range(2)]

    def joined(life: int) -> RemoteParameters:
        remote = RemoteParameters(
            0,
            torch.optim.SGD(parameters, lr=0.1),
            [Direct(server, life) for server in servers],
            ServerJob(method, "osp", "auto"),
            "",
            [],
            [],
            [],
            False,
            buckets,
            lambda: 1.0,
        )
        remote.join()
        return remote

    first = joined(0)
    assert next_deferred(first) == []
    assert [len(places) for places in first.units] == [4, 2]
    masks: list[dict[int, list[int]]] = [{0: [0]}, {0: [0, 2], 1: [1]}]
    if len(servers[0].shard.buckets) == 2:  # the second bucket went there
        masks = [{0: [0], 1: [1]}, {0: [0, 2]}]
    for server, mask in zip(servers, masks, strict=True):
        assert isinstance(server.shard.discipline, TwoStages)
        server.shard.discipline.defer(mask, now=True)
    assert sorted(next_deferred(joined(1))) == [(0, 0), (0, 1), (0, 3), (1, 1)]
