"""A server, or another service, as those who run it see it.

`paceline.parameter_server` implements `Server` (`state_machine.server`; `process` wraps it). Those who run it
are a thread behind sockets (`transport.listener`), the simulated runtime, and tests. `parameter_server.process.service_registry`
says which services there are. One that asks others is an `AskingServer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from paceline.interfaces.method import UpdatesOnServer
from paceline.interfaces.server_messages import Reply, Request


class Sender(NamedTuple):
    """The request that an answer belongs to. A worker that was restarted has another
    *incarnation*. A service that asks has a number behind those of the workers: number *i* of
    its job's services is sender *workers* + *i*."""

    worker: int
    incarnation: int
    channel: str
    number: int
    received: int = 0
    """The worker has the answers to the channel's requests below this number."""


class Answer(NamedTuple):
    """An answer to one request. *payload* is flat, shared by all workers that get it, and
    never written again."""

    to: Sender
    message: Reply
    payload: torch.Tensor | None = None


class Ask(NamedTuple):
    """A service's request to another one, its *peer*. *number* is the asker's own, and comes
    back with the answer. *payload* and *into* are flat, and not touched by the asker until
    then; *channel*: as in `Endpoint.request`."""

    peer: str
    number: int
    message: Request
    payload: torch.Tensor | None = None
    into: torch.Tensor | None = None
    channel: str = ""


class Work(NamedTuple):
    """What a transition cost a server's processor: bytes that it added up (or copied), bytes of
    parameters that an optimizer stepped, and bytes that were read or written for codes."""

    added: int = 0
    stepped: int = 0
    coded: float = 0


class Server(Protocol):
    """A server as a pure state machine: no I/O, no clock, no threads. The real runtime runs
    it behind sockets, the simulated runtime as an event handler, a test calls it directly.

    Exceptions are faults of the server itself: what workers do wrong is answered with
    `Refused`, and changes nothing.
    """

    def on_message(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> list[Answer]:
        """A request has come in. *payload* is the server's from now on. A request that came
        before is not done again, and answered again if it had been answered."""
        ...

    def on_lost(self, worker: int, incarnation: int, now: float) -> list[Answer]:
        """The connection to a worker is lost: nobody waits for it any more."""
        ...

    def next_deadline(self) -> float | None:
        """When `on_timer` wants to be called, if nothing happens before."""
        ...

    def on_timer(self, now: float) -> list[Answer]:
        """A deadline has passed."""
        ...

    def take_work(self) -> Work:
        """What was done since this was last called."""
        ...


@runtime_checkable
class AskingServer(Protocol):
    """A `Server` that is a client of other services, too: its transitions also return what it
    asks of them. Each `Ask` is followed by one `on_reply`, or by the `on_peer_lost` of its
    peer; none comes after that. Example: an aggregator returns an `Ask` once the parts of
    its rack are in, and answers its workers in `on_reply`.

    As `Server`, it has no I/O, no clock and no threads.
    """

    def on_message(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> Sequence[Answer | Ask]:
        """As `Server.on_message`; the sender may be another service."""
        ...

    def on_lost(
        self, worker: int, incarnation: int, now: float
    ) -> Sequence[Answer | Ask]:
        """As `Server.on_lost`; of another service, too, that asks here."""
        ...

    def next_deadline(self) -> float | None:
        """As `Server.next_deadline`."""
        ...

    def on_timer(self, now: float) -> Sequence[Answer | Ask]:
        """As `Server.on_timer`."""
        ...

    def take_work(self) -> Work:
        """As `Server.take_work`."""
        ...

    def on_reply(
        self,
        peer: str,
        number: int,
        reply: Reply,
        payload: torch.Tensor | None,
        now: float,
    ) -> Sequence[Answer | Ask]:
        """*peer* has answered request *number*, maybe with `Refused`. *payload* is the
        tensor that was handed over for it."""
        ...

    def on_peer_lost(
        self, peer: str, reason: str, now: float
    ) -> Sequence[Answer | Ask]:
        """*peer* is gone, for the *reason* given in words: it answers nothing any more, and
        whoever waits for it is to be told."""
        ...


@runtime_checkable
class ReturningServer(AskingServer, Protocol):
    """An `AskingServer` whose peers may come back: who runs it tries to reach one that is lost
    again and again, as one that asks with a later incarnation."""

    def on_peer_back(self, peer: str, now: float) -> Sequence[Answer | Ask]:
        """*peer* is there again after an `on_peer_lost`: it may be asked."""
        ...


AnyServer = Server | AskingServer


@dataclass(frozen=True)
class Start:
    """What a service is told when it starts.

    *workers*: how many there are. *services*: the names of all of its job's, in order; number
    *i* of them asks as sender *workers* + *i*. *peers*: those of them that this one may ask.
    *method*: as in `ServiceJob`.
    """

    name: str
    workers: int
    services: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    method: UpdatesOnServer | None = None

    def name_of(self, sender: int) -> str:
        """What people call a sender: ``"worker 3"``, or a service by its name."""
        if sender < self.workers:
            return f"worker {sender}"
        return self.services[sender - self.workers]
