"""The one program of all local updates: what its presets differ in are its options.

round:  H inner steps of each worker;  D_i = x - x_i;  D = sum w_i D_i / sum w_i
outer:  u <- b*u + D;   x <- x - eta*(D + b*u) (Nesterov), or x - eta*u
start:  x_i <- x;  or, tau steps late,  x_i <- alpha*x_i + (1 - alpha)*x
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from paceline.interfaces import (
    Clips,
    Compressor,
    Consistency,
    GradientSeen,
    Rounds,
    Run,
    UpdatesOn,
)
from paceline.methods.local_updates.groups import own_group
from paceline.methods.local_updates.optimizer_state import require_moments
from paceline.methods.local_updates.options import Options
from paceline.methods.local_updates.worker import LocalWorker


@dataclass(frozen=True, kw_only=True)
class LocalUpdates(Options):
    """Workers step by themselves, and average what they have become every so many steps."""

    consistency: ClassVar[Consistency] = "local"
    updates_on: ClassVar[UpdatesOn] = "worker"
    visible_gradient: ClassVar[GradientSeen] = "local"
    clips: ClassVar[Clips] = "own"
    averages_buffers: ClassVar[bool] = True

    @property
    def rounds(self) -> Rounds:
        if self.has_groups:
            return Rounds(
                every=self.group_every,
                groups=True,
                agree_every=self.every // self.group_every,
            )
        if self.delay or self.fragments > 1:
            return Rounds(every=self.turn, agree_every=1)
        return Rounds(every=self.turn, each_until=self.each_until, after_update=True)

    @property
    def consolidates_together(self) -> bool:
        """Without an anchor the result is the mean of all models."""
        return not self.keeps_anchor

    def compressed_by(self, compressor: Compressor) -> Self:
        """With differences, which alone are compressed."""
        return self.with_differences()

    def start(self, run: Run) -> LocalWorker:
        if self.state == "average":
            require_moments(self, run)
        run.set_period(self.every)
        sentence = self.about_gain()
        if sentence is not None:
            run.report(sentence)
        return LocalWorker(run, self, own_group(self, run))
