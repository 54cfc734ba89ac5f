"""Moves messages over a cluster's links, on a clock; each connection is first in, first out.

Links and processors are shared separately: connections share a link's bytes per second, and threads
share cores, of which each thread uses at most one. A transfer ends when its bytes have moved and
its processors have done their work. So a small message with as much processor work as a large one
takes no bandwidth from it, and no more of a core than any other thread.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from paceline.cluster.bandwidth import BandwidthSharing, Flow
from paceline.cluster.cluster import Cluster, Processor


class Events(Protocol):
    """A clock that calls actions at given times."""

    @property
    def now(self) -> float: ...

    def at(
        self, time: float, action: Callable[[], None], *, last: bool = False
    ) -> None:
        """Call *action* when the clock reaches *time* (seconds).

        *last*: after the other events of that instant.
        """
        ...


class EventQueue:
    """A clock of its own, for calculations: `run` goes from event to event until none is left."""

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
        """Run all events; return the time of the last one."""
        while self._heap:
            self.now, _, _, action = heapq.heappop(self._heap)
            action()
        return self.now


class _Route(NamedTuple):
    """The latency, links and sender of messages between two hosts.

    All messages between the two share these objects, which must not change.
    """

    latency: float
    demand: Mapping[int, float]
    messages: Sequence[tuple[int, float]]


class Links:
    """Transfers over a cluster's links, on a clock.

    After all other events of an instant, rates are shared again, once.
    """

    def __init__(self, clock: Events, cluster: Cluster) -> None:
        self.cluster = cluster
        self._clock = clock
        wires = BandwidthSharing([*cluster.capacities, *cluster.aggregation])
        self._wires = _Shared(clock, wires)
        bursts = cluster.bursts
        self._buckets = TokenBuckets(bursts, wires.capacities) if bursts else None
        self._cores = _Shared(clock, BandwidthSharing(_processors(cluster), most=1.0))
        self._queues: dict[Hashable, deque[Callable[[], None]]] = {}
        self._routes: dict[tuple[int, int], _Route] = {}
        self._computing = Counter[int]()
        """By processor: the number of cores that computing uses now."""

    def set_capacity(self, link: int, rate: float) -> None:
        """Give a directed link another goodput from now on; 0: nothing gets through."""
        self._wires.set_capacity(link, rate)

    def start(
        self,
        demand: Mapping[int, float],
        size: float,
        done: Callable[[], None],
        messages: Sequence[tuple[int, float]] = (),
    ) -> None:
        """Move *size* bytes on each connection of *demand* from now on.

        Args:
            demand: By link, the number of connections on it.
            size: Bytes of each connection.
            done: Called when the last byte has left.
            messages: For each thread that sends meanwhile, its host and its number of messages. If
                messages cost processor time, the transfer also waits until all threads have done
                their work.
        """
        buckets = self._buckets
        # All bytes cost the threads work, even bytes that pass at once.
        work = self._work(messages, size, demand)
        at_once = 0.0
        if buckets is not None and size > 0:
            at_once = buckets.take(demand, size, self._clock.now)
            size -= at_once
        moves = bool(demand) and size > 0
        waits = moves + bool(work)
        if not waits and at_once:
            # Use an event instead of a call: a caller may send many messages, one after the other.
            self._clock.at(self._clock.now, done)
            return
        if not waits:
            done()
            return

        def part_done(now: float) -> None:
            nonlocal waits
            waits -= 1
            if not waits:
                done()

        def moved(now: float) -> None:
            if buckets is not None:
                buckets.rest(demand, now)
            part_done(now)

        if moves:
            self._wires.start(Flow(demand, size, moved))
        if work:
            self._cores.start(_computation(work, self._core_of, part_done))

    def compute(
        self, host: int, seconds: float, cores: int, done: Callable[[], None]
    ) -> None:
        """Keep *cores* of a host busy for *seconds* of computing, then call *done*.

        It takes longer if others use the cores, too. Only for a cluster with a `Processor`.
        """
        core = self._core_of(host)
        self._computing[core] += cores

        def over(now: float) -> None:
            self._computing[core] -= cores
            done()

        self._cores.start(Flow({core: cores}, seconds, over))

    def _work(
        self,
        messages: Sequence[tuple[int, float]],
        size: float,
        demand: Mapping[int, float],
    ) -> list[tuple[int, float]]:
        """Return each thread's host and core-seconds. Threads of a host share its bytes."""
        processor = self.cluster.processor
        if processor is None:
            return []
        threads = Counter(host for host, _ in messages)
        work = []
        for host, count in messages:
            moved = size * demand.get(self.cluster.link_out_of(host), 0.0)
            seconds = count * self._message_seconds(processor, host)
            seconds += moved * processor.byte / threads[host]
            if seconds > 0:
                work.append((host, seconds))
        return work

    def _message_seconds(self, processor: Processor, host: int) -> float:
        """Return the core-seconds of a message that begins now.

        They are more if the message takes a core from computing.
        """
        busy = processor.message_while_computing
        if busy is None:
            return processor.message
        core = self._core_of(host)
        is_busy = self._computing[core] >= self._cores.capacities[core]
        return busy if is_busy else processor.message

    def _core_of(self, host: int) -> int:
        """Return the processor of a host's threads: its own, or the one that all hosts share."""
        processor = self.cluster.processor
        return host if processor is None or processor.cores is None else 0

    def send(
        self,
        connection: Hashable,
        source: int,
        destination: int,
        size: float,
        sent: Callable[[], None],
        arrived: Callable[[], None],
    ) -> None:
        """Send a message between two hosts or switches, after earlier ones of this *connection*.

        A switch sends without a processor of its own. *sent* is called when the last byte has left,
        *arrived* one latency later. Only the head of a connection is a flow; the messages behind it
        wait, and take no bandwidth.
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
            () if cluster.is_switch(source) else ((source, 1.0),),
        )


class TokenBuckets:
    """Token buckets of links. A bucket fills at its link's rate while the link is idle.

    Args:
        bursts: By link, seconds in which an empty bucket fills.
        capacities: By link, its present rate in bytes per second.
    """

    def __init__(
        self, bursts: Mapping[int, float], capacities: Sequence[float]
    ) -> None:
        self._bursts, self._capacities = bursts, capacities
        self._filled = dict(bursts)
        """By link: seconds at the link's rate that its bucket holds."""
        self._flows = dict.fromkeys(bursts, 0)
        self._rests_since = dict.fromkeys(bursts, 0.0)

    def take(self, demand: Mapping[int, float], size: float, now: float) -> float:
        """Start a flow; return how many of its *size* bytes pass at once, on each connection.

        The link is busy with the remaining bytes until `rest` is called. If no bytes remain, do not
        call it.
        """
        at_once = size
        for link, connections in demand.items():
            rate = self._capacities[link]
            if rate == math.inf:
                continue
            if link not in self._bursts:
                at_once = 0.0
                continue
            self._fill(link, now)
            at_once = min(at_once, self._filled[link] * rate / connections)
        for link, connections in demand.items():
            if link not in self._bursts:
                continue
            if at_once:
                used = at_once * connections / self._capacities[link]
                self._filled[link] = max(0.0, self._filled[link] - used)
            if at_once < size:
                self._flows[link] += 1
        return at_once

    def rest(self, demand: Mapping[int, float], now: float) -> None:
        """End a flow: its links are idle from *now* on, unless they carry other flows."""
        for link in demand:
            if link in self._bursts:
                self._flows[link] -= 1
                self._rests_since[link] = now

    def _fill(self, link: int, now: float) -> None:
        if not self._flows[link]:
            filled = self._filled[link] + now - self._rests_since[link]
            self._filled[link] = min(self._bursts[link], filled)
            self._rests_since[link] = now


