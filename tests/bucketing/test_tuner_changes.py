"""What may happen while a tuner plans, and after it: data that ends, errors, another training; what changes
for good is measured again, and what comes and goes is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.bucketing import tuner
from paceline.bucketing.tuner import PROFILED_STEPS, TRIAL_STEPS
from paceline.runtimes.simulated import ComputeModel, Simulation
from tests.bucketing.cases import (
    Watched,
    batch,
    ended,
    flat,
    groups_of,
    note,
    on,
    sgd,
)
from tests.core.cases import assert_gradients, mean_gradients
from tests.support.simulations import cluster, rack, run_on, simulation

SLOW = cluster(rack(2, link=1.25e6))
NOISY = ComputeModel(jitter=0.3, seed=2)
"""All rounds of the trial are held: planning takes 37 steps."""


def model_of(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 2)
    )


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step)).square().mean()


def step_once(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, paceline.rank(), step).backward()
    optimizer.step()


# ---- data that ends ----


def uneven(steps: list[int]) -> Watched:
    model = model_of()
    optimizer = sgd(model)
    watched = Watched()
    with optimizer.join():
        for step in range(steps[paceline.rank()]):
            step_once(model, optimizer, step)
            note(watched, model, optimizer)
    watched.parameters.append(flat(model))
    return watched


@pytest.mark.slow
@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize(
    ("compute", "last", "stride"),
    [
        pytest.param(ComputeModel(), 20, 1, id="exact"),
        pytest.param(NOISY, 46, 2, id="noisy"),
    ],
)
def test_data_may_end_in_any_phase(short, compute, last, stride, monkeypatch, capsys):
    """Of exact times each step up to *last*: planning is over by then, and has been watched twice.
    Of noisy times the even steps of one worker, and the odd ones of the other."""
    monkeypatch.setattr(tuner.watch, "every", 5)
    monkeypatch.setattr(tuner.watch, "steps", 2)
    for end in range(2 + short, last, stride):
        steps = [end + 10, end + 10]
        steps[short] = end
        answers, _ = on(SLOW, lambda rank, s=steps: uneven(s), compute=compute)
        assert torch.equal(answers[0].parameters[-1], answers[1].parameters[-1])
        assert answers[0].groups[:end] == answers[1].groups[:end]
        assert [len(w.groups) for w in answers] == steps
    assert " planned from measured times" in capsys.readouterr().err


@pytest.mark.parametrize("ends", [[0, 20, 9], [6, 6, 6], [1, 2, 30], [40, 0, 0]])
def test_three_ranks_may_end_one_after_the_other(ends):
    where = cluster(rack(3, link=1.25e6))
    answers, _ = on(where, lambda rank: uneven(ends), compute=NOISY)
    for watched in answers[1:]:
        assert torch.equal(watched.parameters[-1], answers[0].parameters[-1])


# ---- ranks whose gradients come in another order ----


class Paced(torch.autograd.Function):
    """Nothing, for so many seconds, backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.seconds:
            paceline.pace(ctx.seconds)
        return gradient, None


