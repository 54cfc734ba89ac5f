"""Runs the servers of methods whose groups have one server each: the server's half of GSSP.

- `GroupDiscipline`: the discipline of one group's server; start here.
- `BoundedGate`, `RoundGate`: when a group's gradients are applied, and when its workers go on.
- `GroupClocks`: which members push here, and the progress of each.
- `PendingUpdates`, `GradientSum`: gradients that were applied here, and that the other servers must get.

    on push(j, g):   w = w - lr w_j g;  acc = acc + w_j g;  every `period` pushes acc is sent to all
    on update(acc'): w = w - lr acc', at once

A gate receives each push with its step number by the group's clocks. After each event it releases
the workers that may go on, so nothing polls. A push without a step number comes from a worker that
no member waits for, since it moves to another group.

A worker reads in a reply that it changes groups. The server applies and answers the worker's last
push here at once, and no member waits for it any more.

Damping scales a group's update by its staleness: the gradients of other groups that were applied
to the bucket since this group's last update, divided by the number of workers. So its unit is a
step of all workers. During one update of a slow group, the others take many steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.interfaces import (
    Discipline,
    Groups,
    GroupServerDiscipline,
    GroupUpdate,
    Hyperparameters,
    PushedGradient,
    Shard,
)
from paceline.methods.gssp.grouping import (
    GroupKnowledge,
    GroupNotice,
    RegroupDecisions,
    Regrouping,
    StepTime,
    StepTimes,
    WorkerNotice,
    WorkerReport,
    encode,
    read_group_notice,
    read_groups,
    read_report,
    smoothed,
)
from paceline.methods.push_pull import without_gradient

AFTER_ALL = 1 << 60
"""A step after all others: `Shard.active_workers` of it returns the workers that train now."""


class GroupDiscipline(GroupServerDiscipline):
    """Applies the pushes of one group, and exchanges updates with the other group servers.

    Args:
        groups: The groups at the start.
        gate: Decides when gradients are applied, and when workers go on.
        period: Gradients of a bucket after which an update is due; 0: as many as the group has
            workers.
        measure_steps: A step time is the median of this many steps.
        regroup: Forms groups from step times; None: groups stay.
        damps: Whether an update of this group has 1/(1 + tau) times its weight, here and at the
            other servers. Here tau is its staleness.
    """

    def __init__(
        self,
        groups: Groups,
        gate: Gate,
        period: int,
        measure_steps: int,
        regroup: Regrouping | None = None,
        damps: bool = False,
    ) -> None:
        self.clocks = GroupClocks()
        self._known = GroupKnowledge(groups)
        self._gate, self._period, self._damps = gate, period, damps
        self._pending = PendingUpdates()
        self._times = StepTimes(measure_steps)
        self._decisions = RegroupDecisions(regroup)
        self._foreign_gradients: Counter[int] = Counter()
        """For each bucket, the gradients of other groups since this group's last update."""
        self._unanswered: Counter[int] = Counter()
        """For each worker, its number of unanswered pushes."""
        self._new_times: dict[int, StepTime] = {}
        """Step times that server 0 does not have yet."""
        self._at_barrier: list[int] = []
        """The workers that wait at the barrier of all workers, by server 0's last notice."""
        self._must_notify = False
        """Whether the other servers must get a notice with this server's groups."""
        self._encoded_groups: tuple[int, bytes] = 0, b""
        """The version of the groups that were last sent to workers, and these groups."""

    # ---- the `Discipline` ----

    def on_push(self, shard: Shard, push: PushedGradient) -> None:
        report = (
            push.report if isinstance(push.report, WorkerReport) else WorkerReport()
        )
        if report.groups not in (b"", self._encoded_groups[1]):
            self._known.adopt(read_groups(report.groups))
        self._known.steps = max(self._known.steps, report.steps)
        worker, step = push.worker, None
        is_whole = shard.clock(worker) > push.step
        if is_whole:
            self._measure(shard, worker)
        if worker in self._at_barrier and self._known.number:
            # A push shows that the barrier has passed, before server 0's notice arrives.
            self._at_barrier = []
        self._admit(push)
        self._update_clocks(shard)
        if worker in self.clocks:
            step = self.clocks.step(worker)
            if is_whole:
                self.clocks.advance(worker)
        self._unanswered[worker] += 1
        self._gate.on_push(self, shard, push, step)
        self._gate.release(self, shard)

    def _admit(self, push: PushedGradient) -> None:
        """Let a member enter the group's clocks with its first push."""
        is_member = self.groups.of[push.worker] == self._known.number
        if is_member and push.worker not in self.clocks:
            alone = self.groups.servers == 1 or not self.clocks.is_begun
            as_joined = alone and not self.groups.version
            step = push.step if as_joined else self._gate.entry_step(self)
            self.clocks.enter(push.worker, step)
            self._times.forget(push.worker)

    def on_change(self, shard: Shard) -> None:
        self._decide(shard)
        self._update_clocks(shard)
        here = set(shard.active_workers(AFTER_ALL))
        for worker in self._unanswered.keys() - here:
            del self._unanswered[worker]
            self._times.forget(worker)
        self._gate.release(self, shard)

    def _update_clocks(self, shard: Shard) -> None:
        """Remove members that have left, and let those back in that the barrier has released."""
        at_barrier: Collection[int] = self._at_barrier
        if self._known.number == 0 and self.groups.servers > 1:
            # Workers of all groups wait at server 0.
            at_barrier = shard.waiting_at_barrier()
        number = self._known.number
        back = self.clocks.update(shard, self.groups, number, at_barrier)
        if back:
            step = self._gate.entry_step(self)
            for worker in back:
                self.clocks.enter(worker, step)

    def first_step(self, shard: Shard) -> int:
        return self._gate.first_step(self, shard)

    def may_pull(self, shard: Shard, step: int, bucket: int) -> bool:
        return self.groups.servers > 1 or self._gate.may_pull(shard, step, bucket)

    def completed_step(self, shard: Shard) -> int | None:
        return self._gate.completed_step(self, shard)

    def take_over(self, before: Discipline) -> None:
        assert isinstance(before, GroupDiscipline)
        # Groups and step times outlive a load of parameters.
        self._known = before._known

    def resume(self, shard: Shard, step: int) -> None:
        self._gate.resume(shard, step)
        self._update_clocks(shard)

    # ---- for the gate ----

    def apply(self, shard: Shard, push: PushedGradient, gradients: int = 1) -> None:
        """Apply a push, and add it to the next update for the other servers.

        Args:
            shard: The part of the model that this server holds.
            push: The push.
            gradients: Number of gradients of which the push is the mean.
        """
        if push.applied:
            # Its update was sent as well.
            shard.apply(push)
            return
        if self._damps:
            staleness = self._foreign_gradients[push.bucket] / len(self.groups.of)
            push = push._replace(weight=push.weight / (1 + staleness))
        shard.apply(push)
        self._foreign_gradients[push.bucket] = 0
        self._count(push.bucket, gradients)
        if self.groups.servers > 1:
            self._pending.add(shard, push, gradients)

    def answer(self, shard: Shard, push: PushedGradient) -> None:
        """Reply to a push. The reply to a step's last push begins the worker's next step."""
        shard.reply(push)
        worker = push.worker
        self._unanswered[worker] = max(0, self._unanswered[worker] - 1)
        if not self._unanswered[worker] and shard.clock(worker) > push.step:
            self._times.begin_step(worker, shard.now)

    # ---- the `GroupServerDiscipline` ----

    @property
    def groups(self) -> Groups:
        return self._known.groups

    def serve_group(self, number: int) -> None:
        self._known.number = number

    def take_due_updates(self, shard: Shard) -> list[GroupUpdate]:
        least = self._period or max(1, len(self.clocks))
        return self._pending.take(least)

    def take_all_updates(self, shard: Shard) -> list[GroupUpdate]:
        return self._pending.take(0)

    def apply_update(self, shard: Shard, source: int, update: GroupUpdate) -> None:
        push = PushedGradient(
            worker=-1 - source,
            step=0,
            bucket=update.bucket,
            weight=update.weight,
            used=update.used,
            hyperparameters=update.hyperparameters,
            gradient=update.values,
            number=-1,
        )
        shard.apply(push)
        self._foreign_gradients[update.bucket] += update.gradients
        self._count(update.bucket, update.gradients)

    def _count(self, bucket: int, gradients: int) -> None:
        """Count *gradients* that were applied to a bucket; one bucket counts for all."""
        if bucket == 0:
            self._known.steps += gradients / len(self.groups.of)

    def encode_notice(self, shard: Shard) -> bytes:
        times, self._new_times = self._new_times, {}
        if self._known.number == 0:
            at_barrier = sorted(shard.waiting_at_barrier())
            self._must_notify = self._must_notify or at_barrier != self._at_barrier
            self._at_barrier = at_barrier
        if not times and not self._must_notify:
            return b""
        self._must_notify = False
        return encode(GroupNotice(self.groups, times, self._at_barrier))

    def on_notice(self, shard: Shard, source: int, notice: bytes) -> None:
        theirs = read_group_notice(notice, self.groups)
        newer = self._known.adopt(theirs.groups)
        if self._known.number == 0 and theirs.groups.version < self.groups.version:
            # The source was restarted, and does not know the current groups.
            self._must_notify = True
        for worker, time in theirs.times.items():
            self._known.add_time(worker, time)
        moved = source == 0 and theirs.at_barrier != self._at_barrier
        if moved:
            self._at_barrier = theirs.at_barrier
        if self._decide(shard) or newer or moved:
            self._update_clocks(shard)
            self._gate.release(self, shard)

    # ---- reports and notices ----

    def decode_report(self, shard: Shard, report: bytes) -> WorkerReport:
        found = read_report(report)
        if found.groups not in (b"", self._encoded_groups[1]):
            read_groups(found.groups, self.groups)
        return found

    def notice(self, bucket: int) -> bytes:
        """Return groups and steps for the workers, with the first bucket only: its replies come first."""
        groups = self.groups
        if bucket:
            return b""
        if self._encoded_groups[0] != groups.version:
            self._encoded_groups = groups.version, encode(groups)
        return encode(WorkerNotice(self._encoded_groups[1], self._known.steps))

    # ---- step times ----

    def _measure(self, shard: Shard, worker: int) -> None:
        """End a worker's step, and send its step time to server 0 if there is a new one."""
        time = self._times.end_step(worker, shard.now)
        if self.groups.servers == 1:
            return
        new = {} if time is None else {worker: time}
        error = self._decisions.needed_error(self.groups)
        if not new and error and not self._known.number:
            new = self._times.take_early(shard.active_workers(AFTER_ALL), error)
        for one, its in new.items():
            its = smoothed(self._known.times.get(one), its)
            self._known.add_time(one, its)
            if self._known.number:
                self._new_times[one] = its
        if new:
            self._decide(shard)

    def _decide(self, shard: Shard) -> bool:
        """On server 0, decide the groups once all workers were measured; return whether they changed."""
        if self._known.number or self.groups.servers == 1:
            return False
        new = self._decisions.decide(self._known, shard.active_workers(AFTER_ALL))
        self._must_notify = self._must_notify or new
        return new


