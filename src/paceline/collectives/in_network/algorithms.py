"""What collectives have in common whose sums are formed at switches: numbers become integers.

1. The buffer is cut into blocks of `BLOCK` numbers, as many as a datagram has on an Ethernet;
   whatever datagrams really are, so that all runtimes have the same bits. The last number is a block
   by itself: a worker that has something to tell makes it NaN (`core.participation`), and all
   others must get through. All ranks agree on each block's
   exponent: the largest of theirs, by a schedule of 2 log2 n steps. One element more is what ranks
   have to say (`Aggregation.standing`).
2. Numbers become 32-bit integers (`collectives.in_network.fixed_point`), whose sums cannot overflow.
3. An `Aggregation` adds them up; integers add up to the same in any order.
4. Sums become numbers: a mean is divided by n. A block in which any rank has a NaN, an infinity or
   2^127 and more is NaN on all ranks.

So all ranks have the same bits. Of float32 (and complex64) 4 bytes a number travel; int32 needs no
exponents. Everything else goes around the plain ring: other types, maxima, and all where no switch
has something to add up. bfloat16 and float16 are other types: at switches they would be 4 bytes a
number, and each rank would send more than around the ring. Buffers on CUDA go by the host's memory;
under NCCL, which performs no schedules, all is native.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
import torch

from paceline.collectives.algorithms import Scheduled
from paceline.collectives.halving_doubling import HalvingDoubling
from paceline.collectives.in_network.aggregation import (
    Aggregation,
    ScheduledAggregation,
)
from paceline.collectives.in_network.datagram_sums import (
    UdpAggregation,
    check_found,
    terms_of,
)
from paceline.collectives.in_network.fixed_point import FixedPoint, exponents_of
from paceline.collectives.in_network.packets import MOST_WORKERS, Array
from paceline.collectives.in_network.ring_session import RingEnd
from paceline.collectives.in_network.slots import all_bits
from paceline.collectives.in_network.sum_queue import MakeEnd
from paceline.collectives.in_network.topology import Group
from paceline.collectives.schedules import Ring
from paceline.collectives.send_receive import flat_of
from paceline.interfaces import Comm, Pending, ReduceOperation, Runtime, Schedule
from paceline.interfaces.buckets import stand_in_for, stands_in, wire_bytes
from paceline.torch_internals import simulated_end

if TYPE_CHECKING:
    from paceline.collectives.communicator import TorchComm

BLOCK = 358
"""Numbers with one exponent."""
SLAB = 256
"""Blocks that are worked on at a time: what stays in a cache."""


def suits_switches(dtype: torch.dtype, operation: ReduceOperation) -> bool:
    """Whether switches form this of real numbers of that type."""
    if dtype == torch.int32:
        return operation == "sum"
    return dtype == torch.float32 and operation != "max"


class Aggregated:
    """A collective whose sums are formed at switches, where there are any."""

    name: ClassVar[str]
    needs_servers: ClassVar[bool] = False
    needs_aggregators: ClassVar[bool] = True

    def __init__(self) -> None:
        self._aggregations: dict[str, Aggregation] = {}
        self._ring = _Ring()
        self._datagrams: UdpAggregation | None = None
        self._tell: Callable[[str], None] | None = None
        """Says a sentence to people, once for the job; None: it has been said."""

    # ---- what a row says ----

    def groups(self, comm: Comm) -> tuple[Group, ...]:
        """Whose sums are formed where, in the order of the ring that these groups are."""
        raise NotImplementedError

    def schedule(self, size: int, comm: Comm, racks: Sequence[int] | None) -> Schedule:
        """In the coarsest pieces; *racks* are those of *comm*."""
        raise NotImplementedError

    def timed(self, size: int, comm: Comm) -> Schedule:
        """`schedule` in pieces as fine as it is played in."""
        return self.schedule(size, comm, None)

    def plain(self, comm: Comm) -> bool:
        """Whether no switch has anything to add up, so that all goes around the ring."""
        return all(group.rack is None for group in self.groups(comm))

    def has_room(self, comm: Comm) -> bool:
        """Whether no aggregator would have more workers than it takes."""
        return all(len(group.ranks) <= MOST_WORKERS for group in self.groups(comm))

    def end(self, comm: TorchComm) -> MakeEnd:
        """What makes a rank's end of what adds up for *comm*, where aggregators are programs."""
        return partial(RingEnd, self.groups(comm))

    # ---- at the start ----

    def begin(self, comm: TorchComm, runtime: Runtime) -> str:
        """Returns what to tell people. Raises `UsageError` where more workers would be at one
        aggregator than it takes, and where one refuses; `PeerLostError` where there is none.
        Collective."""
        check_found(comm, runtime)
        groups = self.groups(comm)
        for group in groups:
            all_bits(len(group.ranks))
        if self.plain(comm):
            return (
                f"collective={self.name}: no rack with two workers of this job has something "
                "that adds up at its switch (key 'aggregates' of the cluster file), so sums "
                "go around the plain ring"
            )
        self._tell = comm.tell
        if simulated_end(comm.process_group) is None:
            self._datagrams = UdpAggregation(self, terms_of(comm, runtime))
            comm.at_close(self._datagrams.close)
            self._datagrams.start(comm)
        at_switches = sum(group.rack is not None for group in groups)
        return (
            f"collective={self.name}: sums of {at_switches} of {len(groups)} groups of workers "
            "are formed at their switches"
        )

    def aggregation_of(self, comm: TorchComm) -> Aggregation | None:
        """What adds up for *comm*; None: nothing does. Collective."""
        if comm.name not in self._aggregations:
            if simulated_end(comm.process_group) is None:
                # Groups that come and go have no queue of their own.
                return self._datagrams if comm.has_own_group else None
            self._aggregations[comm.name] = ScheduledAggregation(self)
        return self._aggregations[comm.name]

    # ---- sums ----

    def run(
        self, comm: Comm, buffer: torch.Tensor, operation: ReduceOperation
    ) -> Pending:
        own = cast("TorchComm", comm)
        if buffer.is_cuda and own.follows_streams:
            return own.all_reduce_natively(buffer, operation)
        flat = flat_of(buffer.detach())
        if not len(flat) or self.plain(own):
            return self._ring.run(comm, buffer, operation)
        if not suits_switches(flat.dtype, operation):
            if flat.dtype.is_floating_point and flat.dtype.itemsize == 2:
                self._say_half(flat.dtype)
            return self._ring.run(comm, buffer, operation)
        aggregation = self.aggregation_of(own)
        if aggregation is None:
            return self._ring.run(comm, buffer, operation)
        elements = len(flat)
        if stands_in(buffer):
            elements = wire_bytes(buffer) // flat.element_size()
        kind = _Integers if flat.dtype == torch.int32 else _Numbers
        return kind(aggregation, own, flat, elements, operation).start()

    def _say_half(self, dtype: torch.dtype) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            name = str(dtype).removeprefix("torch.")
            tell(
                f"collective={self.name}: {name} buffers go around the plain ring, with 2 bytes "
                "a number; at switches they would be 4 bytes a number, more than the ring sends"
            )


