"""What is deferred: decided every few steps, by whoever decides for all workers.

One worker decides (`all_reduce`), or each server for its part of the model (`discipline`), and tells
the others: workers that each decided by their own arithmetic and clock could disagree in a last
bit, and wait for messages that never come.

What the times promise is held against what comes. Where processors carry the messages, as
between processes of one machine, nothing hides behind computing, and deferring makes steps
longer. So the first interval with something deferred is a trial. It ends after `LOOK` steps if
these are much longer, and with its interval if steps are no shorter. After a trial that fails
nothing is deferred for some decisions, and for twice as many each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from paceline.methods.osp import deferral
from paceline.methods.osp.deferral import Parts, Rate, StepTimes
from paceline.methods.osp.options import OSPOptions
from paceline.methods.osp.reports import Measured

LOOK = 5
"""The steps after which a trial is first looked at. Two of five may be outliers without moving
the median; more steps would make a trial that fails cost more."""

LONGER = 1.1
"""A trial fails at once if the median of `LOOK` steps is longer by this factor. Where one step
in three is off by a tenth, that median is off by a twentieth, so that a tenth is seldom chance."""

OTHER = 2.0
"""Steps over a network that is faster or slower by this factor cannot be compared."""

PATIENCE = 10
"""Decisions for which nothing is deferred after the first trial that fails."""


def looks_in(step: int, interval: int) -> bool:
    """Over servers: whether workers report in *step* how a trial goes. What was decided after
    step i is deferred from step i + 2 on. Step i + 2 still waits for what its predecessor
    sent, so steps i + 3 to i + 2 + `LOOK` count, and the one after them reports."""
    return step % interval == LOOK + 3


class Seen(NamedTuple):
    """The steps since what is deferred has last changed: *times* (None: not known, or not of
    the same buckets), *rate* of the network, *whole* seconds of a step (0: fewer than `LOOK`
    steps), and the *workers* that trained."""

    times: StepTimes | None
    rate: Rate
    whole: float
    workers: tuple[int, ...]


class Trial:
    """Remembers how long steps take with nothing deferred, and how trials have ended."""

    def __init__(self) -> None:
        self._plain: Seen | None = None
        self._began = False  # something is deferred since the last decision only
        self._rest, self._patience = 0, PATIENCE

    def rests(self, deferring: bool, seen: Seen) -> bool:
        """Whether nothing is to be deferred in the next interval, as *seen* in the last one:
        because deferring does not pay, or because these workers' steps without are unknown."""
        self._began = not deferring
        if not deferring:
            self._plain = seen if seen.whole > 0 else self._plain
            self._rest = max(0, self._rest - 1)
            return self._rest > 0 or self._plain is None
        if self._plain is None or self._plain.workers != seen.workers:
            return True
        longer = seen.whole > self._plain.whole * (1 - deferral.VISIBLE)
        return longer and self._fails(self._plain, seen)

    def stops_early(self, deferring: bool, seen: Seen) -> bool:
        """Whether a trial ends now, after `LOOK` steps: they are much longer than without."""
        plain = self._plain
        if not deferring or not self._began or plain is None:
            return False
        if plain.workers != seen.workers or seen.whole <= plain.whole * LONGER:
            return False
        # A network that seems to be another may be, or the processors are busy: that stops the
        # trial, too, but the next interval shows it, and is no rest.
        self._fails(plain, seen)
        return True

    def _fails(self, plain: Seen, seen: Seen) -> bool:
        """Rest, unless the network is another one than that of the steps without."""
        before, now = plain.rate.per_byte, seen.rate.per_byte
        fails = before / OTHER < now < before * OTHER
        if fails:
            self._rest, self._patience = self._patience, 2 * self._patience
        return fails


class Decision:
    """Decides, and remembers what that takes: how important pieces are, how trials ended.
    *pulls*: see `Rate`."""

    def __init__(self, options: OSPOptions, pulls: bool) -> None:
        self._options, self._pulls, self._trial = options, pulls, Trial()
        self.importance = options.importance_class()

    def decide(
        self,
        parts: Parts,
        deferred: list[int],
        told: Mapping[int, Measured],
        step: int,
        update: float = 0.0,
    ) -> list[int]:
        """The pieces to defer from now on, of those in *parts*; *deferred* was until now.
        *told*: what each worker has measured. *update*: seconds per byte of a tentative step.
        A *step* that ends no interval looks at a trial."""
        options, seen = self._options, self._seen(parts, told)
        if step % options.interval:
            return [] if self._trial.stops_early(bool(deferred), seen) else deferred
        order = self.order(parts, step)
        growth = min(one.part for one in told.values())
        budget = options.most * sum(parts.sizes) * growth
        if options.defer == "most":
            return sorted(deferral.fill(parts, order, budget))
        rests = self._trial.rests(bool(deferred), seen)
        if rests or seen.times is None or not seen.rate.per_byte:
            return []
        orders = [order]
        if self._pulls and options.order == "time":
            orders.append(deferral.levelled(parts, order))
        return deferral.choose(parts, orders, seen.times, seen.rate, budget, update)

    def order(self, parts: Parts, step: int) -> list[int]:
        """In which order pieces are deferred. Without overlap all are ready together."""
        order = self.importance.order(len(parts.sizes), seed=step)
        if self._options.order == "time" and self._options.overlap:
            order.sort(key=lambda piece: -parts.buckets[piece])  # stable
        return order

    def _seen(self, parts: Parts, told: Mapping[int, Measured]) -> Seen:
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
        return Seen(times, rate, max(steps) if all(steps) else 0.0, tuple(told))