class Gate(Protocol):
    """Decides when gradients of a group are applied, and when its workers go on."""

    def on_push(
        self,
        group: GroupDiscipline,
        shard: Shard,
        push: PushedGradient,
        step: int | None,
    ) -> None:
        """Handle a gradient that has arrived.

        Args:
            group: The discipline whose gate this is.
            shard: The part of the model that the server holds.
            push: The gradient.
            step: Its step by the group's clocks; None if no member waits for its worker.
        """
        ...

    def release(self, group: GroupDiscipline, shard: Shard) -> None:
        """Apply and answer all pushes that need not wait any longer. Called after each event."""
        ...

    def entry_step(self, group: GroupDiscipline) -> int:
        """Return the step, by the group's clocks, with which a member would enter now."""
        ...

    def first_step(self, group: GroupDiscipline, shard: Shard) -> int:
        """See `Discipline.first_step`. The step is by the worker's own count."""
        ...

    def completed_step(self, group: GroupDiscipline, shard: Shard) -> int | None:
        """See `Discipline.completed_step`."""
        ...

    def may_pull(self, shard: Shard, step: int, bucket: int) -> bool:
        """See `Discipline.may_pull`. Called only if there is one group."""
        ...

    def resume(self, shard: Shard, step: int) -> None:
        """See `Discipline.resume`."""
        ...


