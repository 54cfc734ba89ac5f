"""Hyperparameters of DS-Sync, and the checks on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class DSSyncOptions:
    """The keys of ``ds-sync``.

    Attributes:
        groups: The design of groups: see `divide.make_plan`.
        size: Workers of a group.
        seed: Of the groups inside racks.
        cross_rack_every: Under ``topology`` racks with scarce uplinks meet in every so many phases.
        overlap: What hides the averages. ``none``: nothing. ``forward``: the next forward pass,
            with the same numbers. ``step``: the next step up to its update. Its gradients are of
            parameters that were not averaged yet.
        swa_from: From this step on weights are averaged over time, too; -1: never.
        swa_every: Steps from one model in that average to the next.
        adjust_every: Steps from one choice of groups by measured times to the next; 0: never.
            Two runs may then differ, as their times do.
    """

    groups: Literal["auto", "digits", "topology"] = "auto"
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
        if self.cross_rack_every > 1 and self.groups not in ("auto", "topology"):
            raise UsageError(
                f"ds-sync:cross_rack_every={self.cross_rack_every},groups={self.groups}: groups that "
                "were asked for by name know of no racks; use groups=topology, or auto"
            )
        if self.adjust_every < 0:
            raise UsageError(
                f"ds-sync:adjust_every={self.adjust_every}: expected steps from one adjustment to the "
                "next, or 0 for none"
            )
        if self.adjust_every and self.groups not in ("auto", "topology"):
            raise UsageError(
                f"ds-sync:adjust_every={self.adjust_every},groups={self.groups}: groups that were asked "
                "for by name stay as they are; to have them adjusted use groups=auto, or "
                "topology"
            )

    def snapshot(self, step: int) -> bool:
        """Return whether SWA counts the weights at the end of *step*."""
        since = step - self.swa_from
        return self.swa_from >= 0 and since >= 0 and since % self.swa_every == 0
