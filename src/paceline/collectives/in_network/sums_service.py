"""ATP's servers on dedicated hosts: the service and the workers' requests to it.

``paceline serve`` becomes such a server when workers ask for one
(`parameter_server.process.services`). It runs an `AggregatorServer` for the job in a thread, and
replies with the port.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import torch

from paceline.collectives.in_network.server import AggregatorServer, ServerThread
from paceline.collectives.in_network.wire import Address
from paceline.errors import UsageError
from paceline.interfaces import Reply, Sender, Service, Work
from paceline.interfaces.server_messages import (
    Rejected,
    Request,
    ServiceReply,
    ServiceRequest,
)

if TYPE_CHECKING:
    from paceline.transport.connection import ServerConnection

KIND = "atp-server"
"""The service's name in `parameter_server.process.services`."""


class Open(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request: sum at *host*, a numeric address of this machine, for workers with *token*.

    Reply: `Opened`; a repeated request gets the same.
    """

    host: str
    token: str


class Opened(msgspec.Struct):
    """Reply: the port of the sums."""

    port: int


class SumsService(Service):
    """The `Service`; frames of sums go to a port of their own."""

    def __init__(self) -> None:
        self._threads: dict[tuple[str, str], ServerThread] = {}

    def on_request(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> list[Reply]:
        try:
            if not isinstance(message, ServiceRequest):
                raise UsageError("this server adds up for ATP: expected what opens it")
            order = msgspec.json.decode(message.content, type=Open)
            opened = Opened(self._port_for(order))
        except (msgspec.MsgspecError, ValueError) as error:
            return [Reply(sender, Rejected(reason=str(error)))]
        return [Reply(sender, ServiceReply(content=msgspec.json.encode(opened)))]

    def on_worker_lost(self, worker: int, incarnation: int, now: float) -> list[Reply]:
        self.close()  # without this worker no sum can be complete
        return []

    def next_deadline(self) -> float | None:
        return None

    def on_timer(self, now: float) -> list[Reply]:
        return []

    def take_work(self) -> Work:
        return Work()

    def close(self) -> None:
        """End all sums."""
        for thread in self._threads.values():
            thread.close()
        self._threads.clear()

    def _port_for(self, order: Open) -> int:
        key = order.host, order.token
        if key not in self._threads:
            if self._threads:
                raise UsageError("this server adds up for another job already")
            server = AggregatorServer(order.host, 0, token=order.token)
            self._threads[key] = ServerThread(server)
        return self._threads[key].server.address[1]


class ServerHosts:
    """A worker's connections to the services on dedicated hosts, of part 0, 1, ..."""

    def __init__(self, ends: Sequence[ServerConnection]) -> None:
        self._ends = ends

    @property
    def addresses(self) -> list[Address]:
        """Where the services themselves listen."""
        return [end.address for end in self._ends]

    def open(self, token: str) -> list[Address]:
        """Open the sums; return their addresses. Raises `UsageError` or `PeerLostError`."""
        opened = []
        for end in self._ends:
            host = str(socket.getaddrinfo(*end.address)[0][4][0])
            content = msgspec.json.encode(Open(host=host, token=token))
            reply = end.ask(ServiceRequest(content=content)).wait()
            if not isinstance(reply, ServiceReply):
                raise UsageError(f"{end.name}: expected where it adds up, got {reply}")
            port = msgspec.json.decode(reply.content, type=Opened).port
            opened.append((host, port))
        return opened
