"""Whether deferring pays: what the times promise is held against what comes.

Where processors carry the messages, as between processes of one machine, nothing hides
behind computing, whatever the times say: steps are longer with something deferred than
without. So the first interval with something deferred is a trial. `LOOK` steps of it show
whether steps have become much longer; all of it, whether they are no shorter. Either way
nothing is deferred then for some decisions, and twice as many each time that it fails.

Who decides has a `Trial`: under ``collective=native`` the worker that decides for all, over
servers each server for its part.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.methods.osp.choice import VISIBLE
from paceline.methods.osp.options import INTERVAL

LOOK = 5
"""So many steps are the least that tell how long one takes: their median stands as long as
two of them are no steps like the others, and it strays about half as far as one step does.
More would make a trial that fails cost more."""

LONGER = 1.1
"""Where the median of `LOOK` steps is by this factor longer, a trial fails at once. On machines
where one step in three is off by a tenth that median is off by a twentieth, so a tenth is
seldom chance; and what is missed costs less than a tenth, until the interval ends."""

OTHER = 2.0
"""By this factor the network must have changed for steps of before to tell nothing."""

PATIENCE = 10
"""Decisions for which nothing is deferred after the first trial that fails."""


def looks_in(step: int) -> bool:
    """Over servers: whether workers tell in *step* what a trial has shown by then. What was
    decided after step i is deferred from step i + 2 on; that one, which still waits for what
    its predecessor sent, does not count, and they tell it in the step after the last."""
    return step % INTERVAL == LOOK + 3


@dataclass(frozen=True)
class Seen:
    """Steps since what is deferred has last changed: *whole*, how many seconds one takes,
    or 0 if they were fewer than `LOOK`; *per_byte*, what the network took then; and
    *workers*, who trained."""

    whole: float
    per_byte: float
    workers: tuple[int, ...]


class Trial:
    """Remembers how long steps take with nothing deferred, and how trials have ended."""

    def __init__(self) -> None:
        self._plain: Seen | None = None
        self._began = False  # something is deferred since the last decision only
        self._rest, self._patience = 0, PATIENCE

    def rests(self, deferring: bool, seen: Seen) -> bool:
        """After an interval in which something was deferred throughout, or nothing:
        whether nothing is to be deferred in the next one, because that does not pay, or
        because it is not known what these workers' steps take without."""
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
        """After `LOOK` steps with something deferred: whether they are so much longer than
        those without that it need not be tried any further."""
        plain = self._plain
        if not deferring or not self._began:
            return False
        if plain is None or plain.workers != seen.workers:
            return False
        if seen.whole <= plain.whole * LONGER:
            return False
        # A network that seems to have become slow as well may be, or it is the same
        # processors that are busy: the next interval shows it, and is no rest.
        if _alike(plain, seen):
            self._fail()
        return True

    def _fail(self) -> None:
        self._rest, self._patience = self._patience, 2 * self._patience


def _alike(plain: Seen, seen: Seen) -> bool:
    """Whether steps can be compared, as far as the network goes."""
    return plain.per_byte / OTHER < seen.per_byte < plain.per_byte * OTHER
