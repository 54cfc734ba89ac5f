"""OSP over parameter servers: workers push gradients in two stages, and servers apply them.

- `ServerWorker`: a worker's steps.
- `TwoStageDiscipline`: the server's half, which updates parameters and decides what is deferred.
- `encode_mask`, `decode_mask`: the deferred units, as bytes in a server's replies.

Servers hold the exact parameters and the optimizer's state. A worker needs both for its tentative step. It
stores the exact values of deferred units. The optimizer's state depends on the optimizer:

- SGD without Nesterov momentum moves parameters by -eta v. So a worker computes the momentum v, up to
  rounding, as (P(i-1) - P(i)) / eta. No message is needed.
- For other optimizers a worker pulls the state of deferred units during the next step.

A server handles each step in two rounds per bucket, one for each stage. Its replies name the units that the
next step defers. It applies a unit's updates in step order, whichever stage each came in, and the reply to
step i carries exactly the result of step i. So a round with all its gradients may have to wait until its
units have the update of step i - 1.
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
"""Flat values by the number of their piece."""


class ServerWorker(OSPWorker[ServerRun]):
    """Pushes gradients to servers in two stages. The pieces of its layout are the servers' units."""

    def __init__(self, run: ServerRun, options: OSPOptions) -> None:
        """Create the worker, and join the training at the servers. All ranks must call this together."""
        self.remote = run.remote
        self.step = self.remote.join()
        super().__init__(run, options, self.remote.own_optimizer())
        self.timer.rate = Rate(0.0, 0.0, pulls=True)
        for bucket, inside in enumerate(self.layout.inside):
            for number, size in zip(
                inside, self.remote.unit_bytes(bucket), strict=True
            ):
                self.layout.sizes[number] = size
        # P(i) of the pieces that the last step deferred, and of those that this step defers.
        self.exact: Values = {}
        # The exact values that the last stage 2 has brought; None until they were waited for.
        self.late: Values | None = None
        # The learning rates of the last step, by parameter group.
        self.rates: list[float] = []
        # The weight of this worker's gradients in the mean.
        self._weight = 1.0
        self._unused: set[int] = set()
        # Pieces that the last step deferred, but whose parameters it did not use. Their momentum has not
        # changed since the step before.
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
        # Save the weight: a forward pass before step() would replace it by the next batch's.
        self._weight = self.run.weight
        self.remote.push(bucket, self.step, self._weight, units, report=report)

    def backward_ended(self) -> None:
        super().backward_ended()
        # Save them: a forward pass before step() would replace them by the next batch's.
        self._unused = self.layout.unused()

    def after_update(self) -> None:
        how = self.updater.hyperparameters()
        # From here all parameters have their exact values P(i). The units of stage 1 arrive as P(i+1).
        self._finish_stage_2()
        arrived = self._by_number(self.remote.wait_for_units())
        self.timer.mark()
        deferring = self.layout.deferred
        late = set(deferring)
        both = sorted(late.union(self._deferred_next()))
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
        # Servers do not update unused parameters. Here weight decay and momentum would move them.
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
        self._finish_stage_2()
        self.remote.note_write()
        self._explain()
        self.remote.leave()

    def consolidate(self) -> Callable[[], None]:
        """Wait for all gradients that were sent, so that the parameters are exact.

        Returns:
            A function that restores the tentative values, with which training continues.
        """
        everything = range(len(self.layout.pieces))
        tentative = self._copies(everything)
        self._finish_stage_2()

        def undo() -> None:
            self._write(everything, tentative)
            self.remote.note_write()

        return undo

    def parameters_replaced(self) -> None:
        """Discard everything known of the parameters that the script has replaced."""
        self._wait_late()
        # The states were requested before, and would otherwise be taken for those of the next step.
        self.remote.wait_for_states()
        self.exact, self.late, self.rates = {}, None, []
        self._left_out = set()
        self.layout.changes += 1
        self._begin_step()

    # ---- stage 2 ----

    def _begin_step(self) -> None:
        """Defer the pieces that the servers have named, and request their optimizer state.

        The state of SGD without Nesterov momentum is computed instead, by `_mirror_state`.
        """
        self.remote.note_write()
        self.layout.defer(self._deferred_next())
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

    def _finish_stage_2(self) -> None:
        """Wait for the exact values of the pieces that the last step deferred, and load them."""
        late = self._wait_late()
        self._write(late, late.values())

    def _wait_late(self) -> Values:
        """Wait for the exact values of the pieces that the last step deferred."""
        if self.late is None:
            # Copy: the next stage 2 receives into the same memory.
            late = self._by_number(self.remote.wait_for_units(late=True))
            self.late = {number: value.clone() for number, value in late.items()}
        return self.late

    def _by_number(self, answers: Iterable[tuple[int, int, Found]]) -> dict[int, Found]:
        """Return received units by their piece; *answers* names each by its bucket and unit."""
        inside = self.layout.inside
        return {inside[bucket][unit]: found for bucket, unit, found in answers}

    def _deferred_next(self) -> list[int]:
        """Return the pieces that the next step defers."""
        inside = self.layout.inside
        return sorted(
            inside[bucket][unit] for bucket, unit in next_deferred(self.remote)
        )

    def _mirror_state(self, earlier: Values, how: Hyperparameters) -> None:
        """Load the servers' state of the deferred units into this worker's optimizer.

        It is the pulled state. Under SGD it is V(i-1) = (P(i-1) - P(i)) / eta, if P(i-1) is known.

        Args:
            earlier: P(i-1) of the pieces for which it is known.
            how: The hyperparameters of the step.
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
    """Return *value*, which servers send flat, in the shape and strides of *exact*."""
    return in_strides_of(exact, value.view(exact.shape))


def next_deferred(remote: Remote) -> list[tuple[int, int]]:
    """Return bucket and unit of everything that the next step defers.

    The servers' last replies name them (the paper's GIB).

    Args:
        remote: The servers of a worker's model.
    """
    return [
        (bucket, part.units[unit])
        for bucket in range(len(remote.units))
        for part in remote.notices(bucket)
        for unit in decode_mask(part.notice)
    ]


# ---- the server's half ----


Key = tuple[int, bool, int]
"""Identifies a round: its step, whether it belongs to stage 2, and its bucket."""


class TwoStageDiscipline(Discipline):
    """Averages the gradients of each step in two rounds per bucket, and decides what is deferred.

    Attributes:
        rounds: The pushes of each round that are not applied yet.
    """

    accepts_partial_pushes = True

    def __init__(self, options: OSPOptions) -> None:
        self._options = options
        self.rounds: dict[Key, list[PushedGradient]] = {}
        # Per bucket and unit: the step whose update comes next.
        self._versions: dict[int, list[int]] = {}
        self._begin = 0
        # The deferred units of each bucket: those that replies name, and those that they name next.
        self._deferred: dict[int, Sequence[int]] = {}
        self._decided: dict[int, Sequence[int]] = {}
        self._policy = DeferralPolicy(options, pulls=True)
        # The last report of each worker.
        self._reports: dict[int, WorkerReport] = {}
        # One push of each round to rate; it holds the mean gradient of its round.
        self._unrated: list[PushedGradient] = []
        # The step after whose stage 1 a decision is due.
        self._due: int | None = None

    # ---- the `Discipline` ----

    def on_push(self, shard: Shard, push: PushedGradient) -> None:
        if self._due is not None and (push.step, push.late) > (self._due, False):
            # Decide before this push: decisions must not depend on when the timer runs.
            self.on_timer(shard)
        key = (push.step, push.late, push.bucket)
        self.rounds.setdefault(key, []).append(push)
        if push.report is not None:
            self._reports[push.worker] = push.report
        self._close(shard)

    def on_change(self, shard: Shard) -> None:
        self._close(shard)
        # A round may have waited for the step that was skipped.
        while self._skip(shard):
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
        """Defer *mask* from the next step of each bucket on.

        The replies to a bucket's stage 1 announce it, one step before.

        Args:
            mask: The deferred units of each bucket.
            now: Whether no step has begun yet; then the first step defers *mask*.
        """
        self._decided = dict(mask)
        if now:
            self._deferred, self._decided = self._decided, {}

    # ---- after the replies: work that no worker waits for ----

    def next_deadline(self) -> float | None:
        return 0.0 if self._unrated or self._due is not None else None

    def on_timer(self, shard: Shard) -> None:
        """Rate the last updates, and decide what is deferred. The replies have been sent before."""
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
        """Decide what is deferred, by the active workers' last reports."""
        reports = {
            worker: self._reports[worker]
            for worker in shard.active_workers(step)
            if worker in self._reports
        }
        if self._options.defer == "nothing" or not reports:
            return
        places = self._places(shard)
        sizes = [shard.unit_bytes(bucket)[unit] for bucket, unit in places]
        parts = ModelPieces(sizes, [bucket for bucket, _ in places], shard.all_buckets)
        late = self._deferred
        deferred = [n for n, (b, u) in enumerate(places) if u in late.get(b, ())]
        mask: dict[int, list[int]] = {bucket: [] for bucket in shard.buckets}
        for number in self._policy.decide(parts, deferred, reports, step):
            bucket, unit = places[number]
            mask[bucket].append(unit)
        self.defer(mask)

    # ---- rounds ----

    def _close(self, shard: Shard) -> None:
        """Apply every round that has all its gradients, and whose units have the step before."""
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
        """Apply a round's mean gradient, send the replies, and note whether a decision is due."""
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
        """Skip steps that have no active workers; return whether there was one."""
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
        """Return bucket and unit of every piece of the model that this server holds."""
        return [(b, u) for b in shard.buckets for u in range(len(self._of(shard, b)))]


def encode_mask(units: Sequence[int]) -> bytes:
    """Encode the units of a bucket that a server defers: its part of the paper's GIB.

    Args:
        units: Numbers of the units; without any, the result is empty.
    """
    return msgspec.msgpack.encode(list(units)) if units else b""


def decode_mask(mask: bytes) -> list[int]:
    """Return the units that `encode_mask` was given.

    Raises:
        UsageError: *mask* is no result of `encode_mask`.
    """
    units: list[int] = decode("reply", mask, list[int]) if mask else []
    return units
