"""The laws of restarts: what was trained stays trained, whoever looks, saves or loads.

Where a result repeats, its bits are held against those of straight training. Everywhere,
steps are counted: a model whose gradients are all one, trained with plain SGD, tells from
its parameters how many steps' gradients are in it, and a single one that is lost, or applied
twice, is a part of a step too few or too many. Workers are of different speeds meanwhile.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch

import paceline
from paceline.optimizer import DistributedOptimizer
from paceline.testing.cases import Case
from paceline.testing.task import Counting, Quadratic, centers_of, flat_parameters
from paceline.testing.trial import (
    OPTIMIZERS,
    MakeOptimizer,
    adamw,
    begin,
    distribute_as,
    momentum,
    only_these_trainings,
    require,
    require_equal,
    sgd,
    shared_folder,
    step,
)

PAUSE = 0.001
"""Seconds by which one worker's step is longer than the next one's."""


# ---- bits, where a result repeats ----


def state_survives_a_restart(case: Case, rule: str) -> None:
    """3 + 3 steps with `state_dict` saved and loaded in between equal 6 straight ones; or,
    where something is under way between steps, 3 + 3 with a `finish` in between."""
    for make in OPTIMIZERS:
        straight = _straight(case, rule, make)
        first, optimizer = begin(case, rule, make)
        _steps(first, optimizer, range(1, 4))
        with optimizer.consolidated() if case.under_way else nullcontext():
            saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
        optimizer.finish()
        second, optimizer = begin(case, rule, make)
        second.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        _steps(second, optimizer, range(4, 7))
        optimizer.finish()
        require_equal(second, straight, "a restart changes the result")


def a_checkpoint_is_a_restart(case: Case, rule: str) -> None:
    """The same with `paceline.save` and `load` in between."""
    straight = _straight(case, rule, adamw)
    with only_these_trainings():
        first, optimizer = begin(case, rule, adamw)
        with shared_folder() as folder:
            _steps(first, optimizer, range(1, 4))
            paceline.save(folder / "checkpoint")
            optimizer.finish()
            with only_these_trainings():
                second, optimizer = begin(case, rule, adamw)
                paceline.load(folder / "checkpoint")
                _steps(second, optimizer, range(4, 7))
                optimizer.finish()
    require_equal(second, straight, "a checkpoint changes the result")


def evaluations_change_nothing(case: Case, rule: str) -> None:
    """Training with `consolidated` evaluations in between is bit-equal to without."""
    ends = []
    for evaluate in (False, True):
        model, optimizer = begin(case, rule, momentum)
        for number in range(1, 7):
            _steps(model, optimizer, [number])
            if evaluate:
                with optimizer.consolidated(), torch.no_grad():
                    model(centers_of(99))
        optimizer.finish()
        ends.append(model)
    require_equal(ends[0], ends[1], "evaluations in between change the result")


def _straight(case: Case, rule: str, make: MakeOptimizer) -> Quadratic:
    model, optimizer = begin(case, rule, make)
    _steps(model, optimizer, range(1, 4))
    if case.under_way:
        optimizer.finish()
        optimizer = distribute_as(case, rule, model, optimizer.unwrapped)
    _steps(model, optimizer, range(4, 7))
    optimizer.finish()
    return model


def _steps(
    model: Quadratic, optimizer: DistributedOptimizer, numbers: range | list[int]
) -> None:
    for number in numbers:
        step(model, optimizer, centers_of(paceline.rank(), number))


# ---- counts, everywhere ----


def a_restart_loses_nothing(case: Case, rule: str) -> None:
    """After `finish` every worker's gradients are in every worker's model, each once; and
    so are those of another training of that model."""
    model, optimizer = _begin_counting(case, rule)
    _count(model, optimizer, 3, first_is_fast=True)
    optimizer.finish()
    _require_steps(case, model, 3, "after finish()")
    optimizer = distribute_as(case, rule, model, optimizer.unwrapped)
    _count(model, optimizer, 2, first_is_fast=False)
    optimizer.finish()
    _require_steps(case, model, 5, "after a second training")


def a_checkpoint_loses_nothing(case: Case, rule: str) -> None:
    """In a checkpoint is every gradient of a step that ended before `save` on any worker,
    and none of a later one. `load` gives it to every worker, and nothing that any of them
    does then is lost."""
    with only_these_trainings():
        model, optimizer = _begin_counting(case, rule)
        with shared_folder() as folder:
            _count(model, optimizer, 3, first_is_fast=True)
            paceline.save(folder / "checkpoint")
            _count(model, optimizer, 2, first_is_fast=False)
            optimizer.finish()
            _require_steps(case, model, 5, "where it was saved in between")
            with only_these_trainings():
                model, optimizer = _begin_counting(case, rule)
                paceline.load(folder / "checkpoint")
                _require_steps(case, model, 3, "after load()")
                _count(model, optimizer, 2, first_is_fast=False)
                optimizer.finish()
    _require_steps(case, model, 5, "where it was loaded in between")


def evaluations_lose_nothing(case: Case, rule: str) -> None:
    """`consolidated` takes nothing away, and adds nothing, whoever looks in whenever."""
    model, optimizer = _begin_counting(case, rule)
    for number in range(6):
        _count(model, optimizer, 1, first_is_fast=bool(number % 2))
        if (number + paceline.rank()) % 2:
            with optimizer.consolidated(), torch.no_grad():
                model()
    optimizer.finish()
    _require_steps(case, model, 6, "with evaluations in between")


def _begin_counting(case: Case, rule: str) -> tuple[Counting, DistributedOptimizer]:
    model = Counting()
    return model, distribute_as(case, rule, model, sgd(model, case.learning_rate))


def _count(
    model: Counting,
    optimizer: DistributedOptimizer,
    steps: int,
    first_is_fast: bool,
) -> None:
    rank, last = paceline.rank(), paceline.world_size() - 1
    for _ in range(steps):
        paceline.pace(PAUSE * (rank if first_is_fast else last - rank))
        optimizer.zero_grad()
        model().backward()
        optimizer.step()


def _require_steps(case: Case, model: Counting, steps: int, when: str) -> None:
    found = -flat_parameters(model) / case.learning_rate
    least, most = found.min().item(), found.max().item()
    require(
        steps - 1e-3 <= least <= most <= steps + 1e-3,
        f"{when} the gradients of {least:.3f} to {most:.3f} steps are in the model, and "
        f"{steps} were done",
    )
