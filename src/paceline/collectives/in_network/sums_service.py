"""Fallback servers on a host of their own: a kind of service, and what workers say to it.

``paceline serve`` becomes one where workers introduce it so (`parameter_server.process.service_registry`). It opens a
`UdpFallbackServer` for each job that it is asked for, on a thread of its own, and tells where.
Its datagrams are signed with the job's key, which comes over the connection that
`paceline.transport.security` protects.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import torch

from paceline.collectives.in_network.atp_server import Route, UdpFallbackServer
from paceline.collectives.in_network.job_end import numeric
from paceline.collectives.in_network.jobs import MOST_JOBS, key_of, number_of
from paceline.collectives.in_network.packets import (
    FEWEST_ELEMENTS,
    LARGEST_DATAGRAM,
    MOST_WORKERS,
)
from paceline.errors import PeerLostError, UsageError
from paceline.interfaces import Answer, Sender, Start, Work
from paceline.interfaces.server_messages import Refused, Request, Said, Say

if TYPE_CHECKING:
    from paceline.transport.connection import RemoteServer

KIND = "fallback-server"
"""The row of `parameter_server.process.service_registry`."""
MOST_VALUES = 1 << 24
"""In all slots of a job: 64 MB, twice."""
LOOK_SECONDS = 0.1
"""Between two looks at the threads of jobs."""


class Open(msgspec.Struct, tag="open", kw_only=True, forbid_unknown_fields=True):
    """Listen at *host* for job *number*: see `UdpFallbackServer`. Answer: `Opened`."""

    host: str
    number: int
    key: str
    workers: int
    slots: int
    elements: int


class Lead(msgspec.Struct, tag="lead", kw_only=True, forbid_unknown_fields=True):
    """The ways to the workers of job *number*: it begins. Answer: `Opened`."""

    number: int
    routes: list[Route]


class Forget(msgspec.Struct, tag="forget", kw_only=True, forbid_unknown_fields=True):
    """Job *number* is over. Answer: `Opened`."""

    number: int


class Opened(msgspec.Struct):
    """Where the job's server listens; 0 where there is none."""

    port: int = 0


_orders: msgspec.json.Decoder[Open | Lead | Forget] = msgspec.json.Decoder(
    Open | Lead | Forget
)


class SumsService:
    """The `Server`. It has sockets, other than those: what comes to them is nobody else's.

    `on_timer` raises what ends a job's thread: the process ends with it, and so all workers learn
    of it at once, as of any server that is lost."""

    def __init__(self) -> None:
        self._due: float | None = None
        self._servers: dict[int, UdpFallbackServer] = {}
        self._running: dict[int, threading.Thread] = {}

    def on_message(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> list[Answer]:
        try:
            if not isinstance(message, Say):
                raise UsageError(
                    "this server adds up datagrams: expected what opens one"
                )
            opened = self._do(_orders.decode(message.words))
        except (msgspec.MsgspecError, ValueError, OverflowError, OSError) as error:
            return [Answer(sender, Refused(reason=str(error)))]
        if self._running and self._due is None:
            self._due = now + LOOK_SECONDS
        return [Answer(sender, Said(words=msgspec.json.encode(opened)))]

    def on_lost(self, worker: int, incarnation: int, now: float) -> list[Answer]:
        self.close()  # nothing more can be complete
        return []

    def next_deadline(self) -> float | None:
        return self._due

    def on_timer(self, now: float) -> list[Answer]:
        for number in self._running:
            fault = self._servers[number].fault
            if fault is not None:
                raise fault
        self._due = now + LOOK_SECONDS if self._running else None
        return []

    def take_work(self) -> Work:
        return Work()

    def close(self) -> None:
        """All jobs are over."""
        for number in list(self._servers):
            self._forget(number)

    def _do(self, order: Open | Lead | Forget) -> Opened:
        if isinstance(order, Open):
            return self._open(order)
        server = self._servers.get(order.number)
        if isinstance(order, Forget):
            self._forget(order.number)
            return Opened()
        if server is None or order.number in self._running:
            raise UsageError(
                f"job {order.number}: no such one is waiting for its routes"
            )
        if len(order.routes) > MOST_WORKERS:
            raise UsageError(
                f"{len(order.routes)} routes: expected up to {MOST_WORKERS}"
            )
        try:
            server.lead(order.routes)
        except BaseException:
            self._forget(order.number)
            raise
        thread = threading.Thread(target=server.run, name="paceline sums", daemon=True)
        self._running[order.number] = thread
        thread.start()
        return Opened(server.address[1])

    def _open(self, order: Open) -> Opened:
        if order.number in self._servers or len(self._servers) >= MOST_JOBS:
            raise UsageError(
                f"job {order.number}: one of that number is here, or too many"
            )
        if not (
            1 <= order.slots <= MOST_VALUES // max(order.elements, 1)
            and FEWEST_ELEMENTS <= order.elements <= LARGEST_DATAGRAM // 4
        ):
            raise UsageError(
                f"{order.slots} slots of {order.elements} values: expected what a datagram "
                f"holds, and up to {MOST_VALUES} in all"
            )
        server = self._servers[order.number] = UdpFallbackServer(
            order.host,
            number=order.number,
            key=bytes.fromhex(order.key),
            workers=order.workers,
            slots=order.slots,
            elements=order.elements,
        )
        return Opened(server.address[1])

    def _forget(self, number: int) -> None:
        server = self._servers.pop(number, None)
        thread = self._running.pop(number, None)
        if server is not None and thread is None:
            server.close()
        elif server is not None and thread is not None:
            server.stop()
            thread.join()


def make(start: Start) -> SumsService:
    """The row of `parameter_server.process.service_registry`."""
    return SumsService()


class ServerHosts:
    """A worker's ends of the services on dedicated hosts, of part 0, 1, ...; for any threads.
    Of a job's workers one gives the orders, and all `look`."""

    def __init__(self, ends: Sequence[RemoteServer]) -> None:
        self._ends = ends
        self._lock = threading.Lock()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where the services listen."""
        return [end.address for end in self._ends]

    def open(
        self, job: str, token: str, *, workers: int, slots: int, elements: int
    ) -> list[tuple[str, int]]:
        """Where the job's servers listen. Raises `UsageError` and `PeerLostError`."""
        number, key = number_of(token, job), key_of(token, job).hex()
        opened = []
        for end in self._ends:
            host = numeric(end.address)[0]
            order = Open(
                host=host,
                number=number,
                key=key,
                workers=workers,
                slots=slots,
                elements=elements,
            )
            opened.append((host, self._say(end, order)))
        return opened

    def lead(self, job: str, token: str, routes: Sequence[Sequence[Route]]) -> None:
        """Tell each its *routes*. Raises as `open`."""
        number = number_of(token, job)
        for end, ways in zip(self._ends, routes, strict=True):
            self._say(end, Lead(number=number, routes=list(ways)))

    def forget(self, job: str, token: str) -> None:
        """The job is over."""
        number = number_of(token, job)
        for end in self._ends:
            with contextlib.suppress(UsageError, PeerLostError):
                self._say(end, Forget(number=number))

    def look(self) -> None:
        """Raise `PeerLostError` where one is lost."""
        with self._lock:
            for end in self._ends:
                end.look()

    def _say(self, end: RemoteServer, order: Open | Lead | Forget) -> int:
        with self._lock:
            reply = end.ask(Say(words=msgspec.json.encode(order))).wait()
        if not isinstance(reply, Said):
            raise UsageError(f"{end.name}: expected what it has opened, got {reply}")
        return msgspec.json.decode(reply.words, type=Opened).port
