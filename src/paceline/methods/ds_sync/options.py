"""Hyperparameters of DS-Sync, and the checks on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class DSSyncOptions:
    """The keys of ``ds-sync``.

    Attributes:
        groups: ``topology``: groups that avoid scarce uplinks and slow hosts. ``digits``: groups for equal
            links. ``auto``: ``topology`` if the network is known and uneven, else ``digits``.
        size: Workers of a group.
        seed: Seed of the groups inside racks.
        cross_rack_every: Under ``topology``, steps from one average across scarce uplinks to the next.
        overlap: Computation that hides the averages. ``none``: no computation. ``forward``: the
            next forward pass, with the same results. ``step``: the next step up to its update; its
            gradients then come from the parameters before the average.
        swa_from: Step from which weights are also averaged over time (SWA); -1: never.
        swa_every: Steps from one model in the average over time to the next.
        adjust_every: Steps from one choice of groups by measured times to the next; 0: never.
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
                f"ds-sync:size={self.size}: expected 2 or more workers in a group"
            )
        if self.swa_from < -1:
            raise UsageError(
                f"ds-sync:swa_from={self.swa_from}: expected a step, 0 or more, or -1 for "
                "no SWA"
            )
        if self.swa_every < 1:
            raise UsageError(
                f"ds-sync:swa_every={self.swa_every}: expected 1 or more steps"
            )
        if self.swa_every > 1 and self.swa_from < 0:
            raise UsageError(
                f"ds-sync:swa_every={self.swa_every}: expected swa_from, too: the step from "
                "which weights are averaged"
            )
        if self.cross_rack_every < 1:
            raise UsageError(
                f"ds-sync:cross_rack_every={self.cross_rack_every}: expected 1 or more phases"
            )
        if self.cross_rack_every > 1 and self.groups not in ("auto", "topology"):
            raise UsageError(
                f"ds-sync:cross_rack_every={self.cross_rack_every},groups={self.groups}: only "
                "groups that follow racks have phases across them. Use groups=topology or groups=auto"
            )
        if self.adjust_every < 0:
            raise UsageError(
                f"ds-sync:adjust_every={self.adjust_every}: expected steps between two adjustments, or 0 "
                "for none"
            )
        if self.adjust_every and self.groups not in ("auto", "topology"):
            raise UsageError(
                f"ds-sync:adjust_every={self.adjust_every},groups={self.groups}: only groups that "
                "follow the network are adjusted. Use groups=topology or groups=auto"
            )

    def snapshot(self, step: int) -> bool:
        """Return whether SWA counts the weights at the end of *step*."""
        since = step - self.swa_from
        return self.swa_from >= 0 and since >= 0 and since % self.swa_every == 0
