"""The three stages of a hierarchical all-reduce by torch.distributed's own collectives.

For NCCL, under which no schedule can be performed. Not for gloo: its reduce-scatter is an
all-reduce of which each rank keeps its part, so that twice as much would move in the racks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from paceline.buckets import stand_alike
from paceline.collectives.hierarchical import grouped, racks_or_rows
from paceline.collectives.send_receive import flat_of
from paceline.interfaces import Pending, ReduceOperation

if TYPE_CHECKING:
    from paceline.collectives.communicator import TorchComm


class Stages:
    """Groups of *comm*'s ranks: those of this rank's rack, and, across racks, those in its
    place. Where racks differ in size only their first ranks meet, with all of the buffer.
    Collective."""

    def __init__(self, comm: TorchComm) -> None:
        racks = grouped(racks_or_rows(comm.size, comm.racks))
        mine = next(members for members in racks if comm.rank in members)
        place = mine.index(comm.rank)
        self._comm = comm
        self._even = len({len(members) for members in racks}) == 1
        self._rack = comm.group(mine)
        # Who does not meet others is a group of its own: all go through the same works.
        meets = self._even or place == 0
        self._across = comm.group(
            [members[place] for members in racks] if meets else [comm.rank]
        )

    def all_reduce(self, buffer: torch.Tensor, operation: ReduceOperation) -> Pending:
        """Replace *buffer* on every rank by its mean, sum or maximum over ranks."""
        flat = flat_of(buffer)
        adds: ReduceOperation = "max" if operation == "max" else "sum"
        reduced = self._by_parts if self._even else self._by_first_ranks

        def divide() -> None:
            if operation == "mean":
                flat.div_(self._comm.size)

        return reduced(flat, adds, divide)

    def _by_parts(
        self, flat: torch.Tensor, adds: ReduceOperation, end: Callable[[], None]
    ) -> Pending:
        rack, across = self._rack, self._across
        padding = -flat.numel() % rack.size
        whole = flat
        if padding:
            whole = stand_alike(torch.cat([flat, flat.new_zeros(padding)]), flat)
        part = stand_alike(torch.empty_like(whole[: whole.numel() // rack.size]), whole)

        def put() -> None:
            if padding:
                flat.copy_(whole[: flat.numel()])
            end()

        def gather() -> Pending:
            return rack.all_gather(whole, part).then(put)

        def reduce() -> Pending:
            return across.all_reduce_natively(part, adds).then(gather)

        return rack.reduce_scatter(part, whole, adds).then(reduce)

    def _by_first_ranks(
        self, flat: torch.Tensor, adds: ReduceOperation, end: Callable[[], None]
    ) -> Pending:
        rack, across = self._rack, self._across

        def spread() -> Pending:
            return rack.broadcast(flat).then(end)

        def reduce() -> Pending:
            return across.all_reduce_natively(flat, adds).then(spread)

        return rack.all_reduce_natively(flat, adds).then(reduce)
