"""What a checkpoint keeps of one worker's training, beside what all workers share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from paceline.core.method_hooks import MethodHooks
from paceline.errors import UsageError
from paceline.interfaces import (
    Compressor,
    Method,
    State,
    WorkerState,
    redistribute_nothing,
)
from paceline.interfaces.buckets import match_strides


class Coding(Protocol):
    """Who codes tensors, and keeps the *states* of that by their names."""

    @property
    def compressor(self) -> Compressor: ...

    states: dict[str, State]


def worker_states(
    method: Method,
    hooks: MethodHooks,
    codes: Coding | None,
    coded: Sequence[tuple[str, torch.Tensor]],
    rank: int,
    parameters: Sequence[tuple[str, torch.nn.Parameter]],
    optimizer: torch.optim.Optimizer | None,
) -> list[WorkerState]:
    """Those of a training under *method*; *coded*: what *codes* are of, by name."""
    states: list[WorkerState] = []
    if hooks.has("save_state"):
        states.append(MethodState(method.name, hooks))
    if codes is not None and codes.compressor.state != "none":
        states.append(CompressorState(codes, rank, coded))
    if method.rounds.models_may_differ and optimizer is not None:
        states.append(LocalModel(parameters, optimizer))
    return states


class MethodState:
    """What a method's `save_state` gives."""

    def __init__(self, method: str, hooks: MethodHooks) -> None:
        self.name = f"method.{method}"
        self._hooks = hooks

    def save(self) -> dict[str, Any]:
        saved: dict[str, Any] = self._hooks.ask("save_state")
        return saved

    def load(self, saved: dict[str, Any]) -> None:
        self._hooks.is_loaded = False
        self._hooks.call("load_state", saved)

    def redistribute(
        self, parts: Iterable[dict[str, Any]], workers: int
    ) -> dict[str, Any]:
        """The method says it in `redistribute_state`, or it is refused."""
        if not self._hooks.has("redistribute_state"):
            return redistribute_nothing(self.name, parts, workers)
        saved: dict[str, Any] = self._hooks.ask("redistribute_state", parts)
        return saved


class CompressorState:
    """What a compressor keeps of each tensor, by the tensor's name."""

    def __init__(
        self,
        codes: Coding,
        rank: int,
        tensors: Sequence[tuple[str, torch.Tensor]],
    ) -> None:
        self.name = f"compression.{codes.compressor.name}"
        self._codes, self._rank = codes, rank
        self._tensors = dict(tensors)
        self._device = tensors[0][1].device

    def save(self) -> dict[str, Any]:
        return dict(self._codes.states)

    def load(self, saved: dict[str, Any]) -> None:
        self._codes.states = _moved(saved, self._device)

    def redistribute(
        self, parts: Iterable[dict[str, Any]], workers: int
    ) -> dict[str, Any]:
        """The compressor says it, in `inherit`; it is given all *parts* at once."""
        former = [_moved(part, self._device) for part in parts]
        states: dict[str, Any] = {}
        for name in dict.fromkeys(name for part in former for name in part):
            compressor, like = self._codes.compressor, self._like(name)
            states[name] = compressor.init(like, name, self._rank)
            there = [part[name] for part in former if name in part]
            compressor.inherit(states[name], there, workers)
        return states

    def _like(self, name: str) -> torch.Tensor:
        """A tensor such as what is kept under *name* belongs to: see `Run.mean`, *parts*."""
        if name in self._tensors:
            return torch.empty_like(self._tensors[name], requires_grad=False)
        part = _PART.fullmatch(name)
        if part is None or part[1] not in self._tensors:
            raise UsageError(
                f"the checkpoint holds {self.name} of {name!r}, which is no parameter "
                "of this model: load it with as many workers as saved it"
            )
        owner = self._tensors[part[1]].detach()
        row = owner.new_empty(owner.numel())[int(part[2]) : int(part[3])]
        return row if owner.dim() < 2 else row.view(1, -1)


_PART = re.compile(r"(.*)\[(\d+):(\d+)\]")


class LocalModel:
    """This worker's own parameters, and its optimizer's state, where models differ between
    steps. Workers that have no own ones go on with what all share: the method's result."""

    name = "model"

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._parameters, self._optimizer = dict(parameters), optimizer

    def save(self) -> dict[str, Any]:
        return {
            "parameters": dict(self._parameters),
            "optimizer": self._optimizer.state_dict(),
        }

    def load(self, saved: dict[str, Any]) -> None:
        if not saved:
            return
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(saved["parameters"][name])
        self._optimizer.load_state_dict(saved["optimizer"])
        match_strides(self._optimizer)

    def redistribute(
        self, parts: Iterable[dict[str, Any]], workers: int
    ) -> dict[str, Any]:
        return {}


def _moved(value: Any, device: torch.device) -> Any:
    """*value* with the tensors in it on *device*."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(one, device) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(one, device) for one in value)
    return value
