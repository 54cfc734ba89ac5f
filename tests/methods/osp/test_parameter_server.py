"""osp's server: its transitions, one by one, and its refusals in words."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

import pytest
import torch
from msgspec import structs

from paceline import compression
from paceline.interfaces import (
    Reply,
    ServerJob,
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
    Rejected,
    Unit,
)
from paceline.methods.osp import OSP
from paceline.methods.osp.measurement import TRIAL_STEPS, WorkerReport, encode_report
from paceline.methods.osp.parameter_server import (
    TwoStageDiscipline,
    decode_mask,
    next_deferred,
)
from paceline.parameter_server.client.remote_model import RemoteModel, ServedModel
from paceline.parameter_server.state_machine.server import ParameterServer
from tests.methods.osp.helpers import INTERVAL, SERVER_TRIAL
from tests.parameter_server.state_machine.test_server import HOW, Case
from tests.support.server_talk import Direct, Refusal

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
NAMED = WorkerReport(
    ready=[0.1, 0.2], end=0.3, start_up=0.0, per_byte=1e-3, bytes=[48, 48], part=1.0
)


class Talk(Case):
    """A server under osp, and workers' requests to it."""

    def __init__(self, method: UpdatesOnServer | None = None, workers: int = 2) -> None:
        super().__init__(method or OSP(defer="nothing"), workers)

    @property
    def stages(self) -> TwoStageDiscipline:
        assert isinstance(self.server.shard.discipline, TwoStageDiscipline)
        return self.server.shard.discipline

    def begin(self, *workers: int) -> Talk:
        for worker in workers:
            self.ask(worker, JOIN)
        for bucket, sizes in enumerate(UNITS):
            zeros = torch.zeros(sum(sizes), dtype=torch.float64)
            self.ask(workers[0], Load(bucket=bucket), zeros)
        return self

    def push(self, worker: int, step: int, bucket: int, **others: Any) -> list[Reply]:
        life, value = others.pop("life", 0), others.pop("value", 1.0)
        message = a_push(step, bucket, **others)
        return self.ask(worker, message, payload(message, value), life)

    def second(self, worker: int, step: int, bucket: int, *units: int, **others: Any) -> list[Reply]:  # fmt: skip
        others |= {"late": True, "units": list(units)}
        return self.push(worker, step, bucket, **others)

    def first(
        self, worker: int, step: int, *units: Sequence[int] | None, **others: Any
    ) -> list[Reply]:
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
        others["report"] = encode_report(measured)
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


def heard(answers: list[Reply]) -> list[tuple[int, int, list[float]]]:
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


