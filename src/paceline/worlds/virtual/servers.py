"""Parameter servers in virtual time: the same state machine, as a handler of events.

A request travels over the links like any message, on a connection of its own per (worker,
server, channel): first in, first out, so incast falls out of the link model. The server's
processor takes requests first come, first served, and what a transition adds up and steps
keeps it busy; answers leave when it is done. So it is with a server's own deadlines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from paceline.errors import UsageError
from paceline.instruments import Journal
from paceline.interfaces import Answer, Sender, Server, ServerJob
from paceline.messages import Refused, Reply, Request
from paceline.network.cluster import Cluster
from paceline.network.workload import Workload
from paceline.server.protocol import ParameterServer
from paceline.tensors import stand_in_for, wire_bytes
from paceline.worlds.virtual.clock import Clock, Completion
from paceline.worlds.virtual.links import Links

HEADER_BYTES = 128
"""What a message is on the network without its payload."""


@dataclass(frozen=True)
class ServerRates:
    """Bytes per second that a server's processor adds up, and that its optimizer steps."""

    added: float = float("inf")
    stepped: float = float("inf")


def rates_of(workload: Workload | None) -> ServerRates:
    """A server's optimizer is as fast as a worker's, where the workload tells that."""
    if workload is None or not workload.update:
        return ServerRates()
    return ServerRates(stepped=sum(workload.sizes) / workload.update)


