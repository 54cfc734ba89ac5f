"""What differs between servers of different methods: their discipline.

A method's file implements `Discipline`, and those of the optional protocols that it needs;
the server calls it, and gives it the server's part of the model: a `Shard`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from paceline.interfaces.partial_optimizer import Hyperparameters


class HeldPush(NamedTuple):
    """A worker's gradient of one bucket on a server, or of some *units* of that bucket.

    *number* counts pushes as they came. *late*: the bucket's main push of this step has left
    these units out. *report*: what `Informed.read_report` made of the worker's report; None
    without one. *applied*: an earlier life of the worker has sent it, and it is in the parameters:
    the push is answered like any other, and its gradient is not used. *of*: the workers and steps
    of the gradients that this one is the mean of; its own alone where empty.
    """

    worker: int
    step: int
    bucket: int
    weight: float
    used: Sequence[bool]
    hyperparameters: Hyperparameters
    gradient: torch.Tensor
    number: int
    late: bool = False
    units: Sequence[int] | None = None
    report: Any = None
    applied: bool = False
    of: Sequence[tuple[int, int]] = ()


class Shard(Protocol):
    """One server's parameters and clocks, as a discipline sees them."""

    @property
    def now(self) -> float:
        """Seconds on the server's clock: when the request at hand came."""
        ...

    def expected(self, step: int) -> Sequence[int]:
        """The workers, in rank order, whose gradients of *step* have come or will come."""
        ...

    def clock(self, worker: int) -> int:
        """The number of a worker's next step: its main pushes of all steps before are in. Of
        a worker that has yet to join: the number of its first step."""
        ...

    def move_on(self, worker: int, step: int) -> None:
        """Let *worker* leave out its steps before *step*: its answers name the next one. A
        worker whose clock is further stays there."""
        ...

    def fastest(self) -> int:
        """One more than the highest step of which a gradient has come, from whomever."""
        ...

    def meeting(self) -> Collection[int]:
        """The workers that have come to where all meet, and wait there: they send nothing
        until all others that train have come, too."""
        ...

    def slowest(self) -> int:
        """The least clock of those that take part; `fastest` where nobody does."""
        ...

    @property
    def buckets(self) -> Sequence[int]:
        """The buckets of which this server holds a part."""
        ...

    @property
    def all_buckets(self) -> int:
        """How many buckets the model has, on all servers."""
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

    def units_of(
        self, bucket: int, flat: torch.Tensor
    ) -> Iterable[tuple[int, torch.Tensor]]:
        """Views of a tensor of all of *bucket*, unit by unit; each with the number of the
        optimizer's group that the unit is in."""
        ...

    def apply(self, push: HeldPush) -> None:
        """Update by one push alone. Its *weight* scales the learning rate: decay follows
        by itself, and Adam, whose step does not depend on a gradient's size, moves as far
        as it should (design section 4). A push that was applied before changes nothing."""
        ...

    def apply_mean(self, bucket: int, pushes: Sequence[HeldPush]) -> None:
        """Update by the mean of pushes, all of the same units: weighted by their weights,
        divided by the sum of them, and added up in the order given. The gradients are used
        up: the first one becomes the mean. No pushes at all count as an update, too."""
        ...

    def zero_momentum(self, bucket: int) -> None:
        """Make the optimizer's running mean of gradients nought, of all that this server
        holds of *bucket*: SGD's momentum buffer, Adam's first moment. Second moments and
        counts of steps stay. `UsageError` where a step's updates are held until its norm is
        known: this would come before them."""
        ...

    def answer(self, push: HeldPush, counted: Sequence[int] = ()) -> None:
        """Send the parameters that were pushed, as they are now, to the worker that pushed
        them. *counted*: the workers that counted for the step, where that was decided."""
        ...

    def count(self, what: str) -> None:
        """Count something that happened, for reports: ``"gradients dropped"``."""
        ...


class Discipline(Protocol):
    """What a server does with gradients, and when it answers: one object per server."""

    def pushed(self, shard: Shard, push: HeldPush) -> None:
        """A gradient has come. The discipline alone keeps it."""
        ...

    def changed(self, shard: Shard) -> None:
        """Who takes part has changed, or all main pushes of a worker's step are in."""
        ...

    def first_step(self, shard: Shard) -> int:
        """The step with which a worker that joins now begins."""
        ...

    def may_pull(self, shard: Shard, step: int, bucket: int) -> bool:
        """Whether a worker that begins with *step* may have *bucket* as it is."""
        ...

    def ended(self, shard: Shard) -> int | None:
        """The first step that workers may do after a snapshot of this moment: all steps before
        it have ended. A worker whose later gradients are in the parameters goes on after them.
        Example: under asp, with workers that have done 7 and 9 steps, it is step 7; one goes on
        with step 7, the other one with step 9. None while a step has ended for some buckets
        only: then there is no snapshot."""
        ...

    def resume(self, shard: Shard, step: int) -> None:
        """Go on with *step*, holding no gradient. The shard was restored from a snapshot for
        which `ended` was *step*; or other parameters were loaded, and this object is a fresh
        copy. All buckets have the version of then, and at least *step*. Called before
        anything else."""
        ...


@runtime_checkable
class Timed(Discipline, Protocol):
    """A discipline that acts at a time, and not only when something comes."""

    def next_deadline(self) -> float | None:
        """When `timer` is to be called, on the clock of `Shard.now`; None: not at all. Every
        call of the discipline may change it."""
        ...

    def timer(self, shard: Shard) -> None:
        """`Shard.now` has reached the deadline."""
        ...


@runtime_checkable
class Led(Discipline, Protocol):
    """A discipline whose servers would decide differently: so server 0 decides alone."""

    def follow(self) -> None:
        """This is not server 0: do not decide. Called before anything else."""
        ...


@runtime_checkable
class Coordinated(Led, Protocol):
    """What server 0 decides, the others have to know: its answers say it, and workers tell
    the others."""

    def decided(self, shard: Shard, step: int, workers: Sequence[int]) -> None:
        """Server 0 has decided that *workers* count for *step*. Comes from each worker."""
        ...


@runtime_checkable
class Sparing(Discipline, Protocol):
    """A discipline whose steps may end without some of those that take part."""

    @property
    def spares(self) -> bool:
        """Whether they may here. Where workers wait for all others (see `Shard.expected`),
        steps then end without them, so that the others get there."""
        ...


@runtime_checkable
class InParts(Discipline, Protocol):
    """A discipline that takes a step's buckets in parts: some units with the main push, which
    is the step's barrier, and those that it left out late. The others take whole buckets:
    their servers refuse anything else."""

    def has(self, shard: Shard, step: int, bucket: int, units: Sequence[int]) -> bool:
        """Whether all updates before *step* are in these units. A worker that asks for their
        optimizer state is answered then."""
        ...


@runtime_checkable
class Informed(Discipline, Protocol):
    """A discipline that its workers report to, and that tells them something: both are bytes
    that only the method reads."""

    def read_report(self, shard: Shard, report: bytes) -> Any:
        """What a worker's report says: `pushed` finds it in `HeldPush.report`. Raises
        `UsageError` for a report that makes no sense: then its push is refused, and nothing
        has changed."""
        ...

    def tells(self, bucket: int) -> bytes:
        """What goes out with an answer to a main push of *bucket*, or to a pull of it."""
        ...