def told(answers: list[Reply]) -> set[tuple[int, tuple[int, ...]]]:
    """By bucket, the units that answers say are to be deferred."""
    found = set()
    for answer in answers:
        assert isinstance(answer.message, Parameters)
        found.add((answer.message.bucket, tuple(decode_mask(answer.message.notice))))
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
    half = WorkerReport(
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
def test_who_is_gone_does_not_hold_the_budget_down() -> None:
    case = Talk(OSP(defer="most", most=1.0)).begin(0, 1)
    nothing = WorkerReport(
        ready=[0.1, 0.2], end=0.3, start_up=0.0, per_byte=0.0, bytes=[], part=0.0
    )
    case.first(0, 0, measured=NAMED)
    case.first(1, 0, measured=nothing)
    case.server.on_worker_lost(1, 0, 0.0)
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
    case.server.on_worker_lost(1, 0, 0.0)
    assert case.server._state_pulls == []


def test_state_of_the_step_after_the_next_waits() -> None:
    case = Talk().begin(0, 1)
    for worker in (0, 1):
        case.first(worker, 0)
    assert case.ask(0, PullState(bucket=0, units=[1], step=2)) == []
    case.first(0, 1)
    answers = case.first(1, 1)
    assert [a.to.worker for a in answers if isinstance(a.message, OptimizerState)] == [
        0
    ]


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
    assert isinstance(refused.message, Rejected)
    assert (
        "Adafactor's state 'row_var' cannot leave the server" in refused.message.reason
    )


# ---- refusals ----


NEXT = "whose next step is"


def begun() -> Talk:
    """Two workers have parameters."""
    return Talk().begin(0, 1)


def after_first(
    *units: Sequence[int] | None, workers: Sequence[int] = (0, 1)
) -> Callable[[], Talk]:
    """These workers have sent the first stage of step 0: by bucket, these units."""

    def moment() -> Talk:
        case = begun()
        for worker in workers:
            case.first(worker, 0, *units)
        return case

    return moment


def comes_back() -> Talk:
    case = after_first(None, None)()
    case.server.on_worker_lost(1, 0, 0.0)
    case.ask(1, JOIN, life=1)
    return case


def goes_on_with_step_7() -> Talk:
    case = comes_back()
    case.ask(1, Pull(bucket=0, step=7), life=1)
    return case


def owes_a_second_stage() -> Talk:
    """Worker 1 has left a unit of step 1 out, and has begun step 3 in no bucket."""
    case = after_first(None, None, workers=[1])()
    case.first(1, 1, [0, 2], None)
    case.first(1, 2, None, None)
    return case


def left() -> Talk:
    case = after_first([0, 2], None)()
    case.second(1, 0, 0, 1)
    case.ask(1, Leave())
    return case


def reported(change: dict[str, Any]) -> Push:
    """A push whose report is `NAMED` but for this."""
    return a_push(measured=structs.replace(NAMED, **change))


REFUSALS = [
    # Who came back after the first stage of step 0 has nothing to send late, nor has who left.
    Refusal(comes_back, a_push(0, 0, late=True, units=[2]), NEXT, worker=1, life=1),
    Refusal(left, a_push(0, 0, late=True, units=[1]), "has left", worker=1),
    Refusal(after_first(None, [1]), Leave(), "late before it leaves", worker=1),
    Refusal(
        owes_a_second_stage,
        a_push(3),
        "out of its push of step 1: expected them late",
        worker=1,
    ),
    Refusal(
        after_first([0], None),
        a_push(0, 0, late=True, units=[1]),
        "all that worker 1 has",
        worker=1,
    ),
    Refusal(
        goes_on_with_step_7,
        PullState(bucket=0, units=[1], step=9),
        f"up to 8 of worker 1, {NEXT} 7",
        worker=1,
        life=1,
    ),
    *(
        Refusal(begun, reported(change), "make no sense")
        for change in (
            *({"ready": [0.1]}, {"ready": [0.1, math.nan]}, {"ready": [0.1, -1.0]}),
            *({"end": math.inf}, {"per_byte": -1.0}, {"start_up": math.nan}),
            *({"whole": -1.0}, {"whole": math.nan}, {"whole": math.inf}),
            *({"part": 1.5}, {"part": -0.5}, {"bytes": [-1, 4]}),
        )
    ),
    *(
        Refusal(begun, a_push(report=report), "cannot read")
        for report in (
            *(b"\xc1", b"\x81", b"\x80", b"\x90" * 5000, b"\x01"),
            encode_report(NAMED) + b"x",
        )
    ),
]
"""What the kit, which makes mistakes at any moment, does not try."""


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda one: one.words)
def test_what_is_refused_changes_nothing(refusal: Refusal) -> None:
    if isinstance(refusal.message, Push) and refusal.payload is None:
        refusal = refusal._replace(payload=payload(refusal.message))
    refusal.check()


def test_who_leaves_sends_its_second_stage_before() -> None:
    """Its gradients would count for what it did not defer only."""
    case = after_first(None, [1])()
    assert case.second(0, 0, 1, 0, value=3.0) == []
    assert len(case.second(1, 0, 1, 0, value=5.0)) == 2
    assert case.ask(1, Leave()) == []
    assert [a.to.worker for a in case.ask(0, Leave())] == [1, 0]
    assert case.parameters(0, 1) == [-4] * 4 + [-1] * 2
    assert not case.server.counts["updates of units that nobody sent"]


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
    refused = [a for a in answers if isinstance(a.message, Rejected)]
    assert [a.to.worker for a in refused] == [0, 1, 2]
    assert {a.message.reason for a in refused} == {words}  # type: ignore[union-attr]
    assert len(refused) == len(answers)
    assert case.server.counts["gradients applied"] == 3  # of bucket 1
    assert case.server.shard.version(0) == 0
    push = a_push(0, 0, late=True, units=[2])
    assert case.refusal(0, push, payload(push)) == words
    state = PullState(bucket=0, units=[2], step=1)
    assert case.refusal(1, state) == words


def test_units_of_a_first_stage_that_differ_stop_a_second_one_that_waits() -> None:
    case = Talk().begin(0, 1)
    case.first(0, 0, [0], None)
    assert case.second(0, 0, 0, 1, 2) == []
    answers = case.push(1, 0, 0, units=[0, 1])
    words = (
        "step 0, bucket 0: worker 0 has sent units [0] and worker 1 [0, 1]; one step's "
        "must be equal"
    )
    assert [a.message for a in answers] == [Rejected(reason=words)] * 4
    assert [a.to.worker for a in answers] == [0, 0, 0, 1]
    push = a_push(0, 1)
    assert case.refusal(1, push, payload(push)) == words


# ---- who dies, and who comes back ----


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


# ---- the worker's end ----


