"""What is averaged: parameters, BatchNorm's statistics, and, where asked for, the optimizer's
state."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.buckets import by_kind
from paceline.errors import UsageError
from paceline.interfaces import Comm, Run
from paceline.methods.ds_sync.parameter_exchange import (
    BufferParcel,
    Parcel,
    StateParcel,
)
from paceline.methods.flat_tensors import Flat

HALF = (torch.float16, torch.bfloat16)


class Shares:
    """One worker's parcels. *keys*: which of the optimizer's tensors are averaged, too;
    *largest*: the most members that a group has."""

    def __init__(self, run: Run, keys: Sequence[str], largest: int) -> None:
        self.parameters = [
            Parcel(_flat(bucket.parameters, largest), bucket.names)
            for bucket in run.buckets
        ]
        """By the number of their buckets."""
        self.buffers = [
            BufferParcel(
                Flat(kind), [f"buffers {number}.{i}" for i in range(len(kind))]
            )
            for number, kind in enumerate(by_kind(floating(run.own_buffers)))
        ]
        optimizer = run.optimizer
        self.states = [
            StateParcel(
                bucket.parameters,
                bucket.names,
                key,
                lambda parameter: optimizer.state.get(parameter, {}),
            )
            for key in keys
            for bucket in run.buckets
            if optimizer is not None
        ]

    @property
    def all(self) -> list[Parcel]:
        """In the order in which they are sent: what a forward pass needs first goes first, and
        buckets are in the order of backward."""
        return [*self.buffers, *reversed(self.parameters), *self.states]

    @property
    def bytes(self) -> int:
        """What a worker has in a group's mean."""
        return sum(parcel.flat.bytes for parcel in self.all)

    def send(
        self, run: Run, group: Comm, when_in: Callable[[], None] | None = None
    ) -> None:
        """Everything leaves; *when_in* is called when the last mean is in."""
        for parcel in self.all:
            parcel.send(run, group)
        if when_in is not None:
            self.all[-1].follow(when_in)

    def put(self) -> None:
        """Put all means that are due where they belong."""
        for parcel in self.all:
            parcel.put()

    def put_buffers(self) -> None:
        """Put those that are due of the model's buffers."""
        for parcel in self.buffers:
            parcel.put()

    def stamp(self) -> None:
        """The parameters are as they were sent, though they were written to since."""
        for parcel in self.parameters:
            parcel.stamp()

    def drop(self) -> None:
        """All has been replaced."""
        for parcel in self.all:
            parcel.drop()

    def wait(self) -> None:
        """Return when all means are in; none is put."""
        for parcel in self.all:
            parcel.wait()

    def save(self) -> dict[str, torch.Tensor]:
        """The means that are due."""
        return {key: value for one in self.all for key, value in one.save().items()}

    def load(self, saved: dict[str, torch.Tensor]) -> None:
        """Go on from these."""
        for parcel in self.all:
            parcel.load(saved)


def floating(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those that have a mean, and elements."""
    return [
        one
        for one in tensors
        if (one.is_floating_point() or one.is_complex()) and one.numel()
    ]


def _flat(parameters: Sequence[torch.Tensor], largest: int) -> Flat:
    """Half the sum of two numbers is rounded once in any type; of more, each sum of two is,
    unless they are added in single precision."""
    wide = largest > 2 and parameters[0].dtype in HALF
    return Flat(parameters, torch.float32 if wide else None)


def state_keys(optimizer: torch.optim.Optimizer | None) -> list[str]:
    """Under which names *optimizer* keeps tensors of a parameter's shape: found out by a step
    of a copy of it on a small one of each group, so that all workers know it before the first
    step.

    Raises `UsageError` for one that keeps none, or others.
    """
    if optimizer is None:
        raise UsageError(
            "ds-sync:state=average: there is no optimizer here whose state could be averaged"
        )
    name = type(optimizer).__name__
    groups = [group for group in optimizer.param_groups if group["params"]]
    kept = {key: n for group in groups for key, n in _kept(optimizer, group).items()}
    others = sorted(key for key, shape in kept.items() if shape != _TRIED)
    if others:
        raise UsageError(
            f"ds-sync:state=average: {name} keeps {', '.join(others)} in another shape than "
            "the parameter's, and only tensors of that shape are averaged; use state=local"
        )
    if not kept:
        raise UsageError(
            f"ds-sync:state=average: {name} as it is set keeps no tensors of its parameters "
            "(SGD without momentum, for example), so there is nothing to average; use "
            "state=local, or an optimizer with momentum"
        )
    return sorted(kept)


_TRIED = torch.Size((2, 3))
"""The shape of the parameter on which optimizers are tried."""


def _kept(
    optimizer: torch.optim.Optimizer, group: dict[str, Any]
) -> dict[str, torch.Size]:
    """The tensors that *optimizer* keeps of a parameter in *group*: names and shapes."""
    first = group["params"][0]
    small = torch.nn.Parameter(first.new_ones(_TRIED))
    small.grad = torch.ones_like(small)
    probe = copy.copy(optimizer)
    probe.state = defaultdict(dict)
    probe.param_groups = [{**group, "params": [small]}]
    try:
        probe.step()
    except Exception as error:
        raise UsageError(
            f"ds-sync:state=average: {type(optimizer).__name__} cannot be tried on a single "
            f"small parameter, which shows what it keeps ({error}); use state=local"
        ) from error
    return {
        key: tensor.shape
        for key, tensor in probe.state[small].items()
        if isinstance(tensor, torch.Tensor) and tensor.dim()
    }
