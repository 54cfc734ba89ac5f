"""The time of schedules over links: simulated message by message, or estimated as a few activities.

The simulated runtime times its collectives with this, on its own clock. `seconds` does the same on
an event queue of its own, without a runtime.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

from paceline.cluster import Cluster
from paceline.cluster.links import EventQueue, Events, Links
from paceline.errors import UsageError
from paceline.interfaces import Activity, Schedule, Transfer


def seconds(
    schedule: Schedule,
    cluster: Cluster,
    ranks: Sequence[int] | None = None,
    *,
    unit: float = 1,
    play: bool = False,
) -> float:
    """Return the seconds from a common start to the last rank's end, on idle links.

    The simulated runtime charges the same time if nothing else moves. Links are shared max-min
    fairly. Messages take their latency, and processor time if *cluster* has message costs. The
    cluster's rules and bursts are ignored: buckets of a training follow one another, on links that
    have not rested.

    *unit* is the bytes of one unit of *schedule*'s sizes. ``ranks[i]`` is the worker of *cluster*
    that is rank i (None: all workers, in order). *play*: simulate each message, even of schedules
    that have activities, if ranks can perform them.

    Raises `UsageError` if *ranks* does not fit the schedule, or names workers that *cluster* lacks.
    """
    workers = tuple(range(cluster.workers) if ranks is None else ranks)
    strangers = [worker for worker in workers if not 0 <= worker < cluster.workers]
    if len(workers) != schedule.ranks or strangers:
        raise UsageError(
            f"a schedule of {schedule.ranks} ranks: expected as many workers, each 0 to "
            f"{cluster.workers - 1}, got {list(workers)}"
        )
    agenda = EventQueue()
    if cluster.bursts:
        racks = tuple(replace(rack, burst=0.0) for rack in cluster.racks)
        cluster = replace(cluster, racks=racks)
    links = Links(agenda, cluster)
    ends: list[float] = []
    phases = phases_of(schedule, play=play)
    if phases is not None:
        PhaseSimulation(
            phases,
            ActivityCosts(cluster, workers),
            agenda,
            links,
            unit,
            lambda: ends.append(agenda.now),
        ).start()
    else:
        played = MessageSimulation(
            schedule, workers, links, unit, "", lambda position: ends.append(agenda.now)
        )
        for position in range(len(workers)):
            played.present(position)
    agenda.run()
    return ends[-1]


def phases_of(schedule: Schedule, *, play: bool) -> Sequence[Sequence[Activity]] | None:
    """The activities that estimate *schedule*; None: its messages are simulated.

    *play*: simulate the messages of all schedules that ranks can perform.
    """
    return None if play and schedule.performable else schedule.phases()


class ActivityCost(NamedTuple):
    """An activity's cost on a cluster.

    It has seconds of *latency*, connections on each link (*demand*), and for each sending rank its
    host and number of *messages*.
    """

    latency: float
    demand: Mapping[int, float]
    messages: Sequence[tuple[int, float]]


class ActivityCosts:
    """The costs of activities among *workers* of *cluster*, computed once per key."""

    def __init__(self, cluster: Cluster, workers: Sequence[int]) -> None:
        self._cluster, self._workers = cluster, workers
        self._known: dict[Hashable, ActivityCost] = {}

    def of(self, activity: Activity) -> ActivityCost:
        """The cost of *activity*; it does not depend on the size."""
        if activity.key not in self._known:
            self._known[activity.key] = self._work_out(activity)
        return self._known[activity.key]

    def _work_out(self, activity: Activity) -> ActivityCost:
        cluster = self._cluster
        hosts = [
            *(cluster.host_of(worker) for worker in self._workers),
            *(cluster.aggregator_of(rack) for rack in activity.switches),
            *(cluster.host_of_server(server) for server in activity.servers),
        ]
        demand: defaultdict[int, float] = defaultdict(float)
        for (source, destination), count in activity.traffic().items():
            for link in cluster.host_path(hosts[source], hosts[destination]):
                demand[link] += count
        senders = activity.ranks if activity.messages else ()
        messages = [(hosts[rank], float(activity.messages)) for rank in senders]
        latency = activity.latency(
            lambda a, b: cluster.host_latency(hosts[a], hosts[b])
        )
        return ActivityCost(latency, demand, messages)


class PhaseSimulation:
    """Simulates a schedule's activities, its *phases* one after the other, from `start` on.

    One unit of the schedule is *unit* bytes. *done* is called when the last phase has ended.
    """

    def __init__(
        self,
        phases: Sequence[Sequence[Activity]],
        costs: ActivityCosts,
        clock: Events,
        links: Links,
        unit: float,
        done: Callable[[], None],
    ) -> None:
        self._phases, self._costs, self._done = phases, costs, done
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
            cost = self._costs.of(activity)
            start = self._clock.now + cost.latency
            self._clock.at(start, partial(self._move, activity, cost))
        if not phase:
            self.start()

    def _move(self, activity: Activity, cost: ActivityCost) -> None:
        size = self._unit * activity.bytes
        self._links.start(cost.demand, size, self._ended, cost.messages)

    def _ended(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self.start()


class MessageSimulation:
    """Simulates one schedule among *workers*, message by message.

    One unit of the schedule is *unit* bytes. *name* keeps its connections apart from others'.
    *done* is called for each rank, once all its messages have been sent and received.

    A message starts when both its ends are present, and its source has received all that it depends
    on.
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
        self._workers, n = workers, len(workers)
        self._hosts = [links.cluster.host_of(worker) for worker in workers]
        self._present = [False] * n
        out, expected = _in_order(schedule)
        self._out = [deque(mine) for mine in out]
        self._unsent = [len(mine) for mine in out]
        self._expected = expected
        self._received = [0] * n
        self._early: list[set[int]] = [set() for _ in range(n)]
        self._waiting_for: dict[int, list[tuple[int, Transfer]]] = {}  # absent ranks

    def present(self, position: int) -> None:
        """Rank *position* is present: start the messages that waited for it."""
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
            self._done(position)

    def _send(self, place: int, transfer: Transfer) -> None:
        source, destination = transfer.source, transfer.destination
        self._links.send(
            (self._name, self._workers[source], self._workers[destination]),
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
    schedule: Schedule,
) -> tuple[Sequence[Sequence[tuple[int, int, Transfer]]], Sequence[int]]:
    """Each rank's outgoing messages in order, and the number of messages that each rank receives.

    An outgoing message has three entries: how many messages its source must have received before,
    its index among the messages into its destination, and the transfer. Indices count in step
    order. A message of a later step may arrive earlier; it counts only when all messages before it
    have arrived.
    """
    out: list[list[tuple[int, int, Transfer]]] = [[] for _ in range(schedule.ranks)]
    expected = [0] * schedule.ranks
    for number in range(schedule.steps):
        before = expected.copy()
        for transfer in schedule.step(number):
            source, destination = transfer.source, transfer.destination
            out[source].append((before[source], expected[destination], transfer))
            expected[destination] += 1
    return out, expected
