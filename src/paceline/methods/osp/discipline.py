"""OSP's server: it takes each step in two rounds per bucket, and says what may wait.

Law: a unit's update of step i comes after that of step i - 1, whichever stage each came
in, and the answer to step i carries exactly what that update made. A round whose gradients
are all in waits until its units are that far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.interfaces import HeldPush, Shard
from paceline.methods.osp.deferral import Parts
from paceline.methods.osp.deferral_policy import Decision, looks_in
from paceline.methods.osp.options import OSPOptions
from paceline.methods.osp.reports import Measured, read_report, written_mask

Key = tuple[int, bool, int]
"""Of a round: step, whether its units come late (in stage 2), and bucket."""


class TwoStages:
    """The server's half."""

    def __init__(self, options: OSPOptions) -> None:
        self._options = options
        self.rounds: dict[Key, list[HeldPush]] = {}
        """What has come and is not applied yet."""
        # Per bucket and unit: the step whose update comes next.
        self._versions: dict[int, list[int]] = {}
        self._begin = 0
        self._deferred: dict[int, Sequence[int]] = {}
        self._decided: dict[int, Sequence[int]] = {}
        self._decision = Decision(options, pulls=True)
        self._reports: dict[int, Measured] = {}  # by worker, its last one
        self._unrated: list[HeldPush] = []  # each with the mean of its round
        self._due: int | None = None  # the step after whose first stage is decided

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

    def defer(self, mask: Mapping[int, Sequence[int]], now: bool = False) -> None:
        """From the next step on of every bucket that begins, *mask* (units, by bucket) is
        deferred, which goes out with the answers to its first stage before; *now*: no step
        has begun yet."""
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
        for push in unrated:
            units = self._units(shard, push)
            values = shard.values(push.bucket, units)
            parts = push.gradient.split([value.numel() for value in values])
            for unit, value, part in zip(units, values, parts, strict=True):
                self._decision.importance.rate(numbers[push.bucket, unit], value, part)
        step, self._due = self._due, None
        if step is not None:
            self._decide(shard, step)

    def _decide(self, shard: Shard, step: int) -> None:
        reports = self._reports
        told = {w: reports[w] for w in shard.expected(step) if w in reports}
        if self._options.defer == "nothing" or not told:
            return
        places = self._places(shard)
        sizes = [shard.unit_bytes(bucket)[unit] for bucket, unit in places]
        parts = Parts(sizes, [bucket for bucket, _ in places], shard.all_buckets)
        late = self._deferred
        deferred = [n for n, (b, u) in enumerate(places) if u in late.get(b, ())]
        mask: dict[int, list[int]] = {bucket: [] for bucket in shard.buckets}
        for number in self._decision.decide(parts, deferred, told, step):
            bucket, unit = places[number]
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
        options, decides = self._options, step % self._options.interval == 0
        if decides and units:
            self._unrated.append(pushes[0])
        looks = options.defer == "measured" and looks_in(step, options.interval)
        decides = decides or (looks and any(self._deferred.values()))
        if decides and not late and bucket == max(shard.buckets):
            self._due = step

    def _skip(self, shard: Shard) -> bool:
        """Where everybody who was to send a step is gone, go on without it; returns whether
        there was one."""
        held, skipped = {(step, bucket) for step, _, bucket in self.rounds}, False
        for bucket in shard.buckets:
            versions = self._of(shard, bucket)
            for unit, step in enumerate(versions):
                while step < shard.fastest() and not (
                    (step, bucket) in held or shard.expected(step)
                ):
                    step += 1
                    skipped = True
                    shard.count("updates of units that nobody sent")
                versions[unit] = step
        return skipped

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
