"""Simulates a group of workers in virtual time: its collectives over links and its messages.

*Queues.* Each rank's call is the next operation in that rank's queue. The same number on every rank
is the same operation, and must be the same call. A queue has *lanes* (gloo: two worker threads;
NCCL: one stream). An operation is *present* on a rank once a lane is free there, and holds the lane
until it is complete there.

*Estimated operations* (schedules with an estimate, such as rings) start when their last rank is
present, and take the schedule's latency. Then they move as one flow on all connections, phase by
phase, and end on all ranks at once.

*Executed operations* are all others, and those with an estimate on request. Every message of the
schedule starts when both its ends are present and its source has received the messages before it. A
rank is done when its own messages are. Both kinds are in `collectives.timing`.

*Data.* Contributions are copied at the call, unless the schedule lets no rank continue before all
are present. Sums are in gloo's order. A result is written to a rank's buffers at the instant at
which the operation completes there. The last rank's result releases the contributions: a handle
that is kept longer (by torch, or for errors) holds no data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from paceline.cluster.links import Links
from paceline.collectives.timing import (
    ActivityCosts,
    MessageSimulation,
    PhaseSimulation,
    phases_of,
)
from paceline.errors import CollectiveMismatchError, UsageError
from paceline.interfaces import Schedule
from paceline.records import Span
from paceline.runtimes.simulated.clock import MAX_NAMED, Completion, VirtualClock
from paceline.units import show_bytes


class CollectiveCall(NamedTuple):
    """A rank's call, with everything that must be equal on all ranks."""

    name: str
    how: str = ""
    tensors: tuple[tuple[torch.dtype, torch.Size], ...] = ()

    def __str__(self) -> str:
        words = [self.how] if self.how else []
        if len(self.tensors) > 3:
            elements = sum(shape.numel() for _, shape in self.tensors)
            words.append(f"{len(self.tensors)} tensors of {elements} elements")
        else:
            words += [_shape(dtype, tuple(shape)) for dtype, shape in self.tensors]
        return f"{self.name}({', '.join(words)})"


@lru_cache(maxsize=1024)
def _shape(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{'x'.join(map(str, shape))}]"


def shapes_of(
    tensors: Sequence[torch.Tensor],
) -> tuple[tuple[torch.dtype, torch.Size], ...]:
    """Return types and shapes for a `CollectiveCall`."""
    return tuple((tensor.dtype, tensor.shape) for tensor in tensors)


class CollectiveOperation:
    """One collective: its present ranks, their contributions, and the ranks that are done."""

    def __init__(
        self,
        communicator: CollectiveGroup,
        number: int,
        call: CollectiveCall,
        schedule: Schedule,
        unit: float,
    ) -> None:
        positions = communicator.positions
        self.represented_by = communicator.represented_by
        self.unit = unit
        self.number = number
        self.call = call
        self.schedule = schedule
        self.phases = phases_of(schedule, play=communicator.play)
        self.first_caller: int | None = None
        self.contributions: dict[int, Any] = dict.fromkeys(positions)
        # Results are computed once for all ranks, by index.
        self.results: dict[int, Any] = {}
        self.delivers: dict[int, Deliver | None] = dict.fromkeys(positions)
        self.called = dict.fromkeys(positions, False)
        self.present = dict.fromkeys(positions, False)
        self.present_count = 0
        self.done_count = 0
        self.started = dict.fromkeys(positions, 0.0)
        self.lane = dict.fromkeys(positions, 0)
        # Each refers to this operation, so it is released once its rank is done. Otherwise a
        # reference cycle would hold the gradients until the garbage collector runs.
        self.completions: dict[int, Completion | None] = {
            position: Completion(partial(communicator.describe, self))
            for position in positions
        }
        # Only for executed operations: the remaining sends and receives of each rank.
        self.play: MessageSimulation | None = None
        self.weights = communicator.weights
        self.unfinished = dict(communicator.weights or {})
        """Only for executed operations: by representative, how many of its workers are not done."""

    def of_all(self) -> list[Any]:
        """Return each rank's contribution, in rank order; None for a rank that has not called.

        A rank that does not run contributes its representative's.
        """
        return [self.contributions[position] for position in self.represented_by]

    def of(self, position: int) -> Any:
        """Return the contribution of one rank."""
        return self.contributions[self.represented_by[position]]

    def take_completion(self, position: int) -> Completion:
        """Return the completion of the rank at *position*, which is done; call it once."""
        completion = self.completions[position]
        assert completion is not None
        self.completions[position] = None
        return completion

    def forget(self) -> None:
        """Release all data, since all ranks have their results."""
        self.contributions.clear()
        self.results.clear()
        self.play = None


