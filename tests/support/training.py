"""Small trainings in the simulated runtime: a model, its batches, its loop.

`simulate` runs a function on each worker. `train` is the usual loop, with what tests vary, and
`train_to_one_model` the same where all workers must end alike; `train_alone` is the loop in plain
torch. Trainings in real processes: `tests.support.forked` and `tests.support.processes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline
from paceline.cluster import Cluster, uniform_cluster
from paceline.runtimes.join import join_runtime
from paceline.runtimes.simulated import Simulation
from tests.support.simulations import run_on

MakeModel = Callable[[], nn.Module]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
Loss = Callable[[nn.Module, int, int], "torch.Tensor | None"]
"""Of a model, on a rank, in a step; None where a step has none."""
Script = Callable[[int, int, nn.Module, Any], None]
"""All of one step: of a rank, by number, with the model and its optimizer."""

STEPS = 9


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two layers, the same on every worker."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def inputs(rank: int, step: int = 0) -> torch.Tensor:
    """A worker's batch of a step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(5, 6, generator=generator)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = inputs(rank, step).to(next(model.parameters()).dtype)
    return (model(x) - x[:, :3].sin()).square().mean()


def flat(model: nn.Module) -> torch.Tensor:
    """All parameters, as one copy in double precision."""
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


Where = int | Cluster | Simulation
"""So many workers at 1 Gbit/s; on a cluster; or in a simulation."""


def simulate(where: Where, body: Callable[[int], Any], servers: int = 0) -> list[Any]:
    """What *body* returned on each worker, in rank order; *servers* beside so many workers."""
    if isinstance(where, int):
        where = uniform_cluster(where, "1gbit", "50us", servers)
    if isinstance(where, Cluster):
        where = Simulation(where)
    return run_on(where, body)


@dataclass
class Trained:
    """One worker's: its parameters after each step, and after `finish`; bytes sent in each
    step; virtual seconds in all; its model and optimizer; what the run noted."""

    steps: list[torch.Tensor]
    end: torch.Tensor
    sent: list[int]
    seconds: float
    model: nn.Module
    optimizer: Any
    notes: list[str]


def train(
    method: Any,
    where: Where = 2,
    steps: int | Sequence[int] = STEPS,
    *,
    make: MakeModel = network,
    optimizer: MakeOptimizer = sgd,
    loss: Loss = loss_of,
    same: bool = False,
    buckets: str = "wfbp",
    prepare: Callable[[Any], Callable[[], None]] | None = None,
    rates: Sequence[float] = (),
    pace: float = 0.0,
    set_to_none: bool = True,
    watch: Callable[[int, int, nn.Module, Any], None] | None = None,
    script: Script | None = None,
    reads: bool = True,
    first: int = 0,
    load: Path | None = None,
    save: Path | None = None,
    **settings: Any,
) -> list[Trained]:
    """Each worker's training.

    Args:
        method: A spec, or a method.
        where: A number of workers, a cluster, or a simulation.
        steps: How many, of all or of each worker.
        make: Makes the model.
        optimizer: Makes the optimizer, of parameters.
        loss: The loss of a step.
        same: All workers have rank 0's batches.
        buckets: The bucket rule.
        prepare: Is given the optimizer, and returns what is called after each step (a
            scheduler's step).
        rates: The learning rate of each step.
        pace: Seconds that each step takes.
        set_to_none: As of ``zero_grad``.
        watch: Is called after each step with rank, step, model and optimizer.
        script: Does each step, instead of the usual ``zero_grad``, loss, backward and ``step``.
        reads: Whether parameters are read after each step; else they are at the end only.
        first: The first step's number.
        load: A checkpoint from which to go on.
        save: Where to write one after the last step.
        settings: Others of `distribute`.
    """

    def body(rank: int) -> Trained:
        model = make()
        wrapped = paceline.distribute(
            model,
            optimizer(model.parameters()),
            method=method,
            buckets=buckets,
            **settings,
        )
        after = (lambda: None) if prepare is None else prepare(wrapped)
        if load is not None:
            paceline.load(load)
        recorder = join_runtime().recorder
        seen, began = [], join_runtime().clock.now()
        for step in range(
            first, first + (steps if isinstance(steps, int) else steps[rank])
        ):
            if rates:
                for group in wrapped.param_groups:
                    group["lr"] = rates[step]
            if script is not None:
                script(rank, step, model, wrapped)
            else:
                wrapped.zero_grad(set_to_none)
                value = loss(model, 0 if same else rank, step)
                if value is not None:
                    value.backward()
                if pace:
                    paceline.pace(pace)
                wrapped.step()
            after()
            if reads:
                seen.append(flat(model))
            if watch is not None:
                watch(rank, step, model, wrapped)
        sent = [record.bytes_sent for record in recorder.steps]
        seconds = join_runtime().clock.now() - began
        if save is not None:
            paceline.save(save)
        wrapped.finish()
        return Trained(
            seen, flat(model), sent, seconds, model, wrapped, list(recorder.notes)
        )

    return simulate(where, body)


def train_to_one_model(method: Any, workers: int = 2, **options: Any) -> torch.Tensor:
    """The parameters with which all workers end: equal ones, or the test fails."""
    first, *others = train(method, workers, **options)
    for other in others:
        assert torch.equal(other.end, first.end)
    return first.end


def train_alone(
    *,
    make: MakeModel = network,
    optimizer: MakeOptimizer = sgd,
    loss: Loss = loss_of,
    steps: int = STEPS,
    prepare: Callable[[Any], Callable[[], None]] | None = None,
) -> torch.Tensor:
    """What the same training in plain torch, on one worker, ends with."""
    model = make()
    plain = optimizer(model.parameters())
    after = (lambda: None) if prepare is None else prepare(plain)
    for step in range(steps):
        plain.zero_grad()
        value = loss(model, 0, step)
        if value is not None:
            value.backward()
        plain.step()
        after()
    return flat(model)
