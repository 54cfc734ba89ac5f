"""The collectives of the registry: how the mean of a buffer over all ranks is formed."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

import torch

from paceline.collectives import schedules
from paceline.collectives.schedules import hierarchical, racks_or_rows, sequential
from paceline.interfaces import (
    CollectiveSummary,
    Comm,
    Needs,
    Pending,
    Placement,
    ReduceOperation,
    Schedule,
)
from paceline.interfaces.buckets import stands_in, wire_bytes

if TYPE_CHECKING:
    from paceline.collectives.communicator import Communicator


class Native:
    """torch.distributed's own all-reduce."""

    name: ClassVar[str] = "native"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        formed_by=(
            "torch.distributed, as its backend does it (gloo and NCCL: a ring for "
            "large buffers)"
        ),
        sends="2 (n - 1) / n of the buffer per rank",
        good_for="most networks; CUDA under NCCL, which takes a tree where that is faster",
    )
    needs: ClassVar[Needs] = "nothing"

    def schedule(self, size: int, at: Placement) -> Schedule:
        return schedules.Ring(at.size, size)

    def all_reduce(
        self, comm: Comm, buffer: torch.Tensor, operation: ReduceOperation
    ) -> Pending:
        return cast("Communicator", comm).all_reduce_natively(buffer, operation)


class Scheduled:
    """An all-reduce that performs its schedule between the workers."""

    needs: ClassVar[Needs] = "nothing"

    def schedule(self, size: int, at: Placement) -> Schedule:
        raise NotImplementedError

    def all_reduce(
        self, comm: Comm, buffer: torch.Tensor, operation: ReduceOperation
    ) -> Pending:
        elements = buffer.numel() * (2 if buffer.is_complex() else 1)
        schedule = self.schedule(elements, comm.placement)
        timed = None
        if stands_in(buffer):
            timed = self.schedule(wire_bytes(buffer), comm.placement)
        return comm.perform(schedule, buffer, operation, timed)


class ParameterServer(Scheduled):
    """Servers that add up a part of the buffer each."""

    name: ClassVar[str] = "parameter-server"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        formed_by="servers, each of which adds up its part of the buffer in rank order",
        sends="the buffer once per rank, and as often back from the servers",
        good_for="servers with links of their own, or bits that are those of rank order",
    )
    needs: ClassVar[Needs] = "servers"

    def schedule(self, size: int, at: Placement) -> Schedule:
        """As if one server stood beside rank 0."""
        n = at.size
        return sequential(
            schedules.Star(n, size, gather=True, adds=True), schedules.Star(n, size)
        )


class Ring(Scheduled):
    """A ring of all ranks."""

    name: ClassVar[str] = "ring"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        formed_by="a ring of all ranks (Patarasuk and Yuan 2009)",
        sends="2 (n - 1) / n of the buffer per rank, in 2 (n - 1) messages",
        good_for="large buffers",
    )

    def schedule(self, size: int, at: Placement) -> Schedule:
        return schedules.Ring(at.size, size)


class Tree(Scheduled):
    """A binomial tree to rank 0 and back."""

    name: ClassVar[str] = "tree"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        formed_by="a binomial tree to rank 0 and back",
        sends="the whole buffer once to a parent, and once to each child",
        good_for="small buffers where latency is all",
    )

    def schedule(self, size: int, at: Placement) -> Schedule:
        n = at.size
        return sequential(schedules.Tree(n, size, reduce=True), schedules.Tree(n, size))


class HalvingDoubling(Scheduled):
    """Recursive halving and doubling."""

    name: ClassVar[str] = "halving-doubling"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        formed_by="recursive halving and doubling (Thakur, Rabenseifner and Gropp 2005)",
        sends=(
            "as much as a ring in 2 log2 n messages, and a buffer more where n is no "
            "power of two"
        ),
        good_for="large buffers and latency, on switches that pass everything",
    )

    def schedule(self, size: int, at: Placement) -> Schedule:
        return schedules.HalvingDoubling(at.size, size)


class Hierarchical(Scheduled):
    """Reduce-scatters in racks, all-reduces across them, and all-gathers in racks."""

    name: ClassVar[str] = "hierarchical"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        formed_by=(
            "a reduce-scatter in each rack, all-reduces across racks among the ranks "
            "that hold the same part, and an all-gather in each rack; all by rings "
            "(racks that nobody knows: rows of about the root of n ranks)"
        ),
        sends=(
            "in the rack 2 (g - 1) / g of the buffer per rank, for g ranks in it; over"
            " its uplink 2 (r - 1) / r of the buffer for r racks, however many ranks "
            "are in it"
        ),
        good_for="uplinks that are thinner than their hosts' links together",
    )

    def schedule(self, size: int, at: Placement) -> Schedule:
        return hierarchical(size, racks_or_rows(at.size, at.racks))