Deliver = Callable[[CollectiveOperation, int], None]
"""Writes an operation's result into the buffers of the rank at a position."""


class CollectiveGroup:
    """A group of workers, shared by all of them.

    *ranks* are global worker numbers in group order. *represented_by*: by position in the group,
    the position of the rank that runs for it (None: all ranks run, each for itself).
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        clock: VirtualClock,
        links: Links,
        *,
        lanes: int,
        play: bool,
        observe: Callable[[Span], None] | None = None,
        represented_by: Sequence[int] | None = None,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.represented_by = represented_by or range(len(ranks))
        self.stands_for: dict[int, list[int]] = {}
        """By position of a representative: the positions that it represents, its own first."""
        if represented_by is not None:
            for position, representative in enumerate(represented_by):
                self.stands_for.setdefault(representative, []).append(position)
        self.weights: dict[int, int] | None = None
        """By position of a representative: how many workers it represents."""
        if represented_by is not None:
            self.weights = {p: len(self.stands_for[p]) for p in sorted(self.stands_for)}
        self.positions: Sequence[int] = sorted(self.stands_for) or range(len(ranks))
        """Positions of the ranks that run."""
        self.clock = clock
        self.links = links
        self.lanes = lanes
        self.play = play
        self.observe = observe
        self._operations: dict[int, CollectiveOperation] = {}
        self._next = dict.fromkeys(self.positions, 0)
        self._queues: dict[int, deque[CollectiveOperation]] = {
            p: deque() for p in self.positions
        }
        self._free_lanes = {p: list(range(lanes))[::-1] for p in self.positions}
        self._costs = ActivityCosts(links.cluster, self.ranks)
        self.mailbox = Mailbox(self)

    # ---- a worker's call ----

    def launch(
        self,
        position: int,
        call: CollectiveCall,
        schedule: Schedule,
        contribution: Any,
        deliver: Deliver,
        unit: float = 1,
    ) -> Completion:
        """Add the next operation of the rank at *position*; return its completion.

        One unit of *schedule* is *unit* bytes.
        """
        number = self._next[position]
        self._next[position] += 1
        operation = self._operations.get(number)
        if operation is None:
            operation = CollectiveOperation(self, number, call, schedule, unit)
            operation.first_caller = self.ranks[position]
            self._operations[number] = operation
        elif operation.call != call:
            error = CollectiveMismatchError(
                f"operation {number} on group {self.name!r}: worker "
                f"{operation.first_caller} called {operation.call}, but worker "
                f"{self.ranks[position]} called {call}; every rank must issue the same "
                "collectives in the same order"
            )
            # Both workers are at fault, not only the later one.
            self.clock.fail(error)
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

    def describe(self, operation: CollectiveOperation) -> str:
        """Return the operation and its missing ranks, for errors."""
        missing = [
            self.ranks[position]
            for position, called in operation.called.items()
            if not called
        ]
        text = f"{operation.call}, operation {operation.number} on group {self.name!r}"
        if missing:
            names = ", ".join(str(rank) for rank in missing[:MAX_NAMED])
            more = " and more" if len(missing) > MAX_NAMED else ""
            text += f"; not called by worker {names}{more}"
        return text

    # ---- queues and channels ----

    def _enqueue(self, position: int, operation: CollectiveOperation) -> None:
        self._queues[position].append(operation)
        self._take_lanes(position)

    def _take_lanes(self, position: int) -> None:
        queue, free = self._queues[position], self._free_lanes[position]
        while queue and free:
            operation = queue.popleft()
            operation.lane[position] = free.pop()
            operation.started[position] = self.clock.now
            self._present(operation, position)

    def _present(self, operation: CollectiveOperation, position: int) -> None:
        operation.present[position] = True
        operation.present_count += 1
        if operation.phases is not None:
            if operation.present_count == len(self.positions):
                done = partial(self._done_everywhere, operation)
                PhaseSimulation(
                    operation.phases,
                    self._costs,
                    self.clock,
                    self.links,
                    operation.unit,
                    done,
                ).start()
            return
        if operation.play is None:
            operation.play = MessageSimulation(
                operation.schedule,
                self.ranks,
                self.links,
                operation.unit,
                self.name,
                partial(self._messages_done, operation),
            )
        for alike in self.stands_for.get(position, (position,)):
            operation.play.present(alike)

    def _done_everywhere(self, operation: CollectiveOperation) -> None:
        for position in self.positions:
            self.done(operation, position)

    def _messages_done(self, operation: CollectiveOperation, position: int) -> None:
        """Count a worker whose messages are done.

        A representative is done when all workers that it represents are: their next step waits for
        the last of them.
        """
        representative = self.represented_by[position]
        if self.stands_for:
            operation.unfinished[representative] -= 1
            if operation.unfinished[representative]:
                return
        self.done(operation, representative)

    def _span(self, operation: CollectiveOperation, position: int) -> Span:
        """Return the operation's span on one rank.

        It includes the bytes, since tensors that represent others have other shapes.
        """
        sent = operation.schedule.bytes_sent(position) * operation.unit
        return Span(
            worker=self.ranks[position],
            row=f"{self.name} lane {operation.lane[position]}",
            name=f"{operation.call}, {show_bytes(sent)} sent",
            start=operation.started[position],
            end=self.clock.now,
        )

    def done(self, operation: CollectiveOperation, position: int) -> None:
        """*operation* is complete on one rank: write its result, wake it, free its lane."""
        deliver = operation.delivers[position]
        assert deliver is not None
        try:
            # Inference mode permits writes into parameters and inference tensors on any thread.
            with torch.inference_mode():
                deliver(operation, position)
        except Exception as error:
            # The shape may be wrong, or it is a mean of integers.
            raise UsageError(
                f"worker {self.ranks[position]}: the result of {operation.call} does not fit the "
                f"tensors of the call: {error}"
            ) from error
        operation.delivers[position] = None
        self.clock.complete(operation.take_completion(position))
        self._free_lanes[position].append(operation.lane[position])
        if self.observe is not None:
            self.observe(self._span(operation, position))
        operation.done_count += 1
        if operation.done_count == len(self.positions):
            del self._operations[operation.number]
            operation.forget()
        self._take_lanes(position)


@dataclass
class _Unmatched:
    """The unmatched sends and receives of one (source, destination, tag)."""

    sends: deque[tuple[int, Any, Completion]] = field(default_factory=deque)
    receives: deque[tuple[Callable[[Any], None], Completion]] = field(
        default_factory=deque
    )


class Mailbox:
    """Sends and receives between the ranks of a communicator.

    As with gloo, a send starts when its receive is posted, and ends when its last byte has left;
    the receive ends one latency later. Messages between two ranks with one tag arrive in order.
    """

    def __init__(self, communicator: CollectiveGroup) -> None:
        self._communicator = communicator
        self._unmatched: dict[tuple[int, int, Hashable], _Unmatched] = {}

    def send(
        self, source: int, destination: int, tag: Hashable, size: int, payload: Any
    ) -> Completion:
        """Post a send between two positions of the group."""
        completion = self._completion("send to", destination, tag)
        self._post(
            (source, destination, tag),
            lambda m: m.sends.append((size, payload, completion)),
        )
        return completion

    def receive(
        self, source: int, destination: int, tag: Hashable, fill: Callable[[Any], None]
    ) -> Completion:
        """Post a receive; *fill* takes the payload when it has arrived."""
        completion = self._completion("receive from", source, tag)
        self._post(
            (source, destination, tag), lambda m: m.receives.append((fill, completion))
        )
        return completion

    def _completion(self, verb: str, peer: int, tag: Hashable) -> Completion:
        communicator = self._communicator
        return Completion(
            lambda: (
                f"{verb} worker {communicator.ranks[peer]}, tag {tag}, on group "
                f"{communicator.name!r}"
            )
        )

    def _post(
        self, key: tuple[int, int, Hashable], add: Callable[[_Unmatched], None]
    ) -> None:
        clock = self._communicator.clock
        clock.at(clock.current.time, partial(self._meet, key, add))

    def _meet(
        self, key: tuple[int, int, Hashable], add: Callable[[_Unmatched], None]
    ) -> None:
        meeting = self._unmatched.setdefault(key, _Unmatched())
        add(meeting)
        if not (meeting.sends and meeting.receives):
            return
        size, payload, sent = meeting.sends.popleft()
        fill, received = meeting.receives.popleft()
        if not (meeting.sends or meeting.receives):
            del self._unmatched[key]
        communicator = self._communicator
        clock = communicator.clock

        source, destination = communicator.ranks[key[0]], communicator.ranks[key[1]]
        met = clock.now

        def arrived() -> None:
            fill(payload)
            clock.complete(received)
            if communicator.observe is not None:
                row = f"{communicator.name} sends"
                name = f"to worker {destination}, {show_bytes(size)}"
                communicator.observe(Span(source, row, name, met, clock.now))

        communicator.links.send(
            (communicator.name, source, destination),
            communicator.links.cluster.host_of(source),
            communicator.links.cluster.host_of(destination),
            size,
            partial(clock.complete, sent),
            arrived,
        )
