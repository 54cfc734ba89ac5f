"""Whether deferring pays: what the times promise is held against what comes.

Where processors carry the messages, as between processes of one machine, nothing hides behind
computing, and steps are longer with something deferred than without. So the first interval
with something deferred is a trial. It ends after `LOOK` steps if these are much longer, and
after the interval if its steps are no shorter. After a trial that fails nothing is deferred for
some decisions, and for twice as many after the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.methods.osp.choice import VISIBLE, Rate, StepTimes

LOOK = 5
"""The steps after which a trial is first looked at. Two of five may be outliers without moving
the median. More steps would make a trial that fails cost more."""

LONGER = 1.1
"""A trial fails at once if the median of `LOOK` steps is longer by this factor. Where one step
in three is off by a tenth, that median is off by a twentieth, so that a tenth is seldom chance."""

OTHER = 2.0
"""Steps with a network that is faster or slower by this factor are not comparable."""

PATIENCE = 10
"""Decisions for which nothing is deferred after the first trial that fails."""


def looks_in(step: int, interval: int) -> bool:
    """Over servers: whether workers report in *step* how a trial goes. What was decided after
    step i is deferred from step i + 2 on. Step i + 2 still waits for what its predecessor
    sent, so steps i + 3 to i + 2 + `LOOK` count, and the one after them reports."""
    return step % interval == LOOK + 3


@dataclass(frozen=True)
class Seen:
    """The steps since what is deferred has last changed: *times* (None: workers tell none, or
    not of the same buckets), *rate* of the network, *whole* seconds of a step (0: fewer than
    `LOOK` steps), the *workers* that trained, *update* seconds per byte of a tentative step."""

    times: StepTimes | None
    rate: Rate
    whole: float
    workers: tuple[int, ...]
    update: float = 0.0


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
            if seen.whole > 0:
                self._plain = seen
            self._rest = max(0, self._rest - 1)
            return self._rest > 0 or self._plain is None
        plain = self._plain
        if plain is None or plain.workers != seen.workers:
            return True
        if seen.whole <= plain.whole * (1 - VISIBLE) or not _alike(plain, seen):
            return False
        self._fail()
        return True

    def stops_early(self, deferring: bool, seen: Seen) -> bool:
        """Whether a trial ends now, after `LOOK` steps: they are much longer than without."""
        plain = self._plain
        if not deferring or not self._began:
            return False
        if plain is None or plain.workers != seen.workers:
            return False
        if seen.whole <= plain.whole * LONGER:
            return False
        # A network that seems to be slower as well may be, or the processors are busy: the
        # next interval shows it, and is no rest.
        if _alike(plain, seen):
            self._fail()
        return True

    def _fail(self) -> None:
        self._rest, self._patience = self._patience, 2 * self._patience


def _alike(plain: Seen, seen: Seen) -> bool:
    """Whether steps can be compared, as far as the network goes."""
    before = plain.rate.per_byte
    return before / OTHER < seen.rate.per_byte < before * OTHER
