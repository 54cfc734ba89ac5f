"""`TorchGroup`, the `WorkerGroup` of real and emulated jobs: a torch.distributed process group."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from paceline.collectives import schedule_execution
from paceline.collectives.pending import Job, ThreadRunner
from paceline.collectives.process_groups import agreed_tag, group_beside
from paceline.collectives.schedules import Ring
from paceline.errors import UsageError
from paceline.interfaces import ReduceOperation, Schedule
from paceline.torch_internals import (
    all_gather_options,
    all_reduce_options,
    all_to_all_options,
    broadcast_options,
    follows_streams,
    keep_gloo_from_spinning,
    lanes_of,
    moves_host_tensors,
    reduce_scatter_options,
)

_LANES = 2
"""Schedules that a group performs at a time: as many as gloo runs collectives."""

MOST_GROUPS = 16
"""Groups with their own threads and connections that a worker keeps per communicator."""

_OPERATIONS: dict[ReduceOperation, Any] = {
    "mean": dist.ReduceOp.AVG,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
}

_CPU, _CUDA = torch.device("cpu"), torch.device("cuda")


class TorchGroup:
    """One worker's end of a torch.distributed process group.

    It calls the group's own methods: `torch.distributed`'s functions check and log for 25 us per
    call, which is a percent of a small step.

    Args:
        name: Names its streams of messages; unique in the job, and the same on all ranks.
        group: torch's handle; None: the group of all workers.
        members: The ranks of *group* that are rank 0, 1, ... here; None: all.
    """

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup | None = None,
        members: Sequence[int] | None = None,
    ) -> None:
        self.name = name
        whole: Any = dist.group.WORLD
        self._group: Any = whole if group is None else group
        keep_gloo_from_spinning()
        self._members = range(self._group.size()) if members is None else members
        self.rank: int = list(self._members).index(self._group.rank())
        self.size: int = len(self._members)
        self._reduce_options = {
            name: all_reduce_options(kind) for name, kind in _OPERATIONS.items()
        }
        self._tags: dict[tuple[str, str], int] = {}
        self._lanes: dict[str, ScheduleThreads] = {}
        self._under_way: set[OneWait] = set()

    @property
    def follows_streams(self) -> bool:
        return follows_streams(self._group, _CUDA)

    @property
    def moves_host_tensors(self) -> bool:
        return moves_host_tensors(self._group)

    def max_in_flight(self, device: torch.device) -> int:
        return lanes_of(self._group, device)

    # ---- collectives ----

    def all_reduce(self, buffer: torch.Tensor, operation: ReduceOperation) -> Any:
        return self._group.allreduce([buffer], self._reduce_options[operation])

    def broadcast(self, buffer: torch.Tensor, source: int) -> Any:
        return self._group.broadcast([buffer], broadcast_options(source))

    def reduce_scatter(
        self, output: torch.Tensor, buffer: torch.Tensor, operation: ReduceOperation
    ) -> Any:
        options = reduce_scatter_options(_OPERATIONS[operation])
        return self._group.reduce_scatter_single(output, buffer, options)

    def all_gather(self, output: torch.Tensor, buffer: torch.Tensor) -> Any:
        return self._group.all_gather_single(output, buffer, all_gather_options())

    def all_to_all(self, output: torch.Tensor, buffer: torch.Tensor) -> Any:
        options = all_to_all_options()
        return self._group.all_to_all_single(output, buffer, [], [], options)

    # ---- messages and schedules ----

    def send(self, buffer: torch.Tensor, to: int, stream: str) -> OneWait:
        tag = self._tag(stream)
        work = self._group.send([buffer], self._members[to], tag)
        return OneWait(work, self._under_way)

    def receive(self, buffer: torch.Tensor, source: int, stream: str) -> OneWait:
        tag = self._tag(stream)
        work = self._group.recv([buffer], self._members[source], tag)
        return OneWait(work, self._under_way)

    def perform(
        self,
        schedule: Schedule,
        flat: torch.Tensor,
        operation: ReduceOperation,
        timed: Schedule,
        unit: float,
        stream: str,
    ) -> Job:
        if not schedule.performable:
            raise UsageError(
                "a schedule with nodes that are not ranks can only be performed in virtual "
                "time: in other runtimes `paceline aggregate` is such a node"
            )
        if stream not in self._lanes:
            self._lanes[stream] = ScheduleThreads(f"{self.name}{stream}")
        threads = self._lanes[stream]
        tag = self._tag(stream, f"lane {threads.next_lane}")
        job = Job(partial(self._move, schedule, flat, operation, tag))
        threads.start(job)
        return job

    def perform_here(
        self,
        schedule: Schedule,
        flat: torch.Tensor,
        what: str,
        operation: ReduceOperation,
    ) -> None:
        """Perform a schedule in the caller's thread; return when it is complete.

        *what* names the stream of its messages. Schedules of one stream run one after the other, in
        the same order on all ranks.
        """
        self._move(schedule, flat, operation, self._tag("", what))

    def _move(
        self,
        schedule: Schedule,
        flat: torch.Tensor,
        operation: ReduceOperation,
        tag: int,
    ) -> None:
        """Perform this rank's part of a schedule."""
        group, members = self._group, self._members
        if group is None:
            raise UsageError("the communicator was closed before this was performed")
        schedule_execution.perform(
            schedule_execution.steps_of(schedule, self.rank),
            flat,
            schedule_execution.reduce_function(operation),
            lambda part, to: group.send([part], members[to], tag),
            lambda part, source: group.recv([part], members[source], tag),
        )
        if operation == "mean":
            flat.div_(self.size)

    def _tag(self, stream: str, what: str = "") -> int:
        """The unique tag of one stream of messages, the same on all ranks.

        Messages of one stream arrive in the order of issue; tags keep streams apart.
        """
        key = stream, what
        if key not in self._tags:
            self._tags[key] = agreed_tag(f"{self.name}|{stream}|{what}")
        return self._tags[key]

    # ---- other groups ----

    def split(self, name: str, ranks: Sequence[int]) -> TorchGroup:
        if self.size == 1:
            return self.subset(name, ranks)
        members = [self._members[rank] for rank in ranks]
        return TorchGroup(name, group_beside(self._group, name, members))

    def subset(self, name: str, ranks: Sequence[int]) -> TorchGroup:
        return TorchGroup(name, self._group, [self._members[rank] for rank in ranks])

    def has_room(self, kept: int, ranks: Sequence[int]) -> bool:
        if len(ranks) == 1 or not self._has_tags:
            return True
        full = torch.tensor([kept >= MOST_GROUPS], dtype=torch.uint8)
        asked = self.subset(self.name, ranks)
        asked.perform_here(Ring(len(ranks), 1), full, "room", "max")
        return not full.item()

    @property
    def _has_tags(self) -> bool:
        """Whether host tensors can be sent with a tag, as gloo's can."""
        return lanes_of(self._group, _CPU) > 1

    def close(self) -> None:
        """Drop the process group; its threads end with its last reference."""
        for threads in self._lanes.values():
            threads.close()
        self._group = None


class ScheduleThreads:
    """Threads that perform schedules, in the order of issue."""

    def __init__(self, name: str) -> None:
        self.next_lane = 0
        self._runners = [
            ThreadRunner(f"paceline {name}, lane {lane}") for lane in range(_LANES)
        ]

    def start(self, job: Job) -> None:
        """Perform *job* after earlier jobs of its lane. Jobs go to the lanes in turn."""
        self._runners[self.next_lane].put(None, job.run)
        self.next_lane = (self.next_lane + 1) % _LANES

    def close(self) -> None:
        """End the threads."""
        for runner in self._runners:
            runner.close()


class OneWait:
    """torch's handle of a send or a receive, made safe to wait for twice.

    A second wait of gloo's handle would wait for another message, and hang. *under_way* holds this
    object until the wait, because gloo drops a message whose handle is garbage-collected.
    """

    def __init__(self, work: Any, under_way: set[OneWait]) -> None:
        self._work = work
        self._under_way = under_way
        under_way.add(self)
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def wait(self) -> None:
        with self._lock:
            work, self._work = self._work, None
            if work is not None:
                try:
                    work.wait()
                except BaseException as error:
                    self._error = error
                self._under_way.discard(self)
        if self._error is not None:
            raise self._error
