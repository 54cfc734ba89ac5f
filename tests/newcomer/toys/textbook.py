"""Bulk-synchronous training as textbooks have it: gradients are averaged after backward."""

from dataclasses import dataclass
from typing import ClassVar

from paceline.interfaces import Clips, GradientSeen, Run, UpdatesOn
from paceline.methods.bsp import BSP, BSPState


@dataclass(frozen=True, kw_only=True)
class Textbook(BSP):
    """bsp without overlap, under a name of its own."""

    name: ClassVar[str] = "textbook"
    updates_on: ClassVar[UpdatesOn] = "worker"
    gradient_seen_by_user: ClassVar[GradientSeen] = "mean"
    clips: ClassVar[Clips] = "mean"

    overlap: bool = False

    def init(self, run: Run) -> BSPState:
        return super().init(run)
