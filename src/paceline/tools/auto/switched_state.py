"""What goes on from one training of a model to the next: the optimizer's state, and what codes keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from paceline.bucketing.tuner import BucketPlan
from paceline.core.broadcast import average_tensors, broadcast_tensors, gather_bytes
from paceline.core.checkpoint.worker_state import worker_states
from paceline.core.training import Training
from paceline.interfaces import Comm


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of an optimizer's state: of parameter number *index*."""

    index: int
    name: str
    dtype: str
    shape: tuple[int, ...]


def equalize(
    comm: Comm,
    optimizer: torch.optim.Optimizer,
    sources: Sequence[int],
    device: torch.device,
    *,
    mean: bool,
) -> None:
    """Give all workers one state of the optimizer: the *mean* of those that the *sources* have (whole
    numbers: the first one's), or the first one's. What only some keep counts as zeros, as a momentum
    does before the first step. Collective."""
    mine = _kept(optimizer)
    everyone = [
        msgspec.msgpack.decode(said, type=list[_Kept])
        for said in gather_bytes(msgspec.msgpack.encode(mine), device)
    ]
    wanted = everyone[sources[0]]
    if mean:
        more = {one for rank in sources for one in everyone[rank]} - set(wanted)
        wanted = wanted + sorted(more, key=lambda one: (one.index, one.name))
    tensors = _as_wanted(optimizer, mine, wanted)
    real = [tensor.is_floating_point() for tensor in tensors]
    averaged = [t for t, averages in zip(tensors, real, strict=True) if averages]
    if mean:
        average_tensors(comm, averaged, counts=comm.rank in sources)
        tensors = [t for t, averages in zip(tensors, real, strict=True) if not averages]
    broadcast_tensors(comm, tensors, sources[0])


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _kept(optimizer: torch.optim.Optimizer) -> list[_Kept]:
    return [
        _Kept(index, name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for index, parameter in enumerate(_parameters(optimizer))
        for name, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, torch.Tensor)
    ]


def _as_wanted(
    optimizer: torch.optim.Optimizer, mine: Sequence[_Kept], wanted: Sequence[_Kept]
) -> list[torch.Tensor]:
    """The tensors that are *wanted*, in their order; zeros where there is no such one."""
    parameters, there = _parameters(optimizer), set(mine)
    for one in there - set(wanted):
        del optimizer.state[parameters[one.index]][one.name]
    tensors = []
    for one in wanted:
        parameter = parameters[one.index]
        if one not in there:
            # torch keeps counters of steps beside the processor, whatever trains.
            where = parameter.device if one.shape else torch.device("cpu")
            kind = getattr(torch, one.dtype)
            optimizer.state[parameter][one.name] = torch.zeros(
                one.shape, dtype=kind, device=where
            )
        tensors.append(optimizer.state[parameter][one.name])
    return tensors


class KeptCodes:
    """What compressors have not sent when their training ends: it waits until the same code is
    used again, with the same method."""

    def __init__(self) -> None:
        self._states: dict[str, dict[str, Any]] = {}

    def take(self, spec: str, training: Training) -> None:
        """A training by *spec* is about to end."""
        for state in worker_states(training):
            if state.name.startswith("compression."):
                self._states[f"{spec} {state.name}"] = dict(state.save())

    def give_back(self, spec: str, training: Training) -> None:
        """One by *spec* has begun."""
        for state in worker_states(training):
            saved = self._states.pop(f"{spec} {state.name}", None)
            if saved is not None:
                state.load(saved)


class KeptPlans:
    """Buckets that were settled on: who comes back to a spec does not measure them again."""

    def __init__(self) -> None:
        self._plans: dict[str, BucketPlan] = {}

    def take(self, spec: str, training: Training) -> None:
        """A training by *spec* is about to end."""
        if training.tuner.adopted is not None:
            self._plans[spec] = training.tuner.adopted

    def give_back(self, spec: str, training: Training) -> None:
        """One by *spec* has begun."""
        training.tuner.reuse(self._plans.get(spec))
