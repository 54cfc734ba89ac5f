"""A server as those who run it see it.

`paceline.server` implements `Server` (`protocol`; `process` wraps it). Those who run it
are a thread behind sockets (`server.serve`), the virtual world, and tests.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from paceline.messages import Reply, Request


class Sender(NamedTuple):
    """Which request an answer belongs to: it is sent back unread. A worker that was
    restarted has another *incarnation*."""

    worker: int
    incarnation: int
    channel: str
    number: int
    received: int = 0
    """The worker has the answers to all requests of the channel below this number."""


class Answer(NamedTuple):
    """What a server sends, and to whom. *payload* is flat, shared by all who get it, and
    never written again."""

    to: Sender
    message: Reply
    payload: torch.Tensor | None = None


class Work(NamedTuple):
    """What a transition cost a server's processor: bytes that it added up (or copied), and
    bytes of parameters that an optimizer stepped."""

    added: int = 0
    stepped: int = 0


class Server(Protocol):
    """A server as a pure state machine: no I/O, no clock, no threads. The real world runs
    it behind sockets, the virtual world as an event handler, a test calls it directly.

    Exceptions are faults of the server itself: what workers do wrong is answered with
    `Refused`, and changes nothing.
    """

    def on_message(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> list[Answer]:
        """A request has come in. *payload* is the server's from now on. Seen before: it is
        not done again, and answered again if it had been answered."""
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