class _Ring(Scheduled):
    """The row ``ring``, which imports none of this."""

    def schedule(self, size: int, comm: Comm, racks: Sequence[int] | None) -> Schedule:
        return Ring(comm.size, size)


class _Integers:
    """One sum of *flat*, which stands for so many *elements*, over the ranks of *comm*."""

    blocks = 0

    def __init__(
        self,
        aggregation: Aggregation,
        comm: TorchComm,
        flat: torch.Tensor,
        elements: int,
        operation: ReduceOperation,
    ) -> None:
        self._aggregation, self._comm = aggregation, comm
        self._flat, self._elements, self._operation = flat, elements, operation

    def start(self) -> Pending:
        """All ranks agree on exponents, and on where the sum is formed; then it is."""
        comm = self._comm
        agreed = torch.empty(self.blocks + 1, dtype=torch.int16)
        agreed[: self.blocks] = self.exponents()
        agreed[self.blocks] = self._aggregation.standing(comm)
        schedule = HalvingDoubling(comm.size, len(agreed))
        size = exponent_bytes(self._elements if self.blocks else 0)
        timed = HalvingDoubling(comm.size, size)
        pending = comm.perform(schedule, agreed, "max", timed)
        return pending.then(lambda: self._add_up(agreed))

    def _add_up(self, agreed: torch.Tensor) -> Pending:
        values = self.integers(agreed[:-1].numpy())
        if self._elements != len(values):
            stand_in_for(4 * self._elements, values)
        standing = int(agreed[-1])
        pending = self._aggregation.add_up(self._comm, values, standing)
        return pending.then(lambda: self.take(values, agreed[:-1].numpy()))

    def exponents(self) -> torch.Tensor:
        """Of this rank's blocks."""
        return torch.empty(0, dtype=torch.int16)

    def integers(self, exponents: Array) -> torch.Tensor:
        """What this rank contributes."""
        return self._flat.to("cpu", copy=True)

    def take(self, sums: torch.Tensor, exponents: Array) -> None:
        """These are the sums."""
        self._flat.copy_(sums)


