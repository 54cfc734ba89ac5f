"""Runs servers and other services in virtual time: the real state machine handles events.

*Requests.* A request travels over links like any message, on a connection of its own per (sender,
server, channel). Connections are first in, first out, so incast follows from the link model.

*Processing.* The server's processor takes requests first come, first served. A transition's sums
and updates keep it busy. Replies, and requests to other services, leave when it is done. A server's
own deadlines work likewise.

For a trace, `MessageTrace` records when messages were under way.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from paceline.cluster.cluster import Cluster
from paceline.cluster.links import Links
from paceline.cluster.workload import Workload
from paceline.errors import UsageError
from paceline.interfaces import (
    Ask,
    Outputs,
    Reply,
    Sender,
    Service,
    ServiceJob,
)
from paceline.interfaces.buckets import stand_alike, stands_in, wire_bytes
from paceline.interfaces.server_messages import (
    Describe,
    Rejected,
    ReplyMessage,
    Request,
)
from paceline.parameter_server.process.services import make_service
from paceline.records import Span, StepRecorder
from paceline.runtimes import service_placement
from paceline.runtimes.simulated.clock import Completion, VirtualClock
from paceline.transport.peers import no_peer
from paceline.transport.protocol import HEADER_BYTES
from paceline.units import show_bytes

Observe = Callable[[Span], None]


class MessageTrace:
    """Traces messages to and from the service *name*, if there is an observer.

    It traces those of the first *workers* senders.
    """

    def __init__(
        self, name: str, clock: VirtualClock, workers: int, observe: Observe | None
    ) -> None:
        self._name, self._clock = name, clock
        self._workers, self._observe = workers, observe
        self._arrivals: dict[tuple[str, int, str], float] = {}

    def observed(
        self,
        way: str,
        worker: Sender,
        message: Request | ReplyMessage,
        size: int,
        begins: float,
        arrived: Callable[[], None],
    ) -> Callable[[], None]:
        """Return *arrived*, preceded by a record of the message's span.

        The span starts at *begins*, or when the message before it on its connection arrived, as
        that carries one at a time. *way* is "to" or "from".
        """
        observe = self._observe
        if observe is None or worker.worker >= self._workers:
            return arrived

        def arrived_and_recorded() -> None:
            connection = (way, worker.worker, worker.channel)
            start = max(begins, self._arrivals.get(connection, begins))
            self._arrivals[connection] = now = self._clock.now
            name = f"{type(message).__name__.lower()}, {show_bytes(size)}"
            observe(Span(worker.worker, f"{way} {self._name}", name, start, now))
            arrived()

        return arrived_and_recorded


@dataclass(frozen=True)
class ServerRates:
    """Rates of a server, in bytes per second.

    Attributes:
        added: Rate at which its processor sums.
        stepped: Rate at which its optimizer steps.
        coded: Rate at which compression reads or writes.
    """

    added: float = float("inf")
    stepped: float = float("inf")
    coded: float = float("inf")


def rates_of(workload: Workload | None, memory: float) -> ServerRates:
    """Return a server's rates.

    Its optimizer and compressors are as fast as a worker's, if the workload has these. *memory* is
    the bytes per second that compression reads or writes.
    """
    if workload is None or not workload.update:
        return ServerRates(coded=memory)
    return ServerRates(stepped=sum(workload.sizes) / workload.update, coded=memory)


class Receiver(Protocol):
    """Receives the reply to one request, on *host* and *into* a tensor."""

    host: int
    into: torch.Tensor | None

    def arrived(self, message: ReplyMessage, payload: torch.Tensor | None) -> None:
        """Take the reply, whose last byte has arrived."""


class SimulatedServer:
    """One service on a simulated host.

    *number* is its number as a sender of requests. *observe* gets the times of messages from and to
    workers, if there is an observer.
    """

    def __init__(
        self,
        name: str,
        host: int,
        number: int,
        server: Service,
        clock: VirtualClock,
        links: Links,
        rates: ServerRates,
        observe: Observe | None = None,
    ) -> None:
        self.name, self.host, self.server = name, host, server
        self.clock, self.links = clock, links
        self._ways = MessageTrace(name, clock, links.cluster.workers, observe)
        self._number, self._rates = number, rates
        self._peers: dict[str, SimulatedPeer] = {}
        self._waiting: dict[tuple[int, str, int], Receiver] = {}
        self._queue: deque[Callable[[float], Outputs]] = deque()
        """Handlers of pending events, each called with its time."""
        self._busy = False
        self._alarm: float | None = None
        """Time of the next event that checks the deadline."""

    def meet(self, peers: Sequence[SimulatedServer]) -> None:
        """Connect this service to the peers that it may send requests to."""
        self._peers = {
            peer.name: SimulatedPeer(self._number, self.host, peer) for peer in peers
        }

    def take(
        self,
        sender: Sender,
        message: Request,
        payload: torch.Tensor | None,
        receiver: Receiver,
        time: float,
    ) -> int:
        """Send a request to this service at *time*; return its bytes.

        *receiver* takes the reply.
        """
        self._waiting[sender.worker, sender.channel, sender.number] = receiver
        size, copied = HEADER_BYTES, None
        if payload is not None:
            copied = stand_alike(payload.detach().clone(), payload)
            size += wire_bytes(payload)
        arrived = partial(self.server.on_request, sender, message, copied)
        send = partial(
            self.links.send,
            ("to server", self.name, sender.worker, sender.channel),
            receiver.host,
            self.host,
            size,
            lambda: None,
            self._ways.observed(
                "to", sender, message, size, time, partial(self.enter, arrived)
            ),
        )
        self.clock.at(time, send)
        return size

    def enter(self, event: Callable[[float], Outputs]) -> None:
        """Queue an event's handler."""
        self._queue.append(event)
        if not self._busy:
            self._serve()

    def _serve(self) -> None:
        """Handle the first event of the queue; its replies leave when the processor is done."""
        if not self._queue:
            self._busy = False
            return
        self._busy = True
        answers = self._queue.popleft()(self.clock.now)
        self._set_alarm()
        work, rates = self.server.take_work(), self._rates
        seconds = work.added / rates.added + work.stepped / rates.stepped
        seconds += work.coded / rates.coded
        self.clock.at(self.clock.now + seconds, partial(self._done, answers))

    def _set_alarm(self) -> None:
        """Schedule a check of the deadline.

        An event cannot be cancelled: one before a deadline that has moved schedules the next.
        """
        deadline = self.server.next_deadline()
        if deadline is not None and (self._alarm is None or deadline < self._alarm):
            self._alarm = max(deadline, self.clock.now)
            self.clock.at(self._alarm, partial(self._ring, self._alarm))

    def _ring(self, alarm: float) -> None:
        if alarm != self._alarm:
            # A later alarm has replaced this one.
            return
        self._alarm = None
        deadline = self.server.next_deadline()
        if deadline is not None and deadline <= self.clock.now:
            self.enter(self.server.on_timer)
        else:
            self._set_alarm()

    def _done(self, outgoing: Outputs) -> None:
        for one in outgoing:
            if isinstance(one, Ask):
                self._ask(one)
            else:
                self._send(one)
        self._serve()

    def _ask(self, ask: Ask) -> None:
        peer = self._peers.get(ask.peer)
        if peer is None:
            raise UsageError(no_peer(self.name, ask.peer, self._peers))
        replied = partial(self.server.on_reply, ask.peer, ask.number)
        peer.ask(ask, lambda reply, into: self.enter(partial(replied, reply, into)))

    def _send(self, answer: Reply) -> None:
        to = answer.to
        receiver = self._waiting.pop((to.worker, to.channel, to.number), None)
        if receiver is None:
            return
        size = HEADER_BYTES
        if answer.payload is not None:
            # If the receiving tensor represents a larger one, the reply counts as many bytes.
            into = receiver.into
            stands = into is not None and stands_in(into)
            size += wire_bytes(into if stands and into is not None else answer.payload)
        self.links.send(
            ("from server", self.name, to.worker, to.channel),
            self.host,
            receiver.host,
            size,
            lambda: None,
            self._ways.observed(
                "from",
                to,
                answer.message,
                size,
                self.clock.now,
                partial(receiver.arrived, answer.message, answer.payload),
            ),
        )


