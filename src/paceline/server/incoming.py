"""What a worker loads into a server, until all of it is there.

A load comes in many messages, and its worker may die between two of them. So nothing of it
takes effect before the last bucket's parameters are in, and then all of it does at once.
"""

from __future__ import annotations

import torch

from paceline.errors import UsageError
from paceline.messages import LoadState
from paceline.server.held_model import HeldModel
from paceline.server.rest import HeldRest
from paceline.server.store import State


class Incoming:
    """One load under way, of one worker."""

    def __init__(self, model: HeldModel, rest: HeldRest) -> None:
        self._model = model
        self._rest = rest
        self.clear()

    def clear(self) -> None:
        """Its worker is lost, or all of it has taken effect."""
        self.worker: int | None = None
        self._parameters: dict[int, torch.Tensor] = {}
        self._states: dict[int, list[State]] = {}
        self._parts: list[torch.Tensor] = []

    def begin(self, worker: int) -> None:
        """What comes now is this worker's; what came of another one is of no use."""
        if self.worker != worker:
            self.clear()
            self.worker = worker

    def take_parameters(self, bucket: int, payload: torch.Tensor | None) -> None:
        """Raises `UsageError` for what does not fit."""
        self._parameters[bucket] = self._model.fitting("load", bucket, payload)

    def take_state(self, load: LoadState, payload: torch.Tensor | None) -> None:
        """Raises `UsageError` for what does not fit."""
        self._states[load.bucket] = self._model.fitting_state(load, payload)

    def take_rest(self, start: int, payload: torch.Tensor | None) -> None:
        """Raises `UsageError` for a part that does not follow the one before."""
        if payload is None or payload.dtype != torch.uint8:
            raise UsageError("load-rest: expected a payload of bytes")
        here = sum(part.numel() for part in self._parts)
        if start != here:
            raise UsageError(
                f"load-rest: expected what begins at byte {here}, got byte {start}"
            )
        self._parts.append(payload)

    def is_whole(self) -> bool:
        return self._parameters.keys() == set(self._model.buckets)

    def put(self) -> None:
        """Let all of it take effect."""
        if self._parts:
            self._rest.load(self._parts)
        for bucket, states in self._states.items():
            self._model.store.put_state(bucket, states)
        for bucket, parameters in self._parameters.items():
            self._model.store.load(bucket, parameters)
        self.clear()
