"""Sums of integers formed at switches: what does it, in which runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from paceline.interfaces import Comm, Pending, Schedule
from paceline.interfaces.buckets import wire_bytes

if TYPE_CHECKING:
    from paceline.collectives.communicator import TorchComm


class Aggregation(Protocol):
    """Adds up the integers of one communicator's ranks."""

    def standing(self, comm: TorchComm) -> int:
        """What this rank has to say before its next sum: the maximum over ranks is handed to
        `add_up`. 0: it can be formed at switches."""
        ...

    def add_up(
        self, comm: TorchComm, values: torch.Tensor, standing: int = 0
    ) -> Pending:
        """Replace *values* (int32, flat, on the host) on every rank of *comm* by their sums over ranks,
        exact where these are below 2^31. Collective, in the order of issue. *values* count
        as many bytes on the network as `wire_bytes` says."""
        ...

    def close(self) -> None:
        """Nothing more is summed."""
        ...


class Planned(Protocol):
    """A row: how it adds up."""

    def schedule(self, size: int, comm: Comm, racks: None) -> Schedule: ...

    def timed(self, size: int, comm: Comm) -> Schedule:
        """The same over *size* bytes, as fine as it is to be played."""
        ...


class ScheduledAggregation:
    """By the schedule of *row*, switches and all: in virtual time."""

    def __init__(self, row: Planned) -> None:
        self._row = row

    def standing(self, comm: TorchComm) -> int:
        return 0

    def add_up(
        self, comm: TorchComm, values: torch.Tensor, standing: int = 0
    ) -> Pending:
        schedule = self._row.schedule(values.numel(), comm, None)
        timed = self._row.timed(wire_bytes(values), comm)
        return comm.perform(schedule, values, "sum", timed)

    def close(self) -> None:
        """Nothing is held."""
