"""All-reduces in two halves: a reduce-scatter now, and its all-gather when the result is needed.

A collective's schedule is cut at its last addition. Both halves together move the same parts to the
same ranks, and give the same bits, as the whole. Zhang et al., "DeAR" (ICDCS 2023), do this with a
ring. Between the halves each part of the sum is complete at one rank, in its place in the buffer.
The contents of the rest of the buffer are undefined.

gloo's own reduce-scatter is an all-reduce of which each rank keeps a part, so halves over gloo are
schedules. Under NCCL, which performs no schedules, they are NCCL's own two collectives.

*Order.* The second half is a continuation of the first (`Pending.then`): requested early, it starts
when the first half is complete. Second halves start in the order of request, on every rank. As
continuations they have a queue of their own, so first halves issued later never wait behind them.
"""

from __future__ import annotations

import torch

from paceline.collectives.algorithms import Native, Scheduled
from paceline.collectives.autotune import CANDIDATES, Auto
from paceline.collectives.communicator import Communicator, flat_of
from paceline.collectives.pending import PutBack
from paceline.collectives.server_communicator import ServerCommunicator
from paceline.errors import UsageError
from paceline.interfaces import (
    AllReduceAlgorithm,
    Comm,
    Pending,
    ReduceOperation,
    ReduceScatter,
    Schedule,
)
from paceline.interfaces.buckets import stand_alike, stands_in, wire_bytes


def reduce_scatter(
    comm: Comm, buffer: torch.Tensor, operation: ReduceOperation = "mean"
) -> ReduceScatter:
    """Start the half of an all-reduce that adds: the mean, sum or maximum of *buffer* over ranks,
    in place.

    `ReduceScatter.gather` starts the other half. Both are collective: all ranks issue them in the
    same order. Raises `UsageError` if the collective of *comm* has no halves.
    """
    if not isinstance(comm, Communicator) or isinstance(comm, ServerCommunicator):
        raise UsageError(
            "a reduce-scatter in a job whose workers communicate only through servers: "
            "expected a collective between workers. Use collective='native' or 'ring', "
            "without --survive"
        )
    on_cuda = buffer.is_cuda and not comm.is_virtual
    if on_cuda and comm.size > 1:
        _check_on_cuda(comm)
        return NativeReduceScatter(comm, buffer, operation)
    return ScheduledReduceScatter(comm, buffer, operation)


def check_halves(collective: AllReduceAlgorithm) -> None:
    """Raise `UsageError` for a collective that has no halves."""
    if collective.needs == "servers" or not isinstance(
        collective, Native | Scheduled | Auto
    ):
        raise UsageError(
            f"collective={collective.name!r} has no halves, a reduce-scatter and an "
            "all-gather: use 'native', 'ring', 'hierarchical', 'halving-doubling' or 'tree'"
        )


def _check_on_cuda(comm: Communicator) -> None:
    row = comm.collective
    if not comm.follows_streams:
        raise UsageError(
            "a reduce-scatter of a tensor on CUDA over gloo, which sends from host memory: "
            "use NCCL, or a method that sends whole averages"
        )
    if not isinstance(row, Native | Auto | None):
        raise UsageError(
            f"a reduce-scatter under collective={row.name!r} and NCCL, which performs no "
            "schedules: use collective='native'"
        )


def both_halves(schedule: Schedule) -> tuple[Schedule, Schedule]:
    """Both halves of a whole all-reduce; see `Schedule.halves`."""
    adding, spreading = schedule.halves()
    assert adding is not None, f"{schedule} is a half itself"
    assert spreading is not None, f"{schedule} is a half itself"
    return adding, spreading


class ScheduledReduceScatter:
    """Halves of a schedule, over sends and receives."""

    def __init__(
        self, comm: Communicator, buffer: torch.Tensor, operation: ReduceOperation
    ) -> None:
        self._comm, self._buffer = comm, buffer
        row = _row(comm, buffer)
        elements = buffer.numel() * (2 if buffer.is_complex() else 1)
        sizes = [elements, wire_bytes(buffer)] if stands_in(buffer) else [elements]
        # The second schedule is for timing: a stand-in counts other bytes than it holds.
        wholes = [row.schedule(size, comm.placement) for size in sizes]
        first, self._second = zip(*map(both_halves, wholes), strict=True)
        self._pending = comm.perform(first[0], buffer, operation, *first[1:])

    def gather(self) -> Pending:
        return self._pending.then(self._spread)

    def _spread(self) -> Pending:
        schedule, *timed = self._second
        return self._comm.perform(schedule, self._buffer, "sum", *timed)


def _row(comm: Communicator, buffer: torch.Tensor) -> AllReduceAlgorithm:
    """The algorithm that sums *buffer*."""
    row = comm.collective or Native()
    check_halves(row)
    if isinstance(row, Auto):
        size = wire_bytes(buffer)
        return CANDIDATES[row.choice(size, comm.placement, at_switches=False)]
    return row


class NativeReduceScatter:
    """The backend's own reduce-scatter and all-gather, for NCCL.

    They need equal parts, so a buffer of another size goes through a zero-padded copy. The second
    half needs no chain: the group's stream runs operations in the order of issue, and already waits
    for the first half.
    """

    def __init__(
        self, comm: Communicator, buffer: torch.Tensor, operation: ReduceOperation
    ) -> None:
        self._comm = comm
        self._on_stream = buffer.is_cuda and comm.follows_streams
        self._flat = self._whole = flat_of(buffer)
        padding = -self._flat.numel() % comm.size
        if padding:
            zeros = self._flat.new_zeros(padding)
            self._whole = stand_alike(torch.cat([self._flat, zeros]), buffer)
        # In place, as NCCL defines it: the output is this rank's part of the input.
        part = self._whole.view(comm.size, -1)[comm.rank]
        self._part = stand_alike(part, self._whole)
        self._pending = comm.reduce_scatter(self._part, self._whole, operation)

    def gather(self) -> Pending:
        if self._on_stream:
            pending = self._spread()
        else:
            pending = self._pending.then(self._spread)
        if self._whole is self._flat:
            return pending
        row = self._whole[: self._flat.numel()]
        return PutBack(pending, row, self._flat)

    def _spread(self) -> Pending:
        return self._comm.all_gather(self._whole, self._part)
