"""`SwitchML`, `Rina` and `ATP`: all-reduces whose sums are formed at switches, as integers.

1. The buffer is cut into blocks of `BLOCK` numbers, whatever the chunk size, so that all runtimes
   have the same bits. All ranks agree on each block's exponent, the largest of theirs. Switches find
   it like a sum; ranks find it themselves in 2 log2 n steps if these are fewer. The last number is a
   separate block: a worker sets it to NaN to announce a change (`core.participation`), and that must
   not affect other numbers.
2. Numbers become 32-bit integers (`collectives.in_network.fixed_point`), whose sums cannot overflow.
3. Aggregators, or the simulated runtime, add them up; integer sums do not depend on the order.
4. Sums become numbers again; a mean is divided by n. A block in which any rank has a NaN, an infinity
   or 2^127 and more is NaN on all ranks.

So all ranks have the same bits. float32 and complex64 take 4 bytes per real number on the wire.
int32 needs no exponents. Other types, maxima, and all buffers where no switch can add anything go
around the plain ring. This includes bfloat16 and float16: at switches they would take 4 bytes per
number, so each rank would send more than around the ring. Buffers on CUDA go through host memory.
Under NCCL, which performs no schedules, everything is native.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
import torch

from paceline.collectives.algorithms import Scheduled
from paceline.collectives.communicator import flat_of
from paceline.collectives.in_network.aggregator_addresses import check_found
from paceline.collectives.in_network.fixed_point import (
    Array,
    FixedPoint,
    exponents_of,
)
from paceline.collectives.in_network.joining import (
    JobConfig,
    Joining,
    JoinRing,
    JoinTree,
)
from paceline.collectives.in_network.pricing import atp_sum, ring_of_racks_sum
from paceline.collectives.in_network.sums_service import KIND, ServerHosts
from paceline.collectives.in_network.topology import (
    AtpTree,
    Group,
    ServerPlace,
    beside_workers,
    one_switch,
    ring_of_racks,
)
from paceline.collectives.in_network.wire import IntegerOperation
from paceline.collectives.in_network.worker_sums import (
    AggregatorSums,
    sums_by_aggregators,
)
from paceline.collectives.schedules import HalvingDoubling, Ring
from paceline.errors import UsageError
from paceline.interfaces import (
    CollectiveSummary,
    Comm,
    Needs,
    Pending,
    Placement,
    ReduceOperation,
    Runtime,
    Schedule,
    ServiceJob,
    ServiceSpec,
)
from paceline.interfaces.buckets import stand_in_for, stands_in, wire_bytes

if TYPE_CHECKING:
    from paceline.collectives.communicator import Communicator
    from paceline.transport.connection import ServerConnection

BLOCK = 358
"""Numbers that share an exponent."""
SLAB = 256
"""Blocks that are converted at a time, so that they stay in the processor's cache."""


def suits_switches(dtype: torch.dtype, operation: ReduceOperation) -> bool:
    """Whether switches can form this *operation* on real numbers of this *dtype*."""
    if dtype == torch.int32:
        return operation == "sum"
    return dtype == torch.float32 and operation != "max"


