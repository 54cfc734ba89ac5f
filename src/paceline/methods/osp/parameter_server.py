"""OSP over servers: a worker's half, and the server's.

Servers hold the exact parameters and the optimizer's state. For its tentative step a worker has the exact
values of its deferred units, and computes the momentum from how these moved. SGD without Nesterov's form
moves by -eta v, so v is (P(i-1) - P(i)) / eta, up to rounding, without traffic. The state of other
optimizers is pulled for the deferred units, meanwhile.

A server takes each step in two rounds per bucket. Its replies name the units that the next step defers.
Law: a unit's update of step i comes after that of step i - 1, whichever stage each came in, and the reply to
step i carries exactly that update's result. A round whose gradients have all arrived waits until its units
are that far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
import torch

from paceline.interfaces import (
    Discipline,
    Hyperparameters,
    PushedGradient,
    Remote,
    ServerRun,
    Shard,
)
from paceline.interfaces.buckets import Bucket, in_strides_of
from paceline.methods.osp.deferral import DeferralPolicy, reports_trial
from paceline.methods.osp.measurement import (
    RATE_DECAY,
    ModelPieces,
    Rate,
    WorkerReport,
    decode,
    decode_report,
    encode_report,
)
from paceline.methods.osp.options import OSPOptions
from paceline.methods.osp.worker import OSPWorker

Found = TypeVar("Found")
Values = dict[int, torch.Tensor]
"""By piece, flat."""


class ServerWorker(OSPWorker[ServerRun]):
    """A worker whose gradients go to servers. The pieces of its layout are the servers' units."""

    def __init__(self, run: ServerRun, options: OSPOptions) -> None:
        """Collective."""
        self.remote = run.remote
        self.step = self.remote.join()
        super().__init__(run, options, self.remote.own_optimizer())
        self.timer.rate = Rate(0.0, 0.0, pulls=True)
        for bucket, inside in enumerate(self.layout.inside):
            for number, size in zip(
                inside, self.remote.unit_bytes(bucket), strict=True
            ):
                self.layout.sizes[number] = size
        # P(i) of what the last step deferred, and of what the one under way defers.
        self.exact: Values = {}
        # What the last second stage has brought, once that was waited for.
        self.late: Values | None = None
        self.rates: list[float] = []  # of the last step, by group
        self._weight = 1.0  # of this worker's gradients in the mean
        self._unused: set[int] = set()
        # What the last step deferred and left out: its momentum is that of the step before.
        self._left_out: set[int] = set()
        self._begin_step()

    def _send(self, bucket: Bucket) -> None:
        layout, timer, interval = self.layout, self.timer, self.options.interval
        late, report = set(layout.deferred), b""
        ends = self.step % interval == 0
        if bucket.last and (ends or (late and reports_trial(self.step, interval))):
            parts, decay = layout.parts(), RATE_DECAY if ends else 1.0
            report = encode_report(
                timer.report(timer.times(), parts, layout.deferred, decay)
            )
        inside = enumerate(layout.inside[bucket.index])
        units = [unit for unit, number in inside if number not in late]
        # Kept, since a forward pass before step() would make it the next batch's.
        self._weight = self.run.weight
        self.remote.push(bucket, self.step, self._weight, units, report=report)

    def backward_ended(self) -> None:
        super().backward_ended()
        # Kept, since a forward pass before step() would make it the next batch's.
        self._unused = self.layout.unused()

    def after_update(self) -> None:
        how = self.updater.hyperparameters()
        self._settle()  # now all is P(i)
        arrived = self._by_number(self.remote.wait_for_units())  # P(i+1)
        self.timer.mark()
        deferring = self.layout.deferred
        late = set(deferring)
        both = sorted(late.union(self._told()))
        earlier, self.exact = (
            self.exact,
            dict(zip(both, self._copies(both), strict=True)),
        )
        self._write(arrived, arrived.values())
        for bucket in self.run.buckets:
            inside = enumerate(self.layout.inside[bucket.index])
            if units := [unit for unit, number in inside if number in late]:
                self.remote.push(bucket, self.step, self._weight, units, late=True)
        if self.options.correction == "local":
            self._mirror_state(earlier, how)
        # Servers leave out unused parameters, which decay and momentum would move here.
        used = [number for number in deferring if number not in self._unused]
        self._step_tentatively(used, how)
        self._left_out = late & self._unused
        self.late = None
        self.has_deferred = self.has_deferred or bool(deferring)
        self.rates = [float(group["lr"]) for group in how]
        self.step += 1
        self.steps += 1
        changes = self.layout.changes
        self._begin_step()
        self.timer.step_ended(changes, self.run.loss)
        self.timer.step_begins()

    def finish(self) -> None:
        self._settle()
        self.remote.note_write()
        self._explain()
        self.remote.leave()

    def consolidate(self) -> Callable[[], None]:
        """The parameters with all gradients in them that were sent."""
        everything = range(len(self.layout.pieces))
        tentative = self._copies(everything)
        self._settle()

        def undo() -> None:
            self._write(everything, tentative)
            self.remote.note_write()

        return undo

    def parameters_replaced(self) -> None:
        """All parameters are exact now; discard everything known of the earlier ones."""
        self._wait_late()
        self.remote.wait_for_states()  # they were asked for before
        self.exact, self.late, self.rates = {}, None, []
        self._left_out = set()
        self.layout.changes += 1
        self._begin_step()

    # ---- the second stage ----

    def _begin_step(self) -> None:
        """The next step defers what servers have said. Pull the optimizer's state of that;
        SGD's without Nesterov's form is mirrored."""
        self.remote.note_write()
        self.layout.defer(self._told())
        groups = self.updater.hyperparameters()
        asked = set()
        for number in self.layout.deferred:
            group = groups[self.updater.group_of(self.layout.pieces[number])]
            if "dampening" not in group or group["nesterov"]:
                asked.add(number)
        if asked and self.options.correction == "local":
            places = [
                (bucket, unit)
                for bucket, inside in enumerate(self.layout.inside)
                for unit, number in enumerate(inside)
                if number in asked
            ]
            self.remote.request_states(places, self.step)

    def _settle(self) -> None:
        """Put the exact values of what the last step deferred in the place of the tentative
        ones; waits for them."""
        late = self._wait_late()
        self._write(late, late.values())

    def _wait_late(self) -> Values:
        if self.late is None:
            # Copied: the memory in which it lands is used by the next second stage.
            late = self._by_number(self.remote.wait_for_units(late=True))
            self.late = {number: value.clone() for number, value in late.items()}
        return self.late

    def _by_number(self, answers: Iterable[tuple[int, int, Found]]) -> dict[int, Found]:
        """Received units by piece, from those by bucket and unit."""
        inside = self.layout.inside
        return {inside[bucket][unit]: found for bucket, unit, found in answers}

    def _told(self) -> list[int]:
        """What the next step defers."""
        inside = self.layout.inside
        return sorted(
            inside[bucket][unit] for bucket, unit in next_deferred(self.remote)
        )

    def _mirror_state(self, earlier: Values, how: Hyperparameters) -> None:
        """Give the own optimizer the servers' state of the deferred units: the pulled state, or
        V(i-1) = (P(i-1) - P(i)) / eta if P(i-1) is known (*earlier*).
        """
        pulled = self._by_number(self.remote.wait_for_states())
        for number in self.layout.deferred:
            if number in self._left_out and number not in pulled:
                continue
            piece, exact = self.layout.pieces[number], self.exact[number]
            group, live = self.updater.group_of(piece), self.updater.state([piece])[0]
            live.clear()
            if number in pulled:
                for name, value in pulled[number].items():
                    whole = value.numel() == exact.numel()
                    live[name] = _like(exact, value) if whole else value
            elif how[group]["momentum"] and number in earlier and self.rates[group]:
                live["momentum_buffer"] = (earlier[number] - exact) / self.rates[group]


