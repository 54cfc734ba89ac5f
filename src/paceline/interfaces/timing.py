"""Compute time: how it is charged or measured, and how work is timed.

Runtimes bring both. `paceline.core` reports to `Compute`; the planner and methods time
with a `Stopwatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from paceline.interfaces.compression import Compressor

CodingStage = Literal["encode", "decode"]
"""Until the first code of a bucket is there; and all that follows."""


class Compute(Protocol):
    """Charges a model's compute time where no real time passes for it, or measures it."""

    def forward(self, samples: int | None, training: bool) -> None:
        """A forward pass begins, over *samples* samples (None: not known)."""
        ...

    def used(self, index: int) -> None:
        """The forward pass is about to use one tensor, and may have to wait for it."""
        ...

    def usable(self) -> None:
        """It may go on."""
        ...

    def gradient(self, index: int) -> None:
        """The gradient of one tensor was computed; paceline's own work begins."""
        ...

    def gradient_taken(self) -> None:
        """paceline's own work is done; backward goes on."""
        ...

    def codes_with(self, compressor: Compressor) -> None:
        """From now on this compressor may code what has the model's tensors."""
        ...

    def coded(
        self, compressor: Compressor, workers: int, size: float, stage: CodingStage
    ) -> None:
        """A compressor has coded, or decoded, so many bytes of the model's tensors, among so
        many workers."""
        ...

    def update_begins(self) -> None:
        """The optimizer is about to step."""
        ...

    def step_ended(self) -> None:
        """The optimizer stepped: the next step draws its own jitter."""
        ...


class Stopwatch(Protocol):
    """Marks moments without waiting for them, and says later how far apart they were.

    *repeats*: equal work takes equal time, to the bit, and whoever measures may do so once.
    """

    @property
    def repeats(self) -> bool: ...

    def mark(self) -> Any:
        """This moment: on the host's clock, or in the device's stream of work."""
        ...

    def seconds(self, start: Any, marks: Sequence[Any]) -> list[float]:
        """Seconds from *start* to each of *marks*. Waits until the device is past them."""
        ...
