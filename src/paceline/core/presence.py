"""Who trains, as one worker knows it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Presence:
    """*active*: this worker has data. *weight*: its part in a mean of gradients.
    *participants*: ranks that took part in the last round; *behind*: those of the others
    that have left with a step due; *somebody_trains*: whether any rank had data then. These
    three are equal on all ranks. *step_is_due*: gradients were delivered, and ``step()``
    has not followed. *unsent*: steps done since the last round."""

    size: int
    weight: float
    active: bool = True
    participants: list[int] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)
    somebody_trains: bool = True
    step_is_due: bool = False
    unsent: int = 0

    def __post_init__(self) -> None:
        self.participants = list(range(self.size))

    @property
    def takes_part(self) -> bool:
        """Whether what this worker has counts in the next round."""
        return self.active or self.unsent > 0
