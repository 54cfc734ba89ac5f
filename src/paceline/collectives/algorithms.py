"""The collectives of the registry: how the mean of a buffer over all ranks is formed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from paceline.collectives import schedules
from paceline.collectives.composition import InTurn
from paceline.collectives.halving_doubling import HalvingDoubling as Halves
from paceline.collectives.hierarchical import hierarchical, racks_or_rows
from paceline.interfaces import (
    CollectiveSummary,
    Comm,
    Pending,
    ReduceOperation,
    Schedule,
)
from paceline.interfaces.buckets import stands_in, wire_bytes


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
    needs_servers: ClassVar[bool] = False

    def schedule(self, size: int, comm: Comm, racks: Sequence[int] | None) -> Schedule:
        return schedules.Ring(comm.size, size)

    def run(
        self, comm: Comm, buffer: torch.Tensor, operation: ReduceOperation
    ) -> Pending:
        return comm.all_reduce(
            buffer, operation
        )  # on a Comm without another collective


class ParameterServer:
    """Servers that add up a part of the buffer each."""

    name: ClassVar[str] = "parameter-server"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        formed_by="servers, each of which adds up its part of the buffer in rank order",
        sends="the buffer once per rank, and as often back from the servers",
        good_for="servers with links of their own, or bits that are those of rank order",
    )
    needs_servers: ClassVar[bool] = True

    def schedule(self, size: int, comm: Comm, racks: Sequence[int] | None) -> Schedule:
        """As if one server stood beside rank 0."""
        n = comm.size
        return InTurn(
            (schedules.Star(n, size, gather=True, adds=True), schedules.Star(n, size))
        )

    def run(
        self, comm: Comm, buffer: torch.Tensor, operation: ReduceOperation
    ) -> Pending:
        return comm.all_reduce(buffer, operation)  # a Comm over servers


class Scheduled:
    """A collective that is its schedule."""

    needs_servers: ClassVar[bool] = False

    def schedule(self, size: int, comm: Comm, racks: Sequence[int] | None) -> Schedule:
        raise NotImplementedError

    def run(
        self, comm: Comm, buffer: torch.Tensor, operation: ReduceOperation
    ) -> Pending:
        elements = buffer.numel() * (2 if buffer.is_complex() else 1)
        schedule = self.schedule(elements, comm, comm.racks)
        timed = None
        if stands_in(buffer):
            timed = self.schedule(wire_bytes(buffer), comm, comm.racks)
        return comm.perform(schedule, buffer, operation, timed)


class Ring(Scheduled):
    """A ring of all ranks."""

    name: ClassVar[str] = "ring"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        formed_by="a ring of all ranks (Patarasuk and Yuan 2009)",
        sends="2 (n - 1) / n of the buffer per rank, in 2 (n - 1) messages",
        good_for="large buffers",
    )

    def schedule(self, size: int, comm: Comm, racks: Sequence[int] | None) -> Schedule:
        return schedules.Ring(comm.size, size)


class Tree(Scheduled):
    """A binomial tree to rank 0 and back."""

    name: ClassVar[str] = "tree"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        formed_by="a binomial tree to rank 0 and back",
        sends="the whole buffer once to a parent, and once to each child",
        good_for="small buffers where latency is all",
    )

    def schedule(self, size: int, comm: Comm, racks: Sequence[int] | None) -> Schedule:
        n = comm.size
        return InTurn((schedules.Tree(n, size, reduce=True), schedules.Tree(n, size)))


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

    def schedule(self, size: int, comm: Comm, racks: Sequence[int] | None) -> Schedule:
        return Halves(comm.size, size)


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

    def schedule(self, size: int, comm: Comm, racks: Sequence[int] | None) -> Schedule:
        return hierarchical(size, racks_or_rows(comm.size, racks))
