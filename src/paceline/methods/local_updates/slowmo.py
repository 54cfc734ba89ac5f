"""SlowMo: local SGD with a slow outer momentum.

Wang, Tantia, Ballas and Rabbat, "SlowMo: improving communication-efficient distributed SGD
with slow momentum" (ICLR 2020), algorithm 1 over local SGD. At a constant learning rate it is
heavy ball on what each round has moved, and so is BMUF (Chen and Huo, ICASSP 2016), whose
momentum is 1-1/n.

    D = mean(x - x_i);   u <- b*u + D/lr;   x <- x - eta*lr*u

The outer momentum u is in units of the learning rate lr of the moment (of each parameter
group), so it fades as lr falls, which is often what one wants: `rescale=false` is without.
Where lr is 0 there is no such unit, and the plain mean is taken. Defaults are those of the
authors' implementation in fairscale: 48 steps, b = 0.5, eta = 1 (their alpha).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.interfaces import MethodSummary
from paceline.methods.local_updates.method import LocalUpdates


@dataclass(frozen=True, kw_only=True)
class SlowMo(LocalUpdates):
    """After every 48th step, move by a momentum of the mean changes."""

    name: ClassVar[str] = "slowmo"
    summary: ClassVar[MethodSummary] = MethodSummary(
        waits_for="every worker, in every `every`-th step",
        sends="what the parameters have moved, once in `every` steps",
        guarantees="equal models after each round",
    )

    every: int = 48
    outer_momentum: float = 0.5
    rescale: bool = True
