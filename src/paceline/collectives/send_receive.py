"""What one rank sends to another, and schedules that are made of that."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from zlib import crc32

import torch

from paceline.collectives import continuations, execute
from paceline.collectives.continuations import Chain
from paceline.collectives.pending import Job, OneWait, WorkPending
from paceline.errors import UsageError
from paceline.interfaces import (
    Pending,
    ReduceOperation,
    Runner,
    Runtime,
    Schedule,
    servers_of,
    switches_of,
)
from paceline.interfaces.buckets import stand_alike, wire_bytes
from paceline.torch_internals import follows_streams, simulated_end

_LANES = 2
"""Schedules that a communicator performs at a time: as many collectives as gloo moves."""


class Messages:
    """The part of a communicator that sends and receives.

    What works issue (`Pending.then`) needs no queue of its own here: tags tell it from
    what the training issues, so a work may send to one neighbour while others issue
    nothing.
    """

    rank: int
    size: int
    issuer: Chain | None
    chain: Chain
    _group: Any
    _peers: Sequence[int]
    """Each rank's position in the process group."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self.name = name
        self._lanes: dict[str, _Lanes] = {}
        self._under_way: set[OneWait] = set()

    @property
    def is_alone(self) -> bool:
        """Whether there is no other worker in the whole job."""
        return self._runtime.size == 1

    @property
    def follows_streams(self) -> bool:
        """Whether results on CUDA are in the order of the device's streams."""
        return follows_streams(self._group, torch.device("cuda"))

    def chain_of(self, issuer: Chain | None) -> Chain:
        """What follows the operations that *issuer* issues here."""
        if issuer is self.issuer or issuer is None:
            return self.chain
        return issuer.inner

    def wait_for(self, work: Any, name: str) -> None:
        """Wait, and count it."""
        start = self._runtime.now()
        self._runtime.recorder.block(name, work.wait)
        self._runtime.recorder.waited(name, start, self._runtime.now())

    def send(self, buffer: torch.Tensor, to: int) -> Pending:
        self._check_peer(to, "send(buffer, to)")
        issuer = continuations.current()
        self._runtime.recorder.count_bytes(wire_bytes(buffer))
        flat = [stand_alike(flat_of(buffer), buffer)]
        work = self._group.send(flat, self._peers[to], self._tag("", issuer))
        return self._message(work, issuer, "send", buffer)

    def receive(self, buffer: torch.Tensor, source: int) -> Pending:
        self._check_peer(source, "receive(buffer, source)")
        issuer = continuations.current()
        flat = [flat_of(buffer)]
        work = self._group.recv(flat, self._peers[source], self._tag("", issuer))
        return self._message(work, issuer, "receive", buffer)

    def perform(
        self,
        schedule: Schedule,
        buffer: torch.Tensor,
        operation: ReduceOperation = "sum",
        timed: Schedule | None = None,
    ) -> Pending:
        issuer = continuations.current()
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
        path = "" if issuer is self.issuer or issuer is None else issuer.path
        end = simulated_end(self._group)
        work: Any
        if end is not None:
            if path:
                end = end.shared(f"{self.name}, after {path}", range(self.size))
            work = end.perform(schedule, flat, operation, timed, unit)
        else:
            if switches_of(schedule) or servers_of(schedule):
                raise UsageError(
                    "a schedule with nodes that are no ranks is performed in virtual time "
                    "only: elsewhere programs do what these do (`paceline aggregate`)"
                )
            if path not in self._lanes:
                self._lanes[path] = _Lanes(self._runtime, f"{self.name}{path}")
            lanes = self._lanes[path]
            tag = self._tag(f"perform {lanes.started}", issuer)
            work = Job(partial(self._move, schedule, flat, operation, tag))
            lanes.start(work)
        return WorkPending(self, issuer, work, "perform")

    def perform_here(self, schedule: Schedule, flat: torch.Tensor, what: str) -> None:
        """Perform a sum to its end in the caller's own thread, where there are real processes.
        *what* tells its messages from all others; it is not counted."""
        self._move(schedule, flat, "sum", self._tag(what, None))

    def count_sent(self, size: int) -> None:
        """So many bytes leave this rank otherwise than by this object's methods."""
        self._runtime.recorder.count_bytes(size)

    def _move(
        self,
        schedule: Schedule,
        flat: torch.Tensor,
        operation: ReduceOperation,
        tag: int,
    ) -> None:
        """This rank's part of a schedule, to its end."""
        group, peers = self._group, self._peers
        if group is None:
            raise UsageError("the communicator was closed before this was performed")
        execute.perform(
            execute.steps_of(schedule, self.rank),
            flat,
            execute.combining(operation),
            lambda part, to: group.send([part], peers[to], tag),
            lambda part, source: group.recv([part], peers[source], tag),
        )
        if operation == "mean":
            flat.div_(self.size)

    def _message(
        self, work: Any, issuer: Chain | None, name: str, buffer: torch.Tensor
    ) -> Pending:
        if simulated_end(self._group) is None:
            work = OneWait(work, self._under_way)
        return WorkPending(self, issuer, work, name, buffer.is_cuda)

    def _tag(self, what: str, issuer: Chain | None) -> int:
        """Messages between two ranks are told apart by tags. gloo takes 31 bits."""
        path = "" if issuer is None else issuer.path
        return crc32(f"{self.name}|{path}|{what}".encode()) & 0x7FFFFFFF

    def _check_peer(self, rank: int, call: str) -> None:
        if rank == self.rank or not 0 <= rank < self.size:
            raise UsageError(
                f"{call}: expected another rank of this group, 0 to {self.size - 1} but "
                f"not {self.rank}, got {rank}"
            )

    def close_lanes(self) -> None:
        """End the threads that perform schedules."""
        for lanes in self._lanes.values():
            lanes.close()


class _Lanes:
    """Threads that perform schedules, in the order of issue."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self.started = 0
        self._runners: list[Runner] = [
            runtime.runner(f"{name}, lane {lane}", thread=True)
            for lane in range(_LANES)
        ]

    def start(self, job: Job) -> None:
        self._runners[self.started % _LANES].put(None, job.run)
        self.started += 1

    def close(self) -> None:
        for runner in self._runners:
            runner.close()


def real(buffer: torch.Tensor) -> torch.Tensor:
    """A complex tensor as pairs of real numbers; any other as it is."""
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def flat_of(buffer: torch.Tensor) -> torch.Tensor:
    """The same memory, as real numbers in a row."""
    flat = real(buffer)
    return flat if flat.dim() == 1 else flat.view(-1)
