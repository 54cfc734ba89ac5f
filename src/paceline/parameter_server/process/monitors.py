"""Monitors a service's traffic, to find lost workers whose connections are still open.

`MonitoredService` passes a service's events and outputs to its monitors, in one place.
`SilenceMonitor` evicts silent workers, `MissingWorkerMonitor` names workers that other workers wait
for, and `snapshot.Snapshotter` writes snapshots.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.errors import UsageError
from paceline.interfaces import (
    Ask,
    Outputs,
    Reply,
    Sender,
    Service,
)
from paceline.interfaces.server_messages import (
    Join,
    Joined,
    Leave,
    Push,
    Request,
)
from paceline.parameter_server.process.control import WorkerFinished
from paceline.timeouts import timeouts
from paceline.transport.listener import RequestArrived, WorkerLost
from paceline.transport.peers import PeerBack, PeerEvent, PeerLost, PeerReplied

log = logging.getLogger(__name__)

ServiceEvent = RequestArrived | WorkerLost | PeerEvent | WorkerFinished
"""Events of a service, besides its timer."""


class SilentWorker(NamedTuple):
    """A worker to evict: this incarnation has sent nothing for *seconds*."""

    worker: int
    incarnation: int
    seconds: float


class Monitor:
    """Observes a service. It changes nothing, but may report lost workers."""

    def on_request(self, sender: Sender, message: Request, now: float) -> None:
        """Observe a request that the service has handled. Its replies follow."""

    def on_worker_lost(self, worker: int, incarnation: int, now: float) -> None:
        """Observe the loss of a worker, which the service has handled."""

    def on_reply(self, reply: Reply, now: float) -> None:
        """Observe a reply of the service, whatever event has caused it."""

    def next_deadline(self) -> float | None:
        """Return when `on_timer` must be called, if no event comes before."""
        return None

    def on_timer(self, now: float) -> Sequence[SilentWorker]:
        """Handle the deadline. Returns workers that the service must evict."""
        return ()


class MonitoredService:
    """*service*, with *monitors* that observe its requests, losses and replies."""

    def __init__(self, service: Service, monitors: Sequence[Monitor] = ()) -> None:
        self.service = service
        self._monitors = monitors
        self._evicted: list[SilentWorker] = []

    def handle(self, event: ServiceEvent, now: float) -> Outputs:
        """Pass an event to the service, then to the monitors. Returns the messages to send."""
        service = self.service
        match event:
            case RequestArrived(_, sender, message, payload):
                outputs = service.on_request(sender, message, payload, now)
                for monitor in self._monitors:
                    monitor.on_request(sender, message, now)
            case WorkerLost(_, worker, incarnation):
                outputs = self._lose(worker, incarnation, now)
            case PeerReplied(peer, number, reply, payload):
                outputs = service.on_reply(peer, number, reply, payload, now)
            case PeerLost(peer, reason):
                outputs = service.on_peer_lost(peer, reason, now)
            case PeerBack(peer):
                outputs = service.on_peer_back(peer, now)
            case WorkerFinished():
                # A worker that gets a reply here may be silent from now on, within the limit.
                outputs = service.on_worker_finished(event.worker, now)
        return self._observed(outputs, now)

    def next_deadline(self) -> float | None:
        """Return when `on_timer` must be called, if no event comes before."""
        deadlines = [self.service.next_deadline()]
        deadlines += [monitor.next_deadline() for monitor in self._monitors]
        return min((d for d in deadlines if d is not None), default=None)

    def on_timer(self, now: float) -> Outputs:
        """Handle the service's deadline, then the monitors', once the service's messages have left."""
        if _is_due(self.service, now):
            return self._observed(self.service.on_timer(now), now)
        outputs: list[Reply | Ask] = []
        for monitor in self._monitors:
            for silent in monitor.on_timer(now) if _is_due(monitor, now) else ():
                self._evicted.append(silent)
                outputs += self._lose(silent.worker, silent.incarnation, now)
        return self._observed(outputs, now)

    def take_evicted(self) -> list[SilentWorker]:
        """Return workers that a monitor has evicted since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def _lose(self, worker: int, incarnation: int, now: float) -> Outputs:
        outputs = self.service.on_worker_lost(worker, incarnation, now)
        for monitor in self._monitors:
            monitor.on_worker_lost(worker, incarnation, now)
        return outputs

    def _observed(self, outputs: Outputs, now: float) -> Outputs:
        for output in outputs:
            if isinstance(output, Reply):
                for monitor in self._monitors:
                    monitor.on_reply(output, now)
        return outputs


def _is_due(one: Service | Monitor, now: float) -> bool:
    deadline = one.next_deadline()
    return deadline is not None and now >= deadline


SILENT_STEPS = 30
"""Silence limit of a worker, in usual step times."""
FIRST_STEP = 10
"""Factor on the silence limit before the first step is done, in which a worker may compile."""
LOOKS = 20
"""Calls of the monitor within the shortest silence limit, which show that it was awake."""


@dataclass
class _WorkerTraffic:
    """The traffic of one worker."""

    incarnation: int
    last: float
    """When its last message arrived, or the last reply to it was sent."""
    owed: set[tuple[str, int]] = field(default_factory=set)
    """Its unanswered requests: while there are any, it may be waiting."""
    step: int = -1
    began: float = 0.0
    """When the first push of *step* arrived."""
    steps: int = 0


class SilenceMonitor(Monitor):
    """Evicts a silent worker whose connection is open: its process is stopped, or hangs.

    *Silence.* A worker's silence begins with its last message, or with the last reply to it. A
    worker that waits for a reply is not silent. The limit is *least* seconds, or `SILENT_STEPS`
    times the median of all workers' recent steps if that is longer. Before a worker's first step it
    is `FIRST_STEP` times as much. Workers send a `KeepAlive` with each forward pass, so that an
    evaluation is no silence. A worker that is out of data delays no other worker, and may be
    silent.

    *Interruptions.* The monitor must be called regularly (`LOOKS`). If it was not called for twice
    as long, the time in between counts as no worker's silence: this process was stopped, say, or
    copied a large model. So it evicts no worker before there was time to read the messages that
    came meanwhile.

    *judges* is False for a worker that another server judges: it may wait there, and be silent
    here. Example: a worker waits at its group's server for the other workers of its group; servers
    of other groups get no message of it meanwhile.
    """

    def __init__(
        self,
        least: float = timeouts.worker_silent,
        judges: Callable[[int], bool] = lambda _: True,
    ) -> None:
        if not least > 0:
            raise UsageError(f"--evict-silent: expected more than 0 s, got {least}")
        self._least = self._limit = least
        self._judges = judges
        self._traffic: dict[int, _WorkerTraffic] = {}
        self._durations: deque[float] = deque(maxlen=100)
        self._pulse = least / LOOKS
        self._looked = 0.0
        """When the monitor was last called."""
        self._awake = 0.0
        """Since when it has been called as often as required."""
        self._excused = 0.0
        """When the silence of workers that other servers judge was last reset."""

    def on_request(self, sender: Sender, message: Request, now: float) -> None:
        self._note_call(now)
        traffic = self._traffic_of(sender)
        if traffic is None:
            return
        traffic.last = now
        traffic.owed.add((sender.channel, sender.number))
        if isinstance(message, Leave):
            del self._traffic[sender.worker]
        elif isinstance(message, Push) and message.step != traffic.step:
            if traffic.step >= 0:
                self._durations.append(now - traffic.began)
                traffic.steps += 1
            traffic.step, traffic.began = message.step, now

    def on_worker_lost(self, worker: int, incarnation: int, now: float) -> None:
        self._note_call(now)
        traffic = self._traffic.get(worker)
        if traffic is not None and traffic.incarnation == incarnation:
            del self._traffic[worker]

    def on_reply(self, reply: Reply, now: float) -> None:
        """Note the reply, for which its worker has waited until now."""
        to = reply.to
        # It may come long after the request.
        if isinstance(reply.message, Joined):
            self._traffic[to.worker] = _WorkerTraffic(to.incarnation, now)
        traffic = self._traffic_of(to)
        if traffic is not None:
            traffic.owed.discard((to.channel, to.number))
            traffic.last = now

    def next_deadline(self) -> float | None:
        if not self._traffic:
            return None
        deadlines = [self._deadline(v) for v in self._traffic.values() if not v.owed]
        return min([self._looked + self._pulse, *deadlines])

    def on_timer(self, now: float) -> Sequence[SilentWorker]:
        self._note_call(now)
        # Update the limit only here: a `next_deadline` in between may be too early, which costs
        # little.
        self._limit = self._least
        if self._durations:
            usual = statistics.median(self._durations)
            self._limit = max(self._least, SILENT_STEPS * usual)
        silent = [
            SilentWorker(worker, traffic.incarnation, now - traffic.last)
            for worker, traffic in self._traffic.items()
            if not traffic.owed and now >= self._deadline(traffic)
        ]
        for worker, _, seconds in silent:
            log.warning(
                "nothing was heard of worker %d for %.0f s, though its connection stands: it is "
                "taken for lost",
                worker,
                seconds,
            )
        return silent

    def _note_call(self, now: float) -> None:
        """Note a call: the time without calls counts as no worker's silence."""
        away = now - self._looked
        self._looked = now
        if away > 2 * self._pulse:
            self._awake = now
            for traffic in self._traffic.values():
                traffic.last += away
        if now >= self._excused + self._pulse:
            self._excused = now
            for worker, traffic in self._traffic.items():
                if not self._judges(worker):
                    traffic.last = now

    def _traffic_of(self, sender: Sender) -> _WorkerTraffic | None:
        traffic = self._traffic.get(sender.worker)
        known = traffic is not None and traffic.incarnation == sender.incarnation
        return traffic if known else None

    def _deadline(self, traffic: _WorkerTraffic) -> float:
        allowed = self._limit * (1 if traffic.steps else FIRST_STEP)
        return max(traffic.last + allowed, self._awake + self._pulse)


