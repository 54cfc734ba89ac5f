"""How much may wait: more and more of what fits, as training settles down."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

GrowthKind = Literal["loss", "linear", "constant"]

EPOCHS = 10
"""The loss is averaged over this part of the ramp."""


class Growth:
    """The part of the budget that may be used: 0 at first, 1 in the end.

    ``"loss"``: 1 - L/L0, where L0 is the mean loss of the first *ramp* / `EPOCHS` steps,
    and L the least mean since, over as many. ``"linear"``: in *ramp* steps. Early
    gradients are large, and differ between workers; late ones can wait. Without a loss
    the linear one is used, and *say* is told so once.
    """

    def __init__(self, kind: GrowthKind, ramp: int, say: Callable[[str], None]) -> None:
        self._kind, self._ramp, self._say = kind, ramp, say
        self._epoch = max(1, ramp // EPOCHS)
        self._steps = 0
        self._losses: list[float] = []
        self._first = self._least = math.nan

    def step(self, loss: float | None) -> None:
        """A step has ended, with this *loss* if the script tells it."""
        self._steps += 1
        if self._kind != "loss":
            return
        if loss is not None and math.isfinite(loss):
            self._losses.append(loss)
        if self._steps % self._epoch:
            return
        if not self._losses and math.isnan(self._first):
            self._say(
                "osp: budget=loss, and no step has told a finite loss: step(loss=loss) or "
                f"paceline.log(loss=loss). The budget grows over {self._ramp} steps instead"
            )
            self._kind = "linear"
        elif self._losses:
            mean = math.fsum(self._losses) / len(self._losses)
            self._losses.clear()
            if math.isnan(self._first):
                self._first = self._least = mean
                if mean <= 0:
                    self._say(
                        f"osp: budget=loss, and the first losses' mean is {mean:.3g}: how "
                        "far it has fallen cannot be told. The budget grows over "
                        f"{self._ramp} steps instead"
                    )
                    self._kind = "linear"
            self._least = min(self._least, mean)

    @property
    def part(self) -> float:
        """Between 0 and 1."""
        if self._kind == "constant":
            return 1.0
        if self._kind == "linear":
            return min(1.0, self._steps / self._ramp)
        if math.isnan(self._first) or self._first <= 0:
            return 0.0
        return min(1.0, max(0.0, 1 - self._least / self._first))
