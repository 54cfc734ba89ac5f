"""OSP by all-reduce: both stages among workers that each hold the optimizer.

This form is exact for every optimizer that can be applied piece by piece. A worker stores the last exact
values of deferred pieces, with the optimizer's state that belongs to them. The tentative step is a step of
that optimizer whose result is discarded.

The first active worker decides which pieces are deferred, and computes the importance of each piece. All
workers exchange the ready times of their gradients in one small all-reduce. It travels beside stage 2, so no
worker waits for it. Every rank derives when it is due from the number of steps and the deferred pieces,
which are the same on all ranks.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.interfaces import Bucket, Hyperparameters, Pending, UpdatingRun
from paceline.methods.osp.deferral import DeferralPolicy
from paceline.methods.osp.measurement import RATE_DECAY, TRIAL_STEPS, Rate, StepTimes
from paceline.methods.osp.options import OSPOptions
from paceline.methods.osp.worker import OSPWorker

SECOND = "stage 2"
"""The name of the channel that only stage 2 uses."""

COST_IN_UPDATES = 3.0
"""Deferring costs a worker about this many updates of the same bytes.

It takes the tentative step, and saves and restores exact values.
"""

TRIES = 5
"""Measurements of the smallest all-reduce; the first one opens connections."""


@dataclass
class DeferredUpdate:
    """The part of one step's update that travels in stage 2.

    Attributes:
        numbers: The deferred pieces that the backward pass used.
        means: Their mean gradients; valid once the all-reduces were waited for.
        how: The hyperparameters of the step.
        exact: The exact values P(i), or P(i+1) once *applied*.
        stamps: Versions of the pieces, which reveal writes by the script.
        applied: Whether *exact* includes *means*.
    """

    numbers: list[int]
    means: list[torch.Tensor]
    how: Hyperparameters
    exact: list[torch.Tensor]
    stamps: list[int]
    applied: bool = False


class AllReduceWorker(OSPWorker[UpdatingRun]):
    """Averages the gradients of both stages by all-reduce, and applies the optimizer itself."""

    def __init__(self, run: UpdatingRun, options: OSPOptions) -> None:
        """Create the worker. All ranks must call this together, since it runs collectives."""
        total = sum(bucket.bytes for bucket in run.buckets)
        super().__init__(
            run, options, run.partition_optimizer(options.piece_bytes(total))
        )
        self._pending: list[Pending] = []
        # The means of stage 1, by piece.
        self._first: dict[int, torch.Tensor] = {}
        self._unused: set[int] = set()
        # The weight of this worker's gradients in the mean.
        self._weight = 1.0
        # The deferred update of the last step, until the end of the next step's backward pass.
        self._deferral: DeferredUpdate | None = None

        defers = options.defer != "nothing"
        self._channel = run.comm.channel(SECOND) if defers else None
        self._policy = DeferralPolicy(options, pulls=False)
        self._leads = defers and run.comm.rank == 0
        if options.defer == "measured":
            self.timer.rate = Rate(_start_up(run), 0.0)
        self._round = 0
        # The round of the extra decision in a trial.
        self._look: int | None = None
        # The decision and the ready times while their all-reduce is in flight.
        self._notes: torch.Tensor | None = None
        self._agreed: StepTimes | None = None
        self._updates = deque[tuple[Any, Any, int]](maxlen=options.interval)

    def _send(self, bucket: Bucket) -> None:
        flat, parts = self.layout.message(bucket)
        self._first |= parts
        # The last bucket always travels, since it also carries the step's metadata.
        if bucket.last and not parts:
            flat = bucket.buffer.new_zeros(1)
        if flat.numel():
            named = self.layout.by_name(parts)
            self._pending.append(self.run.mean(flat, of=bucket, parts=named))

    def backward_ended(self) -> None:
        super().backward_ended()
        self._wait()
        self.timer.mark()
        # Save the weight: a forward pass before step() would replace it by the next batch's.
        self._weight = self.run.weight
        self._unused = self.layout.unused()

    def after_update(self) -> None:
        self._finish_stage_2()
        if self.run.active:
            how = self.updater.hyperparameters()
            self._apply_first(how)
            self._defer(how)
        elif self.run.participants:
            self._send_second()
        self._first.clear()
        self.timer.step_ended(self.layout.changes, self.run.loss)
        self._exchange()
        self._round += 1
        self.steps += self.run.active
        self.timer.step_begins()

    def parameters_replaced(self) -> None:
        """Do nothing: `after_update` refuses parameters that were replaced during stage 2."""

    def finish(self) -> None:
        source = self.run.participate_until_all_finish()
        self._wait()
        self._finish_stage_2()
        self._explain()
        if source is not None:
            self.run.broadcast_model(source)

    def consolidate(self) -> Callable[[], None]:
        """Apply all gradients that were sent, so that parameters and optimizer state are exact.

        Returns:
            A function that restores the tentative values, with which training continues.
        """
        deferral = self._deferral
        if deferral is None:
            return lambda: None
        self._wait()
        tentative = self._copies(deferral.numbers)
        self._finish_stage_2()
        deferral.exact, deferral.applied = self._copies(deferral.numbers), True

        def undo() -> None:
            self._write(deferral.numbers, tentative)
            deferral.stamps = self._stamps(deferral.numbers)
            self._deferral = deferral

        return undo

    # ---- the stages ----

    def _apply_first(self, how: Hyperparameters) -> None:
        """Apply the mean gradients of stage 1, and time it."""
        numbers = [n for n in self._first if n not in self._unused]
        gradients = [self._first[n] for n in numbers]
        self.run.clip(gradients)
        self._rate(numbers, gradients)
        start = self.run.stopwatch.mark()
        self.updater.apply(self.layout.some(numbers), gradients, how)
        size = sum(mean.numel() * mean.element_size() for mean in gradients)
        self._updates.append((start, self.run.stopwatch.mark(), size))

    def _defer(self, how: Hyperparameters) -> None:
        """Send the deferred pieces, and take the tentative step."""
        if not self.layout.deferred:
            return
        numbers = [n for n in self.layout.deferred if n not in self._unused]
        exact = []
        for number, value in zip(numbers, self._values(numbers), strict=True):
            room = self.layout.memory(("exact", number), value.numel(), value)
            exact.append(room.view(value.shape).copy_(value))
        means = self._send_second()
        # The bucket holds the gradient times this worker's weight: divide to get its own gradient.
        self._step_tentatively(numbers, how, 1 / self._weight if self._weight else 0.0)
        mine = [means[number] for number in numbers]
        self._deferral = DeferredUpdate(
            numbers, mine, how, exact, self._stamps(numbers)
        )

    def _send_second(self) -> dict[int, torch.Tensor]:
        """Start averaging all deferred pieces, used or not, and return each piece's result tensor."""
        means: dict[int, torch.Tensor] = {}
        for flat, parts in self.layout.late_messages():
            if not self.run.active:
                # Shadow collective: a finished worker contributes zeros.
                flat.zero_()
            means |= parts
            named = self.layout.by_name(parts)
            self._pending.append(self.run.mean(flat, channel=SECOND, parts=named))
        return means

    def _finish_stage_2(self) -> None:
        """Replace tentative values by exact ones, and apply the means of the deferred pieces.

        The means must have arrived.

        Raises:
            UsageError: The script has written to a deferred piece since ``step()``.
        """
        deferral, self._deferral = self._deferral, None
        if deferral is None:
            return
        numbers, stamps = deferral.numbers, self._stamps(deferral.numbers)
        for number, now, then in zip(numbers, stamps, deferral.stamps, strict=True):
            if now != then:
                raise UsageError(
                    f"parameter {self.layout.name_of(number)!r} was written to since step(). osp still "
                    "applies a deferred part of its update, so the written values would be lost. Write "
                    "parameters before training, or call finish(), write them, and distribute again"
                )
        self._write(numbers, deferral.exact)
        if not deferral.applied:
            pieces, means = self.layout.some(numbers), deferral.means
            self._rate(numbers, means)
            self.correction.arrived(pieces, means)
            self.updater.apply(pieces, means, deferral.how)

    def _wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending.clear()

    def _stamps(self, numbers: Sequence[int]) -> list[int]:
        return self.updater.stamps(self.layout.some(numbers))

    # ---- decisions ----

    def _ends_interval(self) -> bool:
        return self._round % self.options.interval == 0

    def _rate(self, numbers: Sequence[int], means: Sequence[torch.Tensor]) -> None:
        """Rate the importance of these pieces by their current values and mean gradients."""
        if self._leads and self._ends_interval():
            values = self._values(numbers)
            for number, value, mean in zip(numbers, values, means, strict=True):
                self._policy.importance.rate(number, value, mean)

    def _exchange(self) -> None:
        """Adopt the decision of the last step, and start the next one if it is due."""
        if self._notes is not None:
            self._adopt(self._notes.tolist())
            self._notes = None
        due = self._ends_interval() or self._round == self._look
        if self._channel is None or not due or not self.run.participants:
            return
        self._leads = self.run.comm.rank == self.run.participants[0]
        times = self.timer.times()
        chosen = [0.0] * len(self.layout.pieces)
        for number in self._decided(times) if self._leads else ():
            chosen[number] = 1.0
        # Buckets may have been rebuilt since. All ranks delivered the same number, so send that many.
        ready = [0.0] * (self.timer.delivered + 1)
        if times is not None:
            ready = [*times.ready, times.end]
        device = self.run.buckets[0].buffer.device
        notes = [*chosen, *ready]
        self._notes = torch.tensor(notes, dtype=torch.float64, device=device)
        self._pending.append(self._channel.all_reduce(self._notes, "max"))

    def _adopt(self, notes: Sequence[float]) -> None:
        """Apply the leader's decision; all ranks do this after the same step with the same values."""
        count, began = len(self.layout.pieces), not self.layout.deferred
        self.layout.defer([n for n in range(count) if notes[n] > 0])
        self._look = None
        if self.layout.deferred:
            self.has_deferred = True
            if began and self.options.defer == "measured":
                # The next step does not count: it still waits for messages of the step before.
                self._look = self._round + 1 + TRIAL_STEPS
        *ready, end = notes[count:]
        fits = len(ready) == len(self.run.buckets) and all(ready)
        self._agreed = StepTimes(ready, end) if fits else None

    def _decided(self, times: StepTimes | None) -> list[int]:
        """Decide which pieces to defer: at the end of an interval by all ranks' times, else by own *times*."""
        deferred, agreed = self.layout.deferred, self._agreed
        if times is None and self.options.defer == "measured":
            # The buckets have changed, so their times are unknown.
            return deferred
        ends = self._ends_interval()
        if ends and times and agreed and len(agreed.ready) == len(times.ready):
            times = agreed
        decay = RATE_DECAY if ends else 1.0
        parts = self.layout.parts()
        own = self.timer.report(times, parts, deferred, decay)
        reports = dict.fromkeys(self.run.participants, own)
        update = self._update_seconds()
        return self._policy.decide(parts, deferred, reports, self._round, update)

    def _update_seconds(self) -> float:
        """Return the seconds per byte that deferring costs a worker."""
        costs = [
            self.run.stopwatch.seconds(start, [end])[0] / size
            for start, end, size in self._updates
            if size
        ]
        return COST_IN_UPDATES * statistics.median(costs) if costs else 0.0


def _start_up(run: UpdatingRun) -> float:
    """Measure the seconds of the smallest all-reduce; all ranks must call this together."""
    times = []
    for _ in range(TRIES):
        one = torch.zeros(1, device=run.buckets[0].buffer.device)
        start = run.stopwatch.mark()
        run.comm.all_reduce(one, "sum").wait()
        times.append(run.stopwatch.seconds(start, [run.stopwatch.mark()])[0])
    return statistics.median(times)
