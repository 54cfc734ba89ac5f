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
from paceline.core.optimizer import DistributedOptimizer, training_of
from paceline.testing.cases import Case
from paceline.testing.problems import (
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
from paceline.testing.task import Counting, Quadratic, centers_of, flat_parameters

PAUSE = 0.001
"""Seconds by which one worker's step is longer than the next one's."""


SEGMENTS = (range(1, 3), range(3, 6), range(6, 8))
"""Steps from one restart to the next: of two lengths, so that who forgets what it does every
so many steps is late after one of them."""


# ---- bits, where a result repeats ----


def state_survives_a_restart(case: Case, rule: str) -> None:
    """Steps with all states saved and loaded in between equal straight ones; or, where
    something is under way between steps, those with a `finish` in between. The states are
    `state_dict`'s, and what each worker has of its own."""
    for make in OPTIMIZERS:
        straight = _straight(case, rule, make)
        model, optimizer = begin(case, rule, make)
        for segment in SEGMENTS:
            if segment is not SEGMENTS[0]:
                model, optimizer = _begin_again(case, rule, make, model, optimizer)
            _steps(model, optimizer, segment)
        optimizer.finish()
        require_equal(model, straight, "a restart changes the result")


def _begin_again(
    case: Case,
    rule: str,
    make: MakeOptimizer,
    model: Quadratic,
    optimizer: DistributedOptimizer,
) -> tuple[Quadratic, DistributedOptimizer]:
    """Another training, with the states of this one."""
    with optimizer.consolidated() if case.under_way else nullcontext():
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    before = training_of(optimizer)
    progress = before.progress
    own = {owner.name: copy.deepcopy(owner.save()) for owner in before.own_states}
    optimizer.finish()
    model, optimizer = begin(case, rule, make)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    training = training_of(optimizer)
    training.progress = progress
    for owner in training.own_states:
        owner.load(own[owner.name])
    return model, optimizer


def a_checkpoint_is_a_restart(case: Case, rule: str) -> None:
    """The same with `paceline.save` and `load` in between."""
    straight = _straight(case, rule, adamw)
    with shared_folder() as folder:
        for segment in SEGMENTS:
            with only_these_trainings():
                model, optimizer = begin(case, rule, adamw)
                if segment is not SEGMENTS[0]:
                    paceline.load(folder / "checkpoint")
                _steps(model, optimizer, segment)
                if segment is not SEGMENTS[-1]:
                    paceline.save(folder / "checkpoint")
                optimizer.finish()
    require_equal(model, straight, "a checkpoint changes the result")


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
    for segment in SEGMENTS:
        if case.under_way and segment is not SEGMENTS[0]:
            optimizer.finish()
            optimizer = distribute_as(case, rule, model, optimizer.unwrapped)
        _steps(model, optimizer, segment)
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
    """`consolidated` takes nothing away, and adds nothing, whoever looks in whenever; all
    together where the method says so."""
    model, optimizer = _begin_counting(case, rule)
    for number in range(6):
        _count(model, optimizer, 1, first_is_fast=bool(number % 2))
        together = training_of(optimizer).consolidates_together
        if together or (number + paceline.rank()) % 2:
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
    off = 1e-3 + case.lossy * steps
    require(
        steps - off <= least <= most <= steps + off,
        f"{when} the gradients of {least:.3f} to {most:.3f} steps are in the model, and "
        f"{steps} were done",
    )
