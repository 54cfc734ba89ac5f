"""What differs between servers of different methods: their discipline.

A method's file implements `Discipline`, and the optional protocols that it needs; the
server calls it, and shows it the server's part of the model as a `Shard`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from paceline.interfaces.updates import Hyperparameters
from paceline.messages import FIRST, Measured


class HeldPush(NamedTuple):
    """A worker's gradient of one bucket, or of some *units* of it, on a server. *stamp*
    counts pushes as they came."""

    worker: int
    step: int
    bucket: int
    weight: float
    used: Sequence[bool]
    hyperparameters: Hyperparameters
    gradient: torch.Tensor
    stamp: int
    stage: int = FIRST
    units: Sequence[int] | None = None
    measured: Measured | None = None


class Shard(Protocol):
    """One server's parameters and clocks, as a discipline sees them."""

    @property
    def now(self) -> float:
        """Seconds on the server's clock, when what is being handled came."""
        ...

    def expected(self, step: int) -> Sequence[int]:
        """The workers, in rank order, whose gradients of *step* have come or will come."""
        ...

    def clock(self, worker: int) -> int:
        """How many steps of a worker that takes part, or is to come, have come in whole: the
        number of the one that comes next."""
        ...

    def move_on(self, worker: int, step: int) -> None:
        """The next step of *worker* is *step*, or the one after its last if that is
        later: it is told so with its answers."""
        ...

    def fastest(self) -> int:
        """One more than the highest step of which a gradient has come, also of those that
        are gone."""
        ...

    def slowest(self) -> int:
        """The least clock of those that take part; where nobody does, that of the step of
        which no gradient has come yet."""
        ...

    @property
    def buckets(self) -> Sequence[int]:
        """The buckets of which this server holds a part."""
        ...

    def version(self, bucket: int) -> int:
        """How many times *bucket* was updated."""
        ...

    def unit_bytes(self, bucket: int) -> Sequence[int]:
        """What each unit of *bucket* is on the network."""
        ...

    def values(self, bucket: int, units: Sequence[int]) -> list[torch.Tensor]:
        """The parameters of some units as they are, each flat: to read."""
        ...

    def apply(self, push: HeldPush) -> None:
        """Update by one push alone. Its *weight* scales the learning rate: decay follows
        by itself, and Adam, whose step does not depend on a gradient's size, moves as far
        as it should (design section 4)."""
        ...

    def apply_mean(self, bucket: int, pushes: Sequence[HeldPush]) -> None:
        """Update by the mean of pushes, weighted by their weights and divided by the sum of
        them, added up in the order given. All are of the same units. Their gradients are
        used up: the first one then holds the mean. Counts as an update also where there are
        none."""
        ...

    def answer(self, push: HeldPush, counted: Sequence[int] = ()) -> None:
        """Send the bucket's parameters, as they are, to who pushed it; and who *counted*
        for its step, where that was decided."""
        ...

    def count(self, what: str) -> None:
        """Count something that happened, for reports: ``"gradients dropped"``."""
        ...


class Discipline(Protocol):
    """What a server does with gradients, and when it answers: one object per server."""

    def pushed(self, shard: Shard, push: HeldPush) -> None:
        """A gradient has come. It is kept nowhere but here."""
        ...

    def changed(self, shard: Shard) -> None:
        """Who takes part has changed, or a worker's step is in as a whole."""
        ...

    def first_step(self, shard: Shard) -> int:
        """The step with which a worker that joins now begins."""
        ...

    def may_pull(self, shard: Shard, step: int, bucket: int) -> bool:
        """Whether a worker that begins with *step* may have *bucket* as it is."""
        ...

    def ended(self, shard: Shard) -> int | None:
        """All steps before this one have ended, and nothing of a later one that its workers
        will do again: who goes on from a snapshot of this moment begins with it. None
        while a step has ended for some buckets only: no snapshot then."""
        ...

    def resume(self, shard: Shard, step: int) -> None:
        """The shard was restored from a snapshot for which `ended` was *step*; or other
        parameters were loaded before *step*, and this is a fresh copy, so that no gradient
        from before them is held. Every bucket's version is that of then, and at least
        *step*. Called before anything else."""
        ...


@runtime_checkable
class Timed(Discipline, Protocol):
    """A discipline that acts at a time, and not only when something comes."""

    def next_deadline(self) -> float | None:
        """When, on the clock of `Shard.now`, `timer` is to be called; None: not at all. May
        become another one with every call of this discipline."""
        ...

    def timer(self, shard: Shard) -> None:
        """`Shard.now` has reached the deadline."""
        ...


@runtime_checkable
class Led(Discipline, Protocol):
    """A discipline that decides what other servers would decide otherwise: it does so on
    server 0 alone."""

    def follow(self) -> None:
        """This is not server 0: do not decide. Called before anything else."""
        ...


@runtime_checkable
class Sparing(Discipline, Protocol):
    """A discipline whose steps may end without some of those who take part."""

    @property
    def spares(self) -> bool:
        """Whether they may here. `Shard.expected` then names none who waits where all meet,
        while the others have to go on to come there."""
        ...


@runtime_checkable
class Deferring(Discipline, Protocol):
    """A discipline that takes a part of each step in its second stage."""

    def deferred(self, bucket: int) -> Sequence[int]:
        """The bucket's units that workers are to defer in their next step."""
        ...

    def has(self, shard: Shard, step: int, bucket: int, units: Sequence[int]) -> bool:
        """Whether all updates before *step* are in these units."""
        ...


@runtime_checkable
class Coordinated(Led, Protocol):
    """The others have to know: server 0 says it in its answers, and workers tell them."""

    def decided(self, shard: Shard, step: int, workers: Sequence[int]) -> None:
        """Server 0 has decided that *workers* count for *step*. Comes from each worker."""
        ...
