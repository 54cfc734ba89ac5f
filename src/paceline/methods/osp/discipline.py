"""OSP's server: it takes each step in two rounds per bucket, and says what may wait.

Law: a unit's update of step i comes after that of step i - 1, whichever stage each came
in, and the answer to step i carries exactly what that update made. A round whose gradients
are all in waits until its units are that far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.interfaces import HeldPush, Shard
from paceline.methods.osp.choice import Parts
from paceline.methods.osp.decision import Decision
from paceline.methods.osp.options import OSPOptions
from paceline.methods.osp.reports import Measured, read_report, together, written_mask
from paceline.methods.osp.trial import looks_in

Key = tuple[int, bool, int]
"""Of a round: step, whether its units come late (in stage 2), and bucket."""

Mask = Mapping[int, Sequence[int]]
"""Per bucket, the units that are deferred; none of buckets that are not in it."""


class TwoStages:
    """The server's half."""

    def __init__(self, options: OSPOptions) -> None:
        self._options = options
        self.rounds: dict[Key, list[HeldPush]] = {}
        """What has come and is not applied yet: see `ended`."""
        self._versions: dict[int, list[int]] = {}
        """Per bucket and unit: the step whose update comes next."""
        self._begin = 0
        self._deferred: dict[int, Sequence[int]] = {}
        self._decided: dict[int, Sequence[int]] = {}
        self._decision = Decision(options)
        self._reports: dict[int, Measured] = {}
        """By worker: its last one."""
        self._unrated: list[tuple[int, Sequence[int], HeldPush]] = []
        self._due: int | None = None
        """The step after whose first stage it is to be decided what is deferred."""

    # ---- the `Discipline` ----

    def pushed(self, shard: Shard, push: HeldPush) -> None:
        if self._due is not None and (push.step, push.late) > (self._due, False):
            # It comes before the timer did: what is decided may not depend on that.
            self.timer(shard)
        key = (push.step, push.late, push.bucket)
        self.rounds.setdefault(key, []).append(push)
        if push.report is not None:
            self._reports[push.worker] = push.report
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
        return steps.pop() if len(steps) == 1 and not self.rounds else None

    def resume(self, shard: Shard, step: int) -> None:
        self._begin = step

    def read_report(self, shard: Shard, report: bytes) -> Measured:
        return read_report(report, shard.all_buckets)

    def tells(self, bucket: int) -> bytes:
        return written_mask(self._deferred.get(bucket, ()))

    def has(self, shard: Shard, step: int, bucket: int, units: Sequence[int]) -> bool:
        versions = self._of(shard, bucket)
        return all(versions[unit] >= step for unit in units)

    def defer(self, mask: Mask, now: bool = False) -> None:
        """From the next step on of every bucket that begins, *mask* is deferred, which goes
        out with the answers to its first stage before; *now*: no step has begun yet."""
        self._decided = dict(mask)
        if now:
            self._deferred, self._decided = self._decided, {}

    # ---- the `Timed` part: what nobody waits for ----

    def next_deadline(self) -> float | None:
        return 0.0 if self._unrated or self._due is not None else None

    def timer(self, shard: Shard) -> None:
        """Rate what was updated last, and decide: the answers have left."""
        numbers = {place: number for number, place in enumerate(self._places(shard))}
        unrated, self._unrated = self._unrated, []
        for bucket, units, push in unrated:
            values = shard.values(bucket, units)
            parts = push.gradient.split([value.numel() for value in values])
            for unit, value, part in zip(units, values, parts, strict=True):
                self._decision.importance.rate(numbers[bucket, unit], value, part)
        step, self._due = self._due, None
        if step is not None:
            self._decide(shard, step)

    def _decide(self, shard: Shard, step: int) -> None:
        here = shard.expected(step)
        workers = tuple(worker for worker in here if worker in self._reports)
        told = [self._reports[worker] for worker in workers]
        if self._options.defer == "nothing" or not told:
            return
        places = self._places(shard)
        sizes = [shard.unit_bytes(bucket)[unit] for bucket, unit in places]
        seen = together(workers, told, sum(sizes))
        deferred = [
            n for n, (b, u) in enumerate(places) if u in self._deferred.get(b, ())
        ]
        if step % self._options.interval:
            chosen = self._decision.after_look(deferred, seen)
        else:
            buckets = [bucket for bucket, _ in places]
            parts = Parts(sizes, buckets, len(told[0].ready))
            growth = min(one.part for one in told)
            chosen = self._decision.after_interval(parts, deferred, growth, seen, step)
        mask: dict[int, list[int]] = {bucket: [] for bucket in shard.buckets}
        for bucket, unit in (places[number] for number in chosen):
            mask[bucket].append(unit)
        self.defer(mask)

    # ---- rounds ----

    def _close(self, shard: Shard) -> None:
        """End every round whose gradients are all in and whose turn it is."""
        again = True
        while again:
            again = False
            for key in sorted(self.rounds):
                if self._may_end(shard, key):
                    self._end(shard, key)
                    again = True

    def _may_end(self, shard: Shard, key: Key) -> bool:
        step, _, bucket = key
        pushes = self.rounds[key]
        here = {push.worker for push in pushes}
        versions = self._of(shard, bucket)
        return here.issuperset(shard.expected(step)) and all(
            versions[unit] == step for unit in self._units(shard, pushes[0])
        )

    def _end(self, shard: Shard, key: Key) -> None:
        step, late, bucket = key
        pushes = sorted(self.rounds.pop(key), key=lambda push: push.worker)
        units = self._units(shard, pushes[0])
        shard.apply_mean(bucket, pushes)
        versions = self._of(shard, bucket)
        for unit in units:
            versions[unit] = step + 1
        if not late and bucket in self._decided:
            self._deferred[bucket] = self._decided.pop(bucket)
        for push in pushes:
            shard.answer(push)
        decides = step % self._options.interval == 0
        if decides and units:
            self._unrated.append((bucket, units, pushes[0]))
        last = not late and bucket == max(shard.buckets)
        if last and (decides or self._looks(step)):
            self._due = step

    def _looks(self, step: int) -> bool:
        """Whether what is deferred is on trial, and workers have reported how it goes."""
        options, defers = self._options, any(self._deferred.values())
        return (
            options.defer == "measured" and defers and looks_in(step, options.interval)
        )

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
        held = any(k[0] == step and k[2] == bucket for k in self.rounds)
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

    def _places(self, shard: Shard) -> list[tuple[int, int]]:
        """Bucket and unit of every piece of the model that this server holds."""
        return [(b, u) for b in shard.buckets for u in range(len(self._of(shard, b)))]
