"""Collectives as data: who sends which part of a buffer to whom, and after what.

One list of transfers serves four readers: `collectives.execute` *performs* it on real tensors
over sends and receives; the simulated runtime *plays* it message by message, or *prices* it as
one activity; the planner prices it without a runtime. Ranks here are positions in the group, 0
to n-1. Sizes and offsets are in one unit, whichever whoever makes a schedule takes: elements
of the buffer to perform it, bytes to price it.

A transfer may start when every transfer of an earlier step into its source has arrived:
that is all the order there is. What is sent in a step is what the buffer held before that
step. Messages between the same two ranks never overtake.

Beside n ranks other nodes may take part in a schedule: what adds up at racks' switches, as n,
n + 1, ... (see `switches_of`), and after them servers on hosts of their own (`servers_of`). These are always present, and hold
zeros at first; such schedules are performed in virtual time only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol


class Transfer(NamedTuple):
    """*source* sends *size* units at *offset* of its buffer to *destination*,
    which adds them to its own there (*adds*), or puts them in their place."""

    source: int
    destination: int
    size: int
    offset: int = 0
    adds: bool = False


class Schedule(Protocol):
    """A collective's transfers, and what they cost when nothing disturbs them."""

    def __hash__(self) -> int: ...

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        ...

    @property
    def steps(self) -> int:
        """Number of steps."""
        ...

    def step(self, number: int) -> Iterator[Transfer]:
        """The transfers of one step."""
        ...

    def bytes_sent(self, rank: int) -> int:
        """What *rank* sends in all, in units: bytes where sizes are bytes."""
        ...

    @property
    def priced(self) -> Sequence[Sequence[Priced]] | None:
        """This schedule as activities: in each phase some side by side, and the next phase
        begins when they all have ended; None: it must be played."""
        ...


def switches_of(schedule: Schedule) -> tuple[int, ...]:
    """The racks whose aggregators are nodes of *schedule*, its attribute ``switches``: most
    schedules have none."""
    found: tuple[int, ...] = getattr(schedule, "switches", ())
    return found


def servers_of(schedule: Schedule) -> tuple[int, ...]:
    """The numbers of a cluster's servers on hosts of their own that are nodes of *schedule*, its
    attribute ``servers``: most schedules have none."""
    found: tuple[int, ...] = getattr(schedule, "servers", ())
    return found


class Priced(Protocol):
    """Messages that keep step with each other, so that they can be taken for one activity:
    after the latency of the longest chain all connections carry the same. Where they do not, it has
    ``streams`` as well, which counts instead: how many connections' bytes go from one node to
    another, by pair."""

    @property
    def pattern(self) -> Hashable:
        """Equal for schedules with the same connections and latency, of whatever size."""
        ...

    @property
    def connections(self) -> Iterable[tuple[int, int]]:
        """Source and destination of each connection in use."""
        ...

    @property
    def members(self) -> Sequence[int]:
        """The ranks that take part."""
        ...

    @property
    def messages_sent(self) -> int:
        """Messages that each of them sends."""
        ...

    @property
    def bytes_per_connection(self) -> int:
        """What the busiest connection carries."""
        ...

    def latency(self, one_way: Callable[[int, int], float]) -> float:
        """Seconds of latency on the longest chain of dependent messages. *one_way* gives
        seconds between two ranks."""
        ...
