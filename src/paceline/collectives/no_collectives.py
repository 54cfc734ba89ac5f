"""A `Comm` for workers that meet only at their servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from paceline.errors import UsageError
from paceline.interfaces import Runtime, Schedule


class AloneComm:
    """Knows its rank and the number of workers, and refuses every collective: in a job that
    survives deaths, nobody may wait for a worker that a server has not evicted."""

    def __init__(self, runtime: Runtime) -> None:
        self.rank, self.size = runtime.rank, runtime.size
        self.racks = None
        self.aggregating: frozenset[int] = frozenset()

    def lanes(self, device: torch.device) -> int:
        return 1

    def all_reduce(self, buffer: torch.Tensor, operation: str = "mean") -> NoReturn:
        self._refuse("all_reduce")

    def broadcast(self, buffer: torch.Tensor, source: int = 0) -> NoReturn:
        self._refuse("broadcast")

    def reduce_scatter(
        self, output: torch.Tensor, buffer: torch.Tensor, operation: str = "mean"
    ) -> NoReturn:
        self._refuse("reduce_scatter")

    def all_gather(self, output: torch.Tensor, buffer: torch.Tensor) -> NoReturn:
        self._refuse("all_gather")

    def all_to_all(self, output: torch.Tensor, buffer: torch.Tensor) -> NoReturn:
        self._refuse("all_to_all")

    def send(self, buffer: torch.Tensor, to: int) -> NoReturn:
        self._refuse("send")

    def receive(self, buffer: torch.Tensor, source: int) -> NoReturn:
        self._refuse("receive")

    def perform(
        self,
        schedule: Schedule,
        buffer: torch.Tensor,
        operation: str = "sum",
        timed: Schedule | None = None,
    ) -> NoReturn:
        self._refuse("perform")

    def channel(self, name: str) -> AloneComm:
        return self

    def group(self, ranks: Sequence[int]) -> NoReturn:
        self._refuse("a group")

    def leave(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is held."""

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what} under --survive: workers meet only at their servers, so that the death "
            "of one stops no other; leave out --survive for what needs collectives"
        )
