"""Runs a server process: one loop, one port, and the services of all its trainings.

`ServerHost` takes events from its `ServerListener`, and from each service's connections to its
peers. It passes each event to its service and to the service's monitors, and sends the service's
replies. All of this runs on one thread, so services need no locks.

A service exists from the start (`ServerHost.add`), or workers open it: the first one sends a
description (`Describe`), and the others must send the same. Requests of other services, which may
have been described before, wait until then.

A service ends with its training, and releases everything: parameters and descriptors.
`ServerHost.serve` yields events for the process's parent.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from paceline.errors import UsageError
from paceline.interfaces import Ask, Outputs, Reply, Service
from paceline.interfaces.server_messages import Describe, Done, PeerAddress, Rejected
from paceline.parameter_server.process import control, services
from paceline.parameter_server.process.monitors import Monitor, MonitoredService
from paceline.timeouts import timeouts
from paceline.transport.listener import (
    ControlEnded,
    ControlLine,
    RequestArrived,
    ServerListener,
    WorkerLost,
)
from paceline.transport.peers import PeerConnections, PeerEvent, Route
from paceline.transport.protocol import ServiceKey
from paceline.transport.sessions import ServiceSessions

log = logging.getLogger(__name__)

Until = Literal["deserted", "departed", "replaced"]
"""When a service ends:

- *deserted*: all workers have left, or all that came are lost;
- *departed*: all workers have left;
- *replaced*: all workers have left, and then one of them begins another training. Until then another incarnation of
  a worker may still ask for the result.
"""


class ServiceEnded(NamedTuple):
    """Service *key* has ended; *well*: all workers said goodbye at the end of their training."""

    key: ServiceKey
    well: bool


News = control.WorkerEvicted | control.HoldsModel | control.TrainingOver | ServiceEnded


class HostedService:
    """One service of a process: its state machine, its workers' sessions and its peers.

    *monitored* is None until a worker has described the service. *early* has requests that other
    services have sent before that.
    """

    def __init__(
        self,
        key: ServiceKey,
        service_sessions: ServiceSessions,
        peers: PeerConnections,
        until: Until,
    ) -> None:
        self.key, self.service_sessions, self.peers = key, service_sessions, peers
        self.until = until
        self.monitored: MonitoredService | None = None
        self.early: list[RequestArrived] = []
        self.description: Describe | None = None
        """Its description without its peers' addresses, which workers on other machines may write
        differently."""
        self.incarnation = 0
        """Number of earlier starts of this service; its peers learn it."""
        self.holds_model: bool | None = None
        """The last reported value of the service's `holds_model`."""
        self.end_is_reported = False

    @property
    def service(self) -> Service | None:
        """The state machine; None until it is described."""
        return None if self.monitored is None else self.monitored.service

    @property
    def is_ending(self) -> bool:
        """Whether a worker has ended its training: the others are about to do so."""
        service = self.service
        is_over = service is not None and service.is_over()
        return is_over or self.service_sessions.some_have_departed

    @property
    def is_over(self) -> bool:
        """Whether no worker needs the service any more."""
        service_sessions = self.service_sessions
        if self.until == "replaced":
            return (
                service_sessions.all_have_departed
                and service_sessions.next_training_begun
            )
        deserted = self.until == "deserted" and self.deserted_from <= time.monotonic()
        return service_sessions.all_have_departed or deserted

    @property
    def deserted_from(self) -> float:
        """When the service ends because its workers have left; infinite: never."""
        return (
            self.service_sessions.deserted_from
            if self.until == "deserted"
            else math.inf
        )


