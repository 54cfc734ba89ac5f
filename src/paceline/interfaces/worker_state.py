"""What a worker has of its own, and a checkpoint keeps per worker.

`paceline.core` has a list of these; `paceline.core.checkpoint` saves and restores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from paceline.errors import UsageError


class OwnState(Protocol):
    """One state that differs between workers: a method's, a compressor's residuals.

    What is saved is data: tensors, numpy arrays, numbers, texts, lists, tuples and dicts
    of them.
    """

    @property
    def name(self) -> str:
        """Whose state it is, for example ``"method.bsp"``. Equal on all workers, without a
        slash, and once in a training. A state is loaded by who has the same name."""
        ...

    def save(self) -> dict[str, Any]:
        """This worker's state, between two steps. Not collective. The tensors may be the
        live ones: they are written before training goes on."""
        ...

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from what `save` or `redistribute` gave, bit for bit. Tensors are on the
        processor, and nobody else holds them. Not collective."""
        ...

    def redistribute(
        self, parts: Iterable[dict[str, Any]], workers: int
    ) -> dict[str, Any]:
        """What this worker loads where it cannot have its own: the job that saved had
        another number of workers than this one's *workers*, or lost some of them.

        *parts* gives what `save` gave, in order of ranks, on every worker alike; each is
        read when it is asked for. Changes nothing. Raises `UsageError` where no answer
        would be right.
        """
        ...


def shares_of(parts: Iterable[dict[str, Any]], workers: int) -> dict[str, Any]:
    """For states that are shares of a sum, as residuals are: the sum over *parts* of each
    tensor of floating point, divided by *workers*. A tensor that a part lacks counts as
    zero. All else (numbers, texts, whole tensors of integers) is equal in all parts and
    stays as it is. Raises `UsageError` where it is not equal.

    Example: residuals 3 and 5 of two workers become 2 on each of four.
    """
    total: dict[str, Any] = {}
    for part in parts:
        total = dict(_added(total, part, ""))
    return {key: _divided(value, workers) for key, value in total.items()}


def refused(name: str, parts: Iterable[dict[str, Any]], workers: int) -> dict[str, Any]:
    """For states that mean nothing to another number of workers: raises `UsageError` where
    any part holds something. Returns an empty state where none does."""
    held = [bool(part) for part in parts]
    if not any(held):
        return {}
    raise UsageError(
        f"the checkpoint holds {name} of {len(held)} worker{'s' * (len(held) > 1)}, which a "
        f"job of {workers} cannot take over: load it with as many workers as the job that "
        "saved it had, if all of them lived then; or save after finish(), when nothing of "
        "it is left"
    )


def _added(total: Any, part: Any, path: str) -> Any:
    if isinstance(total, Mapping) and isinstance(part, Mapping):
        return dict(total) | {
            key: _added(total[key], value, f"{path}/{key}") if key in total else value
            for key, value in part.items()
        }
    if isinstance(total, list | tuple) and isinstance(part, list | tuple):
        if len(total) == len(part):
            pairs = enumerate(zip(total, part, strict=True))
            return type(total)(_added(a, b, f"{path}/{i}") for i, (a, b) in pairs)
    elif isinstance(total, torch.Tensor) and isinstance(part, torch.Tensor):
        if total.shape == part.shape and total.dtype == part.dtype:
            if _is_share(total):
                return total + part
            if torch.equal(total, part):
                return total
    elif type(total) is type(part) and total == part:
        return total
    raise UsageError(
        f"the checkpoint's workers differ in {path}, which cannot be divided among "
        f"others: expected equal values, got {_told(total)} and {_told(part)}; load it "
        "with as many workers as saved it"
    )


def _divided(value: Any, workers: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _divided(one, workers) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_divided(one, workers) for one in value)
    if isinstance(value, torch.Tensor) and _is_share(value):
        return value / workers
    return value


def _is_share(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _told(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {tuple(value.shape)}, {value.dtype}"
    return repr(value)
