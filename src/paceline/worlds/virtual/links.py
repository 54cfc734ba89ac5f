"""The virtual network: the clock drives `Sharing`; connections are first in, first out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from functools import partial

from paceline.network.cluster import Cluster
from paceline.network.sharing import Activity, Sharing
from paceline.worlds.virtual.clock import Clock


class Links:
    """Transfers over a cluster's links, on a clock.

    Rates are shared anew once per instant, after everything else that happens then.
    """

    def __init__(self, clock: Clock, cluster: Cluster) -> None:
        self.cluster = cluster
        self._clock = clock
        self._sharing = Sharing(cluster.capacities)
        self._settle_at: float | None = None
        self._queues: dict[Hashable, deque[Callable[[], None]]] = {}

    def set_capacity(self, link: int, rate: float) -> None:
        """Give a directed link another goodput from now on; 0: nothing gets through."""
        self._sharing.set_capacity(link, rate)
        self._settle_by(self._clock.now)

    def start(
        self, demand: Mapping[int, int], size: float, done: Callable[[], None]
    ) -> None:
        """Move *size* bytes on each connection of *demand* (link to number of
        connections), from now on; call *done* when the last byte has left."""
        if not demand or size <= 0:
            done()
            return
        self._sharing.start(Activity(demand, size, lambda now: done()))
        self._settle_by(self._clock.now)

    def send(
        self,
        connection: Hashable,
        source: int,
        destination: int,
        size: int,
        sent: Callable[[], None],
        arrived: Callable[[], None],
    ) -> None:
        """Send a message over a named connection, after those sent over it before.

        *sent* is called when the last byte has left, *arrived* one latency later. Only the
        head of a connection is a flow: its successors wait, and do not take bandwidth.
        """
        queue = self._queues.setdefault(connection, deque())
        latency = self.cluster.latency(source, destination)

        def left() -> None:
            queue.popleft()
            self._clock.at(self._clock.now + latency, arrived)
            if queue:
                queue[0]()
            else:
                del self._queues[connection]
            sent()

        demand = dict.fromkeys(self.cluster.path(source, destination), 1)
        queue.append(partial(self.start, demand, size, left))
        if len(queue) == 1:
            queue[0]()

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
