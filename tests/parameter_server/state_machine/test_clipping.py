"""Servers that clip: what is held until a norm is known, and who may go before it is."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
import torch

from paceline.interfaces import Reply, UpdatesOnServer
from paceline.interfaces.server_messages import (
    Join,
    Joined,
    Parameters,
    Pull,
    Rejected,
)
from paceline.methods.backup import Backup
from paceline.methods.osp import OSP
from paceline.methods.ssp import SSP
from tests.parameter_server.state_machine.test_server import HOW, JOIN, SIZES, Case

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