def least_step(group: GroupDiscipline, shard: Shard) -> int:
    """Return the smallest of the members' own next steps.

    Without members it is `Shard.next_unstarted_step`.
    """
    return min(
        (shard.clock(worker) for worker in group.clocks),
        default=shard.next_unstarted_step(),
    )


class BoundedGate:
    """Runs a group as SSP: applies gradients at once, and holds back workers that are too far ahead.

    A worker starts its step c when all members have completed at least c - *staleness* steps.

    Args:
        staleness: The staleness bound, 1 or more steps.
    """

    def __init__(self, staleness: int) -> None:
        self._staleness = staleness
        self._waiting: list[tuple[PushedGradient, int | None]] = []

    def on_push(
        self,
        group: GroupDiscipline,
        shard: Shard,
        push: PushedGradient,
        step: int | None,
    ) -> None:
        group.apply(shard, push)
        self._waiting.append((without_gradient(push), step))

    def release(self, group: GroupDiscipline, shard: Shard) -> None:
        slowest, waiting = group.clocks.slowest(), self._waiting
        self._waiting = []
        for push, step in waiting:
            if step is None or push.worker not in group.clocks:
                # Its worker moves to another group, or is lost.
                group.answer(shard, push)
            elif step + 1 <= slowest + self._staleness:
                group.answer(shard, push)
            else:
                self._waiting.append((push, step))

    def entry_step(self, group: GroupDiscipline) -> int:
        return group.clocks.slowest() if len(group.clocks) else 0

    def first_step(self, group: GroupDiscipline, shard: Shard) -> int:
        return least_step(group, shard)

    def completed_step(self, group: GroupDiscipline, shard: Shard) -> int | None:
        return least_step(group, shard)

    def may_pull(self, shard: Shard, step: int, bucket: int) -> bool:
        # A restarted worker continues after its own steps, which may be far ahead.
        return step <= shard.slowest_step() + self._staleness

    def resume(self, shard: Shard, step: int) -> None:
        """Do nothing: this gate holds only pushes that wait."""


