"""When messages between workers and a service were on their way, for a trace."""

from __future__ import annotations

from collections.abc import Callable

from paceline.interfaces import Sender
from paceline.interfaces.server_messages import Reply, Request
from paceline.records import Span
from paceline.runtimes.simulated.clock import Clock
from paceline.units import show_bytes

Observe = Callable[[Span], None]


class Ways:
    """The ways to and from the service *name*; those of the first *workers* senders are
    observed, if anybody looks."""

    def __init__(
        self, name: str, clock: Clock, workers: int, observe: Observe | None
    ) -> None:
        self._name, self._clock = name, clock
        self._workers, self._observe = workers, observe
        self._arrivals: dict[tuple[str, int, str], float] = {}

    def observed(
        self,
        way: str,
        worker: Sender,
        message: Request | Reply,
        size: int,
        begins: float,
        arrived: Callable[[], None],
    ) -> Callable[[], None]:
        """*arrived*, and before that a span of the message: since it *begins*, or since the one
        before it on its connection had come, as that carries one at a time. *way*: to, from."""
        observe = self._observe
        if observe is None or worker.worker >= self._workers:
            return arrived

        def told() -> None:
            connection = (way, worker.worker, worker.channel)
            start = max(begins, self._arrivals.get(connection, begins))
            self._arrivals[connection] = now = self._clock.now
            name = f"{type(message).__name__.lower()}, {show_bytes(size)}"
            observe(Span(worker.worker, f"{way} {self._name}", name, start, now))
            arrived()

        return told
