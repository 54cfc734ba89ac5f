"""Where workers wait for each other at a server: loads, meets, and who is missing there."""

from __future__ import annotations

import pytest
import torch

from paceline.interfaces import UpdatesOnServer
from paceline.interfaces.server_messages import (
    BarrierPassed,
    Buffers,
    Done,
    EnterBarrier,
    Joined,
    Leave,
    Load,
    LoadUntrained,
    MixBuffers,
    Parameters,
    Pull,
    PullBuffers,
    PullUntrained,
    Rejected,
    Untrained,
)
from paceline.methods.asp import ASP
from paceline.methods.backup import Backup
from paceline.methods.osp import OSP
from paceline.methods.r2sp import R2SP
from paceline.methods.ssp import SSP
from paceline.parameter_server.state_machine.server import ParameterServer
from tests.parameter_server.state_machine.test_server import JOIN, Case, pushed, zeros

METHODS = [
    *(ASP(), SSP(), SSP(staleness=0), R2SP(), Backup(), Backup(wait_for=1)),
    OSP(defer="nothing"),
]


def names(method: UpdatesOnServer) -> str:
    return repr(method)


def heard(answers: list) -> list[tuple[int, object]]:
    return [(a.to.worker, a.message) for a in answers]


def train(case: Case, *workers: int) -> Case:
    """All have their first parameters."""
    case.begin(*workers)
    for worker in workers:
        for bucket in range(2):
            assert len(case.ask(worker, Pull(bucket=bucket))) == 1
    return case


# ---- loads ----


@pytest.mark.parametrize("method", METHODS, ids=names)
def test_the_lowest_rank_leads_when_all_are_there(method: UpdatesOnServer) -> None:
    case = train(Case(method, 3), 0, 1, 2)
    for step in range(2):
        for worker in range(3):
            case.whole_step(worker, step)
    assert case.arrive(2) == []
    assert case.arrive(0) == []
    assert heard(case.arrive(1)) == [(0, BarrierPassed(leads=True))]
    assert heard(case.ask(0, Load(bucket=0), zeros(2) + 7)) == [(0, Done())]
    assert case.parameters(1, 0) != [7, 7]  # not before all of it is there
    answers = heard(case.ask(0, Load(bucket=1), zeros(3) + 7))
    assert answers == [
        (0, Done()),
        (2, BarrierPassed(load=1)),
        (1, BarrierPassed(load=1)),
    ]
    for worker in range(3):
        for bucket in range(2):
            (answer,) = case.ask(worker, Pull(bucket=bucket))
            assert isinstance(answer.message, Parameters)
            assert answer.message.load == 1
            assert set(answer.payload.tolist()) == {7}  # type: ignore[union-attr]
    assert case.arrive(1, kind="pulled") == []
    assert "is at a barrier" in case.refusal(1, pushed(2), zeros(2))
    assert case.arrive(0, kind="pulled") == []
    assert heard(case.arrive(2, kind="pulled")) == [
        (worker, BarrierPassed(load=1)) for worker in (1, 0, 2)
    ]
    assert "was not at a load" in case.refusal(1, EnterBarrier(kind="pulled"))


def pulled(case: Case, *workers: int) -> list[tuple[int, object]]:
    """They say that they have what was loaded."""
    return [heard(case.arrive(worker, kind="pulled")) for worker in workers][-1]


@pytest.mark.parametrize("method", METHODS, ids=names)
def test_what_the_dead_have_pushed_before_a_load_never_reaches_it(
    method: UpdatesOnServer,
) -> None:
    case = train(Case(method, 3), 0, 1, 2)
    for worker in range(3):
        case.whole_step(worker, 0)
    case.push(2, 1, 1, value=1000.0)
    case.arrive(0)
    case.arrive(1)
    assert heard(case.server.on_worker_lost(2, 0, 0.0)) == [
        (0, BarrierPassed(leads=True))
    ]
    case.load(0, 5.0)
    pulled(case, 0, 1)
    for worker in (0, 1):
        case.whole_step(worker, 1, weight=0.5)
    case.server.on_timer(1e9)
    assert min(case.parameters(0, 1)) >= 3


