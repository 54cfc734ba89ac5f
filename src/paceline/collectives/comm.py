"""The one `Comm`: over torch.distributed, whatever backend a world brings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.collectives.schedule import Ring, Schedule, Tree
from paceline.interfaces import Pending, ReduceOperation, World
from paceline.tensors import wire_bytes
from paceline.torch_private import all_reduce_options, groups_named, lanes_of


class TorchComm:
    """A `Comm` over a torch.distributed process group.

    Counts bytes and waits in *world*'s journal. A group of one moves nothing. *name* is
    unique in the job and the same on all ranks.
    """

    def __init__(
        self,
        world: World,
        name: str = "training",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._world = world
        self.name = name
        self._group: Any = group if group is not None else dist.group.WORLD
        self._channels: dict[str, TorchComm] = {}
        self._groups: dict[tuple[int, ...], TorchComm] = {}
        self._ring_bytes: dict[int, int] = {}
        self._reduce_options = {
            "mean": all_reduce_options(dist.ReduceOp.AVG),
            "sum": all_reduce_options(dist.ReduceOp.SUM),
            "max": all_reduce_options(dist.ReduceOp.MAX),
        }
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """torch's handle of this group."""
        group: dist.ProcessGroup = self._group
        return group

    def leave(self) -> None:
        """This worker's last all-reduce is over."""

    def close(self) -> None:
        """Let go of the process groups: their threads end with the last reference."""
        for other in (*self._channels.values(), *self._groups.values()):
            other.close()
        self._channels.clear()
        self._groups.clear()
        self._group = None

    def now(self) -> float:
        return self._world.now()

    def lanes(self, device: torch.device) -> int:
        return lanes_of(self._group, device)

    def all_reduce(
        self, buffer: torch.Tensor, operation: ReduceOperation = "mean"
    ) -> Pending:
        if self.size == 1:
            return _WorkPending(self, None, "all_reduce")
        size = wire_bytes(buffer)
        if size not in self._ring_bytes:
            self._ring_bytes[size] = Ring(self.size, size).bytes_sent(self.rank)
        self._world.journal.sent(self._ring_bytes[size])
        if buffer.is_complex():
            buffer = torch.view_as_real(buffer)
        # The group's own method, not dist.all_reduce: that checks and logs for 25 us,
        # which is a percent of a small step.
        work = self._group.allreduce([buffer], self._reduce_options[operation])
        return _WorkPending(self, work, "all_reduce")

    def broadcast(self, buffer: torch.Tensor, source: int = 0) -> _WorkPending:
        if self.size == 1:
            return _WorkPending(self, None, "broadcast")
        self._count(Tree(self.size, wire_bytes(buffer), source))
        work = dist.broadcast(
            buffer, group=self._group, group_src=source, async_op=True
        )
        return _WorkPending(self, work, "broadcast")

    def reduce_scatter(
        self, output: torch.Tensor, buffer: torch.Tensor
    ) -> _WorkPending:
        if self.size == 1:
            output.copy_(buffer)
            return _WorkPending(self, None, "reduce_scatter")
        self._count(Ring(self.size, wire_bytes(buffer), rounds=1))
        work = dist.reduce_scatter_single(
            output, buffer, dist.ReduceOp.AVG, group=self._group, async_op=True
        )
        return _WorkPending(self, work, "reduce_scatter")

    def all_gather(self, output: torch.Tensor, buffer: torch.Tensor) -> _WorkPending:
        if self.size == 1:
            output.copy_(buffer)
            return _WorkPending(self, None, "all_gather")
        self._count(Ring(self.size, wire_bytes(output), rounds=1))
        work = dist.all_gather_single(output, buffer, group=self._group, async_op=True)
        return _WorkPending(self, work, "all_gather")

    def channel(self, name: str) -> TorchComm:
        if name not in self._channels:
            self._channels[name] = self._make(f"channel {name}", range(self.size))
        return self._channels[name]

    def group(self, ranks: Sequence[int]) -> TorchComm:
        key = tuple(ranks)
        if key not in self._groups:
            text = " ".join(str(rank) for rank in key)
            self._groups[key] = self._make(f"group {text}", key)
        return self._groups[key]

    def _make(self, what: str, ranks: Sequence[int]) -> TorchComm:
        """A communicator of its own among some ranks of this one."""
        members = dist.get_process_group_ranks(self._group)
        name = f"{self.name}, {what}"
        with groups_named(name):
            group = dist.new_group(
                [members[rank] for rank in ranks],
                use_local_synchronization=True,
                sort_ranks=False,
            )
        return TorchComm(self._world, name, group)

    def _count(self, schedule: Schedule) -> None:
        self._world.journal.sent(schedule.bytes_sent(self.rank))

    def _wait(self, work: dist.Work, name: str) -> None:
        start = self._world.now()
        work.wait()
        self._world.journal.waited(name, start, self._world.now())


class _WorkPending:
    """A `Pending` over torch.distributed's work handle."""

    __slots__ = ("_comm", "_name", "_work")

    def __init__(self, comm: TorchComm, work: dist.Work | None, name: str) -> None:
        self._comm = comm
        self._work = work
        self._name = name

    def wait(self) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            self._comm._wait(work, self._name)
