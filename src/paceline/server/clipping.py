"""Steps whose mean gradient is clipped by its norm, before any of it is applied.

A discipline updates bucket by bucket. `ClippedSteps` stands between it and its shard: it
takes updates and answers, and holds them until every bucket of the step is there. Then the
norm of the step's mean is known, gradients are scaled, and all goes on to the shard.

Example: two buckets, two workers. Bucket 1 is complete first: the discipline has it
updated and answered. Nothing happens yet. Bucket 0 follows: both are scaled and updated, and
then all four answers leave.

Where several servers hold parts of the model, each knows its part of the norm only. Workers
ask all for their parts (`PullNorm`), add them up in the order of servers, and tell all the
sum (`Norm`): servers need no connections among themselves.

A step whose workers are all gone before its norm was known, or before all of it had come, is
scaled by the norm of what is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from paceline.clipping import coefficient, sum_of_squares
from paceline.interfaces import HeldPush, Shard
from paceline.server.checks import total_weight

_KEPT = 64
"""A worker asks for the norm of its own step, which has ended for the others at most one
step ago, or for which it came too late: then nobody needs what it is told."""


class PartOfNorm(NamedTuple):
    """*squares*: the sum of squares of this server's part of a step's mean; *counted*: the
    workers that counted for it, where that was decided."""

    squares: float
    counted: Sequence[int]


@dataclass
class _Update:
    """What a discipline wants done to a bucket."""

    bucket: int
    pushes: Sequence[HeldPush]
    together: bool  # by their mean, or one after the other


@dataclass
class _Held:
    """One step, until its norm is known."""

    updates: dict[int, list[_Update]] = field(default_factory=dict)
    answers: list[tuple[HeldPush, Sequence[int]]] = field(default_factory=list)
    squares: float | None = None  # once it is complete

    def step(self) -> int | None:
        """Its number; None while nobody has sent anything of it."""
        every = (
            push for ups in self.updates.values() for up in ups for push in up.pushes
        )
        return next((push.step for push in every), None)


class ClippedSteps:
    """The `Shard` that a discipline sees where steps are clipped to the norm *limit*.

    *alone*: no other server holds a part. *added* is told how many bytes were added up to
    find norms. All that it does not say itself is what *shard* says.
    """

    def __init__(
        self,
        shard: Shard,
        limit: float,
        alone: bool,
        added: Callable[[int], None],
    ) -> None:
        self._shard = shard
        self._limit = limit
        self._alone = alone
        self._added = added
        self._held = _Held()
        self._parts: dict[int, PartOfNorm] = {}
        """By step: the last ones, also of steps that are done."""
        self._done = 0
        """Steps below this one wait for no norm."""
        self._norms: dict[int, float] = {}
        """By step: what workers have said, of steps that are not complete here."""

    # ---- the `Shard` ----

    @property
    def now(self) -> float:
        return self._shard.now

    def expected(self, step: int) -> Sequence[int]:
        return self._shard.expected(step)

    def clock(self, worker: int) -> int:
        return self._shard.clock(worker)

    def move_on(self, worker: int, step: int) -> None:
        self._shard.move_on(worker, step)

    def fastest(self) -> int:
        return self._shard.fastest()

    def slowest(self) -> int:
        return self._shard.slowest()

    @property
    def buckets(self) -> Sequence[int]:
        return self._shard.buckets

    @property
    def all_buckets(self) -> int:
        return self._shard.all_buckets

    def version(self, bucket: int) -> int:
        held = len(self._held.updates.get(bucket, ()))
        return self._shard.version(bucket) + held

    def unit_bytes(self, bucket: int) -> Sequence[int]:
        return self._shard.unit_bytes(bucket)

    def values(self, bucket: int, units: Sequence[int]) -> list[torch.Tensor]:
        return self._shard.values(bucket, units)

    def apply(self, push: HeldPush) -> None:
        self._hold(_Update(push.bucket, [push], together=False))

    def apply_mean(self, bucket: int, pushes: Sequence[HeldPush]) -> None:
        self._hold(_Update(bucket, list(pushes), together=True))

    def answer(self, push: HeldPush, counted: Sequence[int] = ()) -> None:
        if self._held.updates:
            self._held.answers.append((push, counted))
        else:
            self._shard.answer(push, counted)

    def count(self, what: str) -> None:
        self._shard.count(what)

    # ---- what is held ----

    def holds(self, bucket: int) -> bool:
        """Whether an update of *bucket* has not been done yet."""
        return bucket in self._held.updates

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

    def _hold(self, update: _Update) -> None:
        before = self._held.step()
        if before is not None and any(push.step != before for push in update.pushes):
            # Nobody is left who could complete the step before, or tell its norm.
            self._let_go(self._held, coefficient(self._sum_up(self._held), self._limit))
            self._is_done(before)
        self._held.updates.setdefault(update.bucket, []).append(update)

    def _sum_up(self, held: _Held) -> float:
        """The squares of the mean, of all that is held."""
        return math.fsum(
            self._squares(updates) for updates in held.updates.values() if updates
        )

    def _squares(self, updates: Sequence[_Update]) -> float:
        pushes = [push for update in updates for push in update.pushes]
        whole = total_weight([push.weight for push in pushes])
        if not whole:
            return 0.0  # nobody had a sample
        total = pushes[0].gradient * pushes[0].weight
        for push in pushes[1:]:
            total.add_(push.gradient, alpha=push.weight)
        self._added(total.numel() * total.element_size() * len(pushes))
        return sum_of_squares([total]) / whole**2

    def _let_go(self, held: _Held, factor: float) -> None:
        self._held = _Held()
        for updates in held.updates.values():
            for update in updates:
                if factor != 1.0:
                    for push in update.pushes:
                        push.gradient.mul_(factor)
                if update.together:
                    self._shard.apply_mean(update.bucket, update.pushes)
                else:
                    self._shard.apply(*update.pushes)
        for push, counted in held.answers:
            self._shard.answer(push, counted)

    def _is_done(self, step: int) -> None:
        self._done = max(self._done, step + 1)
        for old in [s for s in self._parts if s < self._done - _KEPT]:
            del self._parts[old]
        for old in [s for s in self._norms if s < self._done]:
            del self._norms[old]
