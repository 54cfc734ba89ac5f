"""DiLoCo: hundreds of local steps, and then an outer step with Nesterov momentum.

Douillard et al., "DiLoCo: distributed low-communication training of language models" (2023),
algorithm 1: inner AdamW, whose state stays on each worker, H = 500, outer SGD with learning
rate 0.7 and Nesterov momentum 0.9.

    D = mean(x - x_i);   u <- b*u + D;   x <- x - eta*(D + b*u)

These are the paper's defaults, and no safe ones: the first round moves the model 1.33 times
as far as the mean of the workers, and a lasting direction 7 times, eta/(1-b). For rounds
of less than 50 steps choose 1 to 3; Google's MaxText ships 0.3 and runs 0.1.
Evaluations see the outer parameters x, not what the workers make of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.interfaces import MethodSummary
from paceline.methods.local_updates.method import LocalUpdates


@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalUpdates):
    """After every 500th step, an outer one of SGD with Nesterov momentum."""

    name: ClassVar[str] = "diloco"
    summary: ClassVar[MethodSummary] = MethodSummary(
        waits_for="every worker, in every `every`-th step",
        sends="what the parameters have moved, once in `every` steps",
        guarantees="equal models after each round",
    )

    every: int = 500
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
