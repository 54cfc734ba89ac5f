"""A server that was there before its job: what it is, the job's workers tell it.

A service that a worker starts is told its kind and its peers by who starts it (see `pool`).
``paceline serve`` starts a server for whatever comes. So workers whose servers are of another
kind than parameter servers that share out a model introduce them: first all of them are told
what they are, and, once all know, where the others listen. All workers say the same, and the
first counts. They show the job's token, as for everything they ask; a server asks its peers with
the same token, and makes nothing but a row of `kinds`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from paceline.errors import UsageError
from paceline.interfaces import (
    Answer,
    AnyServer,
    Ask,
    AskingServer,
    ReturningServer,
    Sender,
    Start,
    Work,
)
from paceline.interfaces.server_messages import Done, Introduce, Refused, Reply, Request
from paceline.parameter_server.process import service_registry
from paceline.parameter_server.process.monitors import make_machine
from paceline.transport.listener import Listener, Shell
from paceline.transport.peers import PeerAddress

MOST_SERVICES = 64
"""A job has no more servers than that which know each other."""

Meet = Callable[[int, Mapping[str, PeerAddress]], None]
"""Connects to peers, as that sender: `Shell.meet`."""


def make_shell(workers: int, listener: Listener, token: str) -> Shell:
    """A dedicated server for one training, where the *listener* is."""
    address, port = listener.address, listener.port
    machine = Dedicated(workers, f"server at {address}:{port}", token)
    shell = Shell(
        machine,
        address,
        port,
        workers=workers,
        services=MOST_SERVICES,
        token=token,
        listener=listener,
    )
    machine.meet = shell.meet
    return shell


class Dedicated:
    """The `AskingServer` of a training of *workers* workers: a parameter server, unless an
    `Introduce` comes before all else. *meet* is to be set before anything comes; *token* is the
    peers', too."""

    def __init__(self, workers: int, name: str, token: str) -> None:
        self.meet: Meet | None = None
        self._workers, self._token = workers, token
        self._machine: AnyServer = make_machine(workers, name)
        self._introduced: Introduce | None = None
        self._asked = self._has_met = False

    @property
    def machine(self) -> AnyServer:
        """What it is for this training."""
        return self._machine

    def on_message(
        self, sender: Sender, message: Request, payload: torch.Tensor | None, now: float
    ) -> Sequence[Answer | Ask]:
        if not isinstance(message, Introduce):
            self._asked = True
            return self._machine.on_message(sender, message, payload, now)
        try:
            self._introduce(sender, message)
        except UsageError as error:
            return [Answer(sender, Refused(reason=str(error)))]
        return [Answer(sender, Done())]

    def on_lost(
        self, worker: int, incarnation: int, now: float
    ) -> Sequence[Answer | Ask]:
        return self._machine.on_lost(worker, incarnation, now)

    def next_deadline(self) -> float | None:
        return self._machine.next_deadline()

    def on_timer(self, now: float) -> Sequence[Answer | Ask]:
        return self._machine.on_timer(now)

    def take_work(self) -> Work:
        return self._machine.take_work()

    def on_reply(
        self,
        peer: str,
        number: int,
        reply: Reply,
        payload: torch.Tensor | None,
        now: float,
    ) -> Sequence[Answer | Ask]:
        assert isinstance(self._machine, AskingServer), "who asks is one"
        return self._machine.on_reply(peer, number, reply, payload, now)

    def on_peer_lost(
        self, peer: str, reason: str, now: float
    ) -> Sequence[Answer | Ask]:
        assert isinstance(self._machine, AskingServer), "who has peers is one"
        return self._machine.on_peer_lost(peer, reason, now)

    def on_peer_back(self, peer: str, now: float) -> Sequence[Answer | Ask]:
        if isinstance(self._machine, ReturningServer):
            return self._machine.on_peer_back(peer, now)
        return ()

    def _introduce(self, sender: Sender, words: Introduce) -> None:
        """Raises `UsageError` for what makes no sense."""
        if sender.worker >= self._workers:
            raise UsageError("introduce: only workers introduce their servers")
        said = msgspec.structs.replace(words, peers={})
        if self._introduced is None:
            self._machine = self._made(said)
            self._introduced = said
        if said != self._introduced:
            raise UsageError(
                f"introduce: worker {sender.worker} has other servers than those of who came "
                "first: give the same options on every worker"
            )
        if words.peers and not self._has_met:
            self._meet(words)

    def _made(self, words: Introduce) -> AnyServer:
        names = words.services
        if self._asked:
            raise UsageError("introduce: this server has begun as a parameter server")
        if not (len(set(names)) == len(names) <= MOST_SERVICES):
            raise UsageError(
                f"introduce: expected up to {MOST_SERVICES} services with names of their "
                f"own, got {len(names)}"
            )
        if not 0 <= words.number < len(names):
            raise UsageError(f"introduce: there is no service {words.number}")
        if words.kind not in service_registry.KINDS:
            known = ", ".join(service_registry.KINDS)
            raise UsageError(f"introduce: expected a kind among {known}")
        name = names[words.number]
        start = Start(
            name,
            self._workers,
            services=tuple(names),
            peers=tuple(other for other in names if other != name),
        )
        return service_registry.make(words.kind, start)

    def _meet(self, words: Introduce) -> None:
        name = words.services[words.number]
        if words.peers.keys() != set(words.services) - {name}:
            raise UsageError("introduce: expected where each of the other services is")
        assert self.meet is not None, "it is set before anything comes"
        self._has_met = True
        peers = {
            name: PeerAddress(host=host, port=port, token=self._token)
            for name, (host, port) in words.peers.items()
        }
        self.meet(self._workers + words.number, peers)
