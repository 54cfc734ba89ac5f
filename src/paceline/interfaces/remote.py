"""A model on its servers, as a method sees it from a worker.

`paceline.server` implements these (`remote`, `staged`); methods with
``updates_on="server"`` use them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from paceline.interfaces.updates import Piece, Updater
from paceline.messages import FIRST, Measured
from paceline.tensors import Bucket


class Remote(Protocol):
    """A model's parameters on their servers, as one worker's method sees them."""

    def join(self) -> int:
        """Take part; the model then holds the servers' parameters. Returns the number of
        this worker's first step: 0, unless it was restarted. Collective at the start."""
        ...

    def push(self, bucket: Bucket, step: int, stage: int = FIRST) -> None:
        """Send a bucket's gradient, and ask for its parameters."""
        ...

    def wait(self) -> int:
        """Wait for the parameters of all that was pushed, and put them into the model.
        Returns the number of this worker's next step."""
        ...

    def leave(self) -> None:
        """This worker is out of data. Returns when all are; the model then holds the
        final parameters."""
        ...

    def consolidate(self) -> Callable[[], None]:
        """Put the servers' present parameters into the model; returns what undoes it."""
        ...


class UnitPlace(NamedTuple):
    """A part of the model that travels by itself: elements [*start*, *stop*) of its
    bucket's buffer."""

    piece: Piece
    start: int
    stop: int


class StagedRemote(Remote, Protocol):
    """A `Remote` whose servers take a step in two stages, bucket by bucket in units."""

    units: list[list[UnitPlace]]
    """Per bucket, in the order of its buffer."""

    deferred: list[list[int]]
    """Per bucket, the numbers of its units that the next step leaves to its second stage, as
    servers have said (GIB)."""

    def unit_bytes(self, bucket: int) -> list[int]:
        """What each unit of a bucket is on the network."""
        ...

    def mirror(self) -> Updater:
        """The optimizer on this worker, for tentative steps: its pieces are the units, and
        its state is its own."""
        ...

    def push_units(
        self,
        bucket: Bucket,
        step: int,
        stage: int,
        numbers: Collection[int],
        measured: Measured | None = None,
    ) -> None:
        """Send some units' gradients, and ask for their parameters."""
        ...

    def arrived(self, stage: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Wait for the answers to all that was pushed in *stage*: bucket, number and
        parameters of each unit."""
        ...

    def ask_states(self, units: Sequence[tuple[int, int]], step: int) -> None:
        """Ask for the optimizer's state of some units (bucket and number), with all updates
        before *step* in it."""
        ...

    def states(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Wait for all states that were asked for: bucket, number, and the entries by
        name; tensors are flat."""
        ...

    def buffers_arrived(self) -> None:
        """Wait for the model's buffers, if any are under way, and put them in."""
        ...

    def written(self) -> None:
        """The method has written into the model."""
        ...
