"""One server's part of the model: what disciplines are given, and the server's modules share."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from paceline.errors import UsageError
from paceline.interfaces import (
    Discipline,
    HeldPush,
    Informed,
    InParts,
    Shard,
    Sparing,
    Timed,
    Work,
)
from paceline.interfaces.server_messages import Join, Push
from paceline.parameter_server.optim.clipping import (
    check_clip_norm,
    coefficient,
    sum_of_squares,
)
from paceline.parameter_server.state_machine.checks import (
    different_hyperparameters,
    different_units,
    total_weight,
)
from paceline.parameter_server.state_machine.compression import Coded
from paceline.parameter_server.state_machine.members import Members
from paceline.parameter_server.state_machine.store import Store

NOTHING_HELD = "this server holds no parameters: it only reduces"

Answering = Callable[[HeldPush, Sequence[int]], None]
"""Sends the parameters that a push asks for, and who counted for its step."""


class OnlyReduces:
    """The discipline of a server that holds no parameters."""

    def pushed(self, shard: Shard, push: HeldPush) -> None:
        """Does not happen: pushes are refused."""

    def changed(self, shard: Shard) -> None:
        pass

    def first_step(self, shard: Shard) -> int:
        return 0

    def may_pull(self, shard: Shard, step: int, bucket: int) -> bool:
        return True

    def ended(self, shard: Shard) -> int | None:
        return None

    def resume(self, shard: Shard, step: int) -> None:
        pass


class HeldShard:
    """The `Shard`: a `Store` once a worker has said what is trained, the `Members` who train
    it, and the discipline that says when it is updated and who is answered.

    *answer* sends an answer. Where workers disagree about a step, the shard is updated no
    more: *fault* says why, and *stopped* is called.
    """

    def __init__(
        self,
        workers: int,
        discipline: Discipline | None,
        answer: Answering,
        stopped: Callable[[], None],
    ) -> None:
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.members = Members(workers)
        self.fault = ""
        self._answer, self._stopped = answer, stopped
        self._store: Store | None = None
        self.coded: Coded | None = None
        """Where gradients are compressed."""
        self._limit, self._alone = math.inf, True
        self._unused: Discipline = discipline or OnlyReduces()
        self._begin(self._unused)

    # ---- what is held ----

    def hold(self, discipline: Discipline, join: Join) -> None:
        """Make room for the model that *join* describes, and begin with this discipline.
        Raises `UsageError`, with nothing changed, for what makes no sense."""
        check_clip_norm(join.clip_norm)
        if not isinstance(discipline, OnlyReduces):
            store = Store(join)
            self.coded = Coded(join, store) if join.compression else None
            self._store = store
        self._limit, self._alone = join.clip_norm, join.servers == 1
        self._unused = copy.deepcopy(discipline)
        self._begin(discipline)

    def renew(self, step: int) -> None:
        """Other parameters were loaded before *step*: drop all gradients, and begin again."""
        self.store.catch_up(step)
        self._begin(copy.deepcopy(self._unused))
        self.resume(step)

    def _begin(self, discipline: Discipline) -> None:
        self.discipline = discipline
        self.clipped: ClippedSteps | None = None
        if self._limit < math.inf:
            self.clipped = ClippedSteps(self, self._limit, self._alone)
        # Looked up once: to ask whether an object fits a protocol takes 16 us.
        self.timed = discipline if isinstance(discipline, Timed) else None
        self.in_parts = discipline if isinstance(discipline, InParts) else None
        self.informed = discipline if isinstance(discipline, Informed) else None
        self.spares = isinstance(discipline, Sparing) and discipline.spares

    @property
    def store(self) -> Store:
        """Raises `UsageError` where there is none."""
        if self._store is None:
            raise UsageError(NOTHING_HELD)
        return self._store

    def check_held(self) -> None:
        """Raise `UsageError` unless parameters are held here."""
        if self._store is None:
            raise UsageError(NOTHING_HELD)

    @property
    def is_held(self) -> bool:
        return self._store is not None

    @property
    def is_loaded(self) -> bool:
        return self._store is not None and all(self._store.loaded)

    def gradient(self, push: Push, payload: torch.Tensor | None) -> torch.Tensor:
        """What a push brings. Raises `UsageError` where it does not fit."""
        if self.coded is not None:
            return self.coded.gradient(push, payload)
        return self.store.fitting("push", push.bucket, payload, push.units)

    def forget(self, worker: int) -> None:
        """This worker is lost."""
        if self.coded is not None:
            self.coded.forget(worker)

    def take_work(self) -> Work:
        """What was done since this was last called."""
        return Work() if self._store is None else self._store.take_work()

    # ---- what happens to its discipline ----

    def changed(self) -> None:
        """Who takes part has changed, or all main pushes of a worker's step are in."""
        self.discipline.changed(self)
        self.settle()

    def next_deadline(self) -> float | None:
        """When the discipline wants to act by itself, if it does."""
        return None if self.timed is None else self.timed.next_deadline()

    def timer(self, now: float) -> None:
        """Let the discipline act, if its deadline is reached."""
        deadline = self.next_deadline()
        if self.timed is not None and deadline is not None and now >= deadline:
            self.timed.timer(self)
            self.settle()

    def settle(self) -> None:
        """The discipline was called: do what it wants, as far as it can be done by now."""
        if self.clipped is not None:
            self.clipped.settle()

    def resume(self, step: int) -> None:
        """Go on with *step*: see `Discipline.resume`."""
        self.discipline.resume(self, step)
        if self.clipped is not None:
            self.clipped.resume(step)

    def ended(self) -> int | None:
        """The step with which workers go on from here, if any: see `Discipline.ended`."""
        return None if self.waits_for_norm() else self.discipline.ended(self)

    def next_step(self, worker: int) -> int:
        """A worker's gradients of all steps before this one are in, here."""
        return 0 if self._store is None else self._store.next_step(worker)

    def may_pull(self, step: int) -> bool:
        """Whether a worker that begins with *step* may have the model: all of it, or it would
        hold buckets from before a load and from after it."""
        clipped = self.clipped
        return self.is_loaded and all(
            not (clipped is not None and clipped.holds(bucket))
            and self.discipline.may_pull(self, step, bucket)
            for bucket in self.buckets
        )

    def waits_for_norm(self) -> bool:
        """Whether updates are held until the norm of their step is known."""
        return self.clipped is not None and not self.clipped.is_between_steps()

    # ---- the `Shard` ----

    def expected(self, step: int) -> list[int]:
        return self.members.expected(step)

    def clock(self, worker: int) -> int:
        return self.members.clock(worker)

    def move_on(self, worker: int, step: int) -> None:
        member = self.members[worker]
        member.clock = max(member.clock, step)

    def meeting(self) -> Collection[int]:
        return self.members.meeting

    def slowest(self) -> int:
        return self.members.slowest()

    def fastest(self) -> int:
        return self.members.furthest

    @property
    def buckets(self) -> list[int]:
        return self.store.buckets

    @property
    def all_buckets(self) -> int:
        return len(self.store.flats)

    def version(self, bucket: int) -> int:
        held = 0 if self.clipped is None else self.clipped.count(bucket)
        return self.store.versions[bucket] + held

    def unit_bytes(self, bucket: int) -> list[int]:
        return self.store.unit_bytes(bucket)

    def values(self, bucket: int, units: Sequence[int]) -> list[torch.Tensor]:
        return self.store.values(bucket, units)

    def units_of(
        self, bucket: int, flat: torch.Tensor
    ) -> list[tuple[int, torch.Tensor]]:
        return self.store.units_of(bucket, flat)

    def apply(self, push: HeldPush) -> None:
        if push.applied:
            self.counts["gradients that were applied before"] += 1
        else:
            self._take(Update(push.bucket, [push], together=False))

    def apply_mean(self, bucket: int, pushes: Sequence[HeldPush]) -> None:
        fresh = [push for push in pushes if not push.applied]
        self._take(Update(bucket, fresh, together=True))

    def zero_momentum(self, bucket: int) -> None:
        if self.clipped is not None:
            raise UsageError(
                "zero_momentum under a method whose servers clip: updates that come before "
                "it may still be held"
            )
        self.store.zero_momentum(bucket)

    def answer(self, push: HeldPush, counted: Sequence[int] = ()) -> None:
        if self.clipped is not None and not self.clipped.is_between_steps():
            self.clipped.hold_answer(push, counted)
        else:
            self._answer(push, counted)

    def count(self, what: str) -> None:
        self.counts[what] += 1

    # ---- updates ----

    def _take(self, update: Update) -> None:
        if self.clipped is None:
            self.update(update)
        else:
            self.clipped.hold(update)

    def update(self, update: Update) -> None:
        """Do what a discipline wants done. Where pushes do not fit each other, that is a
        fault."""
        if not update.together:
            (push,) = update.pushes
            if not self.fault:
                self._step(push, push.gradient, push.used, push.weight)
                self.counts["gradients applied"] += 1
                self._note_applied(push)
            return
        pushes = update.pushes
        if not self.fault:
            self.fault = different_hyperparameters(pushes) or different_units(pushes)
        if self.fault:
            self._stopped()
            return
        self.counts["gradients applied"] += len(pushes)
        for push in pushes:
            self._note_applied(push)
        whole = total_weight([push.weight for push in pushes])
        if not whole:
            self.store.updated(update.bucket)  # nobody had a sample
            return
        mean = _mean(pushes, whole)
        used = [any(flags) for flags in zip(*(p.used for p in pushes), strict=True)]
        self._step(pushes[0], mean, used)
        size = self.store.size(update.bucket, pushes[0].units)
        self.store.add_work(added=size * (len(pushes) - 1))

    def _note_applied(self, push: HeldPush) -> None:
        if self.in_parts is not None:
            return  # a step of its buckets has several updates, and ends for all workers at once
        for worker, step in push.of or [(push.worker, push.step)]:
            if worker >= 0:  # else another server's
                self.store.note_applied(worker, step, push.bucket)

    def _step(
        self,
        push: HeldPush,
        gradient: torch.Tensor,
        used: Sequence[bool],
        factor: float = 1.0,
    ) -> None:
        """One step of the optimizer on what *push* is of."""
        how = push.hyperparameters
        self.store.apply(push.bucket, gradient, used, how, factor, push.units)