class _Shared:
    """A `BandwidthSharing` driven by a clock: rates are shared again once per instant."""

    def __init__(self, clock: Events, sharing: BandwidthSharing) -> None:
        self._clock = clock
        self._sharing = sharing
        self._advance_at: float | None = None

    @property
    def capacities(self) -> Sequence[float]:
        return self._sharing.capacities

    def start(self, flow: Flow) -> None:
        self._sharing.start(flow)
        self._advance_by(self._clock.now)

    def set_capacity(self, index: int, rate: float) -> None:
        self._sharing.set_capacity(index, rate)
        self._advance_by(self._clock.now)

    def _advance_by(self, time: float) -> None:
        if time < math.inf and (self._advance_at is None or time < self._advance_at):
            self._advance_at = time
            self._clock.at(time, partial(self._advance, time), last=True)

    def _advance(self, planned: float) -> None:
        if planned != self._advance_at:
            # A call planned later, for an earlier time, has replaced this one.
            return
        self._advance_at = None
        for flow in self._sharing.advance(planned):
            flow.done(planned)
        self._advance_by(self._sharing.next_end())


def _computation(
    work: Sequence[tuple[int, float]],
    core_of: Callable[[int], int],
    done: Callable[[float], None],
) -> Flow:
    """Return the work of several threads (host, core-seconds) as one flow.

    They end together. The thread with the most work uses a whole core if one is free.
    """
    most = max(seconds for _, seconds in work)
    demand: dict[int, float] = {}
    for host, seconds in work:
        core = core_of(host)
        demand[core] = demand.get(core, 0.0) + seconds / most
    return Flow(demand, most, done)


def _processors(cluster: Cluster) -> list[float]:
    """Return the cores that communication can use: of all hosts together, or of each host."""
    if cluster.processor is None:
        return []
    if cluster.processor.cores is not None:
        return [float(cluster.processor.cores)]
    count = cluster.hosts + len(cluster.servers)
    return [float(cluster.racks[cluster.rack_of_host(h)].cores) for h in range(count)]