def test_the_next_one_leads_if_the_leader_dies() -> None:
    case = train(Case(ASP(), 3), 0, 1, 2)
    for worker in range(3):
        case.arrive(worker)
    case.ask(0, Load(bucket=0), zeros(2) + 100)
    assert heard(case.server.on_worker_lost(0, 0, 0.0)) == [
        (1, BarrierPassed(leads=True))
    ]
    assert "this server has parameters" in case.refusal(2, Load(bucket=1), zeros(3))
    case.ask(1, Load(bucket=1), zeros(3) + 3)
    assert case.parameters(1, 0) == [0, 0]
    answers = heard(case.ask(1, Load(bucket=0), zeros(2) + 3))
    assert answers == [(1, Done()), (2, BarrierPassed(load=1))]
    assert case.parameters(2, 0) == [3, 3]


def test_a_worker_that_comes_back_is_a_guest() -> None:
    case = train(Case(ASP()), 0, 1)
    case.whole_step(0, 0)
    case.server.on_worker_lost(0, 0, 0.0)
    (answer,) = case.ask(0, JOIN, life=1)
    assert answer.message == Joined(step=0, loaded=True, own=1, late_joiner=True)
    reason = case.refusal(0, Load(bucket=0), zeros(2), life=1)
    assert reason.startswith("load: this server has parameters")


def test_a_worker_that_comes_back_before_anything_has_begun_is_none() -> None:
    case = train(Case(ASP()), 0, 1)
    case.server.on_worker_lost(1, 0, 0.0)
    (answer,) = case.ask(1, JOIN, life=1)
    assert answer.message == Joined(step=0, loaded=True, late_joiner=False)


def test_who_comes_back_while_others_have_arrived_joins_when_they_have_met() -> None:
    case = train(Case(ASP(), 3), 0, 1, 2)
    case.arrive(0)
    assert case.ask(2, JOIN, life=1) == []
    assert "asked to join before" in case.refusal(2, JOIN, life=1)
    assert heard(case.arrive(1)) == [(0, BarrierPassed(leads=True))]
    assert heard(case.load(0, 2.0))[-1] == (1, BarrierPassed(load=1))
    joined = Joined(step=0, loaded=True, load=1, late_joiner=True)
    assert pulled(case, 0, 1)[-1] == (2, joined)


def test_who_has_no_parameters_yet_is_not_waited_for_and_gets_the_loaded_ones() -> None:
    case = train(Case(Backup(), 3), 0, 1, 2)
    case.push(2, 0, 0)
    case.server.on_worker_lost(2, 0, 0.0)
    assert case.ask(2, JOIN, life=1)[0].message == Joined(
        step=1, loaded=True, late_joiner=True
    )
    assert case.ask(2, Pull(bucket=1), life=1) == []  # step 0 has begun without it
    case.arrive(0)
    case.arrive(1)
    case.load(0, 4.0)
    pulled(case, 0, 1)
    case.whole_step(0, 0, weight=0.5)
    answers = case.whole_step(1, 0, weight=0.5)
    (given,) = [a for a in answers if a.to.worker == 2]
    assert isinstance(given.message, Parameters)
    assert given.message.load == 1
    assert given.payload.tolist() == [3, 3, 3]  # type: ignore[union-attr]


def test_a_load_goes_on_with_who_remains() -> None:
    case = train(Case(SSP(staleness=0), 3), 0, 1, 2)
    case.arrive(0)
    case.arrive(1)
    assert heard(case.ask(2, Leave())) == [(0, BarrierPassed(leads=True))]


