"""The collectives of the registry: how the mean of a buffer over all ranks is formed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch

from paceline.collectives import schedule as schedules
from paceline.collectives.combined import Among, InTurn, SideBySide
from paceline.collectives.halving_doubling import HalvingDoubling as Halves
from paceline.interfaces import Comm, Pending, ReduceOperation, Schedule


class Native:
    """Formed by: torch.distributed, as its backend does it (gloo and NCCL: a ring for large
    buffers). Sends: 2 (n - 1) / n of the buffer per rank. Good for: most networks; the only one
    on CUDA under NCCL."""

    name: ClassVar[str] = "native"
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
    """Formed by: servers, each of which adds up its part of the buffer in rank order. Sends: the
    buffer once per rank, and as often back from the servers. Good for: servers with links
    of their own, or bits that are those of rank order."""

    name: ClassVar[str] = "parameter-server"
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
        return comm.perform(schedule, buffer, operation)


class Ring(Scheduled):
    """Formed by: a ring of all ranks (Patarasuk and Yuan 2009). Sends: 2 (n - 1) / n of the buffer
    per rank, in 2 (n - 1) messages. Good for: large buffers."""

    name: ClassVar[str] = "ring"

    def schedule(self, size: int, comm: Comm, racks: Sequence[int] | None) -> Schedule:
        return schedules.Ring(comm.size, size)


class Tree(Scheduled):
    """Formed by: a binomial tree to rank 0 and back. Sends: the whole buffer once to a parent, and
    once to each child. Good for: small buffers where latency is all."""

    name: ClassVar[str] = "tree"

    def schedule(self, size: int, comm: Comm, racks: Sequence[int] | None) -> Schedule:
        n = comm.size
        return InTurn((schedules.Tree(n, size, reduce=True), schedules.Tree(n, size)))


class HalvingDoubling(Scheduled):
    """Formed by: recursive halving and doubling (Thakur, Rabenseifner and Gropp 2005). Sends: as much
    as a ring in 2 log2 n messages, and a buffer more where n is no power of two. Good for:
    large buffers and latency, on switches that pass everything."""

    name: ClassVar[str] = "halving-doubling"

    def schedule(self, size: int, comm: Comm, racks: Sequence[int] | None) -> Schedule:
        return Halves(comm.size, size)


class Hierarchical(Scheduled):
    """Formed by: a tree in each rack, a ring of the racks' first ranks, and trees back (racks that
    nobody knows: about the root of n ranks each). Sends: over a rack's uplink 2 (r - 1) / r of
    the buffer for r racks, however many ranks are in it. Good for: thin uplinks."""

    name: ClassVar[str] = "hierarchical"

    def schedule(self, size: int, comm: Comm, racks: Sequence[int] | None) -> Schedule:
        n = comm.size
        if racks is None:
            width = math.isqrt(n - 1) + 1 if n > 1 else 1
            racks = [rank // width for rank in range(n)]
        members: dict[int, list[int]] = {}
        for rank, rack in enumerate(racks):
            members.setdefault(rack, []).append(rank)
        firsts = tuple(ranks[0] for ranks in members.values())

        def in_racks(reduce: bool) -> Schedule:
            return SideBySide(
                tuple(
                    Among(n, tuple(m), schedules.Tree(len(m), size, reduce=reduce))
                    for m in members.values()
                )
            )

        between = Among(n, firsts, schedules.Ring(len(firsts), size))
        return InTurn((in_racks(True), between, in_racks(False)))
