"""How concurrent transfers share links: max-min fairness over connections.

Theory of operation
-------------------
An `Activity` is one transfer, or one collective whose connections all move at the same
rate. It counts on a link as its number of connections there (its *demand*): a ring whose
ranks cross an uplink three times has demand 3 on it. All connections of an activity have
one rate, the smallest fair share over its links; what it cannot use elsewhere is given
to the others (progressive filling: find the tightest link, freeze what crosses it,
repeat). This is the model of SimGrid's parallel tasks (bottleneck max-min fairness).

Rates change only when an activity starts or ends or a capacity changes, so between those
instants every activity has one predicted end. A change reaches what shares a link with it, and what
shares one with these, and so on: all others go on as before. `Sharing` holds no clock: its driver calls
`settle(now)` once per such instant and asks for `next_end()`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.cluster.flow import Activity

if TYPE_CHECKING:
    from paceline.cluster.flow_table import Crowd


# Ends that differ by rounding alone are one instant; without this a symmetric pattern
# falls apart into one instant per flow.
_SAME_INSTANT = 1e-12


MANY = 64
"""From so many activities on they are a crowd, whose rates are shared all at once."""
MOST_NEAR = 16
"""Rates are shared anew among those alone that a change can reach, where it reaches so few."""


class Sharing:
    """Activities on links of given capacities, in bytes per second. No connection is faster than
    *most*, as no thread uses more than one core. From *many* activities on they are a crowd,
    until half as many are left; rates are shared anew among *near* of them at most, or all."""

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
        self._active: dict[Activity, None] = {}  # insertion-ordered: deterministic
        self._crowd: Crowd | None = None
        """The same ones, where they are many; what is known of each is there then."""
        self._on: dict[int, dict[Activity, None]] = {}
        """Which are on a link."""
        self._changed: set[int] = set()
        """Links whose load, or capacity, is another one than when rates were shared last."""
        self._freed: set[int] = set()
        """Those among them that have just become endless: they were the limit until now."""
        self._new: list[Activity] = []
        self._started = 0
        self._settled = 0.0

    def start(self, activity: Activity) -> None:
        """Add *activity* from the instant of the next `settle` on."""
        self._active[activity] = None
        activity.number = self._started
        self._started += 1
        for link in activity.demand:
            self._on.setdefault(link, {})[activity] = None
        self._new.append(activity)
        if self._crowd is not None:
            self._crowd.add(activity)

    def set_capacity(self, link: int, rate: float) -> None:
        """Change a link's capacity from the instant of the next `settle` on."""
        self.capacities[link] = rate
        self._changed.add(link)
        if rate == math.inf:
            self._freed.add(link)

    def settle(self, now: float) -> list[Activity]:
        """Move time to *now*; take out and return what ended, and share anew if needed.

        What `start` added since the last call moves from *now* on.
        """
        elapsed = now - self._settled
        assert elapsed >= 0, "time can't go backwards"
        self._settled = now
        horizon = now + _SAME_INSTANT * abs(now)
        crowd = self._crowd
        if crowd is None:
            ended = [a for a in self._active if a.end <= horizon]
        else:
            ended = crowd.take_ended(horizon)
        for activity in ended:
            del self._active[activity]
            for link in activity.demand:
                del self._on[link][activity]
                self._changed.add(link)
        if elapsed:
            self._move(elapsed)
        if self._changed or self._new:
            self._count()
            self._share(now, self._reached())
            self._changed.clear()
            self._freed.clear()
            self._new.clear()
        return ended

    def _move(self, seconds: float) -> None:
        if self._crowd is not None:
            self._crowd.move(seconds)
            return
        for activity in self._active:
            if activity.own_rate:
                activity.remaining -= activity.own_rate * seconds

    def next_end(self) -> float:
        """When the next activity ends if nothing changes; infinite if none does."""
        if self._crowd is not None:
            return self._crowd.next_end()
        return min((a.end for a in self._active), default=math.inf)

    def _count(self) -> None:
        """Make a crowd of many, and of few none."""
        if self._crowd is None and len(self._active) >= self._many:
            from paceline.cluster.flow_table import Crowd  # numpy, where it pays

            self._crowd = Crowd(self._active)
        elif self._crowd is not None and len(self._active) <= self._many // 2:
            self._crowd.dissolve()
            self._crowd = None

    def _reached(self) -> list[Activity] | None:
        """Those whose rates may change, in the order in which they started; None where they are many."""
        if len(self._new) > self._near:
            return None
        found = dict.fromkeys(self._new)
        links = self._changed.union(*(activity.demand for activity in self._new))
        following = list(links)
        while following:
            link = following.pop()
            if self.capacities[link] == math.inf and link not in self._freed:
                continue  # nobody is slower for others on it
            for activity in self._on.get(link, ()):
                if activity in found:
                    continue
                found[activity] = None
                if len(found) > self._near:
                    return None
                following += activity.demand.keys() - links
                links |= activity.demand.keys()
        return sorted(found, key=lambda activity: activity.number)

    def _share(self, now: float, among: list[Activity] | None) -> None:
        """Rates anew, of all or *among* some that share no link with others."""
        if self._crowd is not None and among is None:
            self._crowd.share(self.capacities, self._most, now, _SAME_INSTANT)
            return
        if self._crowd is not None:
            self._crowd.take_in()
        waiting = list(self._active) if among is None else among
        left: dict[int, float] = {}
        load: dict[int, float] = {}
        users: dict[
            int, int
        ] = {}  # loads need not be whole numbers: count, to end at 0
        for activity in waiting:
            for link, connections in activity.demand.items():
                load[link] = load.get(link, 0.0) + connections
                users[link] = users.get(link, 0) + 1
                left[link] = self.capacities[link]
        while waiting:
            shares = {link: left[link] / load[link] for link in load if users[link]}
            tightest = min(shares.values(), default=math.inf)
            if tightest >= self._most:
                for activity in waiting:
                    self._set_rate(activity, self._most, now)
                return
            tight = {
                link
                for link, share in shares.items()
                if share <= tightest * (1 + _SAME_INSTANT)
            }
            still_waiting = []
            for activity in waiting:
                if tight.isdisjoint(activity.demand):
                    still_waiting.append(activity)
                    continue
                self._set_rate(activity, max(0.0, tightest), now)
                for link, connections in activity.demand.items():
                    load[link] -= connections
                    users[link] -= 1
                    left[link] = max(0.0, left[link] - tightest * connections)
            waiting = still_waiting

    @staticmethod
    def _set_rate(activity: Activity, rate: float, now: float) -> None:
        if activity.crowd is not None:
            activity.crowd.set_rate(activity.slot, rate, now)
            return
        if rate == activity.own_rate and activity.end < math.inf:
            return  # same rate, same end: do not let rounding move it
        activity.own_rate = rate
        if activity.remaining <= 0 or rate == math.inf:
            activity.end = now
        else:
            activity.end = now + activity.remaining / rate if rate else math.inf