class Crossed(nn.Module):
    """Which tensor is used last, and so has its gradient first, is the caller's choice;
    each takes *seconds*, or what is charged."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.seconds = 0.0
        self.a = nn.Parameter(torch.randn(4000) / 9)
        self.b = nn.Parameter(torch.randn(4000) / 9)
        self.c = nn.Parameter(torch.randn(4000) / 9)

    def forward(self, x: torch.Tensor, order: str) -> torch.Tensor:
        loss = x.mean()
        for name in reversed(order):
            parameter = getattr(self, name)
            squares = Paced.apply(parameter, self.seconds).square().sum()
            loss = loss + squares * (1 + x.mean().square())
        return loss


def train_crossed(
    order: Callable[[int, int], str],
    steps: int = 110,
    *,
    seconds: Callable[[int], float] = lambda step: 0.0,
    before: Callable[[Simulation, int], None] = lambda runtime, step: None,
    check: bool = False,
) -> list[Watched]:
    """What each rank saw of *steps*, which compute for ``seconds(step)``, and whose tensors are used
    in ``order(rank, step)``."""
    runtime = simulation(SLOW)

    def body(rank: int) -> Watched:
        model = Crossed()
        optimizer = sgd(model)
        watched = Watched()
        for step in range(steps):
            before(runtime, step)
            used = order(rank, step)
            model.seconds = seconds(step) / 3
            if check:
                expected = mean_gradients(
                    model, lambda m, r, step=step, used=used: m(batch(r, step), used)
                )
            optimizer.zero_grad()
            model(batch(rank, step), used).backward()
            if check:
                assert_gradients(model, expected)
            optimizer.step()
            note(watched, model, optimizer)
        return ended(watched, optimizer)

    return run_on(runtime, body)


def test_ranks_that_differ_in_order_use_ddps_rule_and_say_so(capsys):
    answers = train_crossed(lambda rank, step: ("abc", "cab")[rank], 20, check=True)
    for watched in answers:
        assert watched.groups == 20 * [[("a", "b", "c")]]  # rank 0's order
        assert watched.settled_after == 1
        assert len(set(watched.bytes_sent[1:])) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "another order on some ranks" in line
    assert line.endswith("DDP's rule is used")


# ---- what changes after the plan's choice ----

EVERY, WATCHED = 12, 4
SETTLED = 1 + PROFILED_STEPS + 2 * TRIAL_STEPS
"""Backward passes until the plan is chosen, where times are exact."""

AGAIN = (
    "paceline: bucketing: the order of gradients or the time of a step has changed: "
    "measuring again"
)


@pytest.fixture
def _watch_often(monkeypatch):
    monkeypatch.setattr(tuner.watch, "every", EVERY)
    monkeypatch.setattr(tuner.watch, "steps", WATCHED)


watch_often = pytest.mark.usefixtures("_watch_often")


@watch_often
def test_an_order_that_varies_is_not_measured_again_and_again(capsys):
    train_crossed(lambda rank, step: ("abc", "cab")[step % 2], 80)
    assert "measuring again" not in capsys.readouterr().err


@watch_often
def test_a_tensor_that_is_never_used_is_planned_for_and_no_reason_to_measure(capsys):
    answers = train_crossed(lambda rank, step: "ca", 60)
    names = [name for group in answers[0].plan for name in group]
    assert names == ["c", "a", "b"]
    (line,) = capsys.readouterr().err.splitlines()
    assert "planned from measured times" in line


def train(
    seconds: Callable[[int], float], order: Callable[[int], str], **options: Any
) -> Watched:
    """Steps that both ranks take alike."""
    first, second = train_crossed(
        lambda rank, step: order(step), seconds=seconds, **options
    )
    assert first.groups == second.groups
    assert torch.equal(first.parameters[-1], second.parameters[-1])
    return first


@watch_often
def test_what_does_not_change_is_measured_once(capsys):
    watched = train(lambda step: 0.1, lambda step: "abc")
    assert AGAIN not in capsys.readouterr().err
    assert len({tuple(groups) for groups in watched.groups[SETTLED:]}) == 1
    assert len(set(watched.bytes_sent[SETTLED + EVERY + 1 :: EVERY])) == 1


@watch_often
@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_a_step_that_takes_another_time_for_good_is_measured_again_once(factor, capsys):
    watched = train(
        lambda step: 0.1 * (factor if step >= 30 else 1), lambda step: "abc"
    )
    lines = capsys.readouterr().err.splitlines()
    assert lines.count(AGAIN) == 1
    # measured again: settled after two strange windows, and then for good
    assert 30 + EVERY < watched.settled_after <= 30 + 3 * EVERY + SETTLED
    assert len(lines) == 3  # a trial, the change, and a trial again


@watch_often
def test_a_network_that_slows_down_for_good_is_measured_again_once(capsys):
    def slow_down(runtime: Simulation, step: int) -> None:
        if step == 30:
            for link in range(len(runtime.cluster.capacities)):
                runtime.links.set_capacity(link, 0.2 * runtime.cluster.capacities[link])

    train(lambda step: 0.01, lambda step: "abc", before=slow_down)
    assert capsys.readouterr().err.splitlines().count(AGAIN) == 1


@watch_often
def test_an_order_that_flips_for_good_is_measured_again_once(capsys):
    watched = train(lambda step: 0.1, lambda step: "abc" if step < 30 else "bca")
    assert capsys.readouterr().err.splitlines().count(AGAIN) == 1
    assert [name for group in watched.plan for name in group] == ["b", "c", "a"]


def window(number: int) -> range:
    """The steps, counted from 0, that are watched in a window after the plan's choice."""
    end = SETTLED + (number + 1) * EVERY
    return range(end - WATCHED, end)


