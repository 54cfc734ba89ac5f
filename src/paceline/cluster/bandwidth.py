"""Divides links' bandwidth among concurrent transfers: max-min fairness over connections.

*Model.* A `Flow` is one transfer, or one collective whose connections all move at the same rate.
Its *demand* on a link is its number of connections there: a ring whose ranks cross an uplink three
times has demand 3 on it. All connections of a flow have one rate, the smallest fair share over its
links. Other flows get the bandwidth that a flow cannot use. This is progressive filling: find the
tightest link, freeze the flows that cross it, repeat. SimGrid's parallel tasks have the same model
(bottleneck max-min fairness).

*Time.* Rates change only when a flow starts or ends or a capacity changes, so between those
instants every flow has one predicted end. A change reaches the flows that share a link with it, the
flows that share one with these, and so on. All other flows keep their rates. `BandwidthSharing` has
no clock: its driver calls `advance(now)` once per such instant and asks for `next_end()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Indices = NDArray[np.int64]

# Ends that differ only by rounding are one instant. Otherwise a symmetric pattern would split
# into one instant per flow.
_SAME_INSTANT = 1e-12


MANY = 64
"""From this number of flows on, a table shares all their rates at once."""
MOST_NEAR = 16
"""If a change reaches at most this many flows, only their rates are shared again."""


class Flow:
    """A transfer in progress.

    Args:
        demand: By directed link, this flow's number of connections on it.
        size: Bytes to move on each of its connections.
        done: The driver calls it with the instant, in seconds, at which the last byte has left.
    """

    __slots__ = (
        *("table", "demand", "done", "end"),
        *("number", "own_rate", "remaining", "slot"),
    )

    def __init__(
        self, demand: Mapping[int, float], size: float, done: Callable[[float], None]
    ) -> None:
        self.demand = demand
        self.remaining = float(size)
        self.done = done
        self.own_rate = 0.0
        self.end = math.inf
        self.table: FlowTable | None = None
        self.slot = 0
        self.number = 0
        """Its position among all flows that have started."""

    @property
    def rate(self) -> float:
        """The rate of each of its connections."""
        table = self.table
        return self.own_rate if table is None else table.rate_of(self.slot)


class BandwidthSharing:
    """Shares the bandwidth of links among flows.

    Args:
        capacities: By directed link, bytes per second.
        most: The highest rate of a connection in bytes per second, as no thread uses more than one
            core.
        many: From this number of flows on they are in a table, until half as many are left.
        near: A change shares rates again among at most this many flows, or among all.
    """

    def __init__(
        self,
        capacities: Sequence[float],
        most: float = math.inf,
        many: int = MANY,
        near: int = MOST_NEAR,
    ) -> None:
        self.capacities = list(capacities)
        self._most = most
        self._many, self._near = many, near
        # Insertion order makes results deterministic.
        self._active: dict[Flow, None] = {}
        self._table: FlowTable | None = None
        """The table of the active flows if they are many; it then holds their state."""
        self._on: dict[int, dict[Flow, None]] = {}
        """The flows on each link."""
        self._changed: set[int] = set()
        """Links whose load or capacity has changed since rates were shared last."""
        self._freed: set[int] = set()
        """The changed links whose capacity has become infinite: they were the limit until now."""
        self._new: list[Flow] = []
        self._started = 0
        self._advanced = 0.0

    def start(self, flow: Flow) -> None:
        """Add *flow* from the instant of the next `advance` on."""
        self._active[flow] = None
        flow.number = self._started
        self._started += 1
        for link in flow.demand:
            self._on.setdefault(link, {})[flow] = None
        self._new.append(flow)
        if self._table is not None:
            self._table.add(flow)

    def set_capacity(self, link: int, rate: float) -> None:
        """Change a link's capacity from the instant of the next `advance` on."""
        self.capacities[link] = rate
        self._changed.add(link)
        if rate == math.inf:
            self._freed.add(link)

    def advance(self, now: float) -> list[Flow]:
        """Move time to *now*; remove and return the flows that ended.

        Rates are shared again if needed. Flows from `start` since the last call move from *now* on.
        """
        elapsed = now - self._advanced
        assert elapsed >= 0, "time can't go backwards"
        self._advanced = now
        horizon = now + _SAME_INSTANT * abs(now)
        table = self._table
        if table is None:
            ended = [a for a in self._active if a.end <= horizon]
        else:
            ended = table.take_ended(horizon)
        for flow in ended:
            del self._active[flow]
            for link in flow.demand:
                del self._on[link][flow]
                self._changed.add(link)
        if elapsed:
            self._move(elapsed)
        if self._changed or self._new:
            self._count()
            self._share(now, self._affected())
            self._changed.clear()
            self._freed.clear()
            self._new.clear()
        return ended

    def _move(self, seconds: float) -> None:
        if self._table is not None:
            self._table.move(seconds)
            return
        for flow in self._active:
            if flow.own_rate:
                flow.remaining -= flow.own_rate * seconds

    def next_end(self) -> float:
        """Return when the next flow ends if nothing changes; infinite if no flow does."""
        if self._table is not None:
            return self._table.next_end()
        return min((a.end for a in self._active), default=math.inf)

    def _count(self) -> None:
        """Use a table for many flows, and none for few."""
        if self._table is None and len(self._active) >= self._many:
            self._table = FlowTable(self._active)
        elif self._table is not None and len(self._active) <= self._many // 2:
            self._table.dissolve()
            self._table = None

    def _affected(self) -> list[Flow] | None:
        """Return the flows whose rates may change, by start; None if they are many."""
        if len(self._new) > self._near:
            return None
        found = dict.fromkeys(self._new)
        links = self._changed.union(*(flow.demand for flow in self._new))
        following = list(links)
        while following:
            link = following.pop()
            if self.capacities[link] == math.inf and link not in self._freed:
                # Flows do not slow each other down on it.
                continue
            for flow in self._on.get(link, ()):
                if flow in found:
                    continue
                found[flow] = None
                if len(found) > self._near:
                    return None
                following += flow.demand.keys() - links
                links |= flow.demand.keys()
        return sorted(found, key=lambda flow: flow.number)

    def _share(self, now: float, among: list[Flow] | None) -> None:
        """Share rates among all flows, or *among* some that share no link with other flows."""
        if self._table is not None and among is None:
            self._table.share(self.capacities, self._most, now, _SAME_INSTANT)
            return
        if self._table is not None:
            self._table.take_in()
        waiting = list(self._active) if among is None else among
        left: dict[int, float] = {}
        load: dict[int, float] = {}
        # Loads need not be whole numbers, so a count tells whether a flow is left.
        users: dict[int, int] = {}
        for flow in waiting:
            for link, connections in flow.demand.items():
                load[link] = load.get(link, 0.0) + connections
                users[link] = users.get(link, 0) + 1
                left[link] = self.capacities[link]
        while waiting:
            shares = {link: left[link] / load[link] for link in load if users[link]}
            tightest = min(shares.values(), default=math.inf)
            if tightest >= self._most:
                for flow in waiting:
                    self._set_rate(flow, self._most, now)
                return
            tight = {
                link
                for link, share in shares.items()
                if share <= tightest * (1 + _SAME_INSTANT)
            }
            still_waiting = []
            for flow in waiting:
                if tight.isdisjoint(flow.demand):
                    still_waiting.append(flow)
                    continue
                self._set_rate(flow, max(0.0, tightest), now)
                for link, connections in flow.demand.items():
                    load[link] -= connections
                    users[link] -= 1
                    left[link] = max(0.0, left[link] - tightest * connections)
            waiting = still_waiting

    @staticmethod
    def _set_rate(flow: Flow, rate: float, now: float) -> None:
        if flow.table is not None:
            flow.table.set_rate(flow.slot, rate, now)
            return
        if rate == flow.own_rate and flow.end < math.inf:
            return  # same rate, same end: rounding must not move it
        flow.own_rate = rate
        if flow.remaining <= 0 or rate == math.inf:
            flow.end = now
        else:
            flow.end = now + flow.remaining / rate if rate else math.inf


