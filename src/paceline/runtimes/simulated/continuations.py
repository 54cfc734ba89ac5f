"""What follows results in virtual time: works that run as events, on behalf of a worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from paceline.interfaces import Awaited
from paceline.runtimes.simulated.clock import Clock, Completion

_Item = tuple[Awaited | None, Callable[[BaseException | None], None], float]


class EventRunner:
    """A `Runner` of worker *rank*.

    A work runs at the virtual instant at which what it follows is in, but not before the
    instant at which it was put, nor while the work before it still computes: what it spends
    (`Clock.current`) makes all that it does next that much later, and nothing of what
    the worker itself does meanwhile.
    """

    def __init__(self, clock: Clock, rank: int) -> None:
        self._clock = clock
        self._rank = rank
        self._items: deque[_Item] = deque()
        self._free_at = 0.0

    def put(
        self, awaited: Awaited | None, run: Callable[[BaseException | None], None]
    ) -> None:
        self._items.append((awaited, run, self._clock.current.time))
        if len(self._items) == 1:
            self._expect_first()

    def signal(self, what: str) -> EventSignal:
        return EventSignal(self._clock, f"{what} on worker {self._rank}")

    def close(self) -> None:
        while self._items:
            _, run, _ = self._items.popleft()
            run(None)

    def _expect_first(self) -> None:
        awaited, _, _ = self._items[0]
        if awaited is None:
            self._ready()
        else:
            awaited.when_in(self._ready)

    def _ready(self) -> None:
        if self._items:  # it was not closed
            _, _, earliest = self._items[0]
            time = max(self._clock.now, self._free_at, earliest)
            self._clock.at(time, self._run_first)

    def _run_first(self) -> None:
        if not self._items:
            return
        awaited, run, _ = self._items.popleft()
        error: BaseException | None = None
        with self._clock.acting_for(self._rank) as actor:
            try:
                if awaited is not None:
                    awaited.settle()
            except BaseException as fault:
                error = fault
            run(error)
        self._free_at = actor.time
        if self._items:
            self._expect_first()


class EventSignal:
    """A `Signal` at the instant to which whoever gives it has come."""

    def __init__(self, clock: Clock, what: str) -> None:
        self._clock = clock
        self._completion = Completion(lambda: what)

    def set(self) -> None:
        time = self._clock.current.time
        if time <= self._clock.now:
            self._clock.complete(self._completion)
        else:
            self._clock.at(time, lambda: self._clock.complete(self._completion))

    def wait(self) -> None:
        self._clock.wait(self._completion)

    def when_in(self, action: Callable[[], None]) -> None:
        self._clock.when(self._completion, action)
