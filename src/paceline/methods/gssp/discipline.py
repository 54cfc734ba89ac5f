"""The server's half of methods whose groups have a server each.

- `GroupDiscipline`: the discipline of one group's server; start here.
- `BoundedGate`, `RoundGate`: when a group's gradients are applied, and when its workers go on.
- `GroupClocks`: which members push here, and how far each is.
- `PendingUpdates`, `GradientSum`: what was applied here, and is owed to the other servers.

    on push(j, g):   w = w - lr w_j g;  acc = acc + w_j g;  every `period` pushes acc is sent to all
    on update(acc'): w = w - lr acc', at once

A gate sees each push, with its number by the group's clocks. After each event it releases the
workers that may go on: there is no polling. A push without a number is of a worker that no member
waits for: it is about to push to another group.

A worker reads in a reply that it changes groups. Its last push here is applied and answered at
once, and no member waits for it any more.

Damping is by the staleness of a group's update. It counts the gradients of others that were
applied to its bucket since the group's last update, divided by the number of workers. So it is in
steps of all workers: in the time of one update of a slow group the others do many steps.
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
"""A step after all others: `Shard.active_workers` of it are the workers that train."""


class GroupDiscipline(GroupServerDiscipline):
    """The discipline of one group's server.

    Args:
        groups: The groups at the start.
        gate: When gradients are applied, and workers go on.
        period: After how many gradients of a bucket an update is due; 0: as many as the group has
            workers.
        measure_steps: A step time is the median of so many steps.
        regroup: How groups follow step times; None: they stay.
        damps: An update of this group has 1/(1 + tau) times its weight, here and at the others,
            where tau is its staleness.
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
        """By bucket: gradients of other groups since this group's last update."""
        self._unanswered: Counter[int] = Counter()
        """By worker: how many of its pushes are unanswered."""
        self._new_times: dict[int, StepTime] = {}
        """Step times that server 0 does not have."""
        self._at_barrier: list[int] = []
        """The workers at the barrier where all workers meet, as of server 0's last notice."""
        self._must_notify = False
        """Whether the other servers are to know the groups that are known here."""
        self._encoded_groups: tuple[int, bytes] = 0, b""
        """The version of groups that workers were sent last, and these groups."""

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
            self._at_barrier = []  # the barrier has passed; server 0's notice is on its way
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
        """Let a member enter with its first push."""
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
        at_barrier: Collection[int] = self._at_barrier
        if self._known.number == 0 and self.groups.servers > 1:
            at_barrier = shard.waiting_at_barrier()  # workers of all groups wait there
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
        self._known = before._known  # groups and speeds outlive a load

    def resume(self, shard: Shard, step: int) -> None:
        self._gate.resume(shard, step)
        self._update_clocks(shard)

    # ---- for its gate ----

    def apply(self, shard: Shard, push: PushedGradient, gradients: int = 1) -> None:
        """Apply a push, which may be the mean of several *gradients*, and owe it to the others."""
        if push.applied:  # and so was the update with it
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
        """Answer a push. With the last one of a step its worker goes on."""
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
        """So many gradients of a bucket were applied."""
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
            self._must_notify = True  # that server was away
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
        """Only with the first bucket, whose replies come first."""
        groups = self.groups
        if bucket:
            return b""
        if self._encoded_groups[0] != groups.version:
            self._encoded_groups = groups.version, encode(groups)
        return encode(WorkerNotice(self._encoded_groups[1], self._known.steps))

    # ---- speeds ----

    def _measure(self, shard: Shard, worker: int) -> None:
        """A worker's step has ended."""
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
        """Let server 0 decide, once all workers were measured. Returns whether anything is new."""
        if self._known.number or self.groups.servers == 1:
            return False
        new = self._decisions.decide(self._known, shard.active_workers(AFTER_ALL))
        self._must_notify = self._must_notify or new
        return new


class Gate(Protocol):
    """When gradients of a group are applied, and when its workers go on."""

    def on_push(
        self,
        group: GroupDiscipline,
        shard: Shard,
        push: PushedGradient,
        step: int | None,
    ) -> None:
        """A gradient has come. *step* is its number by the group's clocks; None: it has none."""
        ...

    def release(self, group: GroupDiscipline, shard: Shard) -> None:
        """Apply and answer what may be by now. Called after each event."""
        ...

    def entry_step(self, group: GroupDiscipline) -> int:
        """The step, by the group's clocks, with which a member enters now."""
        ...

    def first_step(self, group: GroupDiscipline, shard: Shard) -> int:
        """See `Discipline.first_step`. The step is one of the workers' own."""
        ...

    def completed_step(self, group: GroupDiscipline, shard: Shard) -> int | None:
        """See `Discipline.completed_step`."""
        ...

    def may_pull(self, shard: Shard, step: int, bucket: int) -> bool:
        """See `Discipline.may_pull`, where there is only one group."""
        ...

    def resume(self, shard: Shard, step: int) -> None:
        """See `Discipline.resume`."""
        ...


def least_step(group: GroupDiscipline, shard: Shard) -> int:
    """The least of the members' own next steps; without members `Shard.next_unstarted_step`."""
    return min(
        (shard.clock(worker) for worker in group.clocks),
        default=shard.next_unstarted_step(),
    )