class RoundGate:
    """Runs a group in bulk-synchronous rounds: updates a bucket once all members have pushed it.

    Args:
        together: Apply the gradients of a round as one, their mean. Otherwise they are applied one
            after the other, in rank order.
    """

    def __init__(self, together: bool = False) -> None:
        self._together = together
        self._rounds: dict[tuple[int, int], list[PushedGradient]] = {}
        """For each step and bucket, the gradients that have arrived."""
        self._ended: Counter[int] = Counter()
        """For each bucket, the first step whose round has not ended."""
        self._begun = 0
        """The first step of which no gradient has arrived."""

    def on_push(
        self,
        group: GroupDiscipline,
        shard: Shard,
        push: PushedGradient,
        step: int | None,
    ) -> None:
        number = max(self._ended[push.bucket], step or 0)
        self._begun = max(self._begun, number + 1)
        self._rounds.setdefault((number, push.bucket), []).append(push)

    def release(self, group: GroupDiscipline, shard: Shard) -> None:
        for bucket in shard.buckets:
            while self._ended[bucket] < self._begun:
                step = self._ended[bucket]
                pushes = self._rounds.get((step, bucket), [])
                here = {push.worker for push in pushes}
                if not here.issuperset(group.clocks.expected_workers(step)):
                    break
                self._rounds.pop((step, bucket), None)
                self._ended[bucket] += 1
                self._close(group, shard, sorted(pushes, key=lambda push: push.worker))

    def _close(
        self, group: GroupDiscipline, shard: Shard, pushes: list[PushedGradient]
    ) -> None:
        """Apply and answer the pushes of one bucket's round."""
        fresh = [push for push in pushes if not push.applied]
        if self._together and fresh:
            group.apply(shard, combined(shard, fresh), len(fresh))
        elif not self._together:
            for push in pushes:
                group.apply(shard, push)
        for push in pushes:
            group.answer(shard, push)

    def entry_step(self, group: GroupDiscipline) -> int:
        return max(self._ended.values(), default=0)

    def first_step(self, group: GroupDiscipline, shard: Shard) -> int:
        return shard.next_unstarted_step()

    def completed_step(self, group: GroupDiscipline, shard: Shard) -> int | None:
        if len({self._ended[bucket] for bucket in shard.buckets}) > 1:
            return None
        return least_step(group, shard)

    def may_pull(self, shard: Shard, step: int, bucket: int) -> bool:
        return self._ended[bucket] >= step

    def resume(self, shard: Shard, step: int) -> None:
        self._ended = Counter(dict.fromkeys(shard.buckets, step))
        self._begun = step


