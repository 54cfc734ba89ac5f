"""Integers added up by `paceline aggregate` at racks' switches, in real and emulated jobs: what their
environment says, and the queues of their sums."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from paceline.collectives.in_network.aggregator_addresses import aggregators_of
from paceline.collectives.in_network.joining import JobConfig, Joining
from paceline.collectives.in_network.sum_queue import LossNotice, SumQueue
from paceline.collectives.in_network.wire import Address, IntegerOperation
from paceline.collectives.pending import WorkPending, current
from paceline.errors import UsageError
from paceline.interfaces import Pending, Placement, Runtime, Schedule
from paceline.interfaces.buckets import wire_bytes
from paceline.transport.security import SECRET, TOKEN, dedicated_token

if TYPE_CHECKING:
    from paceline.collectives.communicator import Communicator


class InNetworkRow(Protocol):
    """A collective: how a rank joins its sums, and what these send."""

    def joining(self, comm: Communicator, job: JobConfig) -> Joining: ...

    def schedule(self, size: int, at: Placement) -> Schedule: ...


class AggregatorSums:
    """By aggregators; a queue for each communicator, for each chain of works that issues sums
    there, and for each operation. *row*: the collective; *where*: each rack's aggregator."""

    def __init__(
        self, row: InNetworkRow, where: Mapping[int, Address], name: str, token: str
    ) -> None:
        self._row, self._where = row, where
        self._name, self._token = name, token
        self._queues: dict[tuple[str, str, str], SumQueue] = {}
        self._losses = LossNotice()

    def start(self, comm: Communicator, operation: IntegerOperation) -> None:
        """Find the aggregators of this *operation* on *comm*'s own integers now. Collective.
        Raises, on all ranks, `UsageError` or `PeerLostError`."""
        self._queue(comm, comm.chain.path, operation).start().wait()

    def all_reduce(
        self, comm: Communicator, values: torch.Tensor, operation: IntegerOperation
    ) -> Pending:
        """Replace *values* by their sums over all ranks, or by the largest. Collective."""
        issuer = current()
        path = comm.chain.path if issuer is None else issuer.path
        schedule = self._row.schedule(wire_bytes(values), comm.placement)
        comm.count_sent(schedule.bytes_sent(comm.rank))
        job = self._queue(comm, path, operation).all_reduce(values, operation)
        return WorkPending(comm, issuer, job, "add_up")

    def close(self) -> None:
        """All sums are in. Collective."""
        for queue in self._queues.values():
            queue.close()
        self._queues.clear()

    def _queue(
        self, comm: Communicator, path: str, operation: IntegerOperation
    ) -> SumQueue:
        """Its own for each *operation*: sums follow what is agreed on for them, and that of the
        next buffer may be under way before."""
        key = comm.name, path, operation
        if key not in self._queues:
            job = JobConfig(
                rank=comm.rank,
                aggregators=self._where,
                name=f"{self._name} {comm.name}|{path}|{operation}",
                token=self._token,
            )
            self._queues[key] = SumQueue(
                comm,
                f"{path}|{operation}",
                self._row.joining(comm, job),
                self._losses,
            )
        return self._queues[key]


def sums_by_aggregators(
    row: InNetworkRow,
    comm: Communicator,
    runtime: Runtime,
    environment: Mapping[str, str] = os.environ,
) -> AggregatorSums:
    """As a job's environment says. Collective. Raises `UsageError`."""
    found = aggregators_of(runtime) or {}
    token = dedicated_token(environment)
    if token is None and found:
        raise UsageError(
            f"aggregators are there, and neither {TOKEN} nor {SECRET}: export what `paceline "
            "aggregate` has printed, where workers are started"
        )
    name = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8)
    comm.broadcast(name).wait()  # no other job has it
    job = bytes(name.numpy()).hex()
    return AggregatorSums(row, found, job, token or job)
