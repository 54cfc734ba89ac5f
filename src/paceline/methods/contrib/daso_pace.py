"""How often DASO's nodes exchange their parameters, by what the loss does."""

from __future__ import annotations

import math
from dataclasses import dataclass

FIRST_EVERY, FIRST_DELAY = 4, 1
"""S and B when warming up is over."""
BEST_BY = 0.05
"""By so much a loss is to be below the best one, relative to it, to have improved."""
PATIENCE = 2
"""So many times in a row it may not have; once more, and it is stable."""
RESET_DELAY = 4
"""After a cycle S begins again with the most, and B with one part in so many of that."""


@dataclass
class Pace:
    """S (*every*) and B (*delay*) as they are. *best*: the least loss; *worse*: how many
    times in a row none has improved on it."""

    every: int = FIRST_EVERY
    delay: int = FIRST_DELAY
    best: float = math.inf
    worse: int = 0

    def judge(self, loss: float, most: int) -> bool:
        """Take the next mean loss; returns whether that changes S or B. *most*: the S with
        which a cycle begins."""
        if not self._is_stable(loss):
            return False
        if self.every > 1:
            # S <- S/2, B <- B - 1, one at least
            self.every //= 2
            self.delay = min(max(1, self.delay - 1), self.every)
        else:
            self.every, self.delay = most, min(most, max(1, most // RESET_DELAY))
        return True

    def _is_stable(self, loss: float) -> bool:
        if loss < self.best - BEST_BY * abs(self.best) or self.best == math.inf:
            self.best, self.worse = loss, 0
            return False
        self.worse += 1
        if self.worse <= PATIENCE:
            return False
        self.worse = 0
        return True