class FlowTable:
    """Many flows as columns of numbers, so that `BandwidthSharing`'s work is vectorized.

    Each flow has a slot; its demands on links are entries. A worker that sends to 64 servers,
    beside 63 others, makes 4,096 flows, and each that ends changes rates of others. The arithmetic
    is that of `BandwidthSharing`; sums are formed in another order.
    """

    def __init__(self, flows: Iterable[Flow]) -> None:
        self._new: list[Flow] = []
        self._free: list[int] = []
        self._members: list[Flow | None] = []
        self._started = 0
        self._taken: NDArray[np.bool_] = np.zeros(0, bool)
        self._order: Indices = np.zeros(0, np.int64)
        self._remaining: Numbers = np.zeros(0)
        self._rate: Numbers = np.zeros(0)
        self._end: Numbers = np.zeros(0)
        self._entries = 0
        self._slot: Indices = np.zeros(0, np.int64)
        self._link: Indices = np.zeros(0, np.int64)
        self._demand: Numbers = np.zeros(0)
        for flow in flows:
            self.add(flow)

    def add(self, flow: Flow) -> None:
        """Add a flow in its present state, from the next `take_in` on."""
        self._new.append(flow)

    def take_in(self) -> None:
        """Enter all added flows into the columns at once.

        Writing one number into a column takes as long as writing many.
        """
        new, self._new = self._new, []
        if not new:
            return
        while len(self._free) < len(new):
            self._grow()
        slots = [self._free.pop() for _ in new]
        for slot, flow in zip(slots, new, strict=True):
            self._members[slot] = flow
            flow.table, flow.slot = self, slot
        self._taken[slots] = True
        self._order[slots] = range(self._started, self._started + len(new))
        self._started += len(new)
        self._remaining[slots] = [flow.remaining for flow in new]
        self._rate[slots] = [flow.own_rate for flow in new]
        self._end[slots] = [flow.end for flow in new]
        counts = [len(flow.demand) for flow in new]
        if self._entries + sum(counts) > len(self._slot):
            self._make_room(sum(counts))
        first, last = self._entries, self._entries + sum(counts)
        self._slot[first:last] = np.repeat(slots, counts)
        self._link[first:last] = [link for one in new for link in one.demand]
        self._demand[first:last] = [n for one in new for n in one.demand.values()]
        self._entries = last

    def _grow(self) -> None:
        had = len(self._members)
        more = max(64, had)
        self._free.extend(range(had + more - 1, had - 1, -1))
        self._members.extend([None] * more)
        self._taken = np.concatenate([self._taken, np.zeros(more, bool)])
        self._order = np.concatenate([self._order, np.zeros(more, np.int64)])
        self._remaining = np.concatenate([self._remaining, np.zeros(more)])
        self._rate = np.concatenate([self._rate, np.zeros(more)])
        self._end = np.concatenate([self._end, np.full(more, np.inf)])

    def _make_room(self, wanted: int) -> None:
        """Drop entries of ended flows; make room for twice as many entries as there are."""
        slot, link, demand = (column[self._alive()] for column in self._columns())
        kept = len(slot)
        room = 2 * (kept + wanted) + 64
        self._slot = np.concatenate([slot, np.zeros(room - kept, np.int64)])
        self._link = np.concatenate([link, np.zeros(room - kept, np.int64)])
        self._demand = np.concatenate([demand, np.zeros(room - kept)])
        self._entries = kept

    def _columns(self) -> tuple[Indices, Indices, Numbers]:
        n = self._entries
        return self._slot[:n], self._link[:n], self._demand[:n]

    def _alive(self) -> NDArray[np.bool_]:
        """A mask of the entries whose flows have not ended."""
        return self._slot[: self._entries] >= 0

    # ---- time ----

    def take_ended(self, horizon: float) -> list[Flow]:
        """Remove and return the flows that end until *horizon*, in the order of their starts."""
        slots = np.flatnonzero(self._end <= horizon)
        if not len(slots):
            return []
        slots = slots[np.argsort(self._order[slots])]
        ended = []
        for slot in slots.tolist():
            flow = self._members[slot]
            assert flow is not None
            flow.table = None
            ended.append(flow)
            self._members[slot] = None
            self._free.append(slot)
        gone = np.zeros(len(self._members), bool)
        gone[slots] = True
        entries = self._slot[: self._entries]
        entries[(entries >= 0) & gone[entries]] = -1
        self._taken[slots] = False
        self._end[slots], self._rate[slots] = np.inf, 0.0
        return ended

    def move(self, seconds: float) -> None:
        """Move all flows for *seconds* at their rates."""
        finite = np.isfinite(self._rate)
        self._remaining[finite] -= self._rate[finite] * seconds

    def next_end(self) -> float:
        """When the next flow ends."""
        return float(self._end.min())

    def rate_of(self, slot: int) -> float:
        """The rate of the flow in *slot*."""
        return float(self._rate[slot])

    def dissolve(self) -> None:
        """Return each flow's state to the flow."""
        for flow in self._members:
            if flow is not None:
                self._put_back(flow)

    def _put_back(self, flow: Flow) -> None:
        slot = flow.slot
        flow.remaining = float(self._remaining[slot])
        flow.own_rate = float(self._rate[slot])
        flow.end = float(self._end[slot])
        flow.table = None

    # ---- rates ----

    def share(
        self, capacities: list[float], most: float, now: float, same: float
    ) -> None:
        """Give each flow its rate, at most *most*.

        *same*: shares whose relative difference is less are equal.
        """
        self.take_in()
        slot, link, demand = (column[self._alive()] for column in self._columns())
        left = np.array(capacities)
        load = np.bincount(link, weights=demand, minlength=len(left))
        users = np.bincount(link, minlength=len(left))
        rate = np.full(len(self._members), most)
        while len(slot):
            share = np.full(len(left), np.inf)
            np.divide(left, load, out=share, where=users > 0)
            tightest = share.min()
            if tightest >= most:
                break
            frozen = np.zeros(len(self._members), bool)
            frozen[slot[(share <= tightest * (1 + same))[link]]] = True
            rate[frozen] = max(0.0, tightest)
            mine = frozen[slot]
            taken = np.bincount(link[mine], weights=demand[mine], minlength=len(left))
            load -= taken
            users -= np.bincount(link[mine], minlength=len(left))
            left = np.maximum(0.0, left - tightest * taken)
            slot, link, demand = slot[~mine], link[~mine], demand[~mine]
        self._set_rates(rate, now)

    def set_rate(self, slot: int, rate: float, now: float) -> None:
        """Give one flow its rate."""
        if rate == self._rate[slot] and self._end[slot] < np.inf:
            return  # same rate, same end: rounding must not move it
        self._rate[slot] = rate
        remaining = float(self._remaining[slot])
        if remaining <= 0 or rate == np.inf:
            self._end[slot] = now
        else:
            self._end[slot] = now + remaining / rate if rate else np.inf

    def _set_rates(self, rate: Numbers, now: float) -> None:
        # Same rate, same end: rounding must not move it.
        new = self._taken & ((rate != self._rate) | (self._end == np.inf))
        self._rate[new] = rate[new]
        with np.errstate(divide="ignore"):
            end = now + self._remaining[new] / rate[new]
        over = (self._remaining[new] <= 0) | (rate[new] == np.inf)
        self._end[new] = np.where(over, now, end)