def test_who_joins_defers_what_servers_say() -> None:
    """Of two servers, each with a half of the first bucket, whose second has the other."""
    sizes = [[40_000, 1000, 30_000], [10, 20]]
    parameters = [torch.nn.Parameter(torch.ones(n)) for group in sizes for n in group]
    named = [(str(n), parameter) for n, parameter in enumerate(parameters)]
    buckets = make_buckets(named, [[0, 1, 2], [3, 4]])
    method = OSP()
    servers = [ParameterServer(1, lambda _: method.server(1)) for _ in range(2)]

    def joined(life: int) -> RemoteModel:
        sgd, job = torch.optim.SGD(parameters, lr=0.1), ServerJob(method, "osp", "auto")
        endpoints = [Direct(server, life) for server in servers]
        remote = RemoteModel(
            ServedModel(0, sgd, endpoints, job), buckets, compression.make("none")
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
        assert isinstance(server.shard.discipline, TwoStageDiscipline)
        server.shard.discipline.defer(mask, now=True)
    assert sorted(next_deferred(joined(1))) == [(0, 0), (0, 1), (0, 3), (1, 1)]


# ---- a trial of deferring ----


def report(whole: float, **others: object) -> WorkerReport:
    """For one computation of 0.3 s each bucket takes 0.48 s: to defer one would pay."""
    known = {"end": 0.3, "start_up": 0.0, "bytes": [48, 48], "part": 1.0}
    known |= {"ready": [0.2, 0.3], "per_byte": 1e-2, "whole": whole}
    return WorkerReport(**(known | others))


class Trying(Talk):
    """A server under osp whose workers take steps in which they defer what they are told."""

    def __init__(self, workers: int, method: OSP | None = None) -> None:
        super().__init__(method or OSP(budget="constant", most=1.0), workers)
        self.begin(*range(workers))
        self.step = 0
        self.masks: list[Sequence[int]] = [()] * len(UNITS)
        self.seen: dict[int, bool] = {}
        """After which steps something is deferred."""

    def steps(
        self,
        until: int,
        whole: Callable[[bool], float],
        workers: Collection[int] = (0, 1),
    ) -> None:
        while self.step < until:
            step, masks = self.step, list(self.masks)
            tells = step % INTERVAL == 0 or (
                step % INTERVAL == TRIAL_STEPS + 3 and any(masks)
            )
            measured = report(whole(any(masks))) if tells else None
            if not step:
                measured = report(0.0, ready=[], per_byte=0.0)  # none was seen
            answers = defaultdict[int, set[tuple[int, ...]]](set)
            for bucket, sizes in enumerate(UNITS):
                units = [n for n in range(len(sizes)) if n not in masks[bucket]]
                for worker in workers:
                    for answer in self.push(
                        worker, step, bucket, units=units,
                        measured=measured if bucket == len(UNITS) - 1 else None,
                    ):  # fmt: skip
                        answers[answer.message.bucket].add(
                            tuple(decode_mask(answer.message.notice))
                        )  # type: ignore[union-attr]
            for bucket, late in enumerate(masks):
                for worker in workers if late else ():
                    self.push(worker, step, bucket, units=late, late=True)
            for bucket, masks in answers.items():
                (self.masks[bucket],) = masks  # the same to all
            self.seen[step] = any(self.masks)
            self.step += 1

    def deferring(self) -> set[int]:
        return {step for step, seen in self.seen.items() if seen}


def slow(deferring: bool) -> float:
    return 2.0 if deferring else 1.0


def quick(deferring: bool) -> float:
    return 0.8 if deferring else 1.0


@pytest.mark.parametrize("at", [INTERVAL + 2, INTERVAL + TRIAL_STEPS + 3])
@pytest.mark.parametrize("whole", [slow, quick])
def test_a_worker_dies_during_a_trial(at: int, whole: Callable[[bool], float]) -> None:
    """What the others take without is found out anew; nobody waits for anything."""
    case = Trying(3)
    case.steps(at, whole, (0, 1, 2))
    case.server.on_worker_lost(2, 0, 0.0)
    case.steps(4 * INTERVAL, whole)
    assert set(range(INTERVAL + 1, 2 * INTERVAL + 1)) <= case.deferring()
    later = {step for step in case.deferring() if step > 2 * INTERVAL}
    again = range(3 * INTERVAL + 1, 4 * INTERVAL)
    ends = (
        {step + 2 * INTERVAL for step in SERVER_TRIAL} if whole is slow else set(again)
    )
    assert later == ends


def test_a_server_that_always_defers_has_no_trial() -> None:
    case = Trying(2, OSP(defer="most", most=1.0, budget="constant"))
    case.steps(3 * INTERVAL, slow)
    assert case.deferring() == set(range(1, 3 * INTERVAL))
