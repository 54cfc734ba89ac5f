"""Many activities at once, as columns of numbers: what `Sharing` does one by one, for all of them.

A worker that sends to 64 servers, beside 63 others, makes 4,096 activities, and each that ends
changes rates of others. The arithmetic is that of `Sharing`; sums are formed in another order.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.flow import Activity

Numbers = NDArray[np.float64]
Indices = NDArray[np.int64]


class Crowd:
    """Activities, each in a slot, and what each demands of links, as entries."""

    def __init__(self, activities: Iterable[Activity]) -> None:
        self._new: list[Activity] = []
        self._free: list[int] = []
        self._members: list[Activity | None] = []
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
        for activity in activities:
            self.add(activity)

    def add(self, activity: Activity) -> None:
        """One more takes part, from the next `take_in` on, in the state in which it is."""
        self._new.append(activity)

    def take_in(self) -> None:
        """Those that were added take part: all at once, since writing one number into a column takes as long as
        writing many."""
        new, self._new = self._new, []
        if not new:
            return
        while len(self._free) < len(new):
            self._grow()
        slots = [self._free.pop() for _ in new]
        for slot, activity in zip(slots, new, strict=True):
            self._members[slot] = activity
            activity.crowd, activity.slot = self, slot
        self._taken[slots] = True
        self._order[slots] = range(self._started, self._started + len(new))
        self._started += len(new)
        self._remaining[slots] = [activity.remaining for activity in new]
        self._rate[slots] = [activity.own_rate for activity in new]
        self._end[slots] = [activity.end for activity in new]
        counts = [len(activity.demand) for activity in new]
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
        """Entries of activities that have ended are left out; twice as many as there are fit."""
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
        """Which entries are of activities that have not ended."""
        return self._slot[: self._entries] >= 0

    # ---- time ----

    def take_ended(self, horizon: float) -> list[Activity]:
        """Take out what ends until *horizon*; in the order in which they started."""
        slots = np.flatnonzero(self._end <= horizon)
        if not len(slots):
            return []
        slots = slots[np.argsort(self._order[slots])]
        ended = []
        for slot in slots.tolist():
            activity = self._members[slot]
            assert activity is not None
            activity.crowd = None
            ended.append(activity)
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
        """All go on for so long at their rates."""
        finite = np.isfinite(self._rate)
        self._remaining[finite] -= self._rate[finite] * seconds

    def next_end(self) -> float:
        """When the next one ends."""
        return float(self._end.min())

    def rate_of(self, slot: int) -> float:
        """Of the activity that has *slot*."""
        return float(self._rate[slot])

    def dissolve(self) -> None:
        """Each is on its own again."""
        for activity in self._members:
            if activity is not None:
                self._put_back(activity)

    def _put_back(self, activity: Activity) -> None:
        slot = activity.slot
        activity.remaining = float(self._remaining[slot])
        activity.own_rate = float(self._rate[slot])
        activity.end = float(self._end[slot])
        activity.crowd = None

    # ---- rates ----

    def share(
        self, capacities: list[float], most: float, now: float, same: float
    ) -> None:
        """Give each its rate, *most* or less; *same*: shares that differ by less, relatively, are equal."""
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
        """Give one its rate."""
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