@watch_often
@pytest.mark.parametrize("what", ["time", "order"])
def test_what_lasts_for_one_window_at_a_time_is_left_alone(what, capsys):
    odd = [*window(2), *window(4)]
    watched = train(
        lambda step: 0.3 if what == "time" and step in odd else 0.1,
        lambda step: "bca" if what == "order" and step in odd else "abc",
    )
    assert AGAIN not in capsys.readouterr().err
    assert watched.settled_after == SETTLED


@watch_often
@pytest.mark.parametrize("what", ["time", "order"])
def test_two_windows_in_a_row_are_a_change(what, capsys):
    """The same, but the next window too: so the last test did hit its window."""
    odd = [*window(2), *window(3)]
    train(
        lambda step: 0.3 if what == "time" and step in odd else 0.1,
        lambda step: "bca" if what == "order" and step in odd else "abc",
    )
    assert AGAIN in capsys.readouterr().err


# ---- errors, other forward passes, other trainings ----


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("boom")


def wrong_shape(model: nn.Module, rank: int, step: int) -> None:
    with pytest.raises(RuntimeError):
        model(torch.zeros(4, 5))


def raise_in_backward(model: nn.Module, rank: int, step: int) -> None:
    with pytest.raises(RuntimeError, match="boom"):
        RaisesInBackward.apply(loss_of(model, rank, step)).backward()


def train_disturbed(disturb, when: tuple[int, ...]) -> list[Watched]:
    def body(rank: int) -> Watched:
        model = model_of()
        optimizer = sgd(model)
        watched = Watched()
        for step in range(16):
            if step in when:
                disturb(model, rank, step)
            step_once(model, optimizer, step)
            note(watched, model, optimizer)
        return ended(watched, optimizer)

    return on(SLOW, body)[0]


@pytest.mark.parametrize("when", [1, 3, 7, 10])
def test_a_forward_pass_that_raises_does_not_disturb_planning(when, capsys):
    answers = train_disturbed(wrong_shape, (when,))
    first = capsys.readouterr().err
    expected = train_disturbed(wrong_shape, ())
    assert capsys.readouterr().err == first != ""
    assert answers[0].groups == expected[0].groups
    assert torch.equal(answers[0].parameters[-1], expected[0].parameters[-1])


def test_a_backward_pass_that_raises_before_anything_was_sent_is_forgotten():
    first, second = train_disturbed(raise_in_backward, (2, 8))
    assert first.groups == second.groups
    assert torch.equal(first.parameters[-1], second.parameters[-1])


def test_two_trainings_plan_side_by_side(capsys):
    """As a GAN's: two models and optimizers, one after the other in each step."""

    def body(rank: int) -> list[Watched]:
        models = [model_of(seed) for seed in (3, 4)]
        optimizers = [sgd(model) for model in models]
        seen = [Watched(), Watched()]
        for step in range(34):
            for model, optimizer, watched in zip(models, optimizers, seen, strict=True):
                expected = mean_gradients(
                    model, lambda m, r, step=step: loss_of(m, r, step)
                )
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                assert_gradients(model, expected)
                optimizer.step()
                note(watched, model, optimizer)
        for optimizer in optimizers:
            optimizer.finish()
        return seen

    answers, _ = on(SLOW, body)
    for ours, theirs in zip(answers[0], answers[1], strict=True):
        assert ours.groups == theirs.groups
        assert len(ours.plan) > 1
    # Of two models that are alike the sentence is the same, and said once.
    assert capsys.readouterr().err.count("the plan is used") == 1


def test_without_a_forward_pass_of_the_model_itself_ddps_rule_stays(capsys):
    """A submodule that is called directly tells no start of the step."""

    def body(rank: int) -> list[tuple[str, ...]]:
        model = nn.ModuleDict({"inner": model_of()})
        optimizer = sgd(model)
        for step in range(30):
            step_once(model["inner"], optimizer, step)
        optimizer.finish()
        return groups_of(optimizer)

    answers, _ = on(SLOW, body)
    assert [len(groups) for groups in answers] == [1, 1]
    assert capsys.readouterr().err == ""
