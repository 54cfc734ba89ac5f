"""How much may wait: more and more of what fits, as training settles down."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

EPOCHS = 10
"""The loss is averaged over this part of the ramp."""


class Growth:
    """The part of the budget that may be used: 0 at first, 1 in the end.

    ``"loss"``: 1 - L/L0, where L0 is the mean loss of the first *ramp* / `EPOCHS` steps,
    and L the least mean since, over as many. ``"linear"``: in *ramp* steps. Early
    gradients are large, and differ between workers; late ones can wait. Without a loss
    the linear one is used, and *say* is told so once.
    """

    def __init__(self, kind: str, ramp: int, say: Callable[[str], None]) -> None:
        self._kind, self._ramp, self._say = kind, ramp, say
        self._epoch = max(1, ramp // EPOCHS)
        self._steps = 0
        self._losses: list[float] = []
        self._first = self._least = math.nan

    def step(self, loss: float | None) -> None:
        """A step has ended, with this *loss* if the script tells it."""
        self._steps += 1
        if self._kind == "loss" and loss is not None and math.isfinite(loss):
            self._losses.append(loss)
        if self._kind != "loss" or self._steps % self._epoch:
            return
        begins = math.isnan(self._first)
        if self._losses:
            mean = statistics.fmean(self._losses)
            self._losses.clear()
            self._first = mean if begins else self._first
            self._least = mean if begins else min(self._least, mean)
            why = f"the first losses' mean is {mean:.3g}: how far it has fallen cannot be told"
        else:
            why = "no step has told a finite loss: step(loss=loss) or paceline.log(loss=loss)"
        if begins and not self._first > 0:
            self._kind = "linear"
            self._say(
                f"osp: budget=loss, and {why}. The budget grows over {self._ramp} steps instead"
            )

    @property
    def part(self) -> float:
        """Between 0 and 1."""
        if self._kind == "constant":
            return 1.0
        if self._kind == "linear":
            return min(1.0, self._steps / self._ramp)
        if math.isnan(self._first):
            return 0.0
        return min(1.0, max(0.0, 1 - self._least / self._first))
