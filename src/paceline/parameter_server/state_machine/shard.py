"""One server's part of the model, as disciplines and the server's other modules use it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from paceline.errors import UsageError
from paceline.interfaces import Discipline, PushedGradient, Sender, Work
from paceline.interfaces.server_messages import Join, Parameters, Push
from paceline.optim.clipping import (
    check_clip_norm,
    clip_factor,
    sum_of_squares,
)
from paceline.parameter_server.state_machine.compression import ServerCompression
from paceline.parameter_server.state_machine.members import Members
from paceline.parameter_server.state_machine.replies import ReplyQueue
from paceline.parameter_server.state_machine.store import Store

NOTHING_HELD = "this server holds no parameters: it only reduces"


class ModelShard:
    """One server's part of the model: the `Shard` that disciplines get.

    It has a `Store` once a worker has described the training, the `Members` who train it, and the
    discipline. The discipline decides when the model is updated and which workers get replies. If
    workers disagree about a step, updates stop, and *fault* is the reason.
    """

    store: Store

    def __init__(
        self, members: Members, counts: Counter[str], replies: ReplyQueue
    ) -> None:
        self.now = 0.0
        self.members = members
        self.counts = counts
        self.fault = ""
        self.loads = 0
        """Number of loads after the first one."""
        self.unanswered: dict[int, tuple[Sender, bool]] = {}
        """Accepted pushes without a reply, by number, and whether they are late."""
        self.compression: ServerCompression | None = None
        """Set if gradients are compressed."""
        self.discipline = Discipline()
        self.clipped: ClippedStep | None = None
        self.is_held = False
        """Whether this server holds parameters: then there is a `store`."""
        self._replies = replies
        self._clip_norm = math.inf

    # ---- the model ----

    def hold(self, discipline: Discipline, join: Join) -> None:
        """Make room for the model that *join* describes, and begin with this discipline.

        Raises `UsageError`, with nothing changed, for an invalid description.
        """
        check_clip_norm(join.clip_norm)
        if join.clip_norm < math.inf and join.servers > 1:
            raise UsageError(
                f"clip_norm={join.clip_norm} with {join.servers} servers: each would know the "
                "norm of its own part of the mean only; take one server"
            )
        store = Store(join)
        self.compression = ServerCompression(join, store) if join.compression else None
        self.store, self._clip_norm, self.is_held = store, join.clip_norm, True
        self._begin(discipline)

    def renew(self, discipline: Discipline, step: int) -> None:
        """Drop all gradients, because other parameters were loaded before *step*.

        A new *discipline* begins.
        """
        self.store.catch_up(step)
        discipline.take_over(self.discipline)
        self._begin(discipline)
        self.resume(step)

    def _begin(self, discipline: Discipline) -> None:
        self.discipline = discipline
        self.clipped = None
        if self._clip_norm < math.inf:
            self.clipped = ClippedStep(self, self._clip_norm)

    def check_held(self) -> None:
        """Raise `UsageError` unless this server holds parameters."""
        if not self.is_held:
            raise UsageError(NOTHING_HELD)

    @property
    def is_loaded(self) -> bool:
        return self.is_held and all(self.store.loaded)

    def gradient(self, push: Push, payload: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient of a push. Raises `UsageError` if it does not fit."""
        if self.compression is not None:
            return self.compression.gradient(push, payload)
        return self.store.fitting("push", push.bucket, payload, push.units)

    def forget(self, worker: int) -> None:
        """Drop the unanswered pushes of a lost worker."""
        self.unanswered = {
            number: (sender, late)
            for number, (sender, late) in self.unanswered.items()
            if sender.worker != worker
        }
        if self.compression is not None:
            self.compression.forget(worker)

    def take_work(self) -> Work:
        """Return the work since the last call."""
        return self.store.take_work() if self.is_held else Work()

    # ---- events of the discipline ----

    def on_push(self, push: PushedGradient) -> None:
        """Pass a gradient to the discipline."""
        self.discipline.on_push(self, push)
        if self.clipped is not None:
            self.clipped.apply_ready_updates()

    def on_change(self) -> None:
        """Inform the discipline of a change.

        The active workers have changed, or all main pushes of a worker's step have arrived.
        """
        self.discipline.on_change(self)
        if self.clipped is not None:
            self.clipped.apply_ready_updates()

    def on_timer(self, now: float) -> None:
        """Let the discipline act, if its deadline is reached."""
        deadline = self.discipline.next_deadline()
        if deadline is not None and now >= deadline:
            self.discipline.on_timer(self)
            self.apply_ready_updates()

    def apply_ready_updates(self) -> None:
        """Do the updates that the discipline has requested, as far as possible."""
        if self.clipped is not None:
            self.clipped.apply_ready_updates()

    def resume(self, step: int) -> None:
        """Continue with *step*: see `Discipline.resume`."""
        self.discipline.resume(self, step)

    def completed_step(self) -> int | None:
        """Return the step with which workers continue, if any: see `Discipline.completed_step`."""
        if self.clipped is not None and self.clipped.is_under_way():
            return None
        return self.discipline.completed_step(self)

    def next_step(self, worker: int) -> int:
        """Return the step before which all gradients of a worker have arrived."""
        return self.store.next_step(worker) if self.is_held else 0

    def may_pull(self, step: int) -> bool:
        """Return whether a worker that begins with *step* may get the model.

        It gets all of it, or it would hold buckets from before a load and from after it.
        """
        clipped = self.clipped
        return self.is_loaded and all(
            not (clipped is not None and clipped.holds(bucket))
            and self.discipline.may_pull(self, step, bucket)
            for bucket in self.buckets
        )

    # ---- the `Shard` ----

    def active_workers(self, step: int) -> list[int]:
        return self.members.active_workers(step)

    def clock(self, worker: int) -> int:
        return self.members.clock(worker)

    def skip_to(self, worker: int, step: int) -> None:
        member = self.members[worker]
        member.clock = max(member.clock, step)

    def waiting_at_barrier(self) -> Collection[int]:
        return self.members.at_barrier

    def slowest_step(self) -> int:
        return self.members.slowest_step()

    def next_unstarted_step(self) -> int:
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

    def zero_momentum(self, bucket: int) -> None:
        if self.clipped is not None:
            raise UsageError(
                "zero_momentum under a method whose servers clip: earlier updates may not be applied "
                "yet"
            )
        self.store.zero_momentum(bucket)

    def reply(self, push: PushedGradient, counted: Sequence[int] = ()) -> None:
        if self.clipped is not None and self.clipped.is_under_way():
            self.clipped.hold_reply(push, counted)
            return
        if self.fault or push.number not in self.unanswered:
            # The push was, or will be, refused; or its worker is lost.
            return
        sender, _ = self.unanswered.pop(push.number)
        bucket, compression = push.bucket, self.compression
        if compression is None or compression.replicas is None:
            values, sequence = self.store.parameters(bucket, push.units), 0
        else:
            try:
                values, sequence = compression.difference(sender.worker, bucket)
            except UsageError as error:
                self._replies.reject(sender, str(error))
                return
        notice = b"" if push.late else self.discipline.notice(bucket)
        self.send_parameters(sender, bucket, values, sequence, counted, notice)

    def send_parameters(
        self,
        to: Sender,
        bucket: int,
        values: torch.Tensor,
        sequence: int,
        counted: Sequence[int],
        notice: bytes,
    ) -> None:
        """Reply with *values* of a bucket, or with their difference from the worker's."""
        message = Parameters(
            bucket=bucket,
            version=self.store.versions[bucket],
            step=self.members[to.worker].clock,
            counted=list(counted),
            notice=notice,
            load=self.loads,
            sequence=sequence,
        )
        self._replies.reply(to, message, values)

    def count(self, what: str) -> None:
        self.counts[what] += 1

    # ---- updates ----

    def apply(self, push: PushedGradient) -> None:
        if push.applied:
            self.counts["gradients that were applied before"] += 1
        elif self.clipped is not None:
            self.clipped.hold(_Update(push.bucket, [push], together=False))
        else:
            self.apply_now(push)

    def apply_mean(self, bucket: int, pushes: Sequence[PushedGradient]) -> None:
        fresh = [push for push in pushes if not push.applied]
        if self.clipped is not None:
            self.clipped.hold(_Update(bucket, fresh, together=True))
        else:
            self.apply_mean_now(bucket, fresh)

    def apply_now(self, push: PushedGradient) -> None:
        """Apply a push at once, even if steps are clipped."""
        if self.fault:
            return
        self.store.apply(
            push.bucket,
            push.gradient,
            push.used,
            push.hyperparameters,
            push.weight,
            push.units,
        )
        self.counts["gradients applied"] += 1
        self._note_applied(push)

    def apply_mean_now(self, bucket: int, pushes: Sequence[PushedGradient]) -> None:
        """Apply the average of pushes at once, even if steps are clipped.

        Pushes that do not fit each other are a fault.
        """
        self.fault = self.fault or _disagreement(pushes)
        if self.fault:
            return
        self.counts["gradients applied"] += len(pushes)
        for push in pushes:
            self._note_applied(push)
        whole = _total_weight([push.weight for push in pushes])
        if not whole:
            # No worker had a sample.
            self.store.updated(bucket)
            return
        mean = _mean(pushes, whole)
        used = [any(flags) for flags in zip(*(p.used for p in pushes), strict=True)]
        how, units = pushes[0].hyperparameters, pushes[0].units
        self.store.apply(bucket, mean, used, how, units=units)
        size = self.store.size(bucket, units)
        self.store.add_work(added=size * (len(pushes) - 1))

    def _note_applied(self, push: PushedGradient) -> None:
        if self.discipline.accepts_partial_pushes:
            # A step has several updates of a bucket, and ends for all workers at once.
            return
        for worker, step in push.of or [(push.worker, push.step)]:
            # Negative numbers are other servers.
            if worker >= 0:
                self.store.note_applied(worker, step, push.bucket)


