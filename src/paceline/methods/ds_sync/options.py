"""DS-Sync's hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class DSSyncOptions:
    """What users choose.

    *shuffle*: how groups change: see `plan.make_plan`. *size*: workers in a group; *seed*: of
    the groups inside racks. *cross_rack_every*: under ``topology`` racks with scarce uplinks meet in
    every so-manieth phase. *overlap*: what the means travel beside: nothing; the next forward
    pass (the same numbers); or all of the next step up to its update, whose gradients then
    belong to parameters that were not averaged yet. *swa_from*: from this step on, and every *swa_every* steps, weights are averaged over
    time, too (-1: never). *adjust_every*: every so many steps groups are chosen anew from the
    times they took (0: never); two runs may then differ, as their times do.
    """

    shuffle: Literal["auto", "digits", "topology"] = "auto"
    size: int = 2
    seed: int = 0
    cross_rack_every: int = 1
    overlap: Literal["none", "forward", "step"] = "none"
    swa_from: int = -1
    swa_every: int = 1
    adjust_every: int = 0

    def __post_init__(self) -> None:
        if self.size < 2:
            raise UsageError(
                f"ds-sync:size={self.size}: expected groups of 2 or more workers; one alone "
                "averages with nobody"
            )
        if self.swa_from < -1:
            raise UsageError(
                f"ds-sync:swa_from={self.swa_from}: expected a step, 0 or more, or -1 for "
                "no average over time"
            )
        if self.swa_every < 1:
            raise UsageError(
                f"ds-sync:swa_every={self.swa_every}: expected 1 or more steps"
            )
        if self.swa_every > 1 and self.swa_from < 0:
            raise UsageError(
                f"ds-sync:swa_every={self.swa_every}: expected swa_from with it, the step "
                "from which on weights are averaged over time"
            )
        if self.cross_rack_every < 1:
            raise UsageError(
                f"ds-sync:cross_rack_every={self.cross_rack_every}: expected 1 or more phases"
            )
        if self.cross_rack_every > 1 and self.shuffle not in ("auto", "topology"):
            raise UsageError(
                f"ds-sync:cross_rack_every={self.cross_rack_every},shuffle={self.shuffle}: groups that "
                "were asked for by name know of no racks; use shuffle=topology, or auto"
            )
        if self.adjust_every < 0:
            raise UsageError(
                f"ds-sync:adjust_every={self.adjust_every}: expected steps from one adjustment to the "
                "next, or 0 for none"
            )
        if self.adjust_every and self.shuffle not in ("auto", "topology"):
            raise UsageError(
                f"ds-sync:adjust_every={self.adjust_every},shuffle={self.shuffle}: groups that were asked "
                "for by name stay as they are; to have them adjusted use shuffle=auto, or "
                "topology"
            )

    def snapshot(self, step: int) -> bool:
        """Whether the weights that *step* ends with are counted by SWA."""
        since = step - self.swa_from
        return self.swa_from >= 0 and since >= 0 and since % self.swa_every == 0
