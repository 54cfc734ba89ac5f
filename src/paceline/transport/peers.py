"""Connects a service to its peers, the other services that it sends requests to.

A service learns its peers' addresses when all services of its training listen
(`PeerConnections.meet`). Connecting may take a while, and two services may connect to each other.
So a thread of its own makes each connection, while the process's loop continues to serve. The
thread passes on its connection, and wakes the loop by a byte in a pipe. From then on the `PollLoop`
reads the connection. `PeerConnections.collect` returns events.

Requests wait until their connection is made. A lost or unreachable peer is an event at once, and
again at each further request: no request waits for it. If peers may come back (*reconnects*), a
thread retries until the peer answers. Each attempt is a later incarnation, since the peer would
refuse the earlier one.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from paceline.errors import PacelineError, UsageError
from paceline.interfaces import Ask
from paceline.interfaces.server_messages import PeerAddress, ReplyMessage
from paceline.timeouts import timeouts
from paceline.transport.connection import ServerConnection, check_listens
from paceline.transport.poll_loop import PollLoop
from paceline.transport.protocol import ServiceKey

ATTEMPTS_AN_INCARNATION = 1 << 20


class PeerReplied(NamedTuple):
    """*peer* has answered request *number*; *payload* is the tensor that the request passed for it."""

    peer: str
    number: int
    message: ReplyMessage
    payload: torch.Tensor | None


class PeerLost(NamedTuple):
    """*peer* no longer answers; *reason* is an error message."""

    peer: str
    reason: str


class PeerBack(NamedTuple):
    """*peer* answers again after a `PeerLost`."""

    peer: str


PeerEvent = PeerReplied | PeerLost | PeerBack


def no_peer(asker: str, peer: str, peers: Iterable[str]) -> str:
    """Return the error message for a request to a service that is no peer."""
    return (
        f"{asker} sends a request to {peer!r}, which is none of its peers: expected one of "
        f"{', '.join(peers) or 'none'}"
    )


class Route(NamedTuple):
    """How to reach a peer: its service, and the address where it listens."""

    service: ServiceKey
    address: PeerAddress


@dataclass
class _Peer:
    """A peer, and the requests that wait for its connection.

    Attributes:
        connection: None until it is made.
        waiting: Requests to send once *connection* is made.
        lost: The reason why there is no connection; empty if there is none.
        route: None until it is known.
        incarnation: This service's incarnation in the next connection.
    """

    connection: ServerConnection | None = None
    waiting: list[Ask] = field(default_factory=list)
    lost: str = ""
    route: Route | None = None
    incarnation: int = 0


class PeerConnections:
    """Connections to peers, made and read beside *loop*.

    Requests to peers in *names* may come before their addresses are known. All methods except
    `meet` are called on the thread of *loop*. With *reconnects*, lost peers may come back.
    """

    def __init__(self, loop: PollLoop, names: Iterable[str] = ()) -> None:
        self.reconnects = False
        self._loop = loop
        self._peers = {name: _Peer() for name in names}
        self._sender = 0
        self._made: queue.SimpleQueue[tuple[str, ServerConnection | PacelineError]] = (
            queue.SimpleQueue()
        )
        self._events: list[PeerEvent] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._awake, self._wake = os.pipe()
        loop.watch(self._awake, self._wake_up)

    def meet(
        self, sender: int, routes: Mapping[str, Route], incarnation: int = 0
    ) -> None:
        """Start connecting to all peers, as this incarnation of service number *sender*.

        Returns at once.
        """
        self._sender = sender
        for name, route in routes.items():
            peer = self._peers.setdefault(name, _Peer())
            peer.route = route
            peer.incarnation = incarnation * ATTEMPTS_AN_INCARNATION
            self._set_out(name, peer, again=False)

    def _wake_up(self) -> None:
        os.read(self._awake, 4096)

    def ask(self, ask: Ask) -> None:
        """Send a request. Raises `UsageError` if its target is no peer."""
        peer = self._peers.get(ask.peer)
        if peer is None:
            raise UsageError(no_peer("a service", ask.peer, self._peers))
        if peer.lost:
            self._events.append(PeerLost(ask.peer, peer.lost))
        elif peer.connection is None:
            peer.waiting.append(ask)
        else:
            self._send(peer.connection, ask)

    def collect(self) -> list[PeerEvent]:
        """Return the events since the last call."""
        while not self._made.empty():
            self._take(*self._made.get())
        events, self._events = self._events, []
        for name, peer in self._peers.items():
            if peer.connection is not None and peer.connection.failure is not None:
                events.append(self._lose(name, peer, str(peer.connection.failure)))
        return events

    def close(self, well: bool) -> None:
        """Close all connections; *well*: with a goodbye, so that no peer reports a loss."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            self._loop.unwatch(self._awake)
            os.close(self._awake)
            os.close(self._wake)
        while not self._made.empty():
            _, made = self._made.get()
            if isinstance(made, ServerConnection):
                made.part(well)
        for peer in self._peers.values():
            if peer.connection is not None:
                peer.connection.part(well)

    def _set_out(self, name: str, peer: _Peer, again: bool) -> None:
        threading.Thread(
            target=self._connect, args=(name, peer, again), daemon=True
        ).start()

    def _connect(self, name: str, peer: _Peer, again: bool) -> None:
        """Connect to one peer, on a thread of its own; *again*: retry until it answers."""
        pause = timeouts.peer_retry
        if again and self._closed.wait(pause):
            return
        made = self._reached(name, peer)
        while again and not isinstance(made, ServerConnection):
            pause = min(2 * pause, timeouts.peer_retry_at_most)
            if self._closed.wait(pause):
                return
            made = self._reached(name, peer)
        with self._lock:
            if not self._closed.is_set():
                self._made.put((name, made))
                os.write(self._wake, b"\n")
                return
        if isinstance(made, ServerConnection):
            made.part(well=True)

    def _reached(self, name: str, peer: _Peer) -> ServerConnection | PacelineError:
        """Return a new connection to a peer, or the error."""
        assert peer.route is not None, "it is known before anybody sets out"
        address = peer.route.address
        try:
            check_listens(name, address.host, address.port)
            return ServerConnection(
                name,
                address.host,
                address.port,
                worker=self._sender,
                incarnation=peer.incarnation,
                token=address.token,
                service=peer.route.service,
            )
        except PacelineError as error:
            return error
        finally:
            peer.incarnation += 1

    def _take(self, name: str, made: ServerConnection | PacelineError) -> None:
        peer = self._peers[name]
        if isinstance(made, PacelineError):
            self._events.append(self._lose(name, peer, str(made)))
            return
        peer.connection = made
        made.read_in(self._loop)
        waiting, peer.waiting = peer.waiting, []
        for ask in waiting:
            self._send(made, ask)
        if peer.lost:
            peer.lost = ""
            self._events.append(PeerBack(name))

    def _send(self, connection: ServerConnection, ask: Ask) -> None:
        def replied(reply: ReplyMessage) -> None:
            self._events.append(PeerReplied(ask.peer, ask.number, reply, ask.into))

        try:
            connection.ask(ask.message, ask.payload, ask.into, ask.channel, replied)
        except PacelineError:
            # `collect` reports a peer that is lost or refuses this service.
            if connection.failure is None:
                raise

    def _lose(self, name: str, peer: _Peer, reason: str) -> PeerLost:
        if peer.connection is not None:
            peer.connection.part(well=False)
        peer.connection, peer.lost = None, reason
        peer.waiting.clear()
        if peer.route is not None and self.reconnects:
            self._set_out(name, peer, again=True)
        return PeerLost(name, reason)
