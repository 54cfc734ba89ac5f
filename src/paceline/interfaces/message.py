"""In which messages a step's gradients travel, where the next forward pass waits for them.

`paceline.bucketing.tuner` makes the plan; methods that go past backward follow it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Half = Literal["all", "scatter", "gather"]
"""What a message does: a whole mean, or the first or second half of forming it."""


@dataclass(frozen=True)
class Message:
    """The part from *start* to *stop* of the buffer of bucket number *bucket*, as fractions of
    it: 0 and 1 are the whole."""

    bucket: int
    start: float = 0.0
    stop: float = 1.0
    half: Half = "all"
