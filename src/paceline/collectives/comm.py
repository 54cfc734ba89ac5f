"""The one `Comm`: over torch.distributed, whatever backend a world brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from paceline.collectives import chains
from paceline.collectives.chains import AtOnce, Chain, Work
from paceline.collectives.schedule import Ring, Schedule, Tree
from paceline.errors import UsageError
from paceline.interfaces import Pending, ReduceOperation, World
from paceline.tensors import wire_bytes
from paceline.torch_private import (
    all_gather_options,
    all_reduce_options,
    broadcast_options,
    follows_streams,
    group_beside,
    lanes_of,
    reduce_scatter_options,
)


class TorchComm:
    """A `Comm` over a torch.distributed process group.

    Counts bytes and waits in *world*'s journal. A group of one moves nothing. *name* is
    unique in the job and the same on all ranks. *chain* runs what follows results; groups
    share it with the communicator that they are of. *issuer*: the chain whose works issue
    all that is issued here; None: the training itself.
    """

    threads: ClassVar[bool] = True
    """Whether another thread than the issuing one may wait for results."""

    def __init__(
        self,
        world: World,
        name: str = "training",
        group: dist.ProcessGroup | None = None,
        chain: Chain | None = None,
        issuer: Chain | None = None,
    ) -> None:
        self._world = world
        self.name = name
        whole: Any = dist.group.WORLD
        self._group: Any = whole if group is None else group
        self.chain = chain or Chain(world, name, thread=self.threads)
        self.issuer = issuer
        self._channels: dict[str, TorchComm] = {}
        self._groups: dict[tuple[int, ...], TorchComm] = {}
        self._rounds: dict[str, TorchComm] = {}
        self._ring_bytes: dict[int, int] = {}
        self._reduce_options = {
            "mean": all_reduce_options(dist.ReduceOp.AVG),
            "sum": all_reduce_options(dist.ReduceOp.SUM),
            "max": all_reduce_options(dist.ReduceOp.MAX),
        }
        self.rank: int = self._group.rank()
        self.size: int = self._group.size()

    @property
    def process_group(self) -> dist.ProcessGroup:
        """torch's handle of this group."""
        group: dist.ProcessGroup = self._group
        return group

    def leave(self) -> None:
        """This worker's last all-reduce is over."""

    def close(self) -> None:
        """Let go of the process groups, whose threads end with the last reference, and of
        works that were not run (`Pending.then`)."""
        self.chain.close()
        for others in (self._channels, self._groups, self._rounds):
            for other in others.values():
                other.close()
            others.clear()
        self._group = None

    def now(self) -> float:
        return self._world.now()

    @property
    def is_alone(self) -> bool:
        """Whether there is no other worker in the whole job."""
        return self._world.size == 1

    @property
    def follows_streams(self) -> bool:
        """Whether results on CUDA are in the order of the device's streams."""
        return follows_streams(self._group, torch.device("cuda"))

    def lanes(self, device: torch.device) -> int:
        return lanes_of(self._group, device)

    def all_reduce(
        self, buffer: torch.Tensor, operation: ReduceOperation = "mean"
    ) -> Pending:
        if chains.current() is not self.issuer:
            return self._round().all_reduce(buffer, operation)
        if self.size == 1:
            return _WorkPending(self, None, "all_reduce")
        size = wire_bytes(buffer)
        if size not in self._ring_bytes:
            self._ring_bytes[size] = Ring(self.size, size).bytes_sent(self.rank)
        self._world.journal.sent(self._ring_bytes[size])
        # The group's own method, not dist.all_reduce: that checks and logs for 25 us,
        # which is a percent of a small step, and in virtual time it would take the
        # thread's worker for the one who calls.
        work = self._group.allreduce([_real(buffer)], self._reduce_options[operation])
        return _WorkPending(self, work, "all_reduce", buffer.is_cuda)

    def broadcast(self, buffer: torch.Tensor, source: int = 0) -> Pending:
        if chains.current() is not self.issuer:
            return self._round().broadcast(buffer, source)
        if self.size == 1:
            return _WorkPending(self, None, "broadcast")
        self._count(Tree(self.size, wire_bytes(buffer), source))
        work = self._group.broadcast([_real(buffer)], broadcast_options(source))
        return _WorkPending(self, work, "broadcast", buffer.is_cuda)

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor) -> Pending:
        if chains.current() is not self.issuer:
            return self._round().reduce_scatter(output, buffer)
        if self.size == 1:
            output.copy_(buffer)
            return _WorkPending(self, None, "reduce_scatter")
        self._count(Ring(self.size, wire_bytes(buffer), rounds=1))
        options = reduce_scatter_options(dist.ReduceOp.AVG)
        work = self._group.reduce_scatter_single(_real(output), _real(buffer), options)
        return _WorkPending(self, work, "reduce_scatter", buffer.is_cuda)

    def all_gather(self, output: torch.Tensor, buffer: torch.Tensor) -> Pending:
        if chains.current() is not self.issuer:
            return self._round().all_gather(output, buffer)
        if self.size == 1:
            output.copy_(buffer)
            return _WorkPending(self, None, "all_gather")
        self._count(Ring(self.size, wire_bytes(output), rounds=1))
        work = self._group.all_gather_single(
            _real(output), _real(buffer), all_gather_options()
        )
        return _WorkPending(self, work, "all_gather", buffer.is_cuda)

    def channel(self, name: str) -> TorchComm:
        if name not in self._channels:
            chains.check_may_make(f"channel {name!r}")
            group = self._beside(f"channel {name}", range(self.size))
            self._channels[name] = TorchComm(self._world, *group)
        return self._channels[name]

    def group(self, ranks: Sequence[int]) -> TorchComm:
        key = tuple(ranks)
        if key not in self._groups:
            chains.check_may_make(f"group {key}")
            if self.rank not in key:
                raise UsageError(
                    f"group {key}: rank {self.rank} is none of its members, and only they "
                    "ask for it"
                )
            text = " ".join(str(rank) for rank in key)
            group = self._beside(f"group {text}", key)
            self._groups[key] = TorchComm(self._world, *group, self.chain)
        return self._groups[key]

    def _round(self) -> TorchComm:
        """Where the work that runs on this thread issues what it issues here."""
        issuer = chains.current()
        chains.check_issued_here(issuer or self.issuer)
        assert issuer is not None
        if issuer.path not in self._rounds:
            self._rounds[issuer.path] = self._make_round(issuer)
        return self._rounds[issuer.path]

    def _make_round(self, issuer: Chain) -> TorchComm:
        name, group = self._beside(f"after {issuer.path}", range(self.size))
        return TorchComm(self._world, name, group, issuer.inner, issuer)

    def _beside(self, what: str, ranks: Sequence[int]) -> tuple[str, dist.ProcessGroup]:
        """Name and process group of a communicator among some ranks of this one."""
        name = f"{self.name}, {what}"
        if self.size == 1:
            return name, self._group
        return name, group_beside(self._group, name, ranks)

    def _count(self, schedule: Schedule) -> None:
        self._world.journal.sent(schedule.bytes_sent(self.rank))

    def _wait(self, work: Any, name: str) -> None:
        start = self._world.now()
        work.wait()
        self._world.journal.waited(name, start, self._world.now())