@pytest.mark.parametrize(
    "method", [SSP(staleness=0), SSP(staleness=1), Backup(), OSP(defer="nothing")]
)
def test_a_load_that_the_others_wait_beside_is_refused(method: UpdatesOnServer) -> None:
    case = train(Case(method, 3), 0, 1, 2)
    for step in range(2):
        for worker in range(3):
            case.whole_step(worker, step)
    assert case.arrive(0) == []
    answers = []
    for step in (2, 3):
        for worker in (1, 2):
            if not answers:
                answers = [
                    a
                    for a in case.whole_step(worker, step)
                    if isinstance(a.message, Rejected)
                ]
    assert {a.to.worker for a in answers} == {0, 1, 2}
    assert answers[0].message.reason.startswith(  # type: ignore[union-attr]
        "worker 0 waits to load, and workers 1, 2 wait for them, in the middle of "
        "training: every worker that trains calls"
    )


@pytest.mark.parametrize("method", METHODS, ids=names)
def test_who_trains_without_the_first_load_is_told(method: UpdatesOnServer) -> None:
    case = train(Case(method), 0, 1)
    assert case.arrive(0) == []
    answers = case.push(1, 0, 1)
    (refused,) = [a for a in answers if isinstance(a.message, Rejected)][:1]
    assert refused.message.reason.startswith(  # type: ignore[union-attr]
        "worker 0 waits to load before the first step, and worker 1 has begun to train"
    )


def test_who_waits_to_meet_does_nothing_else() -> None:
    case = train(Case(ASP()), 0, 1)
    case.arrive(0)
    for message in (Leave(), JOIN):
        assert "worker 0" in case.refusal(0, message)
    (answer,) = case.arrive(0)
    assert "is at a barrier" in answer.message.reason  # type: ignore[union-attr]
    (answer,) = case.push(0, 0, 0)
    assert "is at a barrier" in answer.message.reason  # type: ignore[union-attr]
    case.push(1, 0, 0)
    (answer,) = case.arrive(1)
    assert "in the middle of a step" in answer.message.reason  # type: ignore[union-attr]


def test_nobody_loads_where_nobody_brings_anything() -> None:
    case = train(Case(ASP()), 0, 1)
    case.arrive(0, brings=False)
    both = [(0, BarrierPassed(load=1)), (1, BarrierPassed(load=1))]
    assert heard(case.arrive(1, brings=False)) == both
    assert pulled(case, 0, 1) == both


# ---- meets ----


@pytest.mark.parametrize("method", METHODS, ids=names)
def test_all_meet(method: UpdatesOnServer) -> None:
    case = train(Case(method), 0, 1)
    assert case.arrive(1, kind="meet") == []
    answers = heard(case.arrive(0, kind="meet"))
    assert answers == [(1, BarrierPassed()), (0, BarrierPassed(leads=True))]
    assert len(case.whole_step(0, 0) + case.whole_step(1, 0)) >= 2


def test_a_meet_ends_where_the_others_wait_for_who_is_there() -> None:
    case = train(Case(SSP(staleness=0)), 0, 1)
    case.arrive(0, kind="meet")
    assert heard(case.whole_step(1, 0)) == [(0, BarrierPassed(leads=True))]


def test_a_meet_does_not_wait_for_who_has_come_back_after_its_step() -> None:
    case = train(Case(SSP(staleness=0), 3), 0, 1, 2)
    case.server.on_worker_lost(2, 0, 0.0)
    case.push(0, 0, 0)
    case.ask(2, JOIN, life=1)
    case.push(0, 0, 1)
    case.whole_step(1, 0)
    for bucket in range(2):
        assert len(case.ask(2, Pull(bucket=bucket), life=1)) == 1
    case.arrive(0, kind="meet")
    assert heard(case.arrive(1, kind="meet")) == [
        (0, BarrierPassed(leads=True)),
        (1, BarrierPassed()),
    ]


def test_some_load_and_some_meet() -> None:
    case = train(Case(ASP()), 0, 1)
    case.arrive(0, kind="meet")
    answers = heard(case.arrive(1))
    words = "worker 1 waits to load and worker 0 waits to save: all have to do the same"
    for _, message in answers:
        assert isinstance(message, Rejected)
        assert message.reason.startswith(words)
    assert [worker for worker, _ in answers] == [0, 1]


# ---- what nobody trains ----