def _mean(pushes: Sequence[PushedGradient], whole: float) -> torch.Tensor:
    """Average the pushes in the first one's gradient; *whole* is the sum of weights."""
    total = pushes[0].gradient
    for push in pushes:
        # Round exactly like workers that weight their gradients before sending.
        if push.weight != 1.0:
            push.gradient.mul_(push.weight)
        if push is not pushes[0]:
            total.add_(push.gradient)
    if whole != 1.0:
        total.mul_(1 / whole)
    return total


def _total_weight(weights: Sequence[float]) -> float:
    """Return the sum of weights; 1 if it differs from 1 only by rounding."""
    whole = sum(sorted(weights))
    return 1.0 if abs(whole - 1) < 1e-9 else whole


def _disagreement(pushes: Sequence[PushedGradient]) -> str:
    """Return how the hyperparameters or units of one step's pushes differ; empty if they do not."""
    for first, push in pairwise(pushes):
        if push.hyperparameters != first.hyperparameters:
            return (
                f"step {first.step}: worker {first.worker} has hyperparameters "
                f"{first.hyperparameters!r} and worker {push.worker} "
                f"{push.hyperparameters!r}; one step's must be equal"
            )
    for first, push in pairwise(pushes):
        if push.units != first.units:
            return (
                f"step {first.step}, bucket {first.bucket}: worker {first.worker} has sent "
                f"units {first.units} and worker {push.worker} {push.units}; one step's "
                "must be equal"
            )
    return ""


