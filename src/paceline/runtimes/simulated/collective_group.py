"""A communicator in virtual time: per-rank queues with lanes, collectives over links.

How a collective runs
---------------------
Each rank's call is the next operation in that rank's queue; the same number on every rank
is the same operation, and must be the same call. A queue has *lanes* (gloo: two worker
threads; NCCL: one stream): an operation is *present* on a rank once a lane is free there,
and holds it until it is complete there.

*Priced* (what its schedule has a price for, such as rings): starts when its last rank is
present, takes the schedule's latency, then moves as one activity on all its connections
(where it has several phases, so in each), and ends on all ranks at once.
*Played* (all else, and these where asked for): every message of the schedule starts when both
its ends are present and what its source must have received has arrived; a rank is done
when its own messages are. Both in `collectives.timing`.

Data: contributions are copied at the call, sums go in gloo's order, and a result is written
to a rank's buffers at the instant at which the operation completes there. The last rank's
takes the copies away: whoever still holds its work (for torch, for errors) holds no data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from paceline.cluster.links import Links
from paceline.collectives.timing import Phases, Play, Prices
from paceline.errors import CollectiveMismatchError, UsageError
from paceline.interfaces import Schedule
from paceline.records import Span
from paceline.runtimes.simulated.clock import MAX_NAMED, Clock, Completion
from paceline.units import show_bytes


class Operation:
    """One collective: who is present, what each contributed, who is done."""

    def __init__(
        self,
        communicator: Communicator,
        number: int,
        call: str,
        schedule: Schedule,
        unit: float,
    ) -> None:
        n = len(communicator.ranks)
        self.unit = unit
        self.number = number
        self.call = call
        self.schedule = schedule
        self.first_caller: int | None = None
        self.contributions: list[Any] = [None] * n
        self.results: dict[int, Any] = {}  # what one rank computed for all, by index
        self.delivers: list[Deliver | None] = [None] * n
        self.called = [False] * n
        self.present = [False] * n
        self.present_count = 0
        self.done_count = 0
        self.started = [0.0] * n
        self.lane = [0] * n
        # Each describes this operation, so it is let go of once its rank is done: what
        # only the cycle collector frees stays for as long as it likes, gradients and all.
        self.completions: list[Completion | None] = [
            Completion(partial(communicator.describe, self)) for _ in range(n)
        ]
        # Only for play: what each rank still has to send and receive.
        self.play: Play | None = None

    def take_completion(self, position: int) -> Completion:
        """The rank at *position* is done: whoever waits for it is to be told, once."""
        completion = self.completions[position]
        assert completion is not None
        self.completions[position] = None
        return completion

    def forget(self) -> None:
        """All ranks have their results."""
        self.contributions.clear()
        self.results.clear()
        self.play = None


Deliver = Callable[[Operation, int], None]
"""Writes the result of an operation into the buffers of the rank at a position."""


class Communicator:
    """A group of workers, shared by all of them.

    *ranks* are global worker numbers in group order.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        clock: Clock,
        links: Links,
        *,
        lanes: int,
        play: bool,
        observe: Callable[[Span], None] | None = None,
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.clock = clock
        self.links = links
        self.lanes = lanes
        self._play = play
        self.observe = observe
        self._operations: dict[int, Operation] = {}
        self._next = [0] * len(self.ranks)
        self._queues: list[deque[Operation]] = [deque() for _ in self.ranks]
        self._free_lanes = [list(range(lanes))[::-1] for _ in self.ranks]
        self._prices = Prices(links.cluster, self.ranks)

    # ---- a worker's call ----

    def launch(
        self,
        position: int,
        call: str,
        schedule: Schedule,
        contribution: Any,
        deliver: Deliver,
        unit: float = 1,
    ) -> Completion:
        """The next operation of the rank at *position*; returns what to wait for.

        *call* says what was called, with everything that must be equal on all ranks. One
        unit of *schedule* is *unit* bytes.
        """
        number = self._next[position]
        self._next[position] += 1
        operation = self._operations.get(number)
        if operation is None:
            operation = Operation(self, number, call, schedule, unit)
            operation.first_caller = self.ranks[position]
            self._operations[number] = operation
        elif operation.call != call:
            error = CollectiveMismatchError(
                f"operation {number} on group {self.name!r}: worker "
                f"{operation.first_caller} called {operation.call}, but worker "
                f"{self.ranks[position]} called {call}; every rank must issue the same "
                "collectives in the same order"
            )
            self.clock.fail(error)  # of two workers, not of the one that came second
            raise error
        operation.called[position] = True
        operation.contributions[position] = contribution
        operation.delivers[position] = deliver
        self.clock.at(
            self.clock.current.time, partial(self._enqueue, position, operation)
        )
        completion = operation.completions[position]
        assert completion is not None
        return completion

    def describe(self, operation: Operation) -> str:
        """For errors: which operation this is and who is missing."""
        missing = [
            rank
            for rank, called in zip(self.ranks, operation.called, strict=True)
            if not called
        ]
        text = f"{operation.call}, operation {operation.number} on group {self.name!r}"
        if missing:
            names = ", ".join(str(rank) for rank in missing[:MAX_NAMED])
            more = " and more" if len(missing) > MAX_NAMED else ""
            text += f"; not called by worker {names}{more}"
        return text

    # ---- queues and lanes ----

    def _enqueue(self, position: int, operation: Operation) -> None:
        self._queues[position].append(operation)
        self._take_lanes(position)

    def _take_lanes(self, position: int) -> None:
        queue, free = self._queues[position], self._free_lanes[position]
        while queue and free:
            operation = queue.popleft()
            operation.lane[position] = free.pop()
            operation.started[position] = self.clock.now
            self._present(operation, position)

    def _present(self, operation: Operation, position: int) -> None:
        operation.present[position] = True
        operation.present_count += 1
        phases = None if self._play else operation.schedule.priced
        if phases is not None:
            if operation.present_count == len(self.ranks):
                done = partial(self._done_everywhere, operation)
                Phases(
                    operation.schedule,
                    phases,
                    self._prices,
                    self.clock,
                    self.links,
                    operation.unit,
                    done,
                ).start()
            return
        if operation.play is None:
            operation.play = Play(
                operation.schedule,
                self.ranks,
                self.links,
                operation.unit,
                self.name,
                partial(self.done, operation),
            )
        operation.play.present(position)

    def _done_everywhere(self, operation: Operation) -> None:
        for position in range(len(self.ranks)):
            self.done(operation, position)

    def _span(self, operation: Operation, position: int) -> Span:
        """What it took on one rank; stand-ins have other shapes than what they stand for, so
        it also says the bytes."""
        sent = operation.schedule.bytes_sent(position) * operation.unit
        return Span(
            worker=self.ranks[position],
            row=f"{self.name} lane {operation.lane[position]}",
            name=f"{operation.call}, {show_bytes(sent)} sent",
            start=operation.started[position],
            end=self.clock.now,
        )

    def done(self, operation: Operation, position: int) -> None:
        """*operation* is complete on one rank: write its result, wake it, free its lane."""
        deliver = operation.delivers[position]
        assert deliver is not None
        try:
            deliver(operation, position)
        except Exception as error:  # a buffer of another shape, a mean of whole numbers
            raise UsageError(
                f"worker {self.ranks[position]}: the result of {operation.call} does not "
                f"fit what it was called with: {error}"
            ) from error
        operation.delivers[position] = None
        self.clock.complete(operation.take_completion(position))
        self._free_lanes[position].append(operation.lane[position])
        if self.observe is not None:
            self.observe(self._span(operation, position))
        operation.done_count += 1
        if operation.done_count == len(self.ranks):
            del self._operations[operation.number]
            operation.forget()
        self._take_lanes(position)
