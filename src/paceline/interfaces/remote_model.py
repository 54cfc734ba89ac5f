"""A model on its servers, as a method sees it from a worker.

`paceline.parameter_server.client.remote_model` implements it; methods with ``updates_on="server"`` use it.

A bucket lies on its servers in *units*: parts of its buffer, each of one parameter, which can be
pushed, updated and answered by themselves. Simple methods push whole buckets (`Remote.push`, and
`Remote.wait` puts the answers into the model). Others push some units of a bucket now and the
rest late, and take the answers themselves (`Remote.arrived`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from paceline.buckets import Bucket
from paceline.interfaces.groups import SpeedClass
from paceline.interfaces.partial_optimizer import Piece, Updater


class UnitPlace(NamedTuple):
    """A part of the model that travels by itself: elements [*start*, *stop*) of its
    bucket's buffer."""

    piece: Piece
    start: int
    stop: int


class Told(NamedTuple):
    """The last *words* of one server about its part of a bucket, whose units these are: see
    `Informed.tells`. Empty before its first answer."""

    units: range
    words: bytes


class Arrived(NamedTuple):
    """An answer's parameters of one unit, flat. They stand until the next push of that kind
    (main or late)."""

    bucket: int
    unit: int
    values: torch.Tensor


class Remote(Protocol):
    """A model's parameters on their servers, as one worker's method sees them."""

    def join(self) -> int:
        """Take part; the model then holds the servers' parameters. Returns the number of
        this worker's first step: 0, unless it was restarted. Collective at the start."""
        ...

    def push(
        self,
        bucket: Bucket,
        step: int,
        units: Collection[int] | None = None,
        late: bool = False,
        report: bytes = b"",
    ) -> None:
        """Send a bucket's gradient, or that of these *units* of it, and ask for its parameters.

        Every bucket has one main push a step, though maybe of no units. What it leaves out
        comes *late*: exactly these units, in one push, before the late push of the next step
        and the main push of the one after that. Only for disciplines that take parts
        (`InParts`). *report*: what the method's servers are to know (`Informed`).
        """
        ...

    def wait(self) -> int:
        """Wait for the answers to all main pushes, and put their parameters into the model.
        Returns the number of this worker's next step."""
        ...

    def leave(self) -> None:
        """This worker is out of data. Returns when all are; the model then holds the
        final parameters."""
        ...

    def consolidate(self) -> Callable[[], None]:
        """Put the servers' present parameters into the model; returns what undoes it."""
        ...

    # ---- groups ----

    @property
    def group(self) -> int:
        """The number of the server that this worker pushes to, where there are `Groups`."""
        ...

    def move(self, group: int, step: int) -> None:
        """Between two steps: from *step* on this worker pushes to that group's server, whose
        parameters the model now holds."""
        ...

    def has_speed(self, speed: SpeedClass) -> None:
        """This worker's group is of that class: for codes that depend on it."""
        ...

    # ---- units ----

    @property
    def units(self) -> Sequence[Sequence[UnitPlace]]:
        """Per bucket, in the order of its buffer."""
        ...

    def unit_bytes(self, bucket: int) -> list[int]:
        """What each unit of a bucket is on the network."""
        ...

    def arrived(self, late: bool = False) -> list[Arrived]:
        """Wait for the answers to all main pushes, and for the model's buffers, which are put
        in; or wait for the answers to all *late* pushes. The method puts parameters into the
        model itself, and then says that it has `written`."""
        ...

    def told(self, bucket: int) -> list[Told]:
        """What the servers last told of a bucket: with an answer to a main push, or to this
        worker's join."""
        ...

    def written(self) -> None:
        """The method has written into the model: it was not the script."""
        ...

    # ---- the optimizer ----

    def own_updater(self) -> Updater:
        """The optimizer on this worker: its pieces are the units, and its state is its own.
        What it does stays here."""
        ...

    def ask_states(self, units: Sequence[tuple[int, int]], step: int) -> None:
        """Ask for the optimizer's state of some units (bucket and number), with all updates
        before *step* in it. Only for disciplines that take parts (`InParts`)."""
        ...

    def states(self) -> list[tuple[int, int, dict[str, Any]]]:
        """Wait for all states that were asked for: bucket, number, and the entries by name;
        tensors are flat."""
        ...
