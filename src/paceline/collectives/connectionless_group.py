"""Groups without process groups: their members send to each other on connections they have.

Nothing is made, so nothing is kept: for groups beyond what a worker keeps. Collectives are schedules; sums are added as a ring adds them, or
as the communicator's collective does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from paceline.buckets import stand_alike, stand_in_for, stands_in, wire_bytes
from paceline.collectives.communicator import TorchComm, check_parts
from paceline.collectives.continuations import Chain
from paceline.collectives.pending import AllOf
from paceline.collectives.schedules import Ring, Tree
from paceline.errors import UsageError
from paceline.interfaces import Pending, ReduceOperation
from paceline.torch_internals import virtual_end


class PointToPointComm(TorchComm):
    """The group of some *ranks* of *parent*. *name* is unique, and the same for all."""

    def __init__(self, parent: TorchComm, ranks: Sequence[int], name: str) -> None:
        self._parent = parent
        group = parent.process_group
        end = virtual_end(group)
        if end is not None:
            members = [parent._peers[rank] for rank in ranks]
            group = end.shared(f"{parent.name}, among {members}", members)
        super().__init__(
            parent._world,
            name,
            group,
            parent.chain,
            parent.issuer,
            parent.collective,
            parent.places.among(ranks),
        )
        self.rank, self.size = list(ranks).index(parent.rank), len(ranks)
        if end is None:
            self._peers = [parent._peers[rank] for rank in ranks]
        else:
            self._peers = range(self.size)

    @property
    def has_own_group(self) -> bool:
        return False

    def lanes(self, device: torch.device) -> int:
        return 2

    def all_reduce_natively(
        self, buffer: torch.Tensor, operation: ReduceOperation = "mean"
    ) -> Pending:
        timed = Ring(self.size, wire_bytes(buffer)) if stands_in(buffer) else None
        ring = Ring(self.size, _elements(buffer))
        return self.perform(ring, buffer, operation, timed)

    def broadcast(self, buffer: torch.Tensor, source: int = 0) -> Pending:
        return self.perform(Tree(self.size, _elements(buffer), source), buffer)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        buffer: torch.Tensor,
        operation: ReduceOperation = "mean",
    ) -> Pending:
        whole = _copy(buffer)
        ring = Ring(self.size, _elements(buffer), rounds=1, shift=1)

        def take() -> None:
            output.copy_(whole.view(self.size, -1)[self.rank].view(output.shape))

        return self.perform(ring, whole, operation).then(take)

    def all_gather(self, output: torch.Tensor, buffer: torch.Tensor) -> Pending:
        output.view(self.size, -1)[self.rank].copy_(buffer.view(-1))
        ring = Ring(self.size, _elements(output), rounds=1, gather=True)
        return self.perform(ring, output)

    def all_to_all(self, output: torch.Tensor, buffer: torch.Tensor) -> Pending:
        check_parts(self.size, output, buffer)
        leaving, coming = buffer.view(self.size, -1), output.view(self.size, -1)
        coming[self.rank].copy_(leaving[self.rank])
        pendings = []
        for distance in range(1, self.size):
            to = (self.rank + distance) % self.size
            source = (self.rank - distance) % self.size
            pendings.append(self.receive(coming[source], source))
            pendings.append(self.send(stand_alike(leaving[to], buffer), to))
        return AllOf(self, pendings)

    def _make_channel(self, name: str) -> NoReturn:
        raise UsageError(
            f"channel {name!r} of a group without connections of its own: take the group "
            f"of a channel instead, comm.channel({name!r}).group(...)"
        )

    def group(self, ranks: Sequence[int]) -> TorchComm:
        raise UsageError(
            "a group of a group without connections of its own: take a group of the "
            "communicator that this one is of"
        )

    def _make_round(self, issuer: Chain) -> NoReturn:
        raise AssertionError("whatever is sent here is told apart by tags")

    def close(self) -> None:
        self.close_lanes()
        self._group = None


def _copy(buffer: torch.Tensor) -> torch.Tensor:
    copy = buffer.detach().clone().view(-1)
    if wire_bytes(buffer) != wire_bytes(copy):
        stand_in_for(wire_bytes(buffer), copy)
    return copy


def _elements(buffer: torch.Tensor) -> int:
    return buffer.numel() * (2 if buffer.is_complex() else 1)
