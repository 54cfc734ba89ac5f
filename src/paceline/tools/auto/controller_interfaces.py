"""The seams of `Program`: what a rank sees and has done, and how ranks agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class LeftError(Exception):
    """A worker is out of data: nobody changes anything any more."""


class Senses(Protocol):
    """What one rank sees of its training, and what it can have done."""

    @property
    def settled(self) -> bool:
        """Whether steps of the present method are as they will be."""
        ...

    @property
    def period(self) -> int:
        """After how many steps what they take repeats."""
        ...

    @property
    def refused(self) -> str:
        """Why the last change was not made; empty where it was."""
        ...

    def last(self, steps: int) -> list[float]:
        """Seconds of each of the last so many steps."""
        ...

    def waited(self) -> float:
        """Of the last steps, the share that waits for the network; below 0: not known."""
        ...

    def recall(self) -> tuple[str, float]:
        """Rank 0: the spec that was decided on when the same was trained before, and seconds of its step;
        empty where there is none."""
        ...

    def network_is_as_recalled(self) -> bool:
        """A short look, the same answer on all ranks. Collective."""
        ...

    @property
    def needs_probe(self) -> bool:
        """Whether links must be measured, which takes time."""
        ...

    def begin_plan(self, probe_seconds: float) -> None:
        """Measure links for at most so long, and begin to predict. Collective."""
        ...

    def plan_is_there(self) -> bool:
        """Rank 0: whether candidates were predicted, or could not be; others: False."""
        ...

    def candidates(self) -> list[tuple[str, float]]:
        """Rank 0: what is to be tried, the best first, with predicted seconds a step."""
        ...


class Ranks(Protocol):
    """Messages among all ranks."""

    def post(self, values: Sequence[float]) -> None:
        """Send numbers, as many on all ranks."""
        ...

    def take(self) -> list[float]:
        """The sums over ranks of what was posted last. Raises `LeftError`."""
        ...

    @property
    def size(self) -> int: ...

    def tell(self, text: str) -> None:
        """Send rank 0's text; what others give is not looked at."""
        ...

    def told(self) -> str:
        """The text. Raises `LeftError`."""
        ...
