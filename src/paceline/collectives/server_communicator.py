"""Averages formed by a parameter server, for any method that averages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import ClassVar, NoReturn

import torch
import torch.distributed as dist

from paceline.collectives import continuations
from paceline.collectives.communicator import TorchComm
from paceline.collectives.continuations import Chain, Work
from paceline.collectives.pending import call_when_all_in
from paceline.errors import UsageError
from paceline.interfaces import Endpoint, Pending, Reception, ReduceOperation, Runtime
from paceline.interfaces.buckets import stand_in_for, stands_in, wire_bytes
from paceline.interfaces.server_messages import Leave, Reduce
from paceline.transport.protocol import SMALL_BYTES


class ServerComm(TorchComm):
    """A `Comm` whose all-reduces are requests to *endpoints*, each of which adds up its
    part of the buffer in rank order; all else goes through torch.distributed.

    The sum has the same bits in all runtimes. Each buffer goes out once and comes back once:
    every server's link carries as many times its part as there are workers, each way.
    """

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        endpoints: Sequence[Endpoint],
        group: dist.ProcessGroup | None = None,
        channel: str = "",
        chain: Chain | None = None,
        issuer: Chain | None = None,
    ) -> None:
        super().__init__(runtime, name, group, chain, issuer)
        self._endpoints = endpoints
        self._channel = channel
        self._numbers = 0

    threads: ClassVar[bool] = False
    """An endpoint's answers are taken by whoever asked for them: see `transport.connection`."""

    def all_reduce(
        self, buffer: torch.Tensor, operation: ReduceOperation = "mean"
    ) -> Pending:
        if continuations.current() is not self.issuer:
            return self._round().all_reduce(buffer, operation)
        if buffer.is_complex():
            buffer = torch.view_as_real(buffer).view(-1)
        number, self._numbers = self._numbers, self._numbers + 1
        message = Reduce(channel=self._channel, number=number, operation=operation)
        receptions = [
            endpoint.request(message, part, part, channel=self._channel)
            for endpoint, part in self._parts(number, _flat(buffer))
        ]
        return Receptions(self, receptions)

    def leave(self) -> None:
        for endpoint in self._endpoints:
            endpoint.request(
                Leave()
            )  # answered when all have left: nobody waits for that

    def lanes(self, device: torch.device) -> int:
        return 1

    def _make_channel(self, name: str) -> TorchComm:
        full_name, group = self._beside(f"channel {name}", range(self.size))
        return ServerComm(self._runtime, full_name, self._endpoints, group, name)

    def group(self, ranks: Sequence[int]) -> NoReturn:
        raise UsageError(
            f"group {tuple(ranks)} under collective=parameter-server: its servers add up "
            "what all workers send. Use another collective with this method, "
            "collective=native for example"
        )

    def _make_round(self, issuer: Chain) -> TorchComm:
        name, group = self._beside(f"after {issuer.path}", range(self.size))
        channel = self._channel + issuer.steps
        return ServerComm(
            self._runtime, name, self._endpoints, group, channel, issuer.inner, issuer
        )

    def _parts(
        self, number: int, flat: torch.Tensor
    ) -> list[tuple[Endpoint, torch.Tensor]]:
        """Which server adds up which part: equal ones, or all of a small buffer at one
        server after the other."""
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


class Receptions:
    """A `Pending` over several receptions."""

    def __init__(self, comm: TorchComm, receptions: Sequence[Reception]) -> None:
        self._comm = comm
        self._receptions = receptions

    def wait(self) -> None:
        if self._receptions:
            continuations.check_may_wait()
            self.settle()

    def settle(self) -> None:
        for reception in self._receptions:
            reception.wait()
        self._receptions = ()

    def then(self, work: Work) -> Pending:
        continuations.check_issued_here(self._comm.issuer)
        return self._comm.chain.follow(self, work)

    def when_in(self, action: Callable[[], None]) -> None:
        call_when_all_in(self._receptions, action)
