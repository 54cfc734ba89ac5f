"""Steps whose mean gradient is clipped by its norm, before any of it is applied.

A discipline updates bucket by bucket. `ClippedSteps` holds its updates and answers until every
bucket of the step is there. Then the norm of the step's mean is known: gradients are scaled,
updates are done, and answers leave.

Example: two buckets, two workers. Bucket 1 is complete first: the discipline has it
updated and answered. Nothing happens yet. Bucket 0 follows: both are scaled and updated, and
then all four answers leave.

Where several servers hold parts of the model, each knows its part of the norm only. Workers
ask all for their parts (`PullNorm`), add them up in the order of servers, and tell all the
sum (`Norm`): servers need no connections among themselves.

Where nobody is left who could complete a step, or tell its norm, it is scaled by the norm of
what is here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from paceline.interfaces import HeldPush
from paceline.parameter_server.optim.clipping import coefficient, sum_of_squares
from paceline.parameter_server.state_machine.checks import total_weight

if TYPE_CHECKING:
    from paceline.parameter_server.state_machine.shard import HeldShard

_KEPT = 64
"""Of so many steps that are done parts of norms are known. A worker asks for that of its own
step, which ended for the others at most one step ago; or it came too late for its step, and
then nobody needs what it is told."""


class PartOfNorm(NamedTuple):
    """*squares*: the sum of squares of this server's part of a step's mean; *counted*: the
    workers that counted for it, where that was decided."""

    squares: float
    counted: Sequence[int]


class Update(NamedTuple):
    """What a discipline wants done to a bucket: one step by the mean of *pushes*, or, if they
    are not taken *together*, by the one that there is."""

    bucket: int
    pushes: Sequence[HeldPush]
    together: bool


@dataclass
class _Held:
    """One step, until its norm is known."""

    updates: dict[int, list[Update]] = field(default_factory=dict)
    answers: list[tuple[HeldPush, Sequence[int]]] = field(default_factory=list)
    squares: float | None = None  # once it is complete

    def step(self) -> int | None:
        """Its number; None while nobody has sent anything of it."""
        every = (
            push for ups in self.updates.values() for up in ups for push in up.pushes
        )
        return next((push.step for push in every), None)


class ClippedSteps:
    """The steps of a *shard*, clipped to the norm *limit*. *alone*: no other server holds a
    part of the model."""

    def __init__(self, shard: HeldShard, limit: float, alone: bool) -> None:
        self._shard = shard
        self._limit = limit
        self._alone = alone
        self._held = _Held()
        self._parts: dict[int, PartOfNorm] = {}
        """By step: of the last ones, also where they are done."""
        self._done = 0
        """Steps below this one wait for no norm."""
        self._norms: dict[int, float] = {}
        """By step: what workers have said, of steps that are not complete here."""

    # ---- what is held ----

    def hold(self, update: Update) -> None:
        """Do this once the norm of its step is known."""
        before = self._held.step()
        if before is not None and any(push.step != before for push in update.pushes):
            # Nobody is left who could complete the step before, or tell its norm.
            self._let_go(self._held, coefficient(self._sum_up(self._held), self._limit))
            self._is_done(before)
        self._held.updates.setdefault(update.bucket, []).append(update)

    def hold_answer(self, push: HeldPush, counted: Sequence[int]) -> None:
        """Answer this when the updates that are held have been done."""
        self._held.answers.append((push, counted))

    def holds(self, bucket: int) -> bool:
        """Whether an update of *bucket* has not been done yet."""
        return bucket in self._held.updates

    def count(self, bucket: int) -> int:
        """How many updates of *bucket* have not been done yet."""
        return len(self._held.updates.get(bucket, ()))

    def is_between_steps(self) -> bool:
        """Whether nothing is held."""
        return not self._held.updates

    def settle(self) -> None:
        """Do what can be done by now: the discipline has been called."""
        held = self._held
        if not held.updates:
            return
        step = held.step()
        complete = all(bucket in held.updates for bucket in self._shard.buckets)
        orphaned = step is None or not self._shard.expected(step)
        if not complete and not orphaned:
            return
        if held.squares is None:
            held.squares = self._sum_up(held)
            if step is not None:
                counted = next((c for _, c in held.answers if c), ())
                self._parts[step] = PartOfNorm(held.squares, counted)
        told = self._norms.pop(step, None) if step is not None else None
        if told is None and (self._alone or orphaned):
            told = held.squares
        if told is not None:
            self._let_go(held, coefficient(told, self._limit))
            if step is not None:
                self._is_done(step)

    def part(self, step: int) -> PartOfNorm | None:
        """This server's part of a step's norm; None while it is not known."""
        known = self._parts.get(step)
        if known is None and step < self._done:
            return PartOfNorm(0.0, ())
        return known

    def norm(self, step: int, squares: float) -> None:
        """A worker has added up all servers' parts. The first one's word counts."""
        if step >= self._done:
            self._norms.setdefault(step, squares)
            self.settle()

    def resume(self, step: int) -> None:
        """Steps before this one are over: whoever was in one waits for no norm of it."""
        self._done = max(self._done, step)

    # ---- help ----

    def _sum_up(self, held: _Held) -> float:
        """The squares of the mean, of all that is held."""
        return math.fsum(
            self._squares(updates) for updates in held.updates.values() if updates
        )

    def _squares(self, updates: Sequence[Update]) -> float:
        pushes = [push for update in updates for push in update.pushes]
        whole = total_weight([push.weight for push in pushes])
        if not whole:
            return 0.0  # nobody had a sample
        total = pushes[0].gradient * pushes[0].weight
        for push in pushes[1:]:
            total.add_(push.gradient, alpha=push.weight)
        size = total.numel() * total.element_size()
        self._shard.store.add_work(added=size * len(pushes))
        return sum_of_squares([total]) / whole**2

    def _let_go(self, held: _Held, factor: float) -> None:
        self._held = _Held()
        for updates in held.updates.values():
            for update in updates:
                if factor != 1.0:
                    for push in update.pushes:
                        push.gradient.mul_(factor)
                self._shard.update(update)
        for push, counted in held.answers:
            self._shard.answer(push, counted)

    def _is_done(self, step: int) -> None:
        self._done = max(self._done, step + 1)
        for old in [s for s in self._parts if s < self._done - _KEPT]:
            del self._parts[old]
        for old in [s for s in self._norms if s < self._done]:
            del self._norms[old]