class InNetworkAllReduce:
    """An all-reduce whose sums are formed at aggregating switches, if the cluster has some."""

    name: ClassVar[str]
    needs: ClassVar[Needs] = "aggregators"

    def __init__(self) -> None:
        self._ring = _Ring()
        self._by_aggregators: AggregatorSums | None = None
        self._log: Callable[[str], None] | None = None
        """Logs a message to the user, once per job; None: it has been logged."""

    # ---- the algorithm ----

    def groups(self, at: Placement) -> tuple[Group, ...]:
        """Return the ring's groups in order: which workers' sums are formed at which switch."""
        raise NotImplementedError

    def schedule(self, size: int, at: Placement) -> Schedule:
        """See `AllReduceAlgorithm.schedule`."""
        if self.uses_ring_only(at):
            return Ring(at.size, size)
        return ring_of_racks_sum(self.groups(at), size)

    def uses_ring_only(self, at: Placement) -> bool:
        """Return whether no switch can add anything, so that all sums go around the plain ring."""
        return all(group.rack is None for group in self.groups(at))

    def agrees_at_switches(self, at: Placement) -> bool:
        """Return whether switches find the exponents, instead of the ranks by themselves."""
        return is_sooner_at_switches(len(self.groups(at)), at.size)

    def agreement(self, elements: int, at: Placement) -> Schedule:
        """Return the schedule that agrees on the exponents of *elements* numbers."""
        if self.agrees_at_switches(at):
            return self.schedule(4 * blocks_of(elements), at)
        return agreement_of_ranks(elements, at.size)

    def joining(self, comm: Communicator, job: JobConfig) -> Joining:
        """Return the object that connects a rank to the aggregators of *comm*'s sums."""
        return JoinRing(self.groups(comm.placement), job)

    # ---- at the start ----

    def setup(self, comm: Communicator, runtime: Runtime) -> str:
        """Connect to the aggregators; return a message for the user. Collective.

        Raises `UsageError` if an aggregator refuses, and `PeerLostError` if it cannot be reached.
        """
        check_found(comm.placement, runtime)
        groups = self.groups(comm.placement)
        if self.uses_ring_only(comm.placement):
            return (
                f"collective={self.name}: no rack with two workers of this job has an "
                "aggregator at its switch (key 'aggregates' of the cluster file), so sums use "
                "the plain ring"
            )
        self._log = comm.log
        if not comm.is_virtual:
            self._by_aggregators = sums_by_aggregators(self, comm, runtime)
            comm.at_close(self._by_aggregators.close)
            self._by_aggregators.start(comm, "sum")
            if self.agrees_at_switches(comm.placement):
                self._by_aggregators.start(comm, "max")
        at_switches = sum(group.rack is not None for group in groups)
        return (
            f"collective={self.name}: sums of {at_switches} of {len(groups)} groups of workers "
            "are formed at their switches"
        )

    # ---- sums ----

    def forms_sums_of(self, comm: Communicator) -> bool:
        """Return whether sums of *comm* are formed at switches."""
        if comm.is_virtual:
            return True
        # Temporary groups have no queue of their own.
        return self._by_aggregators is not None and comm.has_own_group

    def reduce_integers(
        self,
        comm: Communicator,
        values: torch.Tensor,
        operation: IntegerOperation = "sum",
    ) -> Pending:
        """Replace *values* on every rank of *comm* by their sums or maxima over ranks.

        Sums are exact below 2^31. Collective, in the order of issue. *values* (int32, flat, on the
        host) count `wire_bytes` bytes on the network.
        """
        if self._by_aggregators is not None:
            return self._by_aggregators.all_reduce(comm, values, operation)
        schedule = self.schedule(values.numel(), comm.placement)
        timed = self.schedule(wire_bytes(values), comm.placement)
        return comm.perform(schedule, values, operation, timed)

    def all_reduce(
        self, comm: Comm, buffer: torch.Tensor, operation: ReduceOperation
    ) -> Pending:
        own = cast("Communicator", comm)
        if buffer.is_cuda and own.follows_streams:
            return own.all_reduce_natively(buffer, operation)
        flat = flat_of(buffer.detach())
        if not len(flat) or self.uses_ring_only(own.placement):
            return self._ring.all_reduce(comm, buffer, operation)
        if not suits_switches(flat.dtype, operation):
            if flat.dtype.is_floating_point and flat.dtype.itemsize == 2:
                self._report_half_precision(flat.dtype)
            return self._ring.all_reduce(comm, buffer, operation)
        if not self.forms_sums_of(own):
            return self._ring.all_reduce(comm, buffer, operation)
        elements = len(flat)
        if stands_in(buffer):
            elements = wire_bytes(buffer) // flat.element_size()
        kind = _Integers if flat.dtype == torch.int32 else _Numbers
        return kind(self, own, flat, elements, operation).start()

    def _report_half_precision(self, dtype: torch.dtype) -> None:
        log, self._log = self._log, None
        if log is not None:
            name = str(dtype).removeprefix("torch.")
            log(
                f"collective={self.name}: {name} buffers use the plain ring, with 2 bytes per "
                "number; at switches they would take 4 bytes per number, more than the ring sends"
            )


class SwitchML(InNetworkAllReduce):
    """One switch that sums the contributions of all workers."""

    name: ClassVar[str] = "switchml"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        purpose="One switch adds up the buffers of all workers.",
        source="Sapio et al., SwitchML (NSDI 2021)",
        formed_by=(
            "one switch, which adds up all workers' integers: in the rack with the most workers among "
            "the racks with an aggregator (a ring if no rack has one)"
        ),
        sends="the buffer once per rank to the switch, and once back",
        good_for=(
            "one rack; the buffers of other racks must cross their own uplinks and the downlink of "
            "the switch's rack"
        ),
        limits=(
            "Aggregators add up float32, complex64 and int32. Other types, and max reductions, use the ring.",
            (
                "16-bit buffers (`compression=bf16`, `fp16`, 16-bit models) use the ring, too: at a "
                "switch they would take 4 bytes per number. paceline prints a note about the first one."
            ),
            "It does not split into halves, so methods that send halves refuse it.",
        ),
    )

    def groups(self, at: Placement) -> tuple[Group, ...]:
        if not at.aggregating or at.racks is None or at.size == 1:
            return tuple(Group((rank,)) for rank in range(at.size))
        count = Counter(at.racks)
        rack = min(at.aggregating, key=lambda rack: (-count[rack], rack))
        return one_switch(at.size, rack)


