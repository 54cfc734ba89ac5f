"""Messages over a cluster's links: a clock drives `Sharing`; connections are first in, first
out."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from paceline.network.cluster import Cluster
from paceline.network.sharing import Activity, Sharing


class Events(Protocol):
    """A clock, and what is to happen on it."""

    @property
    def now(self) -> float: ...

    def at(
        self, time: float, action: Callable[[], None], *, last: bool = False
    ) -> None:
        """Call *action* when the clock reaches *time*; *last*: after the other events
        of that instant."""
        ...


class Agenda:
    """A clock that nobody lives by: `run` goes from event to event until none is left."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._sequence = itertools.count()

    def at(
        self, time: float, action: Callable[[], None], *, last: bool = False
    ) -> None:
        """See `Events`."""
        heapq.heappush(self._heap, (time, int(last), next(self._sequence), action))

    def run(self) -> float:
        """Returns the instant of the last event."""
        while self._heap:
            self.now, _, _, action = heapq.heappop(self._heap)
            action()
        return self.now


class _Route(NamedTuple):
    """Of messages from one host to another: the same objects for all of them, which nobody changes."""

    latency: float
    demand: Mapping[int, float]
    messages: Mapping[int, float]


class Links:
    """Transfers over a cluster's links, on a clock.

    Rates are shared anew once per instant, after everything else that happens then.
    """

    def __init__(self, clock: Events, cluster: Cluster) -> None:
        self.cluster = cluster
        self._clock = clock
        self._sharing = Sharing(
            [*cluster.capacities, *cluster.aggregation, *_processors(cluster)]
        )
        self._settle_at: float | None = None
        self._queues: dict[Hashable, deque[Callable[[], None]]] = {}
        self._routes: dict[tuple[int, int], _Route] = {}

    def set_capacity(self, link: int, rate: float) -> None:
        """Give a directed link another goodput from now on; 0: nothing gets through."""
        self._sharing.set_capacity(link, rate)
        self._settle_by(self._clock.now)

    def start(
        self,
        demand: Mapping[int, float],
        size: float,
        done: Callable[[], None],
        messages: Mapping[int, float] | None = None,
    ) -> None:
        """Move *size* bytes on each connection of *demand* (link to number of
        connections), from now on; call *done* when the last byte has left.

        *messages*: how many messages in all each host sends meanwhile. Where they cost the
        hosts' processors something, bytes move no faster than these keep up.
        """
        work = self._work(messages or {}, size, demand)
        if not work and (not demand or size <= 0):
            done()
            return
        everything, scale = demand, size
        if work:
            # Work without bytes is moved as one byte that crosses no link.
            scale = size if size > 0 else 1.0
            everything = dict(demand) if size > 0 else {}
            everything |= {index: seconds / scale for index, seconds in work.items()}
        self._sharing.start(Activity(everything, scale, lambda now: done()))
        self._settle_by(self._clock.now)

    def _work(
        self, messages: Mapping[int, float], size: float, demand: Mapping[int, float]
    ) -> dict[int, float]:
        """Core-seconds by processor: a message's are halved between its two ends, and
        what several hosts do on shared cores is one sum."""
        processor = self.cluster.processor
        if processor is None:
            return {}
        first = len(self.cluster.capacities) + len(self.cluster.racks)
        work: dict[int, float] = {}
        for host, count in messages.items():
            index = first if processor.cores is not None else first + host
            moved = size * demand.get(self.cluster.link_out_of(host), 0.0)
            seconds = count * processor.message + moved * processor.byte
            work[index] = work.get(index, 0.0) + seconds
        return {index: seconds for index, seconds in work.items() if seconds > 0}

    def send(
        self,
        connection: Hashable,
        source: int,
        destination: int,
        size: float,
        sent: Callable[[], None],
        arrived: Callable[[], None],
    ) -> None:
        """Send a message between two hosts, or switches, over a named connection, after
        those sent over it before. A switch sends without a processor of its own.

        *sent* is called when the last byte has left, *arrived* one latency later. Only the
        head of a connection is a flow: its successors wait, and do not take bandwidth.
        """
        queue = self._queues.setdefault(connection, deque())
        route = self._routes.get((source, destination))
        if route is None:
            route = self._routes[source, destination] = self._route(source, destination)
        latency = route.latency

        def left() -> None:
            queue.popleft()
            self._clock.at(self._clock.now + latency, arrived)
            if queue:
                queue[0]()
            else:
                del self._queues[connection]
            sent()

        queue.append(partial(self.start, route.demand, size, left, route.messages))
        if len(queue) == 1:
            queue[0]()

    def _route(self, source: int, destination: int) -> _Route:
        cluster = self.cluster
        return _Route(
            cluster.host_latency(source, destination),
            dict.fromkeys(cluster.host_path(source, destination), 1.0),
            {} if cluster.is_switch(source) else {source: 1.0},
        )

    def _settle_by(self, time: float) -> None:
        if time < math.inf and (self._settle_at is None or time < self._settle_at):
            self._settle_at = time
            self._clock.at(time, partial(self._settle, time), last=True)

    def _settle(self, planned: float) -> None:
        if planned != self._settle_at:
            return  # an earlier settle has made this one void
        self._settle_at = None
        for activity in self._sharing.settle(planned):
            activity.done(planned)
        self._settle_by(self._sharing.next_end())


def _processors(cluster: Cluster) -> list[float]:
    """Cores that communication can use: of all hosts together, or of each."""
    if cluster.processor is None:
        return []
    if cluster.processor.cores is not None:
        return [float(cluster.processor.cores)]
    count = cluster.hosts + len(cluster.servers)
    return [float(cluster.racks[cluster.rack_of_host(h)].cores) for h in range(count)]
