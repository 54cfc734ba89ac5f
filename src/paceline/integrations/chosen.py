"""What a user of a trainer chooses: what `distribute` takes, checked before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from paceline import spec
from paceline.chosen import read_spec
from paceline.context import current_world
from paceline.distributing import distribute
from paceline.errors import UsageError, unknown
from paceline.interfaces import Method
from paceline.optimizer import DistributedOptimizer

_NOT_HERE = ("model", "optimizer", "sampler")


def check_chosen(settings: dict[str, Any]) -> dict[str, Any]:
    """*settings*, if `distribute` knows them all; raises `UsageError` for others."""
    known = [
        name
        for name in inspect.signature(distribute).parameters
        if name not in _NOT_HERE
    ]
    for name in settings:
        if name not in known:
            raise UsageError(unknown("option", name, known))
    return settings


def shows_mean(method: str | Method | None) -> bool:
    """Whether ``.grad`` holds the mean under what is trained: *method*, or what the
    command line says instead. Not under ``auto``, which may change it."""
    world = current_world()
    said = None if world is None else world.job.options.method
    chosen = said or method or "bsp"
    if isinstance(chosen, str):
        if spec.parse(chosen).name == "auto":
            return False
        chosen, _ = read_spec(chosen)
    return chosen.gradient_seen_by_user == "mean"


@contextmanager
def accumulating(optimizers: Iterable[DistributedOptimizer]) -> Iterator[None]:
    """Backward passes within only accumulate."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.no_sync())
        yield


def owner_of(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module
) -> torch.nn.Module:
    """The smallest module within *model* that holds all that *optimizer* trains.

    Of several optimizers each has its own training, so each needs a module whose trainable
    parameters it has, all of them. Raises `UsageError` where there is none.
    """
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    holding = [m for m in model.modules() if mine <= _ids(m.parameters())]
    if holding:
        smallest = min(holding, key=lambda m: len(_ids(m.parameters())))
        trainable = (p for p in smallest.parameters() if p.requires_grad)
        if _ids(trainable) <= mine:
            return smallest
    raise UsageError(
        f"several optimizers: the {type(optimizer).__name__} with {len(mine)} parameters "
        "trains a part of a module and leaves other parts of it to another one; paceline trains "
        "module by module: put what one optimizer trains into a submodule of its own"
    )


def _ids(parameters: Iterable[torch.nn.Parameter]) -> set[int]:
    return {id(parameter) for parameter in parameters}
