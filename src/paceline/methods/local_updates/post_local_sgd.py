"""Post-local SGD: means in each step at first, and in every 16th later.

Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local SGD" (ICLR 2020). Early
steps change most, and there workers that go apart lose accuracy; later, local steps even
help to generalize.

Parameters are averaged also while that is done in each step, with momenta that stay each
worker's own, as in the authors' code: under SGD that is bsp. Theirs begins to average rarely
at the first decay of the learning rate (epoch 150 of 300): give `each_until` as that step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.interfaces import MethodSummary
from paceline.methods.local_updates.method import LocalUpdates


@dataclass(frozen=True, kw_only=True)
class PostLocalSGD(LocalUpdates):
    """Average the parameters in each step until one, and every so many from then on."""

    name: ClassVar[str] = "post-local-sgd"
    summary: ClassVar[MethodSummary] = MethodSummary(
        waits_for=(
            "every worker, in each of the first `each_until` steps, then in every "
            "`every`-th"
        ),
        sends="the parameters, as often",
        guarantees="equal models after each round",
    )
    in_the_long_run: ClassVar[Mapping[str, str]] = {"each_until": "0"}

    every: int = 16
    each_until: int = 1000

    @property
    def learns_for(self) -> int:
        """Steps until it averages as seldom as it will."""
        return self.each_until
