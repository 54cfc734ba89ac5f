"""The all-reduce algorithms of the registry, except `auto` and in-network aggregation."""

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
        purpose="torch.distributed's own all-reduce; the default.",
        source="PyTorch; NCCL; gloo",
        formed_by="torch.distributed, with its backend's algorithm (gloo and NCCL: a ring for large buffers)",
        sends="2 (n - 1) / n of the buffer per rank",
        good_for="most networks; CUDA under NCCL, which uses a tree if that is faster",
    )
    needs: ClassVar[Needs] = "nothing"

    def schedule(self, size: int, at: Placement) -> Schedule:
        return schedules.Ring(at.size, size)

    def all_reduce(
        self, comm: Comm, buffer: torch.Tensor, operation: ReduceOperation
    ) -> Pending:
        return cast("Communicator", comm).all_reduce_natively(buffer, operation)


class Scheduled:
    """An all-reduce whose schedule the workers perform between themselves."""

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
    """Parameter servers that each sum one part of the buffer."""

    name: ClassVar[str] = "parameter-server"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        purpose="Parameter servers add up the buffers; workers update the parameters.",
        formed_by="servers, each of which adds up one part of the buffer in rank order",
        sends="the buffer once per rank to the servers, and once back",
        good_for="servers with separate links, or sums that must be formed in rank order",
        limits=(
            "Compressors must be linear (`bf16`, `fp16`, `powersgd`): servers only add.",
        ),
    )
    needs: ClassVar[Needs] = "servers"

    def schedule(self, size: int, at: Placement) -> Schedule:
        """The schedule of one server beside rank 0, as an approximation."""
        n = at.size
        return sequential(
            schedules.Star(n, size, gather=True, adds=True), schedules.Star(n, size)
        )


class Ring(Scheduled):
    """A ring all-reduce over all ranks."""

    name: ClassVar[str] = "ring"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        purpose="A ring all-reduce over all ranks.",
        source="Patarasuk and Yuan (JPDC 2009)",
        formed_by="a ring of all ranks",
        sends="2 (n - 1) / n of the buffer per rank, in 2 (n - 1) messages",
        good_for="large buffers",
    )

    def schedule(self, size: int, at: Placement) -> Schedule:
        return schedules.Ring(at.size, size)


class Tree(Scheduled):
    """A binomial tree: reduce to rank 0, then broadcast."""

    name: ClassVar[str] = "tree"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        purpose="A binomial tree: a reduce to rank 0, then a broadcast.",
        formed_by="a binomial tree: a reduce to rank 0, then a broadcast",
        sends="the whole buffer once to the parent, and once to each child",
        good_for="small buffers, whose time is mostly latency",
    )

    def schedule(self, size: int, at: Placement) -> Schedule:
        n = at.size
        return sequential(schedules.Tree(n, size, reduce=True), schedules.Tree(n, size))


class HalvingDoubling(Scheduled):
    """Recursive halving and doubling."""

    name: ClassVar[str] = "halving-doubling"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        purpose="Recursive halving and doubling: a ring's bytes in fewer messages.",
        source="Thakur, Rabenseifner and Gropp (IJHPCA 2005)",
        formed_by="recursive halving and doubling",
        sends="the bytes of a ring in 2 log2 n messages, and one buffer more if n is no power of two",
        good_for="large buffers on networks with high latency and a non-blocking switch",
    )

    def schedule(self, size: int, at: Placement) -> Schedule:
        return schedules.HalvingDoubling(at.size, size)


class Hierarchical(Scheduled):
    """A reduce-scatter in each rack, all-reduces across racks, and an all-gather in each rack."""

    name: ClassVar[str] = "hierarchical"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        purpose="Reduces inside each rack first, so that few bytes cross the uplinks.",
        source="Mikami et al., ImageNet/ResNet-50 Training in a Flash (2018)",
        formed_by=(
            "rings: a reduce-scatter in each rack, all-reduces across racks among the ranks that hold "
            "the same part, an all-gather in each rack"
        ),
        sends=(
            "inside a rack of g ranks 2 (g - 1) / g of the buffer per rank; over each uplink 2 (r - "
            "1) / r of the buffer for r racks, however many ranks a rack has"
        ),
        good_for="racks whose uplink has less than about half the bandwidth of one host's link",
        limits=(
            "Without a cluster file each rack is a row of about the square root of n ranks.",
            "If all ranks of an all-reduce are in one rack, it is a plain ring.",
            "Under NCCL `native` replaces it, and paceline prints a note when training begins.",
        ),
    )

    def schedule(self, size: int, at: Placement) -> Schedule:
        return hierarchical(size, racks_or_rows(at.size, at.racks))
