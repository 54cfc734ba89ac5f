"""The one `Comm`: over torch.distributed, whatever backend a runtime brings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence, Set
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist

from paceline.collectives import continuations, execute
from paceline.collectives.continuations import Chain
from paceline.collectives.pending import AllOf, WorkPending
from paceline.collectives.placement import Places
from paceline.collectives.process_groups import group_beside
from paceline.collectives.schedules import Ring, Tree, all_to_all
from paceline.collectives.send_receive import Messages, real
from paceline.errors import UsageError
from paceline.interfaces import (
    Collective,
    Pending,
    ReduceOperation,
    Runtime,
    Schedule,
)
from paceline.interfaces.buckets import stand_alike, stand_in_for, stands_in, wire_bytes
from paceline.torch_internals import (
    all_gather_options,
    all_reduce_options,
    all_to_all_options,
    broadcast_options,
    lanes_of,
    reduce_scatter_options,
    simulated_end,
)

MOST_GROUPS = 16
"""Groups with threads and connections of their own that a worker keeps of a communicator."""

_OPERATIONS: dict[ReduceOperation, Any] = {
    "mean": dist.ReduceOp.AVG,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
}


class TorchComm(Messages):
    """A `Comm` over a torch.distributed process group.

    Counts bytes and waits in *runtime*'s recorder. A group of one moves nothing. *name* is
    unique in the job and the same on all ranks. *chain* runs what follows results; groups
    share it with the communicator that they are of. *issuer*: the chain whose works issue
    all that is issued here; None: the training itself. *collective*: how averages are
    formed; None: as torch.distributed does it. *places*: where its ranks are (None: all of the
    runtime's workers, where they are).
    """

    threads: ClassVar[bool] = True
    """Whether another thread than the issuing one may wait for results."""

    def __init__(
        self,
        runtime: Runtime,
        name: str = "training",
        group: dist.ProcessGroup | None = None,
        chain: Chain | None = None,
        issuer: Chain | None = None,
        collective: Collective | None = None,
        places: Places | None = None,
    ) -> None:
        super().__init__(runtime, name)
        whole: Any = dist.group.WORLD
        self._group: Any = whole if group is None else group
        self.chain = chain or Chain(runtime, name, thread=self.threads)
        self._owns_chain = chain is None
        self.issuer = issuer
        self.collective = collective
        self.places = Places.of(runtime) if places is None else places
        self._channels: dict[str, TorchComm] = {}
        self._groups: dict[tuple[int, ...], TorchComm] = {}
        self._times_made: dict[tuple[int, ...], int] = {}
        self._rounds: dict[str, TorchComm] = {}
        self._at_close: list[Callable[[], None]] = []
        self._ring_bytes: dict[int, int] = {}
        self._reduce_options = {
            name: all_reduce_options(kind) for name, kind in _OPERATIONS.items()
        }
        self.rank: int = self._group.rank()
        self.size: int = self._group.size()
        self._peers: Sequence[int] = range(self.size)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """torch's handle of this group."""
        group: dist.ProcessGroup = self._group
        return group

    @property
    def racks(self) -> Sequence[int] | None:
        return self.places.racks

    @property
    def aggregating(self) -> Set[int]:
        return self.places.aggregating

    def leave(self) -> None:
        """This worker's last all-reduce is over."""

    def at_close(self, action: Callable[[], None]) -> None:
        """Call *action* when this is closed, before anything else ends."""
        self._at_close.append(action)

    def tell(self, sentence: str) -> None:
        """Say it to people, and keep it beside the run's figures."""
        self._runtime.recorder.add_note(sentence)
        if self.rank == 0:
            print(f"paceline: {sentence}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Let go of the process groups, whose threads end with the last reference, and of
        works that were not run (`Pending.then`)."""
        while self._at_close:
            self._at_close.pop()()
        if self._owns_chain:
            self.chain.close()
        for others in (self._channels, self._groups, self._rounds):
            for other in others.values():
                other.close()
            others.clear()
        self.close_lanes()
        self._group = None

    def lanes(self, device: torch.device) -> int:
        return lanes_of(self._group, device)

    # ---- collectives ----

    def all_reduce(
        self, buffer: torch.Tensor, operation: ReduceOperation = "mean"
    ) -> Pending:
        if self.collective is not None:
            return self.collective.run(self, buffer, operation)
        return self.all_reduce_natively(buffer, operation)

    def all_reduce_natively(
        self, buffer: torch.Tensor, operation: ReduceOperation = "mean"
    ) -> Pending:
        """`all_reduce` as torch.distributed does it."""
        if continuations.current() is not self.issuer:
            return self._round().all_reduce_natively(buffer, operation)
        if self.size == 1:
            return WorkPending(self, self.issuer, None, "all_reduce")
        size = wire_bytes(buffer)
        if size not in self._ring_bytes:
            self._ring_bytes[size] = Ring(self.size, size).bytes_sent(self.rank)
        self._runtime.recorder.count_bytes(self._ring_bytes[size])
        # The group's own method, not dist.all_reduce: that checks and logs for 25 us,
        # which is a percent of a small step, and in virtual time it would take the
        # thread's worker for the one who calls.
        work = self._group.allreduce([real(buffer)], self._reduce_options[operation])
        return WorkPending(self, self.issuer, work, "all_reduce", buffer.is_cuda)

    def broadcast(self, buffer: torch.Tensor, source: int = 0) -> Pending:
        if continuations.current() is not self.issuer:
            return self._round().broadcast(buffer, source)
        if self.size == 1:
            return WorkPending(self, self.issuer, None, "broadcast")
        self._count(Tree(self.size, wire_bytes(buffer), source))
        work = self._group.broadcast([real(buffer)], broadcast_options(source))
        return WorkPending(self, self.issuer, work, "broadcast", buffer.is_cuda)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        buffer: torch.Tensor,
        operation: ReduceOperation = "mean",
    ) -> Pending:
        if continuations.current() is not self.issuer:
            return self._round().reduce_scatter(output, buffer, operation)
        if self.size == 1:
            output.copy_(buffer)
            return WorkPending(self, self.issuer, None, "reduce_scatter")
        self._count(Ring(self.size, wire_bytes(buffer), rounds=1))
        options = reduce_scatter_options(_OPERATIONS[operation])
        work = self._group.reduce_scatter_single(real(output), real(buffer), options)
        return WorkPending(self, self.issuer, work, "reduce_scatter", buffer.is_cuda)

    def all_gather(self, output: torch.Tensor, buffer: torch.Tensor) -> Pending:
        if continuations.current() is not self.issuer:
            return self._round().all_gather(output, buffer)
        if self.size == 1:
            output.copy_(buffer)
            return WorkPending(self, self.issuer, None, "all_gather")
        self._count(Ring(self.size, wire_bytes(output), rounds=1))
        work = self._group.all_gather_single(
            real(output), real(buffer), all_gather_options()
        )
        return WorkPending(self, self.issuer, work, "all_gather", buffer.is_cuda)

    def all_to_all(self, output: torch.Tensor, buffer: torch.Tensor) -> Pending:
        if continuations.current() is not self.issuer:
            return self._round().all_to_all(output, buffer)
        check_parts(self.size, output, buffer)
        if self.size == 1:
            output.copy_(buffer)
            return WorkPending(self, self.issuer, None, "all_to_all")
        self._count(all_to_all(self.size, wire_bytes(buffer) // self.size))
        work = self._group.all_to_all_single(
            real(output), real(buffer), [], [], all_to_all_options()
        )
        return WorkPending(self, self.issuer, work, "all_to_all", buffer.is_cuda)

    # ---- other communicators ----

    def channel(self, name: str) -> TorchComm:
        if name not in self._channels:
            continuations.check_may_make(f"channel {name!r}")
            self._channels[name] = self._make_channel(name)
        return self._channels[name]

    def _make_channel(self, name: str) -> TorchComm:
        full_name, group = self._beside(f"channel {name}", range(self.size))
        return TorchComm(
            self._runtime, full_name, group, None, None, self.collective, self.places
        )

    def group(self, ranks: Sequence[int]) -> TorchComm:
        key = tuple(ranks)
        known = self._groups.get(key)
        if known is not None and known.is_open:
            return known
        continuations.check_may_make(f"group {key}")
        if self.rank not in key or len(set(key)) < len(key):
            raise UsageError(
                f"group {key} asked for by rank {self.rank} of {self.size}: expected "
                "different ranks, this one among them; only members ask for a group"
            )
        made = self._times_made.get(key, 0)
        self._times_made[key] = made + 1
        text = " ".join(str(rank) for rank in key) + (f", {made}" if made else "")
        if not self._all_have_room(key, text):
            self._groups[key] = PointToPointComm(
                self, key, f"{self.name}, group {text}"
            )
            return self._groups[key]
        name, group = self._beside(f"group {text}", key)
        self._groups[key] = TorchComm(
            self._runtime,
            name,
            group,
            self.chain,
            self.issuer,
            self.collective,
            self.places.among(key),
        )
        return self._groups[key]

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called."""
        return self._group is not None

    def _all_have_room(self, members: tuple[int, ...], text: str) -> bool:
        """Whether each of *members* can keep one more group of its own: they agree on it,
        since what others of their groups are is unknown to each other. Collective."""
        if simulated_end(self._group) is not None or len(members) == 1:
            return True  # costs neither threads nor connections
        if not self.speaks_gloo:
            return True
        kept = [group for group in self._groups.values() if group.has_own_group]
        full = torch.tensor([len(kept) >= MOST_GROUPS], dtype=torch.uint8)
        peers = [self._peers[member] for member in members]
        tag = self._tag(f"room for {text}", None)
        everybody = Ring(len(members), 1)
        execute.perform(
            execute.steps_of(everybody, members.index(self.rank)),
            full,
            execute.combining("max"),
            lambda part, to: self._group.send([part], peers[to], tag),
            lambda part, source: self._group.recv([part], peers[source], tag),
        )
        return not full.item()

    @property
    def speaks_gloo(self) -> bool:
        """Whether tensors on the host can be sent with a tag."""
        return lanes_of(self._group, torch.device("cpu")) > 1

    @property
    def has_own_group(self) -> bool:
        """Whether it holds threads and connections."""
        return self.is_open and self.size > 1

    def _round(self) -> TorchComm:
        """Where the work that runs on this thread issues what it issues here."""
        issuer = continuations.current()
        continuations.check_issued_here(issuer or self.issuer)
        assert issuer is not None
        if issuer.path not in self._rounds:
            self._rounds[issuer.path] = self._make_round(issuer)
        return self._rounds[issuer.path]

    def _make_round(self, issuer: Chain) -> TorchComm:
        name, group = self._beside(f"after {issuer.path}", range(self.size))
        return TorchComm(
            self._runtime,
            name,
            group,
            issuer.inner,
            issuer,
            self.collective,
            self.places,
        )

    def _beside(self, what: str, ranks: Sequence[int]) -> tuple[str, dist.ProcessGroup]:
        """Name and process group of a communicator among some ranks of this one."""
        name = f"{self.name}, {what}"
        if self.size == 1:
            return name, self._group
        return name, group_beside(self._group, name, ranks)

    def _count(self, schedule: Schedule) -> None:
        self._runtime.recorder.count_bytes(schedule.bytes_sent(self.rank))


def check_parts(size: int, output: torch.Tensor, buffer: torch.Tensor) -> None:
    """Raise `UsageError` unless both can be cut into *size* equal parts."""
    if output.numel() != buffer.numel() or buffer.numel() % size:
        raise UsageError(
            f"all_to_all among {size}: expected two tensors of one size, a multiple of "
            f"{size}, got {output.numel()} and {buffer.numel()} elements"
        )


class PointToPointComm(TorchComm):
    """A group without a process group: the *ranks* of *parent*, on connections that they have.

    Nothing is made, so nothing is kept: for groups beyond `MOST_GROUPS`. Collectives are schedules; sums are added as a ring adds them,
    or as the communicator's collective does. *name* is unique, and the same for all.
    """

    def __init__(self, parent: TorchComm, ranks: Sequence[int], name: str) -> None:
        self._parent = parent
        group = parent.process_group
        end = simulated_end(group)
        if end is not None:
            members = [parent._peers[rank] for rank in ranks]
            group = end.shared(f"{parent.name}, among {members}", members)
        super().__init__(
            parent._runtime,
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