class BoundedGate:
    """SSP with a bound *staleness* of at least 1.

    A gradient is applied when it comes. A worker starts its step c when all members have done at
    least c - *staleness* steps.
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
                group.answer(
                    shard, push
                )  # its worker moves to another group, or is lost
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
        # A worker that comes back goes on after its own steps, which may be far ahead.
        return step <= shard.slowest_step() + self._staleness

    def resume(self, shard: Shard, step: int) -> None:
        """It holds nothing but pushes that wait."""


class RoundGate:
    """Bulk-synchronous rounds: a bucket is updated once the gradients of all members are in.

    The gradients are applied one after the other, in rank order; or *together*, as their mean.
    """

    def __init__(self, together: bool = False) -> None:
        self._together = together
        self._rounds: dict[tuple[int, int], list[PushedGradient]] = {}
        """By step and bucket, the gradients that are in."""
        self._ended: Counter[int] = Counter()
        """By bucket, the first step whose round has not ended."""
        self._begun = 0
        """The first step of which no gradient has come."""

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
        """End a round of one bucket."""
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
    """One push with the mean of these by weight, and the sum of their weights.

    The memory of the first gradient becomes the mean's.
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
    """The members that the others of their group wait for, and the progress of each.

    **Entry.** A member enters with its first push here. So no member waits for one that is on its way
    from another group, or that comes back and is held up at another server. At the start the members of the
    first groups have entered. With one group, workers enter as they join.

    **A clock** counts the whole steps of a worker that have arrived, from its entry. It begins
    with the least clock of the others, however many steps the worker has done elsewhere. So a
    slow worker that comes into a fast group delays no other. While no worker has changed groups a
    clock is the worker's own step.

    **At a barrier** of all workers a member is not waited for: others of its group may have many
    steps to do until they arrive. When the barrier has passed its members enter again, together.
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
        """Note which workers have come or gone.

        Args:
            shard: The server's.
            groups: The groups by now.
            number: The number of this server's group.
            at_barrier: The workers at the barrier where workers of all groups meet.

        Returns:
            The members that are back from the barrier: they are to enter.
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
        """The other members wait for this one, from this step of the group on."""
        self._steps[worker] = self._first[worker] = step

    def advance(self, worker: int) -> None:
        """A whole step of the worker is in."""
        self._steps[worker] += 1

    def step(self, worker: int) -> int:
        """The number of the worker's next step, by its clock."""
        return self._steps[worker]

    def slowest(self) -> int:
        """The least clock; `AFTER_ALL` without members."""
        return min(self._steps.values(), default=AFTER_ALL)

    def expected_workers(self, step: int) -> set[int]:
        """The members whose gradients of that step have come or will come."""
        return {worker for worker, first in self._first.items() if first <= step}


@dataclass
class _Pending:
    """The sum of so many *gradients* of one bucket, since its last update."""

    total: GradientSum
    gradients: int


class PendingUpdates:
    """Updates for the other servers: a sum of gradients for each bucket."""

    def __init__(self) -> None:
        self._sums: dict[int, _Pending] = {}

    def add(self, shard: Shard, push: PushedGradient, gradients: int) -> None:
        """A push was applied, maybe the mean of several *gradients*. Its memory is used up."""
        its = push.gradient, push.weight, push.used, push.hyperparameters
        pending = self._sums.get(push.bucket)
        if pending is None:
            self._sums[push.bucket] = _Pending(GradientSum(*its), gradients)
            return
        pending.total.add(shard, push.bucket, *its)
        pending.gradients += gradients

    def take(self, least: int) -> list[GroupUpdate]:
        """Take the updates of the buckets for which at least so many gradients are owed."""
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
    """A weighted sum of gradients of one bucket, to be applied as one update.

    An update by its `mean` and its `weight` moves parameters as far as updates by each gradient,
    momentum and rounding aside. Where learning rates differ, as those of two steps may, each
    gradient counts by its weight times its learning rate. `hyperparameters` then has the mean of
    the learning rates by weight, for each group of the optimizer; everything else is of the last
    gradient.

    The memory of the first gradient becomes the sum's.
    """

    def __init__(
        self,
        gradient: torch.Tensor,
        weight: float,
        used: Sequence[bool],
        hyperparameters: Hyperparameters,
    ) -> None:
        self._values, self._is_sum = gradient, False
        """The sum of gradients times their weights; with one gradient alone, that gradient."""
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
        """Add a gradient of the same *bucket* of *shard*. It is not changed."""
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
        """The mean by weight. Nothing can be added any more."""
        if self._is_sum and self.weight:
            self._values.mul_(1 / self.weight)
        return self._values


def _rates(
    before: float, weight_before: float, new: float, weight: float
) -> tuple[float, float, float]:
    """The mean of two learning rates by weight, and how many times the mean each of them is."""
    whole = weight_before + weight
    if before == new or not whole:
        return new, 1.0, 1.0
    mean = (weight_before * before + weight * new) / whole
    return (mean, before / mean, new / mean) if mean else (mean, 1.0, 1.0)
