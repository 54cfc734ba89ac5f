"""Chooses the deferred pieces: those that a step waits for, as few as give the shortest step.

The first layers' gradients are ready last, so a step waits for them, and deferring them shortens it.
Gradients that are ready early hide behind backward: deferring them gains nothing.

One worker decides every few steps (`all_reduce`), or each server for its part of the model
(`parameter_server`), and sends the choice to the others. Workers that each decided by their own arithmetic
and clock could disagree in a last bit, and wait for messages that never come.

Predicted gains are compared with measured steps. If processors carry the messages, as between processes
of one machine, nothing hides behind computing, and deferring makes steps longer. So the first interval
with deferred pieces is a trial. It ends after `TRIAL_STEPS` steps if these are much longer, and with its
interval if steps are no shorter. After a failed trial nothing is deferred for some decisions, and for twice
as many each time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.methods.osp.measurement import (
    TRIAL_STEPS,
    VISIBLE,
    ModelPieces,
    Rate,
    StepTimes,
    WorkerReport,
    step_seconds,
)
from paceline.methods.osp.options import OSPOptions

WORTHWHILE = 0.02
"""Deferring must shorten a step by this part of it."""

MUCH_LONGER = 1.1
"""A trial fails at once if the median of `TRIAL_STEPS` steps is longer by this factor. Where one
step in three is off by a tenth, that median is off by a twentieth: a tenth is seldom chance."""

OTHER_NETWORK = 2.0
"""Steps over a network that is faster or slower by this factor cannot be compared."""

PATIENCE = 10
"""Decisions for which nothing is deferred after the first trial that fails."""


def largest_bucket_first(parts: ModelPieces, order: Sequence[int]) -> list[int]:
    """Pieces of the bucket that is then the largest first, in *order* among themselves. Where
    a bucket is pulled when it has been pushed, a step that only communicates waits for the
    largest one twice."""
    left, turn = parts.left(()), list[int]()
    waiting: list[list[int]] = [[] for _ in left]
    for piece in reversed(order):
        waiting[parts.buckets[piece]].append(piece)
    while any(waiting):
        _, bucket = max((left[b], b) for b, pieces in enumerate(waiting) if pieces)
        turn.append(waiting[bucket].pop())
        left[bucket] -= parts.sizes[turn[-1]]
    return turn


def choose_deferred(
    parts: ModelPieces,
    orders: Sequence[Sequence[int]],
    times: StepTimes,
    rate: Rate,
    budget: float,
    update_seconds_per_byte: float = 0.0,
) -> list[int]:
    """The pieces to defer, at most *budget* bytes, in the first of *orders* unless another
    makes steps shorter.

    What backward hides is not deferred. Nothing is where that would not pay: a deferred byte
    costs a worker *update_seconds_per_byte* for its tentative step.
    """
    plain = step_seconds(times, 0.0, parts.left(()), rate)
    if plain <= times.end * (1 + WORTHWHILE):
        return []
    if rate.per_byte > 0:
        budget = min(budget, times.end / rate.per_byte)  # what one computation covers
    takes, chosen = math.inf, list[int]()
    for order in orders:
        kept = _least(parts, order, times, rate, budget)
        size = parts.total(kept)
        seconds = step_seconds(times, size, parts.left(kept), rate)
        seconds += size * update_seconds_per_byte
        if seconds < takes * (1 - WORTHWHILE):
            takes, chosen = seconds, sorted(kept)
    return chosen if takes < plain * (1 - WORTHWHILE) else []


def _least(
    parts: ModelPieces,
    order: Sequence[int],
    times: StepTimes,
    rate: Rate,
    budget: float,
) -> list[int]:
    """Of what fits into *budget*, no more than it takes for steps as short."""
    deferred = fill_budget(parts, order, budget)
    left, size = parts.left(deferred), parts.total(deferred)
    enough = step_seconds(times, size, left, rate) * (1 + VISIBLE / 2)
    kept = []
    for piece in reversed(deferred):
        bucket, own = parts.buckets[piece], parts.sizes[piece]
        left[bucket] += own
        if step_seconds(times, size - own, left, rate) > enough:
            left[bucket] -= own
            kept.append(piece)
        else:
            size -= own
    return kept


def fill_budget(parts: ModelPieces, order: Sequence[int], budget: float) -> list[int]:
    """The first pieces of *order* that fit into *budget* bytes; one that does not is
    skipped, and smaller ones behind it are taken."""
    taken = []
    for piece in order:
        if parts.sizes[piece] <= budget:
            budget -= parts.sizes[piece]
            taken.append(piece)
    return taken


# ---- decisions ----


def reports_trial(step: int, interval: int) -> bool:
    """Over servers: whether workers report in *step* how a trial goes. What was decided after
    step i is deferred from step i + 2 on. Step i + 2 still waits for what its predecessor
    sent, so steps i + 3 to i + 2 + `TRIAL_STEPS` count, and the one after them reports."""
    return step % interval == TRIAL_STEPS + 3


class StepSummary(NamedTuple):
    """The steps since the deferred pieces last changed, of all workers that reported.

    *times*: None if they are unknown, or not of the same buckets. *rate*: of the network.
    *whole*: seconds of a step; 0 with fewer than `TRIAL_STEPS` steps. *workers*: the active ones.
    """

    times: StepTimes | None
    rate: Rate
    whole: float
    workers: tuple[int, ...]


class Trial:
    """Judges whether deferring pays.

    It remembers how long steps take with nothing deferred, and how trials have ended.
    """

    def __init__(self) -> None:
        self._plain: StepSummary | None = None
        self._began = False  # something is deferred since the last decision only
        self._rest, self._patience = 0, PATIENCE

    def rests(self, deferring: bool, seen: StepSummary) -> bool:
        """Whether nothing is to be deferred in the next interval, as *seen* in the last one:
        because deferring does not pay, or because these workers' steps without are unknown."""
        self._began = not deferring
        if not deferring:
            self._plain = seen if seen.whole > 0 else self._plain
            self._rest = max(0, self._rest - 1)
            return self._rest > 0 or self._plain is None
        if self._plain is None or self._plain.workers != seen.workers:
            return True
        longer = seen.whole > self._plain.whole * (1 - VISIBLE)
        return longer and self._fails(self._plain, seen)

    def stops_early(self, deferring: bool, seen: StepSummary) -> bool:
        """Whether a trial ends after `TRIAL_STEPS` steps: they are much longer than without."""
        plain = self._plain
        if not deferring or not self._began or plain is None:
            return False
        if plain.workers != seen.workers or seen.whole <= plain.whole * MUCH_LONGER:
            return False
        # A network that seems to be another may be, or the processors are busy: that stops the
        # trial, too, but the next interval shows it, and is no rest.
        self._fails(plain, seen)
        return True

    def _fails(self, plain: StepSummary, seen: StepSummary) -> bool:
        """Rest, unless the network is another one than that of the steps without."""
        before, now = plain.rate.per_byte, seen.rate.per_byte
        fails = before / OTHER_NETWORK < now < before * OTHER_NETWORK
        if fails:
            self._rest, self._patience = self._patience, 2 * self._patience
        return fails