def _like(exact: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """*value*, which servers have sent flat, with the shape and strides of *exact*."""
    return in_strides_of(exact, value.view(exact.shape))


def next_deferred(remote: Remote) -> list[tuple[int, int]]:
    """Bucket and unit of all that the next step defers, as servers have told with their last
    answers (GIB)."""
    return [
        (bucket, part.units[unit])
        for bucket in range(len(remote.units))
        for part in remote.notices(bucket)
        for unit in decode_mask(part.notice)
    ]


# ---- the server's half ----


Key = tuple[int, bool, int]
"""Of a round: step, whether its units come late (in stage 2), and bucket."""


class TwoStageDiscipline(Discipline):
    """A server that takes each step in two rounds per bucket."""

    accepts_partial_pushes = True

    def __init__(self, options: OSPOptions) -> None:
        self._options = options
        self.rounds: dict[Key, list[PushedGradient]] = {}
        """What has come and is not applied yet."""
        # Per bucket and unit: the step whose update comes next.
        self._versions: dict[int, list[int]] = {}
        self._begin = 0
        self._deferred: dict[int, Sequence[int]] = {}
        self._decided: dict[int, Sequence[int]] = {}
        self._policy = DeferralPolicy(options, pulls=True)
        self._reports: dict[int, WorkerReport] = {}  # by worker, its last one
        self._unrated: list[PushedGradient] = []  # each with the mean of its round
        self._due: int | None = None  # the step after whose first stage is decided

    # ---- the `Discipline` ----

    def on_push(self, shard: Shard, push: PushedGradient) -> None:
        if self._due is not None and (push.step, push.late) > (self._due, False):
            # It comes before the timer did: what is decided may not depend on that.
            self.on_timer(shard)
        key = (push.step, push.late, push.bucket)
        self.rounds.setdefault(key, []).append(push)
        if push.report is not None:
            self._reports[push.worker] = push.report
        self._close(shard)

    def on_change(self, shard: Shard) -> None:
        self._close(shard)
        while self._skip(shard):  # what is skipped may be what a round waits for
            self._close(shard)

    def first_step(self, shard: Shard) -> int:
        return shard.next_unstarted_step()

    def may_pull(self, shard: Shard, step: int, bucket: int) -> bool:
        return min(self._of(shard, bucket), default=step) >= step

    def completed_step(self, shard: Shard) -> int | None:
        steps = {v for bucket in shard.buckets for v in self._of(shard, bucket)}
        return steps.pop() if len(steps) == 1 and not self.rounds else None

    def resume(self, shard: Shard, step: int) -> None:
        self._begin = step

    def decode_report(self, shard: Shard, report: bytes) -> WorkerReport:
        return decode_report(report, shard.all_buckets)

    def notice(self, bucket: int) -> bytes:
        return encode_mask(self._deferred.get(bucket, ()))

    def has_updates(
        self, shard: Shard, step: int, bucket: int, units: Sequence[int]
    ) -> bool:
        versions = self._of(shard, bucket)
        return all(versions[unit] >= step for unit in units)

    def defer(self, mask: Mapping[int, Sequence[int]], now: bool = False) -> None:
        """From the next step on of every bucket that begins, *mask* (units, by bucket) is
        deferred, which goes out with the answers to its first stage before; *now*: no step
        has begun yet."""
        self._decided = dict(mask)
        if now:
            self._deferred, self._decided = self._decided, {}

    # ---- at its own time: what nobody waits for ----

    def next_deadline(self) -> float | None:
        return 0.0 if self._unrated or self._due is not None else None

    def on_timer(self, shard: Shard) -> None:
        """Rate the last updates, and decide: the replies have left."""
        numbers = {place: number for number, place in enumerate(self._places(shard))}
        unrated, self._unrated = self._unrated, []
        for push in unrated:
            units = self._units(shard, push)
            values = shard.values(push.bucket, units)
            parts = push.gradient.split([value.numel() for value in values])
            for unit, value, part in zip(units, values, parts, strict=True):
                self._policy.importance.rate(numbers[push.bucket, unit], value, part)
        step, self._due = self._due, None
        if step is not None:
            self._decide(shard, step)

    def _decide(self, shard: Shard, step: int) -> None:
        reports = self._reports
        told = {w: reports[w] for w in shard.active_workers(step) if w in reports}
        if self._options.defer == "nothing" or not told:
            return
        places = self._places(shard)
        sizes = [shard.unit_bytes(bucket)[unit] for bucket, unit in places]
        parts = ModelPieces(sizes, [bucket for bucket, _ in places], shard.all_buckets)
        late = self._deferred
        deferred = [n for n, (b, u) in enumerate(places) if u in late.get(b, ())]
        mask: dict[int, list[int]] = {bucket: [] for bucket in shard.buckets}
        for number in self._policy.decide(parts, deferred, told, step):
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
        return here.issuperset(shard.active_workers(step)) and all(
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
            shard.reply(push)
        options, decides = self._options, step % self._options.interval == 0
        if decides and units:
            self._unrated.append(pushes[0])
        looks = options.defer == "measured" and reports_trial(step, options.interval)
        decides = decides or (looks and any(self._deferred.values()))
        if decides and not late and bucket == max(shard.buckets):
            self._due = step

    def _skip(self, shard: Shard) -> bool:
        """Continue without a step whose workers have all gone; return whether there was one."""
        held, skipped = {(step, bucket) for step, _, bucket in self.rounds}, False
        for bucket in shard.buckets:
            versions = self._of(shard, bucket)
            for unit, step in enumerate(versions):
                while step < shard.next_unstarted_step() and not (
                    (step, bucket) in held or shard.active_workers(step)
                ):
                    step += 1
                    skipped = True
                    shard.count("updates of units that nobody sent")
                versions[unit] = step
        return skipped

    def _units(self, shard: Shard, push: PushedGradient) -> Sequence[int]:
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


def encode_mask(units: Sequence[int]) -> bytes:
    """The units that a server wants deferred, of those that it holds: the paper's GIB."""
    return msgspec.msgpack.encode(list(units)) if units else b""


def decode_mask(words: bytes) -> list[int]:
    """The units that `encode_mask` was given. Raises `UsageError` for other bytes."""
    units: list[int] = decode("answer", words, list[int]) if words else []
    return units
