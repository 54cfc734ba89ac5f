"""torch.distributed's handle of an operation, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from paceline.runtimes.simulated.clock import Clock, Completion
from paceline.torch_internals import WorkBase

_ASKING = 1e-6
"""Seconds that a question for completion takes."""


class SimulatedWork(WorkBase):
    """Work that ends at a virtual instant."""

    def __init__(self, clock: Clock, completion: Completion) -> None:
        super().__init__()
        self._clock = clock
        self._completion = completion

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._clock.wait(self._completion)
        return True

    def when_in(self, action: Callable[[], None]) -> None:
        """Call *action* at the instant at which the result is in."""
        self._clock.when(self._completion, action)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Whether the result is in, at this worker's own time.

        Asking in vain takes a microsecond: a script that asks in a loop would otherwise
        never let virtual time go on.
        """
        time = self._completion.time
        if time is None or time > self._clock.current.time:
            self._clock.pause(_ASKING)
            time = self._completion.time
        return time is not None and time <= self._clock.current.time

    def is_success(self) -> bool:
        return self.is_completed()