class SimulatedPendingReply:
    """The `PendingReply` of one request of a worker on *host*."""

    def __init__(
        self,
        host: int,
        clock: VirtualClock,
        recorder: StepRecorder,
        into: torch.Tensor | None,
        describe: Callable[[], str],
    ) -> None:
        self.host, self.into = host, into
        self._clock, self._recorder = clock, recorder
        self._completion = Completion(describe)
        self._answer: ReplyMessage | None = None

    def arrived(self, message: ReplyMessage, payload: torch.Tensor | None) -> None:
        """Take the reply, whose last byte has arrived."""
        _put(payload, self.into)
        self._answer = message
        self._clock.complete(self._completion)

    def on_completion(self, action: Callable[[], None]) -> None:
        self._clock.when(self._completion, action)

    def wait(self) -> ReplyMessage:
        start = self._clock.current.time
        self._clock.wait(self._completion)
        self._recorder.waited("server", start, self._clock.current.time)
        assert self._answer is not None
        if isinstance(self._answer, Rejected):
            raise UsageError(self._answer.reason)
        return self._answer


@dataclass
class SimulatedEndpoint:
    """One simulated worker's `Endpoint`."""

    worker: int
    server: SimulatedServer
    recorder: StepRecorder
    _numbers: Counter[str] = field(default_factory=Counter)
    """By channel: the number of the next request."""

    @property
    def name(self) -> str:
        return self.server.name

    def request(
        self,
        message: Request,
        payload: torch.Tensor | None = None,
        into: torch.Tensor | None = None,
        channel: str = "",
    ) -> SimulatedPendingReply:
        clock, cluster = self.server.clock, self.server.links.cluster
        sender = Sender(self.worker, 0, channel, self._numbers[channel])
        self._numbers[channel] += 1
        what = type(message).__name__.lower()
        pending_reply = SimulatedPendingReply(
            cluster.host_of(self.worker),
            clock,
            self.recorder,
            into,
            lambda: f"an answer of {self.name} to its {what}",
        )
        size = self.server.take(
            sender, message, payload, pending_reply, clock.current.time
        )
        self.recorder.count_bytes(size)
        return pending_reply

    def close(self) -> None:
        """Do nothing: a simulated endpoint has no connection."""


