"""Collectives as data: which rank sends which part of a buffer to which rank, in which order, at what cost.

One `Schedule` serves four readers. `collectives.schedule_execution` *performs* it on real tensors over
sends and receives. The simulated runtime simulates its messages one by one, or moves its
`Activity`s at once. The planner prices it without a runtime. Ranks here are positions in the
group, 0 to n - 1. Sizes and offsets are in one unit: elements of the buffer to perform a
schedule, bytes to price it. A `Placement` says where the ranks are.

- `collectives.execute` *performs* it on real tensors, by sends and receives;
- the simulated runtime simulates its messages one by one;
- or it simulates its `Activity`s, each as a whole;
- the planner prices it without a runtime.

Ranks here are positions in the group, 0 to n - 1. Sizes and offsets have one unit: elements of the
buffer when a schedule is performed, bytes when it is priced. A `Placement` says where the ranks are.

A transfer may start when every transfer of an earlier step into its source has arrived. There is no
other order. A step sends what the buffer held before that step. Messages between the same two ranks
never overtake each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from paceline.cluster import Cluster
from paceline.errors import UsageError

__all__ = ["Activity", "Placement", "Schedule", "Transfer"]

OneWay = Callable[[int, int], float]
"""Seconds of latency from one node to another."""
Traffic = Mapping[tuple[int, int], float]
"""How many connections send from one node to another, by (source, destination)."""


class Transfer(NamedTuple):
    """One message of a schedule.

    *source* sends *size* units at *offset* of its buffer to *destination*, which adds them to its
    own there (*adds*), or puts them in their place.
    """

    source: int
    destination: int
    size: int
    offset: int = 0
    adds: bool = False


@dataclass(frozen=True)
class Activity:
    """Messages that progress together, so that they are priced as one.

    After the latency of the longest chain of dependent messages, all connections carry *bytes*.

    Args:
        key: Equal for activities with the same traffic and latency, of whatever size.
        ranks: The ranks that take part.
        traffic: Returns the connections in use; called once per key.
        bytes: Units on the busiest connection.
        messages: Messages that each rank sends.
        latency: Given the seconds between two nodes, returns those of the longest chain of
            dependent messages.
        switches: Racks whose aggregators are additional nodes n, n + 1, ...
        servers: Numbers of the cluster's dedicated servers, which are the nodes after those.
    """

    key: Hashable
    ranks: Sequence[int]
    traffic: Callable[[], Traffic] = field(compare=False)
    bytes: int
    messages: int
    latency: Callable[[OneWay], float] = field(compare=False)
    switches: tuple[int, ...] = ()
    servers: tuple[int, ...] = ()

    def relabel(self, members: tuple[int, ...]) -> Activity:
        """Return the same activity among ``members`` of a larger group.

        Args:
            members: Rank in the larger group of each rank of this activity. The activity must not
                have other nodes.
        """
        return Activity(
            (members, self.key),
            [members[rank] for rank in self.ranks],
            lambda: {
                (members[a], members[b]): count
                for (a, b), count in self.traffic().items()
            },
            self.bytes,
            self.messages,
            lambda one_way: self.latency(lambda a, b: one_way(members[a], members[b])),
        )


@dataclass(frozen=True)
class Schedule(ABC):
    """A collective's transfers, and their cost on an otherwise idle network.

    Subclasses are frozen dataclasses: equal schedules are performed and priced alike.

    Args:
        ranks: Number of ranks.

    Example:
        Every rank sends its buffer to the next one, which adds it::

            @dataclass(frozen=True)
            class Shift(Schedule):
                size: int
                steps: ClassVar[int] = 1

                def step(self, number: int) -> Iterator[Transfer]:
                    for rank in range(self.ranks):
                        yield Transfer(rank, (rank + 1) % self.ranks, self.size, adds=True)
    """

    ranks: int

    performable: ClassVar[bool] = True
    """Whether ranks can perform it by sending to each other. A schedule that they cannot perform is
    a sum over ranks, and is always priced."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of steps."""

    @abstractmethod
    def step(self, number: int) -> Iterator[Transfer]:
        """Return the transfers of one step, counted from 0."""

    def own_steps(self, rank: int) -> Iterable[Sequence[Transfer]]:
        """Return the transfers of each step that *rank* sends or receives, in their order.

        A schedule with about as many steps as ranks overrides it: if each of n ranks looked through
        all transfers of n steps, it would take time proportional to n^2.
        """
        for number in range(self.steps):
            yield [t for t in self.step(number) if rank in (t.source, t.destination)]

    def bytes_sent(self, rank: int) -> int:
        """Return the units that *rank* sends in all: bytes where sizes are bytes."""
        sent = (t for step in self.own_steps(rank) for t in step if t.source == rank)
        return sum(transfer.size for transfer in sent)

    def phases(self) -> Sequence[Sequence[Activity]] | None:
        """Return this schedule as activities; None: its messages are simulated one by one.

        The activities of a phase run in parallel. The next phase begins when all of them have ended.
        """
        return None

    def halves(self) -> tuple[Schedule | None, Schedule | None]:
        """Return the schedule of the transfers that add, and that of the transfers that distribute the sum.

        Returns:
            Two schedules that together have the transfers of this one; None for a half without
            transfers.

        Raises:
            UsageError: The schedule does not define which of its steps add.
        """
        raise UsageError(
            f"a reduce-scatter by {type(self).__name__}, of which nobody has told "
            "which steps add and which only spread the sum: use collective='ring'"
        )


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a communicator are, as far as their runtime knows it.

    Args:
        workers: The job's worker that each rank is.
        racks: The rack of each rank; None if it is unknown.
        cluster: The network; None if it is unknown.
        aggregating: The racks whose switch has an aggregator.

    Example:
        ::

            schedule = make("hierarchical").schedule(1_000_000, Placement.on(cluster))
    """

    workers: Sequence[int]
    racks: tuple[int, ...] | None = None
    cluster: Cluster | None = None
    aggregating: frozenset[int] = frozenset()

    @classmethod
    def on(cls, cluster: Cluster, workers: Sequence[int] | None = None) -> Placement:
        """Return the placement of some workers of a cluster; None: all."""
        chosen = tuple(range(cluster.workers) if workers is None else workers)
        racks = tuple(cluster.rack_of(worker) for worker in chosen)
        return cls(chosen, racks, cluster, aggregating_racks(cluster))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.workers)

    def subset(self, ranks: Sequence[int]) -> Placement:
        """Return the placement of some of the ranks, as a group of its own."""
        racks = self.racks
        return Placement(
            tuple(self.workers[rank] for rank in ranks),
            None if racks is None else tuple(racks[rank] for rank in ranks),
            self.cluster,
            self.aggregating,
        )


def aggregating_racks(cluster: Cluster | None) -> frozenset[int]:
    """Return the racks of *cluster* that aggregate; none if *cluster* is None."""
    racks = () if cluster is None else cluster.racks
    return frozenset(i for i, rack in enumerate(racks) if rack.aggregates)