def _real(buffer: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


class _WorkPending:
    """A `Pending` over torch.distributed's work handle; None: the result is in."""

    __slots__ = ("_comm", "_name", "_on_cuda", "_work")

    def __init__(
        self, comm: TorchComm, work: Any, name: str, on_cuda: bool = False
    ) -> None:
        self._comm = comm
        self._work = work
        self._name = name
        self._on_cuda = on_cuda

    def wait(self) -> None:
        work = self._work
        if work is not None:
            chains.check_may_wait()
            try:
                self._comm._wait(work, self._name)
            finally:
                self._work = None

    def then(self, work: Work) -> Pending:
        comm = self._comm
        chains.check_issued_here(comm.issuer)
        issued = None if self._work is None else _Issued(self, self._work)
        if comm.is_alone or (self._on_cuda and comm.follows_streams):
            return AtOnce(issued, work)
        return comm.chain.follow(issued, work)

    def settle(self) -> None:
        if self._work is not None:
            _Issued(self, self._work).settle()

    def when_in(self, action: Callable[[], None]) -> None:
        if self._work is None:
            action()
        else:
            self._work.when_in(action)

    def is_in(self) -> None:
        """Whoever waits from now on need not."""
        self._work = None


class _Issued:
    """What a chain waits for: also when the training waits for it, too, in another
    thread."""

    __slots__ = ("_pending", "_work")

    def __init__(self, pending: _WorkPending, work: Any) -> None:
        self._pending, self._work = pending, work

    def settle(self) -> None:
        self._work.wait()
        self._pending.is_in()

    def when_in(self, action: Callable[[], None]) -> None:
        self._work.when_in(action)