class DeferralPolicy:
    """Decides which pieces are deferred.

    It remembers how important pieces are, and how trials ended. *pulls*: see `Rate`.
    """

    def __init__(self, options: OSPOptions, pulls: bool) -> None:
        self._options, self._pulls, self._trial = options, pulls, Trial()
        self.importance = options.importance_class()

    def decide(
        self,
        parts: ModelPieces,
        deferred: list[int],
        told: Mapping[int, WorkerReport],
        step: int,
        update: float = 0.0,
    ) -> list[int]:
        """The pieces to defer from now on, of those in *parts*; *deferred* was until now.
        *told*: what each worker has measured. *update*: seconds per byte of a tentative step.
        A *step* that ends no interval looks at a trial."""
        options, seen = self._options, self._summary(parts, told)
        if step % options.interval:
            return [] if self._trial.stops_early(bool(deferred), seen) else deferred
        order = self.order(parts, step)
        growth = min(one.part for one in told.values())
        budget = options.most * sum(parts.sizes) * growth
        if options.defer == "most":
            return sorted(fill_budget(parts, order, budget))
        rests = self._trial.rests(bool(deferred), seen)
        if rests or seen.times is None or not seen.rate.per_byte:
            return []
        orders = [order]
        if self._pulls and options.order == "time":
            orders.append(largest_bucket_first(parts, order))
        return choose_deferred(parts, orders, seen.times, seen.rate, budget, update)

    def order(self, parts: ModelPieces, step: int) -> list[int]:
        """In which order pieces are deferred. Without overlap all are ready together."""
        order = self.importance.order(len(parts.sizes), seed=step)
        if self._options.order == "time" and self._options.overlap:
            order.sort(key=lambda piece: -parts.buckets[piece])  # stable
        return order

    def _summary(
        self, parts: ModelPieces, told: Mapping[int, WorkerReport]
    ) -> StepSummary:
        """A step is as long as the slowest worker's. Who decides for a part of the model has
        that part of a bucket's messages, so that a byte of its own costs more."""
        reports = list(told.values())
        times = None
        if reports[0].ready and len({len(one.ready) for one in reports}) == 1:
            ready = map(max, zip(*(one.ready for one in reports), strict=True))
            times = StepTimes(list(ready), max(one.end for one in reports))
        whole, mine = sum(reports[0].bytes), sum(parts.sizes)
        per_byte = max(one.per_byte for one in reports) * whole / max(1, mine)
        rate = Rate(max(one.start_up for one in reports), per_byte, self._pulls)
        steps = [one.whole for one in reports]
        return StepSummary(times, rate, max(steps) if all(steps) else 0.0, tuple(told))
