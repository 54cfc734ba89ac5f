"""Small trainings in the simulated runtime, and the masks with which native OSP is tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from benchmarks.osp_comparisons import compared
from torch import nn

import paceline
from paceline.cluster import uniform_cluster
from paceline.methods.osp import OSP
from paceline.runtimes.simulated import Simulation

STEPS = 9
FIRST_DEFERRED = 2
"""With ``budget=constant`` the first decision is made in step 0, and known after step 1."""

HALF = "osp:collective=native,defer=most,budget=constant,most=0.5,chunk=64"
ALL = "osp:collective=native,defer=most,budget=constant,most=1,chunk=64"

MASKS: dict[str, str | OSP] = {
    "0.3 product": ALL.replace("most=1", "most=0.3,order=importance"),
    "0.5 random": compared("random", f"{HALF},order=importance"),
    "0.5 inverse": compared("inverse", f"{HALF},order=importance"),
    "0.5": HALF,
    "all": ALL,
    "all, small pieces": ALL.replace("chunk=64", "chunk=16"),
    "0.5, after backward": f"{HALF},overlap=false",
    "growing": HALF.replace("constant", "linear,ramp=8"),
}
"""Where importance decides and `decide_often` holds, masks change from step to step."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


def decide_often(monkeypatch: pytest.MonkeyPatch, steps: int = 3) -> None:
    """Let a decision be made every few steps, so that short trainings see many."""
    monkeypatch.setattr(OSP, "interval", steps)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same on every worker."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def inputs(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(5, 6, generator=generator)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = inputs(rank, step).to(next(model.parameters()).dtype)
    return (model(x) - x[:, :3].sin()).square().mean()


def flat(model: nn.Module) -> torch.Tensor:
    """All parameters, as one copy in double precision."""
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


class Gradients:
    """A loss function that notes each worker's own gradients, as ``own[step][rank]``:
    ``.grad`` may hold what travels, and hold it no longer after the step."""

    def __init__(
        self,
        workers: int,
        steps: int,
        loss: Callable[[nn.Module, int, int], torch.Tensor] = loss_of,
    ) -> None:
        self.own: list[list[torch.Tensor | None]] = [
            [None] * workers for _ in range(steps)
        ]
        self._loss = loss

    def __call__(self, model: nn.Module, rank: int, step: int) -> torch.Tensor:
        value = self._loss(model, rank, step)
        self.own[step][rank] = gradient_of(model, value)
        return value


def gradient_of(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """All gradients of *loss* likewise; zeros where it does not depend on a parameter."""
    gradients = torch.autograd.grad(
        loss,
        list(model.parameters()),
        retain_graph=True,
        materialize_grads=True,
        allow_unused=True,
    )
    return torch.cat([g.detach().double().reshape(-1) for g in gradients])


def simulate(workers: int, body: Callable[[int], Any]) -> list[Any]:
    """What *body* returned on each worker, in rank order."""
    answers: list[Any] = [None] * workers

    def main(rank: int) -> None:
        paceline.init()
        answers[rank] = body(rank)

    Simulation(uniform_cluster(workers, "1gbit", "50us")).run(main)
    return answers


def train(
    method: str | OSP,
    workers: int = 2,
    *,
    make: Callable[[], nn.Module] = network,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    loss: Callable[[nn.Module, int, int], torch.Tensor | None] = loss_of,
    steps: int | Sequence[int] = STEPS,
    same: bool = False,
    buckets: str = "wfbp",
    prepare: Callable[[Any], Callable[[], None]] | None = None,
    watch: Callable[[int, int, nn.Module, Any], None] | None = None,
    set_to_none: bool = True,
) -> torch.Tensor:
    """The parameters with which all workers end: equal ones, or the test fails.

    *same*: all workers have the same minibatches. *prepare* is given the optimizer and
    returns what is to be called after each step (a scheduler's step); *watch* is called
    then too.
    """

    def body(rank: int) -> torch.Tensor:
        model = make()
        wrapped = paceline.distribute(
            model, optimizer(model.parameters()), method=method, buckets=buckets
        )
        after = (lambda: None) if prepare is None else prepare(wrapped)
        for step in range(steps if isinstance(steps, int) else steps[rank]):
            wrapped.zero_grad(set_to_none)
            value = loss(model, 0 if same else rank, step)
            if value is not None:
                value.backward()
            wrapped.step()
            after()
            if watch is not None:
                watch(rank, step, model, wrapped)
        wrapped.finish()
        return flat(model)

    ends = simulate(workers, body)
    for end in ends:
        assert torch.equal(end, ends[0])
    return ends[0]


def train_alone(
    *,
    make: Callable[[], nn.Module] = network,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    loss: Callable[[nn.Module, int, int], torch.Tensor] = loss_of,
    steps: int = STEPS,
    prepare: Callable[[Any], Callable[[], None]] | None = None,
) -> torch.Tensor:
    """The same training in plain torch, without paceline."""
    model = make()
    plain = optimizer(model.parameters())
    after = (lambda: None) if prepare is None else prepare(plain)
    for step in range(steps):
        plain.zero_grad()
        loss(model, 0, step).backward()
        plain.step()
        after()
    return flat(model)
