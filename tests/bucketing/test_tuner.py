"""Plans change in which pieces gradients travel, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.bucketing.tuner import (
    PROFILED_STEPS,
    ROUNDS,
    TRIAL_STEPS,
    BucketPlan,
    BucketTuner,
)
from paceline.core import training
from paceline.runtimes.simulated import ComputeModel
from tests.bucketing.tunings import Watched, batch, ended, note, on, sgd
from tests.core.cases import assert_gradients, mean_gradients
from tests.support.simulations import cluster, rack

SLOW = cluster(rack(3, link=1.25e6))
"""10 Mbit/s: which pieces gradients travel in matters, also for small models."""


def steps_for(rounds: int) -> int:
    """Beyond the trial of so many rounds."""
    return 1 + PROFILED_STEPS + 2 * TRIAL_STEPS * rounds + 3


STEPS = steps_for(1)
"""Where times repeat one round decides."""


def plain() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


class Mixed(nn.Module):
    """Three dtypes, alternating, and a complex one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 48)
        self.exact = nn.Linear(48, 48, dtype=torch.float64)
        self.middle = nn.Linear(48, 48)
        self.phase = nn.Parameter(torch.randn(48, 48, dtype=torch.complex64) / 7)
        self.exact_again = nn.Linear(48, 48, dtype=torch.float64)
        self.last = nn.Linear(48, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.exact(self.first(x).double()).float())
        x = (x.to(torch.complex64) @ self.phase).abs()
        return self.last(self.exact_again(x.double()).float())


class Partly(nn.Module):
    """A frozen part, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.frozen = nn.Linear(6, 64).requires_grad_(False)
        self.used = nn.Linear(64, 64)
        self.unused = nn.Linear(64, 64)
        self.last = nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.used(self.frozen(x))))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step)).square().mean()


def checked(make: Callable[[], nn.Module], steps: int) -> Watched:
    """A training whose gradients are the mean in each step."""
    model = make()
    optimizer = sgd(model)
    watched = Watched()
    for step in range(steps):
        expected = mean_gradients(model, lambda m, r, step=step: loss_of(m, r, step))
        optimizer.zero_grad()
        loss_of(model, paceline.rank(), step).backward()
        assert_gradients(model, expected)
        optimizer.step()
        note(watched, model, optimizer)
    return ended(watched, optimizer)


@pytest.mark.parametrize("jitter", [0.0, 0.3])
@pytest.mark.parametrize("make", [plain, Mixed, Partly])
def test_groups_are_equal_on_all_ranks_and_gradients_are_the_mean(make, jitter, capsys):
    compute = ComputeModel(jitter=jitter, seed=5)
    steps = steps_for(ROUNDS if jitter else 1)
    answers, _ = on(SLOW, lambda rank: checked(make, steps), compute=compute)
    for watched in answers:
        assert watched.groups == answers[0].groups
        for ours, theirs in zip(watched.parameters, answers[0].parameters, strict=True):
            assert torch.equal(ours, theirs)
    plans = {tuple(groups) for groups in answers[0].groups}
    assert len(plans) >= 2  # both sides of the trial, at least
    (line,) = capsys.readouterr().err.splitlines()
    assert " planned from measured times" in line


# ---- buckets made anew between backward and step ----


class Restless(BucketTuner):
    """Changes its mind after each backward pass."""

    def backward_ended(self) -> bool:
        super().backward_ended()
        rule = "single" if len(self.plan.buckets) > 1 else "wfbp"
        return self._use(BucketPlan(self._by_rule(rule)))


def steps_with_momentum(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    loss_of(model, rank, step).backward()


def clipped(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    (30 * loss_of(model, rank, step)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def accumulated(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    with optimizer.no_sync():
        loss_of(model, rank, 100 + step).backward()
        loss_of(model, rank, 200 + step).backward()
    loss_of(model, rank, step).backward()


def accumulation_left_to_step(
    model: nn.Module, optimizer: Any, rank: int, step: int
) -> None:
    with optimizer.no_sync():
        loss_of(model, rank, step).backward()


def two_backwards(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    loss_of(model, rank, step).backward()
    loss_of(model, rank, 100 + step).backward()


def two_forwards(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    (loss_of(model, rank, step) + loss_of(model, rank, 100 + step)).backward()


def evaluations(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    with torch.no_grad():
        loss_of(model, rank, 300)
    loss = loss_of(model, rank, step)
    with torch.no_grad():
        loss_of(model, rank, 300)
    loss.backward()
    loss_of(model, rank, 300)  # an evaluation that forgot no_grad


def kept_gradients(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    """Not cleared between steps but faded: the next pass adds to what is there."""
    loss_of(model, rank, step).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


def with_graph(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    loss_of(model, rank, step).backward(create_graph=True)
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.requires_grad


PASSES = [
    steps_with_momentum,
    clipped,
    accumulated,
    accumulation_left_to_step,
    two_backwards,
    two_forwards,
    evaluations,
    kept_gradients,
    with_graph,
]


def learned(passes: Callable[..., None], buckets: str) -> Watched:
    model = plain()
    optimizer = sgd(model, buckets=buckets)
    watched = Watched()
    for step in range(STEPS):
        if passes is not kept_gradients:
            optimizer.zero_grad(set_to_none=bool(step % 2))
        passes(model, optimizer, paceline.rank(), step)
        optimizer.step()
        note(watched, model, optimizer)
    return ended(watched, optimizer)


def assert_same_course(ours: Watched, theirs: Watched) -> None:
    for step, (a, b) in enumerate(zip(ours.parameters, theirs.parameters, strict=True)):
        error = (a - b).abs().max() / b.abs().max()
        # Sums in another order differ in the last place, and the difference grows in training.
        assert error <= 1e-7 * (step + 10), f"step {step + 1} is off by {error}"


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("passes", PASSES)
def test_learning_is_that_of_a_fixed_rule(passes, monkeypatch):
    fixed, _ = on(SLOW, lambda rank: learned(passes, "ddp"))
    planned, _ = on(SLOW, lambda rank: learned(passes, "optimal"))
    assert_same_course(planned[0], fixed[0])
    for watched in planned:
        assert watched.groups == planned[0].groups
    monkeypatch.setattr(training, "BucketTuner", Restless)
    restless, _ = on(SLOW, lambda rank: learned(passes, "wfbp"))
    assert len({len(groups) for groups in restless[0].groups[-2:]}) == (
        1 if passes is two_backwards else 2
    )
    assert_same_course(restless[0], fixed[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_brief_dtypes_learn_in_any_pieces(dtype, monkeypatch):
    """Parameters of 16 bits, in buckets that change after each pass."""

    def body(rank: int) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2)).to(dtype)
        optimizer = sgd(model, buckets="wfbp")
        courses = []
        for step in range(6):
            optimizer.zero_grad()
            F.mse_loss(
                model(batch(rank, step).to(dtype)), torch.ones(4, 2, dtype=dtype)
            ).backward()
            optimizer.step()
            courses += [p.detach().clone() for p in model.parameters()]
        optimizer.finish()
        return courses

    fixed, _ = on(2, body)
    monkeypatch.setattr(training, "BucketTuner", Restless)
    restless, _ = on(2, body)
    # Of two workers sums are the same in any pieces: a + b is b + a.
    for ours, theirs in zip(restless[0], fixed[0], strict=True):
        assert torch.equal(ours, theirs)