class _Numbers(_Integers):
    """The same of floating point."""

    def __init__(
        self,
        aggregation: Aggregation,
        comm: TorchComm,
        flat: torch.Tensor,
        elements: int,
        operation: ReduceOperation,
    ) -> None:
        super().__init__(aggregation, comm, flat, elements, operation)
        self.blocks = blocks_of(len(flat))
        self._fixed = FixedPoint(comm.size)
        self._numbers = flat.to("cpu", torch.float32)

    def exponents(self) -> torch.Tensor:
        found = np.empty(self.blocks, np.int16)
        for first, rows in _slabs(self._numbers.numpy()):
            found[first : first + len(rows)] = exponents_of(rows)
        return torch.from_numpy(found)

    def integers(self, exponents: Array) -> torch.Tensor:
        values = np.empty(len(self._numbers), np.int32)
        for (first, rows), (_, into) in zip(
            _slabs(self._numbers.numpy()), _slabs(values), strict=True
        ):
            agreed = exponents[first : first + len(rows)]
            into[:] = self._fixed.to_integers(rows, agreed)
        return torch.from_numpy(values)

    def take(self, sums: torch.Tensor, exponents: Array) -> None:
        numbers = self._numbers
        for (first, rows), (_, into) in zip(
            _slabs(sums.numpy()), _slabs(numbers.numpy()), strict=True
        ):
            agreed = exponents[first : first + len(rows)]
            into[:] = self._fixed.to_numbers(rows, agreed)
        if self._operation == "mean":
            numbers /= self._comm.size  # before it becomes a type that holds less
        if numbers.data_ptr() != self._flat.data_ptr():
            self._flat.copy_(numbers)


def blocks_of(elements: int) -> int:
    """How many blocks so many numbers have."""
    return -(-(elements - 1) // BLOCK) + 1 if elements else 0


def exponent_bytes(elements: int) -> int:
    """Bytes of what ranks agree on before they add up so many numbers."""
    return 2 * (blocks_of(elements) + 1)


def _slabs(values: Array) -> Iterator[tuple[int, Array]]:
    """Views of *values*, some blocks at a time as rows, and the number of the first; a shorter one
    and the last number are rows by themselves."""
    whole, rest = divmod(len(values) - 1, BLOCK)
    rows = values[: whole * BLOCK].reshape(-1, BLOCK)
    for first in range(0, whole, SLAB):
        yield first, rows[first : first + SLAB]
    if rest:
        yield whole, values[whole * BLOCK : -1].reshape(1, -1)
    yield blocks_of(len(values)) - 1, values[-1:].reshape(1, 1)