def test_the_rest_of_a_model_goes_to_who_joins() -> None:
    case = Case(ASP())
    case.ask(0, JOIN)
    case.ask(1, JOIN)
    assert case.ask(1, PullUntrained(start=0, most=9)) == []
    data = torch.arange(7, dtype=torch.uint8)
    case.ask(0, LoadUntrained(start=0), data[:4])
    assert "begins at byte 4, got one that begins at byte 2" in case.refusal(
        0, LoadUntrained(start=2), data[2:]
    )
    case.ask(0, LoadUntrained(start=4), data[4:])
    *_, answer = case.load(0)
    assert (answer.to.worker, answer.message) == (1, Untrained(whole=7))
    assert torch.equal(answer.payload, data)  # type: ignore[arg-type]
    (part,) = case.ask(1, PullUntrained(start=5, most=9))
    assert part.payload.tolist() == [5, 6]  # type: ignore[union-attr]
    assert "a start of at most 7" in case.refusal(1, PullUntrained(start=8, most=1))


def test_a_snapshot_holds_all_that_a_server_holds() -> None:
    case = Case(ASP(), 1)
    case.ask(0, JOIN)
    case.ask(0, LoadUntrained(start=0), torch.arange(5, dtype=torch.uint8))
    case.load(0)
    case.arrive(0)
    case.ask(0, LoadUntrained(start=0), torch.arange(3, dtype=torch.uint8))
    case.load(0, 1.0)
    pulled(case, 0)
    trained = torch.full((3,), 7.0, dtype=torch.float64)
    case.ask(0, MixBuffers(weight=1.0, floats=3), trained)
    saved = case.server.snapshot()
    again = Case(ASP(), 1)
    again.server = ParameterServer(1, lambda _: ASP().server(1))
    assert again.server.restore(saved) == 0
    joined = Joined(step=0, loaded=True, load=1, late_joiner=True)
    assert heard(again.ask(0, JOIN)) == [(0, joined)]
    (rest,) = again.ask(0, PullUntrained(start=0, most=9))
    assert rest.payload.tolist() == [0, 1, 2]  # type: ignore[union-attr]
    # A script that begins at its top has fresh ones, and they are not mixed in.
    fresh = torch.zeros(3, dtype=torch.float64)
    (blended,) = again.ask(0, MixBuffers(weight=1.0, floats=3), fresh)
    assert torch.equal(blended.payload, trained)  # type: ignore[arg-type]
    (buffers,) = again.ask(0, PullBuffers())
    assert buffers.message == Buffers()
    assert torch.equal(buffers.payload, trained)  # type: ignore[arg-type]
    (blended,) = again.ask(0, MixBuffers(weight=0.5, floats=3), fresh)
    assert blended.payload.tolist() == [3.5] * 3  # type: ignore[union-attr]


def test_constant_buffers_stay_what_they_are() -> None:
    case = train(Case(ASP()), 0, 1)
    same = torch.tensor([-torch.inf, 0.1, 1e300, 3.0], dtype=torch.float64)
    for worker in (0, 1):
        (answer,) = case.ask(worker, MixBuffers(weight=0.3, floats=3), same)
        assert torch.equal(answer.payload, same)  # type: ignore[arg-type]


# ---- who comes back ----


def test_who_has_left_waits_for_who_is_lost_and_comes_back() -> None:
    case = train(Case(ASP(), 3), 0, 1, 2)
    case.server.wait_for_the_lost()
    case.server.on_worker_lost(1, 0, 0.0)
    assert case.ask(0, Leave()) == []
    assert case.ask(2, Leave()) == []
    case.ask(1, JOIN, life=1)
    assert heard(case.ask(1, Leave(), life=1)) == [
        (0, Done()),
        (2, Done()),
        (1, Done()),
    ]


def test_a_worker_that_is_done_does_not_come_back() -> None:
    case = train(Case(ASP(), 3), 0, 1)
    case.server.wait_for_the_lost()
    case.server.on_worker_lost(1, 0, 0.0)
    assert case.ask(0, Leave()) == []
    assert case.server.on_worker_finished(1, 0.0) == []
    assert heard(case.server.on_worker_finished(2, 0.0)) == [
        (0, Done())
    ]  # it never came