def _mean(pushes: Sequence[HeldPush], whole: float) -> torch.Tensor:
    """Made in the first push's gradient; *whole*: the sum of weights."""
    total = pushes[0].gradient
    for push in pushes:
        # As workers do that weigh before they send, so that the bits are the same.
        if push.weight != 1.0:
            push.gradient.mul_(push.weight)
        if push is not pushes[0]:
            total.add_(push.gradient)
    if whole != 1.0:
        total.mul_(1 / whole)
    return total


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
    """Steps whose mean gradient is clipped by its norm, before any of it is applied.

    A discipline updates bucket by bucket. This holds its updates and answers until every
    bucket of the step is there. Then the norm of the step's mean is known: gradients are scaled,
    updates are done, and answers leave.

    Example: two buckets, two workers. Bucket 1 is complete first: the discipline has it
    updated and answered. Nothing happens yet. Bucket 0 follows: both are scaled and updated,
    and then all four answers leave.

    Where several servers hold parts of the model, each knows its part of the norm only.
    Workers ask all for their parts (`PullNorm`), add them up in the order of servers, and tell
    all the sum (`Norm`): servers need no connections among themselves.

    Where nobody is left who could complete a step, or tell its norm, it is scaled by the norm
    of what is here.

    *limit*: of the norm of each step of *shard*. *alone*: no other server holds a part of the
    model.
    """

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
