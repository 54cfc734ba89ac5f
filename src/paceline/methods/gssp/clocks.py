"""Who pushes to a group's server, and how far each of them is here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from paceline.interfaces import Groups, Shard

EVER = 1 << 60
"""A step after all others: `Shard.expected` then says who trains."""


class Clocks:
    """The workers that the others of their group wait for: those that are members of it, train,
    and *have entered*. A worker enters when it first pushes here: nobody waits for one that is
    still on its way from another group, or that comes back and is held up at another server. At
    the start members of the first groups have entered; where there is one group, who joins has.

    A clock is how many steps of a worker are in, from where it has entered: it begins with the
    least of the others, however many steps it has done elsewhere. So a slow worker that comes
    into a fast group holds up nobody. Where nobody has changed groups it is the worker's own.

    Who waits where all workers meet is not waited for: others of its group may have to do many steps
    until they come there, too. When they have met all of them enter again, together.
    """

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self._resting: set[int] = set()
        """Who had entered, and waits where all meet."""
        self._here: set[int] = set()
        """Who trains, here or elsewhere, and sends gradients."""
        self.is_begun = False
        """Whether anybody has looked who is here."""

    def __contains__(self, worker: int) -> bool:
        return worker in self._steps

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def look(
        self,
        shard: Shard,
        groups: Groups,
        number: int,
        meeting: Collection[int],
        entry: Callable[[], int],
    ) -> None:
        """Who has come or gone since the last look. *number*: of this server; *meeting*: who
        waits for workers of all groups; *entry*: the step with which a member enters now."""
        trains = set(shard.expected(EVER))
        members = trains.intersection(groups.members(number))
        here = trains.difference(meeting)
        self._resting.update(self._steps.keys() & meeting)
        self._resting &= members
        if not groups.version and (groups.servers == 1 or not self.is_begun):
            for worker in sorted(here - self._here):
                if worker in members and worker not in self._steps:
                    self.enter(worker, shard.clock(worker))
        self._here, self.is_begun = here, True
        for worker in list(self._steps):
            if worker not in here & members:
                del self._steps[worker], self._first[worker]
        back = sorted(self._resting & here)
        if back:
            step = entry()
            self._resting.difference_update(back)
            for worker in back:
                self.enter(worker, step)

    def enter(self, worker: int, step: int) -> None:
        """A member takes part from this step of the group on."""
        self._steps[worker] = self._first[worker] = step

    def tick(self, worker: int) -> None:
        """A whole step of its is in."""
        self._steps[worker] += 1

    def step(self, worker: int) -> int:
        """The number of its next step."""
        return self._steps[worker]

    def slowest(self) -> int:
        """The least clock; `EVER` where nobody is waited for."""
        return min(self._steps.values(), default=EVER)

    def expected(self, step: int) -> set[int]:
        """Whose gradients of that step have come or will come."""
        return {worker for worker, first in self._first.items() if first <= step}
