"""`Communicator`, the `Comm` that trainings use.

It adds byte counts, continuations, channels and groups to the `WorkerGroup` of a runtime.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn, cast

import torch

from paceline.collectives.in_network.aggregator_addresses import aggregators_of
from paceline.collectives.pending import (
    AllOf,
    ContinuationChain,
    WorkPending,
    check_issued_here,
    check_may_make,
    current,
)
from paceline.collectives.schedules import Ring, Tree, all_to_all
from paceline.collectives.torch_group import TorchGroup
from paceline.errors import UsageError
from paceline.interfaces import (
    AllReduceAlgorithm,
    Pending,
    Placement,
    ReduceOperation,
    Runtime,
    Schedule,
    WorkerGroup,
)
from paceline.interfaces.buckets import stand_alike, stand_in_for, stands_in, wire_bytes
from paceline.interfaces.schedules import aggregating_racks


class Communicator:
    """A `Comm` over *workers*, which `close` closes, too.

    It counts bytes and waiting times in *runtime*'s recorder. A group of one worker moves nothing.

    Args:
        runtime: Its recorder counts.
        name: Unique in the job, and the same on all ranks.
        workers: The group that communicates (None: all workers of the job).
        chain: Runs continuations. A group shares its parent communicator's chain.
        issuer: The chain whose works issue all operations here (None: the training itself).
        collective: The all-reduce algorithm (None: torch.distributed's own).
        placement: Where its ranks are (None: where all of the runtime's workers are).
    """

    threads: ClassVar[bool] = True
    """Whether a thread other than the issuing one may wait for results."""

    def __init__(
        self,
        runtime: Runtime,
        name: str = "training",
        workers: WorkerGroup | None = None,
        chain: ContinuationChain | None = None,
        issuer: ContinuationChain | None = None,
        collective: AllReduceAlgorithm | None = None,
        placement: Placement | None = None,
    ) -> None:
        self._runtime = runtime
        self.name = name
        self.workers: WorkerGroup = workers or runtime.workers(name)
        self.is_open = True
        """False after `close`."""
        self.chain = chain or ContinuationChain(runtime, name, thread=self.threads)
        self._owns_chain = chain is None
        self.issuer = issuer
        self.collective = collective
        self.placement = placement_of(runtime) if placement is None else placement
        self._channels: dict[str, Communicator] = {}
        self._groups: dict[tuple[int, ...], Communicator] = {}
        self._times_made: dict[tuple[int, ...], int] = {}
        self._rounds: dict[str, Communicator] = {}
        self._at_close: list[Callable[[], None]] = []
        self._ring_bytes: dict[int, int] = {}
        self.rank, self.size = self.workers.rank, self.workers.size

    @property
    def is_alone(self) -> bool:
        """Whether this is the only worker of the whole job."""
        return self._runtime.size == 1

    @property
    def follows_streams(self) -> bool:
        """Whether results on CUDA are in the order of the device's streams."""
        return self.workers.follows_streams

    @property
    def moves_host_tensors(self) -> bool:
        """Whether it can send tensors in host memory."""
        return self.workers.moves_host_tensors

    @property
    def is_virtual(self) -> bool:
        """Whether its operations take virtual time."""
        return self._runtime.clock.is_virtual

    def chain_of(self, issuer: ContinuationChain | None) -> ContinuationChain:
        """The chain that runs continuations of operations that *issuer* issues here."""
        if issuer is self.issuer or issuer is None:
            return self.chain
        return issuer.nested

    def wait_for(self, work: Any, name: str) -> None:
        """Wait for *work*, and record the waiting time."""
        start = self._runtime.clock.now()
        self._runtime.recorder.block(name, work.wait)
        self._runtime.recorder.waited(name, start, self._runtime.clock.now())

    def leave(self) -> None:
        """Called after this worker's last all-reduce."""

    def at_close(self, action: Callable[[], None]) -> None:
        """Call *action* first when this communicator is closed."""
        self._at_close.append(action)

    def log(self, message: str) -> None:
        """Print a message on rank 0, and add it to the run's records."""
        self._runtime.recorder.add_note(message)
        if self.rank == 0:
            print(f"paceline: {message}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Release threads and connections, and drop continuations that have not run."""
        while self._at_close:
            self._at_close.pop()()
        if self._owns_chain:
            self.chain.close()
        for others in (self._channels, self._groups, self._rounds):
            for other in others.values():
                other.close()
            others.clear()
        self._let_go()

    def _let_go(self) -> None:
        self.is_open = False
        self.workers.close()
        self.workers = cast("WorkerGroup", _ClosedGroup(self.name))

    def max_in_flight(self, device: torch.device) -> int:
        return self.workers.max_in_flight(device)

    # ---- collectives ----

    def all_reduce(
        self, buffer: torch.Tensor, operation: ReduceOperation = "mean"
    ) -> Pending:
        if self.collective is not None:
            return self.collective.all_reduce(self, buffer, operation)
        return self.all_reduce_natively(buffer, operation)

    def all_reduce_natively(
        self, buffer: torch.Tensor, operation: ReduceOperation = "mean"
    ) -> Pending:
        """`all_reduce` by the runtime: torch.distributed's own in real and emulated jobs."""
        if current() is not self.issuer:
            return self._round().all_reduce_natively(buffer, operation)
        if self.size == 1:
            return WorkPending(self, self.issuer, None, "all_reduce")
        size = wire_bytes(buffer)
        if size not in self._ring_bytes:
            self._ring_bytes[size] = Ring(self.size, size).bytes_sent(self.rank)
        self._runtime.recorder.count_bytes(self._ring_bytes[size])
        work = self.workers.all_reduce(real(buffer), operation)
        return WorkPending(self, self.issuer, work, "all_reduce", buffer.is_cuda)

    def broadcast(self, buffer: torch.Tensor, source: int = 0) -> Pending:
        if current() is not self.issuer:
            return self._round().broadcast(buffer, source)
        if self.size == 1:
            return WorkPending(self, self.issuer, None, "broadcast")
        self._count(Tree(self.size, wire_bytes(buffer), source))
        work = self.workers.broadcast(real(buffer), source)
        return WorkPending(self, self.issuer, work, "broadcast", buffer.is_cuda)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        buffer: torch.Tensor,
        operation: ReduceOperation = "mean",
    ) -> Pending:
        if current() is not self.issuer:
            return self._round().reduce_scatter(output, buffer, operation)
        if self.size == 1:
            output.copy_(buffer)
            return WorkPending(self, self.issuer, None, "reduce_scatter")
        self._count(Ring(self.size, wire_bytes(buffer), rounds=1))
        work = self.workers.reduce_scatter(real(output), real(buffer), operation)
        return WorkPending(self, self.issuer, work, "reduce_scatter", buffer.is_cuda)

    def all_gather(self, output: torch.Tensor, buffer: torch.Tensor) -> Pending:
        if current() is not self.issuer:
            return self._round().all_gather(output, buffer)
        if self.size == 1:
            output.copy_(buffer)
            return WorkPending(self, self.issuer, None, "all_gather")
        self._count(Ring(self.size, wire_bytes(output), rounds=1))
        work = self.workers.all_gather(real(output), real(buffer))
        return WorkPending(self, self.issuer, work, "all_gather", buffer.is_cuda)

    def all_to_all(self, output: torch.Tensor, buffer: torch.Tensor) -> Pending:
        if current() is not self.issuer:
            return self._round().all_to_all(output, buffer)
        check_parts(self.size, output, buffer)
        if self.size == 1:
            output.copy_(buffer)
            return WorkPending(self, self.issuer, None, "all_to_all")
        self._count(all_to_all(self.size, wire_bytes(buffer) // self.size))
        work = self.workers.all_to_all(real(output), real(buffer))
        return WorkPending(self, self.issuer, work, "all_to_all", buffer.is_cuda)

    # ---- messages and schedules ----
    #
    # Continuations (`Pending.then`) may send here without a process group of their own. Stream
    # names keep their messages apart from the training's, so a work may send to one neighbour
    # while other ranks send nothing.

    def send(self, buffer: torch.Tensor, to: int) -> Pending:
        self._check_peer(to, "send(buffer, to)")
        issuer = current()
        self._runtime.recorder.count_bytes(wire_bytes(buffer))
        flat = stand_alike(flat_of(buffer), buffer)
        work = self.workers.send(flat, to, self._stream(issuer))
        return WorkPending(self, issuer, work, "send", buffer.is_cuda)

    def receive(self, buffer: torch.Tensor, source: int) -> Pending:
        self._check_peer(source, "receive(buffer, source)")
        issuer = current()
        work = self.workers.receive(flat_of(buffer), source, self._stream(issuer))
        return WorkPending(self, issuer, work, "receive", buffer.is_cuda)

    def perform(
        self,
        schedule: Schedule,
        buffer: torch.Tensor,
        operation: ReduceOperation = "sum",
        timed: Schedule | None = None,
    ) -> Pending:
        issuer = current()
        if self.size == 1:
            return WorkPending(self, issuer, None, "perform")
        if buffer.is_cuda and self.follows_streams:
            raise UsageError(
                "schedules are performed over gloo's sends and receives, and this tensor "
                "is on CUDA under NCCL: use collective=native"
            )
        flat = flat_of(buffer)
        unit = wire_bytes(buffer) / flat.numel()
        if timed is None:
            timed = schedule
        else:
            unit = 1.0
        self._runtime.recorder.count_bytes(round(unit * timed.bytes_sent(self.rank)))
        work = self.workers.perform(
            schedule, flat, operation, timed, unit, self._stream(issuer)
        )
        return WorkPending(self, issuer, work, "perform")

    def perform_here(
        self,
        schedule: Schedule,
        flat: torch.Tensor,
        what: str,
        operation: ReduceOperation = "sum",
    ) -> None:
        """See `TorchGroup.perform_here`; only in real and emulated jobs. Its bytes are not counted."""
        assert isinstance(self.workers, TorchGroup), "virtual time has no threads"
        self.workers.perform_here(schedule, flat, what, operation)

    def count_sent(self, size: int) -> None:
        """Count *size* bytes that this rank sends without this object's methods."""
        self._runtime.recorder.count_bytes(size)

    def _stream(self, issuer: ContinuationChain | None) -> str:
        """The name that keeps messages of *issuer* apart from other messages."""
        return "" if issuer is None or issuer is self.issuer else issuer.path

    def _check_peer(self, rank: int, call: str) -> None:
        if rank == self.rank or not 0 <= rank < self.size:
            raise UsageError(
                f"{call}: expected another rank of this group, 0 to {self.size - 1} but "
                f"not {self.rank}, got {rank}"
            )

    # ---- other communicators ----

    def channel(self, name: str) -> Communicator:
        if name not in self._channels:
            check_may_make(f"channel {name!r}")
            self._channels[name] = self._make_channel(name)
        return self._channels[name]

    def _make_channel(self, name: str) -> Communicator:
        full_name, workers = self._split(f"channel {name}", range(self.size))
        return Communicator(
            self._runtime,
            full_name,
            workers,
            None,
            None,
            self.collective,
            self.placement,
        )

    def group(self, ranks: Sequence[int]) -> Communicator:
        key = tuple(ranks)
        known = self._groups.get(key)
        if known is not None and known.is_open:
            return known
        check_may_make(f"group {key}")
        if self.rank not in key or len(set(key)) < len(key):
            raise UsageError(
                f"group {key} asked for by rank {self.rank} of {self.size}: expected "
                "different ranks, this one among them; only members ask for a group"
            )
        made = self._times_made.get(key, 0)
        self._times_made[key] = made + 1
        text = " ".join(str(rank) for rank in key) + (f", {made}" if made else "")
        kept = [group for group in self._groups.values() if group.has_own_group]
        if not self.workers.has_room(len(kept), key):
            self._groups[key] = ConnectionlessGroup(
                self, key, f"{self.name}, group {text}"
            )
            return self._groups[key]
        name, workers = self._split(f"group {text}", key)
        self._groups[key] = Communicator(
            self._runtime,
            name,
            workers,
            self.chain,
            self.issuer,
            self.collective,
            self.placement.subset(key),
        )
        return self._groups[key]

    @property
    def has_own_group(self) -> bool:
        """Whether it holds threads and connections of its own."""
        return self.is_open and self.size > 1

    def _round(self) -> Communicator:
        """The communicator for operations that the current continuation issues here."""
        issuer = current()
        check_issued_here(issuer or self.issuer)
        assert issuer is not None
        if issuer.path not in self._rounds:
            self._rounds[issuer.path] = self._make_round(issuer)
        return self._rounds[issuer.path]

    def _make_round(self, issuer: ContinuationChain) -> Communicator:
        name, workers = self._split(f"after {issuer.path}", range(self.size))
        return Communicator(
            self._runtime,
            name,
            workers,
            issuer.nested,
            issuer,
            self.collective,
            self.placement,
        )

    def _split(self, what: str, ranks: Sequence[int]) -> tuple[str, WorkerGroup]:
        """Name and workers of a communicator among some ranks of this one."""
        name = f"{self.name}, {what}"
        return name, self.workers.split(name, ranks)

    def _count(self, schedule: Schedule) -> None:
        self._runtime.recorder.count_bytes(schedule.bytes_sent(self.rank))


class _ClosedGroup:
    """Replaces the workers of a closed communicator; every call raises `UsageError`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def close(self) -> None:
        """Do nothing: it is closed already."""

    def __getattr__(self, call: str) -> NoReturn:
        raise UsageError(
            f"{call} on communicator {self._name!r}, which is closed: expected an open one; issue "
            "operations before close(), or ask for the channel or the group again"
        )


def real(buffer: torch.Tensor) -> torch.Tensor:
    """A complex tensor as pairs of real numbers; any other as it is."""
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def flat_of(buffer: torch.Tensor) -> torch.Tensor:
    """The same memory as a one-dimensional real tensor."""
    flat = real(buffer)
    return flat if flat.dim() == 1 else flat.view(-1)


def placement_of(runtime: Runtime) -> Placement:
    """Return where all workers of a job are, as far as *runtime* knows.

    Raises `UsageError` if the described cluster has another number of workers than this job.
    """
    cluster = runtime.cluster
    if cluster is not None and cluster.workers != runtime.size:
        raise UsageError(
            f"the cluster file describes {cluster.workers} workers, and this job has "
            f"{runtime.size}: expected one for each rank. Give the cluster file of this job's "
            "hosts"
        )
    known = None if cluster is None else cluster.racks_of_workers
    aggregating, found = aggregating_racks(cluster), aggregators_of(runtime)
    if found is not None:
        aggregating = frozenset(found)
        if known is None and len(found) == 1:  # one aggregator serves all workers
            known = (*found,) * runtime.size
    return Placement(range(runtime.size), known, cluster, aggregating)


def check_parts(size: int, output: torch.Tensor, buffer: torch.Tensor) -> None:
    """Raise `UsageError` unless both tensors can be cut into *size* equal parts."""
    if output.numel() != buffer.numel() or buffer.numel() % size:
        raise UsageError(
            f"all_to_all among {size}: expected two tensors of one size, a multiple of "
            f"{size}, got {output.numel()} and {buffer.numel()} elements"
        )


class ConnectionlessGroup(Communicator):
    """A group that sends over its *parent*'s connections, for groups beyond `MOST_GROUPS`.

    It makes no threads or connections, so it costs nothing to keep. All collectives are schedules
    over sends and receives; sums use a ring or the communicator's collective. *ranks* are ranks of
    *parent*. *name* is unique, and the same on all members.
    """

    def __init__(self, parent: Communicator, ranks: Sequence[int], name: str) -> None:
        super().__init__(
            parent._runtime,
            name,
            parent.workers.subset(name, ranks),
            parent.chain,
            parent.issuer,
            parent.collective,
            parent.placement.subset(ranks),
        )

    @property
    def has_own_group(self) -> bool:
        return False

    def max_in_flight(self, device: torch.device) -> int:
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
            f"channel {name!r} of a group that shares its parent's connections: use a group "
            f"of a channel instead, comm.channel({name!r}).group(...)"
        )

    def group(self, ranks: Sequence[int]) -> Communicator:
        raise UsageError(
            "a group of a group that shares its parent's connections: make the group from "
            "the parent communicator"
        )

    def _make_round(self, issuer: ContinuationChain) -> NoReturn:
        raise AssertionError("tags distinguish all messages here")

    def close(self) -> None:
        self._let_go()


def _copy(buffer: torch.Tensor) -> torch.Tensor:
    copy = buffer.detach().clone().view(-1)
    if wire_bytes(buffer) != wire_bytes(copy):
        stand_in_for(wire_bytes(buffer), copy)
    return copy


def _elements(buffer: torch.Tensor) -> int:
    return buffer.numel() * (2 if buffer.is_complex() else 1)