class SimulatedPeer:
    """A service's connection to its *peer*; it sends from *host*, as number *sender*."""

    def __init__(self, sender: int, host: int, peer: SimulatedServer) -> None:
        self._sender, self._host, self._peer = sender, host, peer
        self._numbers: Counter[str] = Counter()

    def ask(
        self, ask: Ask, replied: Callable[[ReplyMessage, torch.Tensor | None], None]
    ) -> None:
        """Send a request; *replied* is called with its reply when that arrives."""

        def arrived(reply: ReplyMessage) -> None:
            replied(reply, ask.into)

        sender = Sender(self._sender, 0, ask.channel, self._numbers[ask.channel])
        self._numbers[ask.channel] += 1
        receiver = AskReceiver(self._host, ask.into, arrived)
        now = self._peer.clock.now
        self._peer.take(sender, ask.message, ask.payload, receiver, now)


@dataclass
class AskReceiver:
    """The `Receiver` of a service's request."""

    host: int
    into: torch.Tensor | None
    replied: Callable[[ReplyMessage], None]

    def arrived(self, message: ReplyMessage, payload: torch.Tensor | None) -> None:
        """Take the reply, whose last byte has arrived."""
        _put(payload, self.into)
        self.replied(message)


def _put(payload: torch.Tensor | None, into: torch.Tensor | None) -> None:
    if payload is not None and into is not None:
        into[: payload.numel()].copy_(payload)


def make_services(
    job: ServiceJob,
    cluster: Cluster,
    clock: VirtualClock,
    links: Links,
    rates: ServerRates,
    observe: Observe | None,
) -> list[SimulatedServer]:
    """Make the services of a job, on the hosts that it asks for."""
    placed = service_placement.place_services(
        job, partial(hosts_of, cluster), cluster.host_of
    )
    names = [service.name for service, _ in placed]
    made: dict[str, SimulatedServer] = {}
    for index, (service, host) in enumerate(placed):
        number = cluster.workers + index
        description = Describe(kind=service.kind, services=names, number=index)
        machine = make_service(description, cluster.workers, job.method)
        made[service.name] = SimulatedServer(
            service.name, host, number, machine, clock, links, rates, observe
        )
    for service, _ in placed:
        made[service.name].meet([made[peer] for peer in service.peers])
    return list(made.values())


def hosts_of(cluster: Cluster, place: str) -> Sequence[int]:
    """Return the hosts that *place* names. Raises `UsageError`."""
    if place == "auto":
        place = "dedicated" if cluster.servers else "embedded"
    if place == "embedded":
        return [cluster.host_of(0)]
    if place == "per-node":
        return range(cluster.hosts)
    if place != "dedicated":
        raise UsageError(
            f"servers={place}: addresses are for real servers; in the simulated runtime "
            "take embedded, per-node or dedicated"
        )
    if not cluster.servers:
        raise UsageError(
            "servers=dedicated: the cluster has no host of its own for a server; add "
            "a [[server]] table to its file, or --dedicated-servers 1"
        )
    return [cluster.host_of_server(i) for i in range(len(cluster.servers))]