def combined(shard: Shard, pushes: Sequence[PushedGradient]) -> PushedGradient:
    """Combine pushes of one bucket into one: their weighted mean, with the sum of their weights.

    Args:
        shard: The part of the model that the server holds.
        pushes: One or more pushes. The mean is written into the first one's gradient.
    """
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


class GroupClocks:
    """Counts the steps of the members that the others of their group wait for.

    **Entry.** A member enters with its first push here. So no member waits for a worker that is on its
    way from another group, or for a restarted one that another server holds up. At the start the members
    of the first groups have entered. With one group, workers enter as they join.

    **Clocks.** A clock counts the whole steps of a worker that have arrived since its entry. It begins
    at the smallest clock of the others, whatever the worker's own steps elsewhere. So a slow worker that
    moves into a fast group delays no other. While no worker has changed groups, a clock equals the
    worker's own step.

    **Barriers.** No member waits for one that is at a barrier of all workers: others of its group may
    take many steps until they arrive there. When the barrier has passed, its members enter again,
    together.
    """

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self._at_barrier: set[int] = set()
        """Members that had entered, and wait at the barrier."""
        self._pushing: set[int] = set()
        """Workers that train, of any group, and are not at the barrier."""
        self.is_begun = False
        """Whether `update` was called."""

    def __contains__(self, worker: int) -> bool:
        return worker in self._steps

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def update(
        self, shard: Shard, groups: Groups, number: int, at_barrier: Collection[int]
    ) -> list[int]:
        """Add members that have joined, and remove those that have left.

        Args:
            shard: The part of the model that the server holds.
            groups: The current groups.
            number: The number of this server's group.
            at_barrier: The workers that wait at the barrier of all workers.

        Returns:
            The members that the barrier has released. The caller must `enter` them.
        """
        trains = set(shard.active_workers(AFTER_ALL))
        members = trains.intersection(groups.members(number))
        pushing = trains.difference(at_barrier)
        self._at_barrier.update(self._steps.keys() & at_barrier)
        self._at_barrier &= members
        if not groups.version and (groups.servers == 1 or not self.is_begun):
            for worker in sorted(pushing - self._pushing):
                if worker in members and worker not in self._steps:
                    self.enter(worker, shard.clock(worker))
        self._pushing, self.is_begun = pushing, True
        for worker in list(self._steps):
            if worker not in pushing & members:
                del self._steps[worker], self._first[worker]
        back = sorted(self._at_barrier & pushing)
        self._at_barrier.difference_update(back)
        return back

    def enter(self, worker: int, step: int) -> None:
        """Let the other members wait for *worker*, from *step* of the group on."""
        self._steps[worker] = self._first[worker] = step

    def advance(self, worker: int) -> None:
        """Count a step of *worker* whose gradients have all arrived."""
        self._steps[worker] += 1

    def step(self, worker: int) -> int:
        """Return the number of the worker's next step, by its clock."""
        return self._steps[worker]

    def slowest(self) -> int:
        """Return the smallest clock; `AFTER_ALL` without members."""
        return min(self._steps.values(), default=AFTER_ALL)

    def expected_workers(self, step: int) -> set[int]:
        """Return the members whose gradients of *step* have arrived or will arrive."""
        return {worker for worker, first in self._first.items() if first <= step}


@dataclass
class _Pending:
    """The sum of *gradients* gradients of one bucket since its last update."""

    total: GradientSum
    gradients: int