class ServerHost:
    """Runs services behind *listener*."""

    def __init__(self, listener: ServerListener) -> None:
        self.listener = listener
        self.services: dict[ServiceKey, HostedService] = {}
        self._news: list[News] = []

    def add(
        self,
        service: Service,
        monitors: Sequence[Monitor] = (),
        *,
        until: Until = "departed",
        description: Describe | None = None,
        incarnation: int = 0,
    ) -> HostedService:
        """Serve *service*.

        Args:
            service: The state machine to serve.
            monitors: Observe its events and replies.
            until: When it ends.
            description: Identifies it among several services. It may send requests to the others
                before it gets their addresses.
            incarnation: Number of its earlier starts.
        """
        number = 0 if description is None else description.number
        names = [] if description is None else description.services
        others = [name for name in names if name != names[number]]
        key = ServiceKey(0, number)
        hosted = self._host(key, self.listener.open(key), until, others)
        hosted.description, hosted.incarnation = description, incarnation
        self._begin(hosted, service, monitors)
        return hosted

    def serve(self, control: int | None = None) -> Iterator[News]:
        """Serve, and yield events for the process's parent.

        It ends once its services have; if workers open services, only with *control*. That is a
        descriptor of lines (see `control`). When it ends, services end at once, with one exception.
        Services whose training is over for some worker have up to `Timeouts.last_requests`: a
        worker that was done first may end the process while other workers still pull the final
        state.

        Raises:
            Exception: The error of a service that was added. The error of a service that workers
                have opened is logged, and ends that service.
        """
        self.listener.watch_control(control)
        closing = math.inf
        try:
            while self._goes_on(closing):
                if self._turn(self._patience(closing)):
                    closing = self._begin_to_close()
                news, self._news = self._news, []
                if any(isinstance(one, ServiceEnded) for one in news):
                    # The parts of a state machine refer to each other. Python's collector would not
                    # run in a process that only waits.
                    gc.collect()
                yield from news
        finally:
            self.listener.watch_control(None)
            for key in list(self.services):
                self._end(key)

    def close(self) -> None:
        """Release all services, and the listener."""
        for key in list(self.services):
            self._end(key)
        self.listener.close()

    # ---- the loop ----

    def _goes_on(self, closing: float) -> bool:
        if closing < math.inf:
            return bool(self.services) and time.monotonic() < closing
        return bool(self.services) or self.listener.welcomes_any

    def _patience(self, closing: float) -> float:
        """Return the seconds until the next deadline."""
        moments = [closing]
        for hosted in self.services.values():
            moments.append(hosted.deserted_from)
            if hosted.monitored is not None:
                deadline = hosted.monitored.next_deadline()
                moments.append(math.inf if deadline is None else deadline)
        return min(moments) - time.monotonic()

    def _turn(self, seconds: float) -> bool:
        """Wait for events and handle them. Returns whether this process must end."""
        ends = False
        events = self.listener.poll(seconds)
        for key, service_sessions in self.listener.sessions_by_service.items():
            # A worker has opened it.
            if key not in self.services:
                self._host(key, service_sessions, "deserted")
        for event in events:
            if isinstance(event, ControlEnded):
                ends = True
            elif isinstance(event, ControlLine):
                self._on_line(event.line)
            elif event.key in self.services:
                hosted = self.services[event.key]
                with self._faults_of(hosted):
                    self._handle(hosted, event)
        for hosted in list(self.services.values()):
            with self._faults_of(hosted):
                self._attend(hosted)
        return ends

    def _attend(self, hosted: HostedService) -> None:
        """Do all work of a service that is due without a worker's request."""
        monitored, service_sessions = hosted.monitored, hosted.service_sessions
        if monitored is not None:
            now, deadline = time.monotonic(), monitored.next_deadline()
            if deadline is not None and now >= deadline:
                self._send(hosted, monitored.on_timer(now))
            for worker, incarnation, _ in monitored.take_evicted():
                service_sessions.evict(worker, incarnation)
                self._news.append(
                    control.WorkerEvicted(worker=worker, incarnation=incarnation)
                )
        while events := hosted.peers.collect():
            for event in events:
                self._handle(hosted, event)
        if (
            monitored is not None
            and monitored.service.holds_model != hosted.holds_model
        ):
            hosted.holds_model = monitored.service.holds_model
            self._news.append(control.HoldsModel(holds=bool(hosted.holds_model)))
        if hosted.until == "replaced":
            if service_sessions.all_have_departed and not hosted.end_is_reported:
                self._news.append(control.TrainingOver())
            hosted.end_is_reported = service_sessions.all_have_departed
        if hosted.is_over:
            self._end(hosted.key)

    def _begin_to_close(self) -> float:
        """End the services that no worker needs; return when the rest must have ended."""
        self.listener.welcomes_any = False
        for key, hosted in list(self.services.items()):
            if hosted.until != "deserted" or not hosted.is_ending:
                self._end(key)
        return time.monotonic() + timeouts.last_requests

    # ---- services ----

    def _host(
        self,
        key: ServiceKey,
        service_sessions: ServiceSessions,
        until: Until,
        peers: Iterable[str] = (),
    ) -> HostedService:
        connections = PeerConnections(self.listener.loop, peers)
        hosted = HostedService(key, service_sessions, connections, until)
        self.services[key] = hosted
        return hosted

    def _begin(
        self, hosted: HostedService, service: Service, monitors: Sequence[Monitor] = ()
    ) -> None:
        hosted.monitored = MonitoredService(service, monitors)
        hosted.peers.reconnects = service.reconnects_to_peers

    def _end(self, key: ServiceKey) -> None:
        hosted = self.services.pop(key)
        hosted.peers.close(well=hosted.service_sessions.all_have_departed)
        self.listener.end(key)
        self._news.append(
            ServiceEnded(key, hosted.service_sessions.all_have_ended_well)
        )

    @contextlib.contextmanager
    def _faults_of(self, hosted: HostedService) -> Iterator[None]:
        """Let an error of a service that workers have opened end only that service."""
        try:
            yield
        except Exception:
            if hosted.until != "deserted":
                raise
            # Log it as text: a handler may keep records, whose frames hold the service.
            log.error("a service has failed\n%s", traceback.format_exc())
            if hosted.key in self.services:
                self._end(hosted.key)

    # ---- events ----

    def _handle(
        self,
        hosted: HostedService,
        event: RequestArrived | WorkerLost | PeerEvent | control.WorkerFinished,
    ) -> None:
        if isinstance(event, RequestArrived) and isinstance(event.message, Describe):
            self._on_describe(hosted, event, event.message)
        elif hosted.monitored is not None:
            self._send(hosted, hosted.monitored.handle(event, time.monotonic()))
        elif isinstance(event, WorkerLost):
            lost = event.worker, event.incarnation
            hosted.early = [one for one in hosted.early if one.sender[:2] != lost]
        elif isinstance(event, RequestArrived):
            if event.sender.worker >= self.listener.workers:
                hosted.early.append(event)
                return
            reason = "this server has yet to be told what it is: expected a description"
            self._reject(hosted, event, reason)

    def _send(self, hosted: HostedService, outputs: Outputs) -> None:
        replies = [output for output in outputs if isinstance(output, Reply)]
        self.listener.send(hosted.key, replies)
        for output in outputs:
            if isinstance(output, Ask):
                hosted.peers.ask(output)

    def _reject(
        self, hosted: HostedService, event: RequestArrived, reason: str
    ) -> None:
        self._send(hosted, [Reply(event.sender, Rejected(reason=reason))])

    def _on_line(self, line: bytes) -> None:
        """Handle a line of the parent about its one service."""
        message = msgspec.json.decode(line, type=control.LineToServer)
        (hosted,) = self.services.values()
        if isinstance(message, Describe):
            assert msgspec.structs.replace(message, peers={}) == hosted.description
            self._meet(hosted, message)
        elif isinstance(message, control.WorkerFinished):
            self._handle(hosted, message)
        else:
            lost = WorkerLost(hosted.key, message.worker, message.incarnation)
            self._handle(hosted, lost)

    # ---- description of a service ----

    def _on_describe(
        self, hosted: HostedService, event: RequestArrived, description: Describe
    ) -> None:
        try:
            begins = self._check_description(hosted, event, description)
            if begins:
                service = services.make_service(description, self.listener.workers)
        except UsageError as error:
            self._reject(hosted, event, str(error))
            return
        if begins:
            hosted.description = msgspec.structs.replace(description, peers={})
            self._begin(hosted, service)
            self._meet(hosted, description)
        self._send(hosted, [Reply(event.sender, Done())])
        early, hosted.early = hosted.early, []
        for request in early:
            self._handle(hosted, request)

    def _check_description(
        self, hosted: HostedService, event: RequestArrived, description: Describe
    ) -> bool:
        """Return whether this is the first description.

        Raises `UsageError` if it differs from the first.
        """
        worker = event.sender.worker
        if worker >= self.listener.workers:
            raise UsageError("describe: only workers describe their servers")
        if hosted.description is None:
            if hosted.monitored is not None:
                raise UsageError("describe: this server is of another kind already")
            return True
        if msgspec.structs.replace(description, peers={}) != hosted.description:
            raise UsageError(
                f"describe: worker {worker} describes other servers than the first worker did: give "
                "the same options on every worker"
            )
        return False

    def _meet(self, hosted: HostedService, description: Describe) -> None:
        """Connect to the service's peers, whose numbers are the positions of their names."""

        def route(name: str, address: PeerAddress) -> Route:
            number = description.services.index(name)
            return Route(ServiceKey(hosted.key.training, number), address)

        peers = {name: route(name, at) for name, at in description.peers.items()}
        sender = self.listener.workers + description.number
        hosted.peers.meet(sender, peers, hosted.incarnation)
