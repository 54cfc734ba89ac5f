"""Point-to-point messages in virtual time: a send meets its receive, then both move."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paceline.records import Span
from paceline.runtimes.simulated.clock import Completion
from paceline.runtimes.simulated.collective_group import Communicator
from paceline.units import show_bytes


@dataclass
class _Meeting:
    """The sends and receives of one (source, destination, tag) that have not met."""

    sends: deque[tuple[int, Any, Completion]] = field(default_factory=deque)
    receives: deque[tuple[Callable[[Any], None], Completion]] = field(
        default_factory=deque
    )


class Mailbox:
    """Sends and receives between the ranks of a communicator.

    As with gloo, a send starts when its receive is posted, and ends when its last byte has
    left; the receive ends one latency later. Messages between two ranks with one tag
    arrive in order.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._meetings: dict[tuple[int, int, int], _Meeting] = {}

    def send(
        self, source: int, destination: int, tag: int, size: int, payload: Any
    ) -> Completion:
        """Post a send between two positions of the group."""
        completion = self._completion("send to", destination, tag)
        self._post(
            (source, destination, tag),
            lambda m: m.sends.append((size, payload, completion)),
        )
        return completion

    def receive(
        self, source: int, destination: int, tag: int, fill: Callable[[Any], None]
    ) -> Completion:
        """Post a receive; *fill* takes the payload when it has arrived."""
        completion = self._completion("receive from", source, tag)
        self._post(
            (source, destination, tag), lambda m: m.receives.append((fill, completion))
        )
        return completion

    def _completion(self, verb: str, peer: int, tag: int) -> Completion:
        communicator = self._communicator
        return Completion(
            lambda: (
                f"{verb} worker {communicator.ranks[peer]}, tag {tag}, on group "
                f"{communicator.name!r}"
            )
        )

    def _post(self, key: tuple[int, int, int], add: Callable[[_Meeting], None]) -> None:
        clock = self._communicator.clock
        clock.at(clock.current.time, partial(self._meet, key, add))

    def _meet(self, key: tuple[int, int, int], add: Callable[[_Meeting], None]) -> None:
        meeting = self._meetings.setdefault(key, _Meeting())
        add(meeting)
        if not (meeting.sends and meeting.receives):
            return
        size, payload, sent = meeting.sends.popleft()
        fill, received = meeting.receives.popleft()
        if not (meeting.sends or meeting.receives):
            del self._meetings[key]
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