class PendingUpdates:
    """Accumulates the updates for the other servers: a sum of gradients for each bucket."""

    def __init__(self) -> None:
        self._sums: dict[int, _Pending] = {}

    def add(self, shard: Shard, push: PushedGradient, gradients: int) -> None:
        """Add a push that was applied here.

        Args:
            shard: The part of the model that the server holds.
            push: The push. The sum may take over the memory of its gradient.
            gradients: Number of gradients of which it is the mean.
        """
        its = push.gradient, push.weight, push.used, push.hyperparameters
        pending = self._sums.get(push.bucket)
        if pending is None:
            self._sums[push.bucket] = _Pending(GradientSum(*its), gradients)
            return
        pending.total.add(shard, push.bucket, *its)
        pending.gradients += gradients

    def take(self, least: int) -> list[GroupUpdate]:
        """Remove and return the updates of buckets with at least *least* gradients."""
        due = [b for b, pending in self._sums.items() if pending.gradients >= least]
        return [self._take_update(bucket) for bucket in due]

    def _take_update(self, bucket: int) -> GroupUpdate:
        pending = self._sums.pop(bucket)
        total = pending.total
        return GroupUpdate(
            bucket=bucket,
            gradients=pending.gradients,
            weight=total.weight,
            used=total.used,
            hyperparameters=total.hyperparameters,
            values=total.mean(),
        )


class GradientSum:
    """Sums weighted gradients of one bucket, which other servers apply as one update.

    An update by its `mean` and its `weight` moves parameters as far as updates by each gradient would,
    apart from momentum and rounding. Learning rates may differ between steps: then each gradient counts
    by its weight times its learning rate. `hyperparameters` has the weighted mean of the learning rates,
    for each parameter group of the optimizer. All other values are those of the last gradient.

    Args:
        gradient: The first gradient, flat. The sum takes over its memory.
        weight: Its weight.
        used: For each unit of the bucket, whether the gradient has it.
        hyperparameters: The optimizer's hyperparameters at its step.

    Attributes:
        weight: The sum of all weights.
        used: For each unit, whether any gradient has it.
        hyperparameters: The hyperparameters of the update.
    """

    def __init__(
        self,
        gradient: torch.Tensor,
        weight: float,
        used: Sequence[bool],
        hyperparameters: Hyperparameters,
    ) -> None:
        self._values, self._is_sum = gradient, False
        """The sum of gradients times their weights; with one gradient, that gradient itself."""
        self.weight, self.used = weight, list(used)
        self.hyperparameters = hyperparameters

    def add(
        self,
        shard: Shard,
        bucket: int,
        gradient: torch.Tensor,
        weight: float,
        used: Sequence[bool],
        hyperparameters: Hyperparameters,
    ) -> None:
        """Add a gradient of the same bucket, without changing it.

        Args:
            shard: The part of the model that the server holds.
            bucket: The bucket's number.
            gradient: The gradient, flat.
            weight: Its weight.
            used: For each unit of the bucket, whether the gradient has it.
            hyperparameters: The optimizer's hyperparameters at its step.
        """
        if not self._is_sum:
            self._values.mul_(self.weight)
            self._is_sum = True
        rates = [
            _rates(before["lr"], self.weight, new["lr"], weight)
            for before, new in zip(self.hyperparameters, hyperparameters, strict=True)
        ]
        if all(before == new == 1.0 for _, before, new in rates):
            self._values.add_(gradient, alpha=weight)
        else:
            sums = shard.units_of(bucket, self._values)
            news = shard.units_of(bucket, gradient)
            for (group, its_sum), (_, its_new) in zip(sums, news, strict=True):
                _, before, new = rates[group]
                its_sum.mul_(before).add_(its_new, alpha=weight * new)
        self.hyperparameters = [
            {**how, "lr": rate}
            for how, (rate, _, _) in zip(hyperparameters, rates, strict=True)
        ]
        self.weight += weight
        self.used = [a or b for a, b in zip(self.used, used, strict=True)]

    def mean(self) -> torch.Tensor:
        """Return the weighted mean. Nothing may be added afterwards."""
        if self._is_sum and self.weight:
            self._values.mul_(1 / self.weight)
        return self._values


def _rates(
    before: float, weight_before: float, new: float, weight: float
) -> tuple[float, float, float]:
    """Return the weighted mean of two learning rates, and the ratio of each to that mean."""
    whole = weight_before + weight
    if before == new or not whole:
        return new, 1.0, 1.0
    mean = (weight_before * before + weight * new) / whole
    return (mean, before / mean, new / mean) if mean else (mean, 1.0, 1.0)
