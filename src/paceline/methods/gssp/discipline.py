"""The server's half of methods whose groups have a server each.

What happens where
------------------
- `clocks`: who pushes here, and how far each is. `gates`: when gradients of the group are
  applied, and when their workers go on.
- `outbox`: what was applied here, until the other servers are told.
- `step_times`: how long steps take.
- `speeds`: who is in which group; server 0 decides. `grouping`: how.
- here: which of them an event concerns.

    on push(j, g):   w = w - lr w_j g;  acc = acc + w_j g;  every so many pushes acc is passed on
    on parcel(acc'): w = w - lr acc', at once

A worker that changes groups learns it from an answer. Its last push here is applied and answered
at once, and nobody waits for it any more.

Staleness of what a group has made, for damping: how many gradients of others were applied to its bucket
since its last update of it; divided by the number of workers, so that it is in steps of all. In the
time in which a slow group makes one update the others do many steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from paceline.interfaces import Groups, HeldPush, Parcel, Shard
from paceline.methods.gssp.clocks import EVER, Clocks
from paceline.methods.gssp.gates import Gate
from paceline.methods.gssp.group_assignment import (
    Known,
    Looks,
    News,
    Report,
    Words,
    read_groups,
    read_report,
    read_words,
    written,
)
from paceline.methods.gssp.grouping import BySpeed
from paceline.methods.gssp.pending_updates import Outbox
from paceline.methods.gssp.step_times import Measured, StepTimes, smoothed


class GroupDiscipline:
    """One group's server; *gate* says who waits there. It passes on what it has applied after
    *period* gradients of a bucket; 0: as many as the group has workers. *regroup* says how groups
    follow speeds, which are of *measure_steps* steps at most. *damps*: what this group makes counts
    for 1/(1 + tau), here and there, where tau is its staleness."""

    def __init__(
        self,
        groups: Groups,
        gate: Gate,
        period: int,
        measure_steps: int,
        regroup: BySpeed | None = None,
        damps: bool = False,
    ) -> None:
        self.clocks = Clocks()
        self._known = Known(groups)
        self._gate, self._period, self._damps = gate, period, damps
        self._outbox = Outbox()
        self._times, self._looks = StepTimes(measure_steps), Looks(regroup)
        self._others: Counter[int] = Counter()
        """By bucket: gradients of other groups since this group's last update."""
        self._waiting: Counter[int] = Counter()
        """By worker: its pushes that are not answered."""
        self._news: dict[int, Measured] = {}
        self._meeting: list[int] = []
        """Who waits where all meet, as far as server 0 has said it; on server 0, as far as it
        has."""
        self._speaks = False
        """The others are to be told which groups are known here."""
        self._said: tuple[int, bytes] = 0, b""

    # ---- the `Discipline` ----

    def pushed(self, shard: Shard, push: HeldPush) -> None:
        report = push.report if isinstance(push.report, Report) else Report()
        if report.groups not in (b"", self._said[1]):
            self._known.adopt(read_groups(report.groups))
        self._known.steps = max(self._known.steps, report.steps)
        worker, step = push.worker, None
        is_whole = shard.clock(worker) > push.step
        if is_whole:
            self._measure(shard, worker)
        if worker in self._meeting and self._known.number:
            self._meeting = []  # all have met; server 0 is yet to say it
        self._enter(push)
        self._look_who_is_here(shard)
        if worker in self.clocks:
            step = self.clocks.step(worker)
            if is_whole:
                self.clocks.tick(worker)
        self._waiting[worker] += 1
        self._gate.take(self, shard, push, step)
        self._gate.let_go(self, shard)

    def _enter(self, push: HeldPush) -> None:
        """The first push of a member."""
        is_member = self.groups.of[push.worker] == self._known.number
        if is_member and push.worker not in self.clocks:
            alone = self.groups.servers == 1 or not self.clocks.is_begun
            as_joined = alone and not self.groups.version
            step = push.step if as_joined else self._gate.entry(self)
            self.clocks.enter(push.worker, step)
            self._times.forget(push.worker)

    def changed(self, shard: Shard) -> None:
        self._look(shard)
        self._look_who_is_here(shard)
        here = set(shard.expected(EVER))
        for worker in self._waiting.keys() - here:
            del self._waiting[worker]
            self._times.forget(worker)
        self._gate.let_go(self, shard)

    def _look_who_is_here(self, shard: Shard) -> None:
        meeting: Collection[int] = self._meeting
        if self._known.number == 0 and self.groups.servers > 1:
            meeting = shard.meeting()  # it is there that they meet
        number = self._known.number
        self.clocks.look(
            shard, self.groups, number, meeting, lambda: self._gate.entry(self)
        )

    def first_step(self, shard: Shard) -> int:
        return self._gate.first_step(self, shard)

    def may_pull(self, shard: Shard, step: int, bucket: int) -> bool:
        return self.groups.servers > 1 or self._gate.may_pull(step, bucket)

    def ended(self, shard: Shard) -> int | None:
        return self._gate.ended(self, shard)

    def resume(self, shard: Shard, step: int) -> None:
        self._gate.resume(shard, step)
        self._look_who_is_here(shard)

    # ---- the `Desk` of its gate ----

    def apply(self, shard: Shard, push: HeldPush, gradients: int = 1) -> None:
        if push.applied:  # and was passed on
            shard.apply(push)
            return
        if self._damps:
            staleness = self._others[push.bucket] / len(self.groups.of)
            push = push._replace(weight=push.weight / (1 + staleness))
        shard.apply(push)
        self._others[push.bucket] = 0
        self._count(push.bucket, gradients)
        if self.groups.servers > 1:
            self._outbox.add(shard, push, gradients)

    def answer(self, shard: Shard, push: HeldPush) -> None:
        shard.answer(push)
        worker = push.worker
        self._waiting[worker] = max(0, self._waiting[worker] - 1)
        if not self._waiting[worker] and shard.clock(worker) > push.step:
            self._times.goes_on(worker, shard.now)

    # ---- the `Meshed` ----

    @property
    def groups(self) -> Groups:
        return self._known.groups

    def is_server(self, number: int) -> None:
        self._known.number = number

    def outgoing(self, shard: Shard) -> list[Parcel]:
        least = self._period or max(1, len(self.clocks))
        return self._outbox.take(least)

    def owed(self, shard: Shard) -> list[Parcel]:
        return self._outbox.take(0)

    def incoming(self, shard: Shard, source: int, parcel: Parcel) -> None:
        push = HeldPush(
            worker=-1 - source,
            step=0,
            bucket=parcel.bucket,
            weight=parcel.weight,
            used=parcel.used,
            hyperparameters=parcel.hyperparameters,
            gradient=parcel.values,
            number=-1,
        )
        shard.apply(push)
        self._others[parcel.bucket] += parcel.gradients
        self._count(parcel.bucket, parcel.gradients)

    def _count(self, bucket: int, gradients: int) -> None:
        """So many gradients were applied."""
        if bucket == 0:
            self._known.steps += gradients / len(self.groups.of)

    def words(self, shard: Shard) -> bytes:
        news, self._news = self._news, {}
        if self._known.number == 0 and self._meeting != sorted(shard.meeting()):
            self._meeting = sorted(shard.meeting())
            self._speaks = True
        if not news and not self._speaks:
            return b""
        self._speaks = False
        return written(Words(self.groups, news, self._meeting))

    def heard(self, shard: Shard, source: int, words: bytes) -> None:
        theirs = read_words(words, self.groups)
        newer = self._known.adopt(theirs.groups)
        if self._known.number == 0 and theirs.groups.version < self.groups.version:
            self._speaks = True  # it was away
        for worker, times in theirs.times.items():
            self._known.measured(worker, times)
        met = source == 0 and theirs.meeting != self._meeting
        if met:
            self._meeting = theirs.meeting
        if self._look(shard) or newer or met:
            self._look_who_is_here(shard)
            self._gate.let_go(self, shard)

    # ---- the `Informed` ----

    def read_report(self, shard: Shard, report: bytes) -> Report:
        found = read_report(report)
        if found.groups not in (b"", self._said[1]):
            read_groups(found.groups, self.groups)
        return found

    def tells(self, bucket: int) -> bytes:
        """With the first bucket: each server has it, and its answers come first."""
        groups = self.groups
        if bucket:
            return b""
        if self._said[0] != groups.version:
            self._said = groups.version, written(groups)
        return written(News(self._said[1], self._known.steps))

    # ---- speeds ----

    def _measure(self, shard: Shard, worker: int) -> None:
        times = self._times.step_is_in(worker, shard.now)
        if self.groups.servers == 1:
            return
        new = {} if times is None else {worker: times}
        error = self._looks.error_of(self.groups)
        if not new and error and not self._known.number:
            new = self._times.soon(shard.expected(EVER), error)
        for one, its in new.items():
            its = smoothed(self._known.times.get(one), its)
            self._known.measured(one, its)
            if self._known.number:
                self._news[one] = its
        if new:
            self._look(shard)

    def _look(self, shard: Shard) -> bool:
        """Server 0 decides, where all were measured; whether it has decided something new."""
        if self._known.number or self.groups.servers == 1:
            return False
        new = self._looks.look(self._known, shard.expected(EVER))
        self._speaks = self._speaks or new
        return new
