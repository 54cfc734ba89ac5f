"""A communicator in virtual time: per-rank queues with lanes, collectives over links.

How a collective runs
---------------------
Each rank's call is the next operation in that rank's queue; the same number on every rank
is the same operation, and must be the same call. A queue has *lanes* (gloo: two worker
threads; NCCL: one stream): an operation is *present* on a rank once a lane is free there,
and holds it until it is complete there.

*Priced* (what its schedule has a price for, such as rings): starts when its last rank is present, takes the schedule's latency, then
moves as one activity on all its connections, and ends on all ranks at once.
*Played* (all else, and these where asked for): every message of the schedule starts when both
its ends are present and what its source must have received has arrived; a rank is done
when its own messages are.

Data: contributions are copied at the call, sums go in gloo's order, and a result is written
to a rank's buffers at the instant at which the operation completes there. The last rank's
takes the copies away: whoever still holds its work (for torch, for errors) holds no data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from paceline.errors import CollectiveMismatchError, UsageError
from paceline.instruments import Span
from paceline.interfaces import Priced, Schedule, Transfer
from paceline.worlds.virtual.clock import MAX_NAMED, Clock, Completion
from paceline.worlds.virtual.links import Links


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
        observe: Callable[[Span], None],
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.clock = clock
        self.links = links
        self.lanes = lanes
        self._play = play
        self._observe = observe
        self._operations: dict[int, Operation] = {}
        self._next = [0] * len(self.ranks)
        self._queues: list[deque[Operation]] = [deque() for _ in self.ranks]
        self._free_lanes = [list(range(lanes))[::-1] for _ in self.ranks]
        n = len(self.ranks)
        # What is priced, by pattern: seconds of latency, and connections on each link.
        self._prices: dict[Hashable, tuple[float, dict[int, float]]] = {}
        self._senders: dict[int, int] = {}  # ranks by host
        for position in range(n if n > 1 else 0):
            host = links.cluster.host_of(self.ranks[position])
            self._senders[host] = self._senders.get(host, 0) + 1

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
        priced = None if self._play else operation.schedule.priced
        if priced is not None:
            if operation.present_count == len(self.ranks):
                latency, demand = self._price(priced)
                self.clock.at(
                    self.clock.now + latency,
                    partial(self._move_priced, operation, priced, demand),
                )
            return
        if operation.play is None:
            operation.play = Play(self, operation)
        operation.play.present(position)

    def _move_priced(
        self, operation: Operation, priced: Priced, demand: dict[int, float]
    ) -> None:
        messages = priced.messages_sent
        self.links.start(
            demand,
            operation.unit * priced.bytes_per_connection,
            partial(self._done_everywhere, operation),
            {host: ranks * messages for host, ranks in self._senders.items()},
        )

    def _done_everywhere(self, operation: Operation) -> None:
        for position in range(len(self.ranks)):
            self.done(operation, position)

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
        self._observe(
            Span(
                worker=self.ranks[position],
                row=f"{self.name} lane {operation.lane[position]}",
                name=operation.call,
                start=operation.started[position],
                end=self.clock.now,
            )
        )
        operation.done_count += 1
        if operation.done_count == len(self.ranks):
            del self._operations[operation.number]
            operation.forget()
        self._take_lanes(position)

    def _price(self, priced: Priced) -> tuple[float, dict[int, float]]:
        """Seconds of latency, and how many connections each link carries."""
        if priced.pattern not in self._prices:
            demand: dict[int, float] = {}
            for source, destination in priced.connections:
                for link in self.links.cluster.path(
                    self.ranks[source], self.ranks[destination]
                ):
                    demand[link] = demand.get(link, 0) + 1
            self._prices[priced.pattern] = priced.latency(self._one_way), demand
        return self._prices[priced.pattern]

    def _one_way(self, a: int, b: int) -> float:
        return self.links.cluster.latency(self.ranks[a], self.ranks[b])


class Play:
    """One operation, message by message."""

    def __init__(self, communicator: Communicator, operation: Operation) -> None:
        self._communicator = communicator
        self._operation = operation
        n = len(communicator.ranks)
        # Each rank's messages out, in order: how many of the messages into the rank must
        # have arrived before, and the message's own place among those into its
        # destination. Places count in step order: a message of a later step may arrive
        # earlier, and counts only when what comes before it is in.
        self._out: list[deque[tuple[int, int, Transfer]]] = [deque() for _ in range(n)]
        self._unsent = [0] * n
        self._received = [0] * n
        self._early: list[set[int]] = [set() for _ in range(n)]
        self._waiting_for: dict[int, list[tuple[int, Transfer]]] = {}  # absent ranks
        expected = [0] * n
        for number in range(operation.schedule.steps):
            before = expected.copy()
            for transfer in operation.schedule.step(number):
                source, destination = transfer.source, transfer.destination
                place = expected[destination]
                self._out[source].append((before[source], place, transfer))
                self._unsent[source] += 1
                expected[destination] += 1
        self._expected = expected

    def present(self, position: int) -> None:
        """One more rank is present: what waited for it may go."""
        self._advance(position)
        for place, transfer in self._waiting_for.pop(position, []):
            self._send(place, transfer)

    def _advance(self, position: int) -> None:
        operation = self._operation
        if not operation.present[position]:
            return
        out = self._out[position]
        while out and out[0][0] <= self._received[position]:
            _, place, transfer = out.popleft()
            if operation.present[transfer.destination]:
                self._send(place, transfer)
            else:
                waiting = self._waiting_for.setdefault(transfer.destination, [])
                waiting.append((place, transfer))
        if (
            not self._unsent[position]
            and self._received[position] == self._expected[position]
        ):
            self._unsent[position] = -1  # done once
            self._communicator.done(operation, position)

    def _send(self, place: int, transfer: Transfer) -> None:
        communicator = self._communicator
        source = communicator.ranks[transfer.source]
        destination = communicator.ranks[transfer.destination]
        communicator.links.send(
            (communicator.name, source, destination),
            communicator.links.cluster.host_of(source),
            communicator.links.cluster.host_of(destination),
            self._operation.unit * transfer.size,
            partial(self._sent, transfer.source),
            partial(self._arrived, transfer.destination, place),
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
