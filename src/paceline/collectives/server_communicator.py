"""Communicators of jobs with servers: `ServerCommunicator` averages at servers, `NoCollectives`
refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import ClassVar, NoReturn

import torch

from paceline.collectives.communicator import Communicator
from paceline.collectives.pending import (
    Callback,
    ContinuationChain,
    call_when_all_complete,
    check_issued_here,
    check_may_wait,
    current,
)
from paceline.errors import UsageError
from paceline.interfaces import (
    Endpoint,
    Pending,
    PendingReply,
    Placement,
    ReduceOperation,
    Runtime,
    Schedule,
    WorkerGroup,
)
from paceline.interfaces.buckets import stand_in_for, stands_in, wire_bytes
from paceline.interfaces.server_messages import Leave, Reduce
from paceline.transport.protocol import SMALL_BYTES


class ServerCommunicator(Communicator):
    """A `Comm` whose all-reduces are sums at parameter servers; all else goes between workers.

    Each of *endpoints* is a server that sums one part of the buffer, in rank order. So the result
    has the same bits in all runtimes. Each worker sends and receives each buffer once. Each
    server's link carries its part once per worker, in each direction.
    """

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        endpoints: Sequence[Endpoint],
        workers: WorkerGroup | None = None,
        channel: str = "",
        chain: ContinuationChain | None = None,
        issuer: ContinuationChain | None = None,
    ) -> None:
        super().__init__(runtime, name, workers, chain, issuer)
        self._endpoints = endpoints
        self._channel = channel
        self._numbers = 0

    threads: ClassVar[bool] = False
    """An endpoint's replies are taken by the thread that requested them: see
    `transport.connection`."""

    def all_reduce(
        self, buffer: torch.Tensor, operation: ReduceOperation = "mean"
    ) -> Pending:
        if current() is not self.issuer:
            return self._round().all_reduce(buffer, operation)
        if buffer.is_complex():
            buffer = torch.view_as_real(buffer).view(-1)
        number, self._numbers = self._numbers, self._numbers + 1
        message = Reduce(channel=self._channel, number=number, operation=operation)
        pending_replies = [
            endpoint.request(message, part, part, channel=self._channel)
            for endpoint, part in self._parts(number, _flat(buffer))
        ]
        return PendingReplies(self, pending_replies)

    def leave(self) -> None:
        for endpoint in self._endpoints:
            # Servers reply when all workers have left; no worker waits for that.
            endpoint.request(Leave())

    def max_in_flight(self, device: torch.device) -> int:
        return 1

    def _make_channel(self, name: str) -> Communicator:
        full_name, workers = self._split(f"channel {name}", range(self.size))
        return ServerCommunicator(
            self._runtime, full_name, self._endpoints, workers, name
        )

    def group(self, ranks: Sequence[int]) -> NoReturn:
        raise UsageError(
            f"group {tuple(ranks)} under collective=parameter-server: its servers only sum "
            "over all workers. Use another collective with this method, such as "
            "collective=native"
        )

    def _make_round(self, issuer: ContinuationChain) -> Communicator:
        name, workers = self._split(f"after {issuer.path}", range(self.size))
        channel = self._channel + issuer.steps
        return ServerCommunicator(
            self._runtime,
            name,
            self._endpoints,
            workers,
            channel,
            issuer.nested,
            issuer,
        )

    def _parts(
        self, number: int, flat: torch.Tensor
    ) -> list[tuple[Endpoint, torch.Tensor]]:
        """The part of *flat* that each server sums: equal parts, or a whole small buffer at one
        server in turn."""
        count, size = len(self._endpoints), wire_bytes(flat)
        if count == 1 or size < SMALL_BYTES * count:
            return [(self._endpoints[number % count], flat)]
        cuts = [flat.numel() * i // count for i in range(count + 1)]
        parts = [flat[start:stop] for start, stop in pairwise(cuts)]
        if stands_in(flat):
            for part in parts:
                stand_in_for(size // count, part)
        return list(zip(self._endpoints, parts, strict=True))


def _flat(buffer: torch.Tensor) -> torch.Tensor:
    return buffer if buffer.dim() == 1 else buffer.view(-1)


class PendingReplies:
    """A `Pending` over the replies of several servers."""

    def __init__(
        self, comm: Communicator, pending_replies: Sequence[PendingReply]
    ) -> None:
        self._comm = comm
        self._receptions = pending_replies

    def wait(self) -> None:
        if self._receptions:
            check_may_wait()
            self.wait_for_result()

    def wait_for_result(self) -> None:
        for pending_reply in self._receptions:
            pending_reply.wait()
        self._receptions = ()

    def then(self, work: Callback) -> Pending:
        check_issued_here(self._comm.issuer)
        return self._comm.chain.append(self, work)

    def on_completion(self, action: Callable[[], None]) -> None:
        call_when_all_complete(self._receptions, action)


class NoCollectives:
    """The `Comm` of a supervised job (``--survive``): has rank and size, and refuses every
    collective.

    Any worker may die, so no worker may wait for another one that no server has evicted.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.rank, self.size = runtime.rank, runtime.size
        self.placement = Placement(tuple(range(self.size)))
        self.moves_host_tensors = True

    def max_in_flight(self, device: torch.device) -> int:
        return 1

    def all_reduce(self, buffer: torch.Tensor, operation: str = "mean") -> NoReturn:
        self._refuse("all_reduce")

    def broadcast(self, buffer: torch.Tensor, source: int = 0) -> NoReturn:
        self._refuse("broadcast")

    def reduce_scatter(
        self, output: torch.Tensor, buffer: torch.Tensor, operation: str = "mean"
    ) -> NoReturn:
        self._refuse("reduce_scatter")

    def all_gather(self, output: torch.Tensor, buffer: torch.Tensor) -> NoReturn:
        self._refuse("all_gather")

    def all_to_all(self, output: torch.Tensor, buffer: torch.Tensor) -> NoReturn:
        self._refuse("all_to_all")

    def send(self, buffer: torch.Tensor, to: int) -> NoReturn:
        self._refuse("send")

    def receive(self, buffer: torch.Tensor, source: int) -> NoReturn:
        self._refuse("receive")

    def perform(
        self,
        schedule: Schedule,
        buffer: torch.Tensor,
        operation: str = "sum",
        timed: Schedule | None = None,
    ) -> NoReturn:
        self._refuse("perform")

    def channel(self, name: str) -> NoCollectives:
        return self

    def group(self, ranks: Sequence[int]) -> NoReturn:
        self._refuse("a group")

    def leave(self) -> None:
        """Do nothing: no worker waits for this one."""

    def close(self) -> None:
        """Do nothing: it holds no connections."""

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what} under --survive: workers communicate only through servers, so that the "
            "death of one stops no other. Leave out --survive, or use no collective"
        )
