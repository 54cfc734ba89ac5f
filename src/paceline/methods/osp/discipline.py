"""OSP's server: it takes each step in two rounds per bucket, and says what may wait.

Law: a unit's update of step i comes after that of step i - 1, whichever stage each came
in, and the answer to step i carries exactly what that update made. A round whose gradients
are all in waits until its units are that far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paceline.interfaces import HeldPush, Shard
from paceline.methods.osp.choice import (
    Parts,
    Rate,
    StepTimes,
    choose,
    fill,
    levelled,
    turns,
)
from paceline.methods.osp.importance import product
from paceline.methods.osp.options import INTERVAL, OSPOptions
from paceline.methods.osp.reports import Measured, read_report, written_mask
from paceline.methods.osp.trial import Seen, Trial, looks_in

Key = tuple[int, bool, int]
"""Step, stage and bucket of a round. The stage is False for the first one, whose units come
with main pushes, and True for the second, whose units come late."""


class TwoStages:
    """The server's half."""

    def __init__(self, options: OSPOptions) -> None:
        self._options = options
        self._rounds: dict[Key, list[HeldPush]] = {}
        self._versions: dict[int, list[int]] = {}
        """Per bucket and unit: the step whose update comes next."""
        self._begin = 0
        # GIB: what is deferred of each bucket in its next step, and what after that.
        self._deferred: dict[int, list[int]] = {}
        self._decided: dict[int, list[int]] = {}
        self._importance: dict[tuple[int, int], float] = {}
        self._measured: dict[int, Measured] = {}
        """By worker: what it has told last."""
        self._unrated: list[tuple[int, Sequence[int], HeldPush]] = []
        self._trial = Trial()
        self._due: int | None = None
        """The step after whose first stage it is to be decided what is deferred."""

    # ---- the `Discipline` ----

    def pushed(self, shard: Shard, push: HeldPush) -> None:
        if self._due is not None and (push.step, push.late) > (self._due, False):
            # It comes before the timer did: what is decided may not depend on that.
            self.timer(shard)
        key = (push.step, push.late, push.bucket)
        self._rounds.setdefault(key, []).append(push)
        if push.report is not None:
            self._measured[push.worker] = push.report
        self._close(shard)

    def changed(self, shard: Shard) -> None:
        self._close(shard)
        while self._skip(shard):  # what is skipped may be what a round waits for
            self._close(shard)

    def first_step(self, shard: Shard) -> int:
        return shard.fastest()

    def may_pull(self, shard: Shard, step: int, bucket: int) -> bool:
        return min(self._of(shard, bucket), default=step) >= step

    def ended(self, shard: Shard) -> int | None:
        steps = {v for bucket in shard.buckets for v in self._of(shard, bucket)}
        return steps.pop() if len(steps) == 1 and not self._rounds else None

    def resume(self, shard: Shard, step: int) -> None:
        self._begin = step

    def read_report(self, shard: Shard, report: bytes) -> Measured:
        return read_report(report, shard.all_buckets)

    def tells(self, bucket: int) -> bytes:
        return written_mask(self._deferred.get(bucket, ()))

    def has(self, shard: Shard, step: int, bucket: int, units: Sequence[int]) -> bool:
        versions = self._of(shard, bucket)
        return all(versions[unit] >= step for unit in units)

    # ---- the `Timed` part: what nobody waits for ----

    def next_deadline(self) -> float | None:
        return 0.0 if self._unrated or self._due is not None else None

    def timer(self, shard: Shard) -> None:
        """Rank what was updated last, and decide: the answers have left."""
        unrated, self._unrated = self._unrated, []
        for bucket, units, push in unrated:
            values = shard.values(bucket, units)
            parts = push.gradient.split([value.numel() for value in values])
            for unit, value, part in zip(units, values, parts, strict=True):
                self._importance[bucket, unit] = product(value, part)
        step, self._due = self._due, None
        if step is not None:
            self._decide(shard, step)

    # ---- rounds ----

    def _close(self, shard: Shard) -> None:
        """End every round whose gradients are all in and whose turn it is."""
        again = True
        while again:
            again = False
            for key in sorted(self._rounds):
                if self._may_end(shard, key):
                    self._end(shard, key)
                    again = True

    def _may_end(self, shard: Shard, key: Key) -> bool:
        step, _, bucket = key
        pushes = self._rounds[key]
        here = {push.worker for push in pushes}
        versions = self._of(shard, bucket)
        return here.issuperset(shard.expected(step)) and all(
            versions[unit] == step for unit in self._units(shard, pushes[0])
        )

    def _end(self, shard: Shard, key: Key) -> None:
        step, late, bucket = key
        pushes = sorted(self._rounds.pop(key), key=lambda push: push.worker)
        units = self._units(shard, pushes[0])
        shard.apply_mean(bucket, pushes)
        versions = self._of(shard, bucket)
        for unit in units:
            versions[unit] = step + 1
        if not late and bucket in self._decided:
            self._deferred[bucket] = self._decided.pop(bucket)
        for push in pushes:
            shard.answer(push)
        decides = step % INTERVAL == 0
        if decides and units and self._options.importance != "random":
            self._unrated.append((bucket, units, pushes[0]))
        last = not late and bucket == max(shard.buckets)
        if last and (decides or self._looks(step)):
            self._due = step

    def _skip(self, shard: Shard) -> bool:
        """Where everybody who was to send a step is gone, go on without it; returns whether
        there was one."""
        skipped = False
        for bucket in shard.buckets:
            versions = self._of(shard, bucket)
            for unit, version in enumerate(versions):
                while version < shard.fastest() and not self._comes(
                    shard, version, bucket
                ):
                    version += 1
                    skipped = True
                    shard.count("updates of units that nobody sent")
                versions[unit] = version
        return skipped

    def _comes(self, shard: Shard, step: int, bucket: int) -> bool:
        """Whether somebody has sent, or will send, a gradient of this step."""
        held = any(k[0] == step and k[2] == bucket for k in self._rounds)
        return held or bool(shard.expected(step))

    def _units(self, shard: Shard, push: HeldPush) -> Sequence[int]:
        if push.units is not None:
            return push.units
        return range(len(self._of(shard, push.bucket)))

    def _of(self, shard: Shard, bucket: int) -> list[int]:
        if bucket not in self._versions:
            count = len(shard.unit_bytes(bucket))
            self._versions[bucket] = [self._begin] * count
        return self._versions[bucket]

    # ---- what may wait ----

    def _decide(self, shard: Shard, step: int) -> None:
        """Choose what every bucket defers. It goes out with the answers to each bucket's next
        first stage, so that all workers begin with it in the same step."""
        here = shard.expected(step)
        workers = tuple(worker for worker in here if worker in self._measured)
        told = [self._measured[worker] for worker in workers]
        if self._options.defer == "nothing" or not told:
            return
        rests = False
        if self._options.defer == "measured":
            seen = _seen(workers, told)
            if step % INTERVAL:
                if self._trial.stops_early(self._defers(), seen):
                    self._decided = {bucket: [] for bucket in shard.buckets}
                return
            rests = self._trial.rests(self._defers(), seen)
        places = [(b, u) for b in shard.buckets for u in range(len(self._of(shard, b)))]
        sizes = {bucket: shard.unit_bytes(bucket) for bucket in shard.buckets}
        parts = Parts(
            [sizes[bucket][unit] for bucket, unit in places],
            [bucket for bucket, _ in places],
            len(told[0].ready),
        )
        values = [self._importance.get(place, 0.0) for place in places]
        order = turns(self._options, parts, values, step)
        mine = sum(parts.sizes)
        budget = self._options.most * mine * min(one.part for one in told)
        if self._options.defer == "most":
            chosen = sorted(fill(parts, order, budget))
        elif rests:
            chosen = []
        else:
            chosen = self._measured_choice(parts, order, told, budget, mine)
        self._decided = {bucket: [] for bucket in shard.buckets}
        for number in chosen:
            bucket, unit = places[number]
            self._decided[bucket].append(unit)

    def _looks(self, step: int) -> bool:
        """Whether what is deferred is on trial, and workers have told how it goes."""
        measured = self._options.defer == "measured"
        return measured and looks_in(step) and self._defers()

    def _defers(self) -> bool:
        return any(self._deferred.values())

    def _measured_choice(
        self,
        parts: Parts,
        order: Sequence[int],
        told: Sequence[Measured],
        budget: float,
        mine: int,
    ) -> list[int]:
        """By the slowest worker's times. A server that holds a part of the model has a part of
        what a worker's messages cost per byte."""
        counts = Counter(len(one.ready) for one in told)
        timed = len(counts) == 1 and told[0].ready
        if not timed or not max(one.per_byte for one in told):
            return []
        times = StepTimes(
            [max(ready) for ready in zip(*(one.ready for one in told), strict=True)],
            max(one.end for one in told),
        )
        whole = sum(told[0].bytes)
        rate = Rate(
            max(one.start_up for one in told),
            max(one.per_byte for one in told) * whole / max(1, mine),
            pulls=True,
        )
        orders = [order]
        if self._options.order == "time":
            orders.append(levelled(parts, order))
        return choose(parts, orders, times, rate, budget)


def _seen(workers: tuple[int, ...], told: Sequence[Measured]) -> Seen:
    """What *workers* have told, for a trial: a step is as long as the slowest one's."""
    whole = max(one.whole for one in told)
    known = all(one.whole for one in told)
    return Seen(whole if known else 0.0, max(one.per_byte for one in told), workers)