class _Update(NamedTuple):
    """A requested update of a bucket.

    It is one step with the average of *pushes* or, if they are not taken *together*, with the only
    push.
    """

    bucket: int
    pushes: Sequence[PushedGradient]
    together: bool


class ClippedStep:
    """A step whose average gradient is clipped by its norm, before any of it is applied.

    A discipline updates bucket by bucket. This class holds its updates and replies until every
    bucket of the step has arrived. Then the norm of the step's average is known: gradients are
    scaled, updates are done, and replies leave. If no worker is left that could complete a step,
    the norm of the buckets that have arrived counts.

    Example: two buckets, two workers. Bucket 1 is complete first: the discipline requests its
    update and its replies. Nothing happens yet. Bucket 0 follows: both are scaled and updated, and
    then all four replies leave.

    *limit* is the largest norm of each step of *shard*, which holds all of the model.
    """

    def __init__(self, shard: ModelShard, limit: float) -> None:
        self._shard = shard
        self._limit = limit
        self._updates: dict[int, list[_Update]] = {}
        self._replies: list[tuple[PushedGradient, Sequence[int]]] = []

    def hold(self, update: _Update) -> None:
        """Hold an update until the norm of its step is known."""
        before = self._step()
        if before is not None and any(push.step != before for push in update.pushes):
            # No worker is left that could complete the previous step.
            self._release()
        self._updates.setdefault(update.bucket, []).append(update)

    def hold_reply(self, push: PushedGradient, counted: Sequence[int]) -> None:
        """Hold the reply to a push until the held updates are done."""
        self._replies.append((push, counted))

    def holds(self, bucket: int) -> bool:
        """Return whether an update of *bucket* is held."""
        return bucket in self._updates

    def count(self, bucket: int) -> int:
        """Return how many updates of *bucket* are held."""
        return len(self._updates.get(bucket, ()))

    def is_under_way(self) -> bool:
        """Return whether updates are held until the norm of their step is known."""
        return bool(self._updates)

    def apply_ready_updates(self) -> None:
        """Do all updates that are possible after a call of the discipline."""
        if not self._updates:
            return
        step = self._step()
        complete = all(bucket in self._updates for bucket in self._shard.buckets)
        orphaned = step is None or not self._shard.active_workers(step)
        if complete or orphaned:
            self._release()

    def _step(self) -> int | None:
        """Return the number of the held step; None before its first gradient."""
        updates = (update for ups in self._updates.values() for update in ups)
        return next((push.step for up in updates for push in up.pushes), None)

    def _release(self) -> None:
        updates, self._updates = self._updates, {}
        replies, self._replies = self._replies, []
        squares = math.fsum(self._squares(held) for held in updates.values() if held)
        factor = clip_factor(squares, self._limit)
        for update in (update for held in updates.values() for update in held):
            if factor != 1.0:
                for push in update.pushes:
                    push.gradient.mul_(factor)
            if update.together:
                self._shard.apply_mean_now(update.bucket, update.pushes)
            else:
                self._shard.apply_now(*update.pushes)
        for push, counted in replies:
            self._shard.reply(push, counted)

    def _squares(self, updates: Sequence[_Update]) -> float:
        pushes = [push for update in updates for push in update.pushes]
        whole = _total_weight([push.weight for push in pushes])
        if not whole:
            # No worker had a sample.
            return 0.0
        total = pushes[0].gradient * pushes[0].weight
        for push in pushes[1:]:
            total.add_(push.gradient, alpha=push.weight)
        size = total.numel() * total.element_size()
        self._shard.store.add_work(added=size * len(pushes))
        return sum_of_squares([total]) / whole**2
