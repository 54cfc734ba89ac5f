"""Chooses the deferred pieces: the fewest that give the shortest step.

The first layers' gradients are ready last, so a step waits for them, and deferring them shortens it.
Gradients that are ready early hide behind backward: deferring them gains nothing.

One worker decides every few steps (`all_reduce`), or each server for its part of the model
(`parameter_server`), and sends the decision to the others. If each worker decided from its own clock, two
decisions could differ in a last bit. Workers would then wait for messages that never come.

Predicted gains are compared with measured steps. Between processes of one machine, processors carry the
messages: communication cannot overlap with computation, and deferring makes steps longer. So the first
interval with deferred pieces is a trial. It fails after `TRIAL_STEPS` steps if these are much longer, and at
the end of its interval if steps are no shorter. After a failed trial no piece is deferred for `PATIENCE`
decisions. Each further failure doubles that number.
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
"""Deferring must shorten a step by at least this fraction."""

MUCH_LONGER = 1.1
"""A trial fails early if the median of `TRIAL_STEPS` steps is longer by this factor.

Where one step in three is off by a tenth, that median is off by a twentieth. A tenth is seldom chance.
"""

OTHER_NETWORK = 2.0
"""Step times are not compared if the network became faster or slower by this factor."""

PATIENCE = 10
"""Decisions without deferred pieces after the first failed trial."""


def largest_bucket_first(parts: ModelPieces, order: Sequence[int]) -> list[int]:
    """Order pieces so that each comes from the bucket that is then the largest.

    A bucket is pulled after it has been pushed. So a step that only communicates waits for the largest bucket
    twice.

    Args:
        parts: Sizes and buckets of the pieces.
        order: All pieces; keeps its order among the pieces of one bucket.

    Returns:
        The numbers of all pieces.
    """
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
    """Choose the pieces to defer, which shorten the predicted step most.

    Messages that backward hides are not deferred.

    Args:
        parts: Sizes and buckets of the pieces.
        orders: Orders in which to defer pieces. The first is taken unless another makes steps shorter.
        times: When gradients are ready, and when computation ends, in seconds.
        rate: Cost of messages on the network.
        budget: The most bytes to defer.
        update_seconds_per_byte: Cost of the tentative step for each deferred byte.

    Returns:
        The pieces' numbers, sorted. Empty if deferring shortens the step by less than `WORTHWHILE`.
    """
    plain = step_seconds(times, 0.0, parts.left(()), rate)
    if plain <= times.end * (1 + WORTHWHILE):
        return []
    if rate.per_byte > 0:
        # Stage 2 has to end within the computation of one step.
        budget = min(budget, times.end / rate.per_byte)
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
    """Return the fewest pieces within *budget* that keep the step as short as all that fit."""
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
    """Return the first pieces of *order* that fit into *budget* bytes.

    A piece that does not fit is skipped, and smaller ones after it are still taken.
    """
    taken = []
    for piece in order:
        if parts.sizes[piece] <= budget:
            budget -= parts.sizes[piece]
            taken.append(piece)
    return taken


# ---- decisions ----


def reports_trial(step: int, interval: int) -> bool:
    """Return whether workers report the step times of a trial to the servers in *step*.

    A decision after step i takes effect in step i + 2, which still waits for the messages of step i + 1. So
    steps i + 3 to i + 2 + `TRIAL_STEPS` count, and the step after them reports.
    """
    return step % interval == TRIAL_STEPS + 3


class StepSummary(NamedTuple):
    """Summarizes the steps since the deferred pieces last changed, over all workers that reported.

    Attributes:
        times: Ready times of the buckets; None if they are unknown, or workers have different buckets.
        rate: Cost of messages on the network.
        whole: Seconds of a step; 0 with fewer than `TRIAL_STEPS` steps.
        workers: The active workers.
    """

    times: StepTimes | None
    rate: Rate
    whole: float
    workers: tuple[int, ...]


class Trial:
    """Judges from measured steps whether deferring shortens them.

    It stores the step time without deferred pieces, and the outcome of earlier trials.
    """

    def __init__(self) -> None:
        self._plain: StepSummary | None = None
        self._began = False  # something is deferred since the last decision only
        self._rest, self._patience = 0, PATIENCE

    def rests(self, deferring: bool, seen: StepSummary) -> bool:
        """Return whether the next interval must run without deferred pieces.

        That is so after a failed trial, and while the step time of these workers without deferred pieces is
        unknown.

        Args:
            deferring: Whether pieces were deferred in the last interval.
            seen: The steps of the last interval.
        """
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
        """Return whether a trial ends after `TRIAL_STEPS` steps, since they are `MUCH_LONGER`."""
        plain = self._plain
        if not deferring or not self._began or plain is None:
            return False
        if plain.workers != seen.workers or seen.whole <= plain.whole * MUCH_LONGER:
            return False
        # The network may have changed, or the processors are busy. Both stop the trial. If the
        # network seems to have changed, the next interval measures it and does not count as a rest.
        self._fails(plain, seen)
        return True

    def _fails(self, plain: StepSummary, seen: StepSummary) -> bool:
        """Start a rest, unless the network has changed since the steps without deferred pieces."""
        before, now = plain.rate.per_byte, seen.rate.per_byte
        fails = before / OTHER_NETWORK < now < before * OTHER_NETWORK
        if fails:
            self._rest, self._patience = self._patience, 2 * self._patience
        return fails


class DeferralPolicy:
    """Decides which pieces are deferred, from measurements, importance and earlier trials.

    Attributes:
        importance: The ratings of the pieces.
    """

    def __init__(self, options: OSPOptions, pulls: bool) -> None:
        self._options, self._pulls, self._trial = options, pulls, Trial()
        self.importance = options.importance_class()

    def decide(
        self,
        parts: ModelPieces,
        deferred: list[int],
        reports: Mapping[int, WorkerReport],
        step: int,
        update: float = 0.0,
    ) -> list[int]:
        """Decide which pieces to defer from now on.

        A *step* inside an interval only checks whether a trial has to end early.

        Args:
            parts: Sizes and buckets of the pieces.
            deferred: The pieces deferred until now.
            reports: The measurements of each worker, by its rank.
            step: The number of the step.
            update: Seconds per byte of a tentative step.

        Returns:
            The pieces' numbers, sorted.
        """
        options, seen = self._options, self._summary(parts, reports)
        if step % options.interval:
            return [] if self._trial.stops_early(bool(deferred), seen) else deferred
        order = self.order(parts, step)
        growth = min(one.part for one in reports.values())
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
        """Return the order in which pieces are deferred; without overlap, by importance only."""
        order = self.importance.order(len(parts.sizes), seed=step)
        if self._options.order == "time" and self._options.overlap:
            order.sort(key=lambda piece: -parts.buckets[piece])  # stable
        return order

    def _summary(
        self, parts: ModelPieces, reports: Mapping[int, WorkerReport]
    ) -> StepSummary:
        """Summarize reports: the slowest worker sets the step time, and a server's share scales the rate."""
        every = list(reports.values())
        times = None
        if every[0].ready and len({len(one.ready) for one in every}) == 1:
            ready = map(max, zip(*(one.ready for one in every), strict=True))
            times = StepTimes(list(ready), max(one.end for one in every))
        whole, mine = sum(every[0].bytes), sum(parts.sizes)
        per_byte = max(one.per_byte for one in every) * whole / max(1, mine)
        rate = Rate(max(one.start_up for one in every), per_byte, self._pulls)
        steps = [one.whole for one in every]
        return StepSummary(
            times, rate, max(steps) if all(steps) else 0.0, tuple(reports)
        )
