"""Schedules in time, over links: played message by message, or priced as a few activities.

The simulated runtime moves its collectives so, on its clock; `pricing` does the same on an
agenda of its own, without a runtime.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from paceline.cluster import Cluster
from paceline.cluster.links import Events, Links
from paceline.interfaces import Priced, Schedule, Transfer, servers_of, switches_of


class Price(NamedTuple):
    """What an activity is on a cluster: seconds of *latency*, connections on each link
    (*demand*), and of each member that sends its host and how many *messages*."""

    latency: float
    demand: Mapping[int, float]
    messages: Sequence[tuple[int, float]]


class Prices:
    """Of activities among *workers* of *cluster*: each is worked out once per pattern."""

    def __init__(self, cluster: Cluster, workers: Sequence[int]) -> None:
        self._cluster, self._workers = cluster, workers
        self._known: dict[Hashable, Price] = {}

    def of(self, activity: Priced, schedule: Schedule) -> Price:
        """The price of *activity* of *schedule*, of whatever size."""
        pattern = activity.pattern, switches_of(schedule), servers_of(schedule)
        if pattern not in self._known:
            hosts = hosts_of(schedule, self._cluster, self._workers)
            self._known[pattern] = self._work_out(activity, hosts)
        return self._known[pattern]

    def _work_out(self, activity: Priced, hosts: Sequence[int]) -> Price:
        cluster = self._cluster
        demand: defaultdict[int, float] = defaultdict(float)
        streams: Mapping[tuple[int, int], float] | None
        streams = getattr(activity, "streams", None)
        if streams is None:
            streams = Counter(activity.connections)
        for (source, destination), count in streams.items():
            for link in cluster.host_path(hosts[source], hosts[destination]):
                demand[link] += count
        count = activity.messages_sent
        senders = activity.members if count else ()
        messages = [(hosts[member], float(count)) for member in senders]
        latency = activity.latency(
            lambda a, b: cluster.host_latency(hosts[a], hosts[b])
        )
        return Price(latency, demand, messages)


def hosts_of(schedule: Schedule, cluster: Cluster, workers: Sequence[int]) -> list[int]:
    """Where the nodes of *schedule* are: its ranks, which are *workers*, what adds up at its
    switches, its servers. Numbers of hosts, as `Cluster` has them."""
    return [
        *(cluster.host_of(worker) for worker in workers),
        *(cluster.aggregator_of(rack) for rack in switches_of(schedule)),
        *(cluster.host_of_server(server) for server in servers_of(schedule)),
    ]


class Phases:
    """The activities of *schedule*, its *phases* one by one, from `start` on. One unit of them is
    *unit* bytes; *done* is called when the last has ended."""

    def __init__(
        self,
        schedule: Schedule,
        phases: Sequence[Sequence[Priced]],
        prices: Prices,
        clock: Events,
        links: Links,
        unit: float,
        done: Callable[[], None],
    ) -> None:
        self._phases, self._prices, self._done = phases, prices, done
        self._schedule = schedule
        self._clock, self._links, self._unit = clock, links, unit
        self._next = self._under_way = 0

    def start(self) -> None:
        """Begin the next phase."""
        if self._next == len(self._phases):
            self._done()
            return
        phase = self._phases[self._next]
        self._next += 1
        self._under_way = len(phase)
        for activity in phase:
            price = self._prices.of(activity, self._schedule)
            start = self._clock.now + price.latency
            self._clock.at(start, partial(self._move, activity, price))
        if not phase:
            self.start()

    def _move(self, activity: Priced, price: Price) -> None:
        size = self._unit * activity.bytes_per_connection
        self._links.start(price.demand, size, self._ended, price.messages)

    def _ended(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self.start()


class Play:
    """One schedule among *workers*, message by message. One unit of it is *unit* bytes;
    *name* tells its connections from others'; *done* is called for each position whose
    messages all have left and come.

    A message starts when both its ends are present and what its source must have received
    has arrived. Nodes that are no ranks are always present.
    """

    def __init__(
        self,
        schedule: Schedule,
        workers: Sequence[int],
        links: Links,
        unit: float,
        name: Hashable,
        done: Callable[[int], None],
    ) -> None:
        self._links, self._name = links, name
        self._unit, self._done = unit, done
        self._ranks = len(workers)
        self._hosts = hosts_of(schedule, links.cluster, workers)
        others = len(self._hosts) - len(workers)
        self._ends = [*workers, *(-1 - node for node in range(others))]  # by name
        n = len(self._hosts)
        self._present = [position >= self._ranks for position in range(n)]
        out, expected = _in_order(schedule, n)
        self._out = [deque(mine) for mine in out]
        self._unsent = [len(mine) for mine in out]
        self._expected = expected
        self._received = [0] * n
        self._early: list[set[int]] = [set() for _ in range(n)]
        self._waiting_for: dict[int, list[tuple[int, Transfer]]] = {}  # absent ranks

    def present(self, position: int) -> None:
        """One more rank is present: what waited for it may go."""
        self._present[position] = True
        self._advance(position)
        for place, transfer in self._waiting_for.pop(position, []):
            self._send(place, transfer)

    def _advance(self, position: int) -> None:
        if not self._present[position]:
            return
        out = self._out[position]
        while out and out[0][0] <= self._received[position]:
            _, place, transfer = out.popleft()
            if self._present[transfer.destination]:
                self._send(place, transfer)
            else:
                waiting = self._waiting_for.setdefault(transfer.destination, [])
                waiting.append((place, transfer))
        if (
            not self._unsent[position]
            and self._received[position] == self._expected[position]
        ):
            self._unsent[position] = -1  # done once
            if position < self._ranks:
                self._done(position)

    def _send(self, place: int, transfer: Transfer) -> None:
        source, destination = transfer.source, transfer.destination
        self._links.send(
            (self._name, self._ends[source], self._ends[destination]),
            self._hosts[source],
            self._hosts[destination],
            self._unit * transfer.size,
            partial(self._sent, source),
            partial(self._arrived, destination, place),
        )

    def _sent(self, position: int) -> None:
        self._unsent[position] -= 1
        self._advance(position)

    def _arrived(self, position: int, place: int) -> None:
        early = self._early[position]
        early.add(place)
        while self._received[position] in early:
            early.remove(self._received[position])
            self._received[position] += 1
        self._advance(position)


@lru_cache(maxsize=16)
def _in_order(
    schedule: Schedule, nodes: int
) -> tuple[Sequence[Sequence[tuple[int, int, Transfer]]], Sequence[int]]:
    """Each node's messages out, in order: how many of the messages into the node must have
    arrived before, and the message's own place among those into its destination. And how many come into
    each node.

    Places count in step order: a message of a later step may arrive earlier, and counts only when what
    comes before it is in.
    """
    out: list[list[tuple[int, int, Transfer]]] = [[] for _ in range(nodes)]
    expected = [0] * nodes
    for number in range(schedule.steps):
        before = expected.copy()
        for transfer in schedule.step(number):
            source, destination = transfer.source, transfer.destination
            out[source].append((before[source], expected[destination], transfer))
            expected[destination] += 1
    return out, expected