class MissingWorkerMonitor(Monitor):
    """Names missing workers while other workers wait for them: perhaps they were never started.

    It logs first after *seconds*, then less and less often. *missing* returns workers that must
    still come, or come back.
    """

    def __init__(
        self,
        missing: Callable[[], Sequence[int]],
        seconds: float = timeouts.workers_missing,
    ) -> None:
        self._missing, self._seconds = missing, seconds
        self._due: float | None = None
        """When to check again; None while no worker is missing."""

    def on_request(self, sender: Sender, message: Request, now: float) -> None:
        if isinstance(message, Join | Leave):
            self._look(now)

    def on_worker_lost(self, worker: int, incarnation: int, now: float) -> None:
        self._look(now)

    def next_deadline(self) -> float | None:
        return self._due

    def on_timer(self, now: float) -> Sequence[SilentWorker]:
        missing = self._missing()
        # The worker has finished, which sends no message.
        if not missing:
            self._due = None
            return ()
        self._seconds *= 2
        self._due = now + self._seconds
        log.warning(
            "not here, and waited for: workers %s; is each started, and started again when it dies?",
            ", ".join(map(str, missing)),
        )
        return ()

    def _look(self, now: float) -> None:
        if not self._missing():
            self._due = None
        elif self._due is None:
            self._due = now + self._seconds
