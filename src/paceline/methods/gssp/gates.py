"""When gradients inside a group are applied, and when their workers go on.

A gate is told of each push, with the number of its step by the group's clocks, and lets go of those
that have waited long enough whenever something has happened. There is no polling. A push without a
number is of a worker that nobody here waits for: it is about to push elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from paceline.interfaces import HeldPush, Shard
from paceline.methods.gssp.clocks import Clocks
from paceline.methods.gssp.gradient_sum import GradientSum
from paceline.methods.push_pull import without_gradient


class Desk(Protocol):
    """The server as its gate sees it."""

    @property
    def clocks(self) -> Clocks: ...

    def apply(self, shard: Shard, push: HeldPush, gradients: int = 1) -> None:
        """Update by this one, which stands for so many gradients, here and later at the other
        servers."""
        ...

    def answer(self, shard: Shard, push: HeldPush) -> None: ...


class Gate(Protocol):
    """See above."""

    def take(self, desk: Desk, shard: Shard, push: HeldPush, step: int | None) -> None:
        """A gradient has come."""
        ...

    def let_go(self, desk: Desk, shard: Shard) -> None:
        """Something has happened."""
        ...

    def entry(self, desk: Desk) -> int:
        """The step with which a member enters that pushes now."""
        ...

    def first_step(self, desk: Desk, shard: Shard) -> int:
        """See `Discipline.first_step`: by the workers' own numbers."""
        ...

    def ended(self, desk: Desk, shard: Shard) -> int | None:
        """See `Discipline.ended`."""
        ...

    def may_pull(self, step: int, bucket: int) -> bool:
        """See `Discipline.may_pull`, where there is only one group."""
        ...

    def resume(self, shard: Shard, step: int) -> None:
        """See `Discipline.resume`."""
        ...


def least_step(desk: Desk, shard: Shard) -> int:
    """The least of the workers' own numbers of their next steps; `Shard.fastest` where nobody is
    here."""
    return min((shard.clock(worker) for worker in desk.clocks), default=shard.fastest())


class Bounded:
    """SSP with a bound s of at least 1: a gradient is applied when it comes, and a worker goes on
    with its step c when all have done at least c - s."""

    def __init__(self, staleness: int) -> None:
        self._staleness = staleness
        self._waiting: list[tuple[HeldPush, int | None]] = []

    def take(self, desk: Desk, shard: Shard, push: HeldPush, step: int | None) -> None:
        desk.apply(shard, push)
        self._waiting.append((without_gradient(push), step))

    def let_go(self, desk: Desk, shard: Shard) -> None:
        slowest, waiting = desk.clocks.slowest(), self._waiting
        self._waiting = []
        for push, step in waiting:
            if step is None or push.worker not in desk.clocks:
                desk.answer(shard, push)  # it moves to another group, or is lost
            elif step + 1 <= slowest + self._staleness:
                desk.answer(shard, push)
            else:
                self._waiting.append((push, step))

    def entry(self, desk: Desk) -> int:
        return desk.clocks.slowest() if len(desk.clocks) else 0

    def first_step(self, desk: Desk, shard: Shard) -> int:
        return least_step(desk, shard)

    def ended(self, desk: Desk, shard: Shard) -> int | None:
        return least_step(desk, shard)

    def may_pull(self, step: int, bucket: int) -> bool:
        return True

    def resume(self, shard: Shard, step: int) -> None:
        """Nothing is kept that a snapshot would have to hold."""


class Rounds:
    """A bucket is updated when the gradients of all members are in: by one after the other, in
    rank order, or *together*, by their mean."""

    def __init__(self, together: bool = False) -> None:
        self._together = together
        self._rounds: dict[tuple[int, int], list[HeldPush]] = {}
        """By step and bucket."""
        self._ended: Counter[int] = Counter()
        """By bucket: the gradients of all steps below this one are in."""
        self._begun = 0
        """Of no bucket has a gradient of this step come, or of a later one."""

    def take(self, desk: Desk, shard: Shard, push: HeldPush, step: int | None) -> None:
        number = max(self._ended[push.bucket], step or 0)
        self._begun = max(self._begun, number + 1)
        self._rounds.setdefault((number, push.bucket), []).append(push)

    def let_go(self, desk: Desk, shard: Shard) -> None:
        for bucket in shard.buckets:
            while self._ended[bucket] < self._begun:
                step = self._ended[bucket]
                pushes = self._rounds.get((step, bucket), [])
                here = {push.worker for push in pushes}
                if not here.issuperset(desk.clocks.expected(step)):
                    break
                self._rounds.pop((step, bucket), None)
                self._ended[bucket] += 1
                self._close(desk, shard, sorted(pushes, key=lambda push: push.worker))

    def _close(self, desk: Desk, shard: Shard, pushes: list[HeldPush]) -> None:
        fresh = [push for push in pushes if not push.applied]
        if self._together and fresh:
            desk.apply(shard, joined(shard, fresh), len(fresh))
        elif not self._together:
            for push in pushes:
                desk.apply(shard, push)
        for push in pushes:
            desk.answer(shard, push)

    def entry(self, desk: Desk) -> int:
        return max(self._ended.values(), default=0)

    def first_step(self, desk: Desk, shard: Shard) -> int:
        return shard.fastest()

    def ended(self, desk: Desk, shard: Shard) -> int | None:
        if len({self._ended[bucket] for bucket in shard.buckets}) > 1:
            return None
        return least_step(desk, shard)

    def may_pull(self, step: int, bucket: int) -> bool:
        return self._ended[bucket] >= step

    def resume(self, shard: Shard, step: int) -> None:
        self._ended = Counter(dict.fromkeys(shard.buckets, step))
        self._begun = step


def joined(shard: Shard, pushes: Sequence[HeldPush]) -> HeldPush:
    """One push with the mean of these by weight, and the sum of their weights. The first one's
    gradient is used up."""
    if len(pushes) == 1:
        return pushes[0]
    first, *others = pushes
    total = GradientSum(first.gradient, first.weight, first.used, first.hyperparameters)
    for push in others:
        total.add(
            shard,
            push.bucket,
            push.gradient,
            push.weight,
            push.used,
            push.hyperparameters,
        )
    return first._replace(
        gradient=total.mean(),
        weight=total.weight,
        used=total.used,
        hyperparameters=total.hyperparameters,
        of=[(push.worker, push.step) for push in pushes],
    )