class Rina(InNetworkAllReduce):
    """A ring of racks, whose switches sum their workers' contributions."""

    name: ClassVar[str] = "rina"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        purpose="A ring of racks, in which each switch with an aggregator is one member.",
        source="Rina (ICNP 2024)",
        formed_by=(
            "a ring of racks: all workers behind a switch with an aggregator are one member, each "
            "other worker is one member (a ring of all workers if no switch has one)"
        ),
        sends=(
            "the buffer once per rank and a little more; 2 (G - 1) / G of it for a worker that is a "
            "member by itself, for G members"
        ),
        good_for=(
            "networks in which some racks have an aggregator at their switch (`paceline aggregate`), "
            "and high latency"
        ),
        limits=(
            "Aggregators add up float32, complex64 and int32. Other types, and max reductions, use the ring.",
            (
                "16-bit buffers (`compression=bf16`, `fp16`, 16-bit models) use the ring, too: at a "
                "switch they would take 4 bytes per number. paceline prints a note about the first one."
            ),
            "It does not split into halves, so methods that send halves refuse it.",
        ),
    )

    def groups(self, at: Placement) -> tuple[Group, ...]:
        racks = range(at.size) if at.racks is None else at.racks
        return ring_of_racks(racks, at.aggregating)


class ATP(InNetworkAllReduce):
    """Sums at servers, behind switches that add up their racks' contributions."""

    name: ClassVar[str] = "atp"
    summary: ClassVar[CollectiveSummary] = CollectiveSummary(
        purpose="Servers add up the buffers, with partial sums at the switches on the way.",
        source="Lao et al., ATP (NSDI 2021)",
        formed_by=(
            "servers, on dedicated hosts or one beside each worker; on the way each rack's switch adds up "
            "its workers, and the switch of a server's rack adds up the racks"
        ),
        sends=(
            "the buffer once per rank; n / s times the buffer goes to each of s servers and back, where "
            "n counts racks with an aggregator, and workers in other racks"
        ),
        good_for="clusters in which all switches have an aggregator",
        limits=(
            "Aggregators add up float32, complex64 and int32. Other types, and max reductions, use the ring.",
            (
                "16-bit buffers (`compression=bf16`, `fp16`, 16-bit models) use the ring, too: at a "
                "switch they would take 4 bytes per number. paceline prints a note about the first one."
            ),
            "It does not split into halves, so methods that send halves refuse it.",
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._hosts: ServerHosts | None = None

    def tree(self, at: Placement) -> AtpTree:
        """Return which switch or server sums which contributions."""
        racks = at.racks or (0,) * at.size
        servers = beside_workers(racks)
        if at.cluster is not None and at.cluster.servers:
            servers = tuple(
                ServerPlace(server.rack, None, number)
                for number, server in enumerate(at.cluster.servers)
            )
        return AtpTree(racks, tuple(sorted(at.aggregating)), servers)

    def groups(self, at: Placement) -> tuple[Group, ...]:
        tree = self.tree(at)
        return (
            *(Group(tree.members[rack], rack) for rack in tree.aggregating_racks),
            *(Group((rank,)) for rank in tree.direct_workers),
        )

    def schedule(self, size: int, at: Placement) -> Schedule:
        if self.uses_ring_only(at):
            return Ring(at.size, size)
        return atp_sum(self.tree(at), size)

    def uses_ring_only(self, at: Placement) -> bool:
        if at.size == 1:
            return True
        tree = self.tree(at)
        dedicated = any(server.rank is None for server in tree.servers)
        return not tree.aggregating_racks and not dedicated

    def agrees_at_switches(self, at: Placement) -> bool:
        return True  # one way to a server, and back

    def joining(self, comm: Communicator, job: JobConfig) -> Joining:
        return JoinTree(self.tree(comm.placement), self._hosts, job)

    def setup(self, comm: Communicator, runtime: Runtime) -> str:
        if self.uses_ring_only(comm.placement):
            return super().setup(comm, runtime)
        tree = self.tree(comm.placement)
        own = sum(server.rank is None for server in tree.servers)
        if own and not comm.is_virtual:
            self._hosts = self._found(comm, runtime, own)
        super().setup(comm, runtime)
        where = "on dedicated hosts" if own else "beside workers"
        count = len(tree.servers)
        streams = len(tree.aggregating_racks) + len(tree.direct_workers)
        return (
            f"collective={self.name}: {count} server{'s' * (count > 1)} {where}: sums of "
            f"{streams} streams, {len(tree.aggregating_racks)} of which come from racks' "
            "switches"
        )

    def _found(self, comm: Communicator, runtime: Runtime, own: int) -> ServerHosts:
        """Connect to the servers on dedicated hosts. Collective."""
        job = ServiceJob((ServiceSpec("sums", kind=KIND, place="dedicated"),))
        ends = cast("Sequence[ServerConnection]", runtime.services(job))
        for end in ends:
            comm.at_close(end.close)
        if len(ends) != own:
            raise UsageError(
                f"collective={self.name}: the cluster has {own} hosts for servers, and "
                f"{len(ends)} servers were started: expected one on each host"
            )
        return ServerHosts(ends)


class _Ring(Scheduled):
    """The algorithm ``ring``, as a class without imports from this package."""

    def schedule(self, size: int, at: Placement) -> Schedule:
        return Ring(at.size, size)


class _Integers:
    """One sum of *flat*, which stands in for *elements* numbers, over the ranks of *comm*."""

    def __init__(
        self,
        algorithm: InNetworkAllReduce,
        comm: Communicator,
        flat: torch.Tensor,
        elements: int,
        operation: ReduceOperation,
    ) -> None:
        self._algorithm, self._comm = algorithm, comm
        self._flat, self._elements, self._operation = flat, elements, operation

    def start(self) -> Pending:
        """Start the sum; integers need no exponents."""
        return self._add_up(np.empty(0, np.int16))

    def _add_up(self, exponents: Array) -> Pending:
        values = self.integers(exponents)
        if self._elements != len(values):
            stand_in_for(4 * self._elements, values)
        pending = self._algorithm.reduce_integers(self._comm, values)
        return pending.then(lambda: self.take(values, exponents))

    def integers(self, exponents: Array) -> torch.Tensor:
        """This rank's contribution."""
        return self._flat.to("cpu", copy=True)

    def take(self, sums: torch.Tensor, exponents: Array) -> None:
        """Store the result."""
        self._flat.copy_(sums)


class _Numbers(_Integers):
    """One sum of floating-point numbers."""

    def __init__(
        self,
        algorithm: InNetworkAllReduce,
        comm: Communicator,
        flat: torch.Tensor,
        elements: int,
        operation: ReduceOperation,
    ) -> None:
        super().__init__(algorithm, comm, flat, elements, operation)
        self._fixed = FixedPoint(comm.size)
        self._numbers = flat.to("cpu", torch.float32)

    def start(self) -> Pending:
        """Agree on exponents with all ranks, then start the sum."""
        comm, at = self._comm, self._comm.placement
        agreed = torch.from_numpy(self._exponents())
        if self._algorithm.agrees_at_switches(at):
            agreed = agreed.to(torch.int32)
            if self._elements != len(self._numbers):
                stand_in_for(4 * blocks_of(self._elements), agreed)
            pending = self._algorithm.reduce_integers(comm, agreed, "max")
        else:
            timed = self._algorithm.agreement(self._elements, at)
            schedule = HalvingDoubling(comm.size, len(agreed))
            pending = comm.perform(schedule, agreed, "max", timed)
        return pending.then(lambda: self._add_up(agreed.numpy()))

    def _exponents(self) -> Array:
        """The exponents of this rank's blocks."""
        found = np.empty(blocks_of(len(self._numbers)), np.int16)
        for first, rows in _slabs(self._numbers.numpy()):
            found[first : first + len(rows)] = exponents_of(rows)
        return found

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
            numbers /= self._comm.size  # before a conversion to a type with less range
        if numbers.data_ptr() != self._flat.data_ptr():
            self._flat.copy_(numbers)


def is_sooner_at_switches(groups: int, ranks: int) -> bool:
    """Return whether a ring of *groups* has fewer steps in a row than an agreement of the ranks
    themselves."""
    return 2 * (groups - 1) <= agreement_of_ranks(1, ranks).steps


def agreement_of_ranks(elements: int, ranks: int) -> HalvingDoubling:
    """Return the schedule by which ranks agree on the exponents of *elements* numbers, in 2 bytes
    each."""
    return HalvingDoubling(ranks, 2 * blocks_of(elements))


def blocks_of(elements: int) -> int:
    """The number of blocks of *elements* numbers."""
    return -(-(elements - 1) // BLOCK) + 1 if elements else 0


def _slabs(values: Array) -> Iterator[tuple[int, Array]]:
    """Views of *values* as rows of one block each, up to `SLAB` rows at a time, with the first
    row's number.

    A shorter last block and the last number are rows by themselves.
    """
    whole, rest = divmod(len(values) - 1, BLOCK)
    rows = values[: whole * BLOCK].reshape(-1, BLOCK)
    for first in range(0, whole, SLAB):
        yield first, rows[first : first + SLAB]
    if rest:
        yield whole, values[whole * BLOCK : -1].reshape(1, -1)
    yield blocks_of(len(values)) - 1, values[-1:].reshape(1, 1)