class VirtualServer:
    """One server on a virtual host."""

    def __init__(
        self,
        name: str,
        host: int,
        server: Server,
        clock: Clock,
        links: Links,
        rates: ServerRates,
    ) -> None:
        self.name, self.host, self.server = name, host, server
        self.clock, self.links = clock, links
        self._rates = rates
        self._waiting: dict[tuple[int, str, int], VirtualReception] = {}
        self._queue: deque[Callable[[float], Sequence[Answer]]] = deque()
        """What is to be handled, each at an instant that it is told."""
        self._busy = False
        self._alarm: float | None = None
        """When the next event is that looks whether a deadline has passed."""

    def expect(self, sender: Sender, reception: VirtualReception) -> None:
        """*reception* takes the answer to a request that is on its way."""
        self._waiting[sender.worker, sender.channel, sender.number] = reception

    def arrived(
        self, sender: Sender, message: Request, payload: torch.Tensor | None
    ) -> None:
        """A request's last byte is here."""
        self._enter(partial(self.server.on_message, sender, message, payload))

    def _enter(self, event: Callable[[float], Sequence[Answer]]) -> None:
        self._queue.append(event)
        if not self._busy:
            self._serve()

    def _serve(self) -> None:
        """Handle what came first; its answers leave when the processor is done."""
        if not self._queue:
            self._busy = False
            return
        self._busy = True
        answers = self._queue.popleft()(self.clock.now)
        self._set_alarm()
        added, stepped = self.server.take_work()
        seconds = added / self._rates.added + stepped / self._rates.stepped
        self.clock.at(self.clock.now + seconds, partial(self._done, answers))

    def _set_alarm(self) -> None:
        """An event cannot be taken back: one that comes before the deadline, which has
        moved, sets the next."""
        deadline = self.server.next_deadline()
        if deadline is not None and (self._alarm is None or deadline < self._alarm):
            self._alarm = max(deadline, self.clock.now)
            self.clock.at(self._alarm, partial(self._ring, self._alarm))

    def _ring(self, alarm: float) -> None:
        if alarm != self._alarm:
            return  # an earlier one was set since
        self._alarm = None
        deadline = self.server.next_deadline()
        if deadline is not None and deadline <= self.clock.now:
            self._enter(self.server.on_timer)
        else:
            self._set_alarm()

    def _done(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._send(answer)
        self._serve()

    def _send(self, answer: Answer) -> None:
        to = answer.to
        reception = self._waiting.pop((to.worker, to.channel, to.number), None)
        if reception is None:
            return
        size = HEADER_BYTES
        if answer.payload is not None:
            # A tensor that stands for a larger one is as large as what it answers.
            into = reception.into
            stands = into is not None and hasattr(into, "stands_for_bytes")
            size += wire_bytes(into if stands and into is not None else answer.payload)
        self.links.send(
            ("from server", self.name, to.worker, to.channel),
            self.host,
            self.links.cluster.host_of(to.worker),
            size,
            lambda: None,
            partial(reception.arrived, answer.message, answer.payload),
        )


class VirtualReception:
    """The `Reception` of one request."""

    def __init__(
        self,
        clock: Clock,
        journal: Journal,
        into: torch.Tensor | None,
        describe: Callable[[], str],
        received: Callable[[], None],
    ) -> None:
        """*received* is called when the answer is here."""
        self.into = into
        self._clock, self._journal = clock, journal
        self._completion = Completion(describe)
        self._received = received
        self._answer: Reply | None = None

    def arrived(self, message: Reply, payload: torch.Tensor | None) -> None:
        """The answer's last byte is here."""
        if payload is not None and self.into is not None:
            self.into[: payload.numel()].copy_(payload)
        self._answer = message
        self._received()
        self._clock.complete(self._completion)

    def when_in(self, action: Callable[[], None]) -> None:
        self._clock.when(self._completion, action)

    def wait(self) -> Reply:
        start = self._clock.current.time
        self._clock.wait(self._completion)
        self._journal.waited("server", start, self._clock.current.time)
        assert self._answer is not None
        if isinstance(self._answer, Refused):
            raise UsageError(self._answer.reason)
        return self._answer


@dataclass
class VirtualChannel:
    """A worker's requests on one channel: the next one's number, and which of them are
    unanswered, in order."""

    next: int = 0
    unanswered: dict[int, None] = field(default_factory=dict)

    def take_number(self) -> tuple[int, int]:
        """A request's number, and the one below which all are answered."""
        number, self.next = self.next, self.next + 1
        received = next(iter(self.unanswered), number)
        self.unanswered[number] = None
        return number, received


@dataclass
class VirtualEndpoint:
    """One virtual worker's `Endpoint`."""

    worker: int
    server: VirtualServer
    journal: Journal
    _channels: dict[str, VirtualChannel] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.server.name

    def request(
        self,
        message: Request,
        payload: torch.Tensor | None = None,
        into: torch.Tensor | None = None,
        channel: str = "",
    ) -> VirtualReception:
        clock, links = self.server.clock, self.server.links
        requests = self._channels.setdefault(channel, VirtualChannel())
        number, received = requests.take_number()
        sender = Sender(self.worker, 0, channel, number, received)
        what = type(message).__name__.lower()
        reception = VirtualReception(
            clock,
            self.journal,
            into,
            lambda: f"an answer of {self.name} to its {what}",
            partial(requests.unanswered.pop, number),
        )
        self.server.expect(sender, reception)
        size, copied = HEADER_BYTES, None
        if payload is not None:
            copied = payload.detach().clone()
            size += wire_bytes(payload)
            if hasattr(payload, "stands_for_bytes"):
                stand_in_for(wire_bytes(payload), copied)
        self.journal.sent(size)
        send = partial(
            links.send,
            ("to server", self.server.name, self.worker, channel),
            links.cluster.host_of(self.worker),
            self.server.host,
            size,
            lambda: None,
            partial(self.server.arrived, sender, message, copied),
        )
        clock.at(clock.current.time, send)
        return reception

    def close(self) -> None:
        """Nothing is left to do."""


def make_servers(
    job: ServerJob, cluster: Cluster, clock: Clock, links: Links, rates: ServerRates
) -> list[VirtualServer]:
    """The servers of a training, on the hosts that *job* asks for."""
    place = job.place
    if place == "auto":
        place = "dedicated" if cluster.servers else "embedded"
    if place == "embedded":
        hosts = [cluster.host_of(0)]
    elif place == "per-node":
        hosts = list(range(cluster.hosts))
    else:
        hosts = [cluster.host_of_server(i) for i in range(len(cluster.servers))]
        if place != "dedicated":
            raise UsageError(
                f"servers={place}: addresses are for real servers; in the virtual world "
                "take embedded, per-node or dedicated"
            )
        if not hosts:
            raise UsageError(
                "servers=dedicated: the cluster has no host of its own for a server; add "
                "a [[server]] table to its file, or --server-hosts 1"
            )
    servers = []
    for number, host in enumerate(hosts):
        name = f"server {number}"
        discipline = None if job.method is None else job.method.server(cluster.workers)
        # Links lose nothing here, so no request comes again.
        machine = ParameterServer(cluster.workers, discipline, name, remembers=False)
        servers.append(VirtualServer(name, host, machine, clock, links, rates))
    return servers
