"""What a method, or a code, promises of gradients: its class."""

from __future__ import annotations

from typing import Literal, get_args

Consistency = Literal["exact", "delayed", "lossy", "local", "asynchronous"]
"""What becomes of a gradient, from the strongest promise to the weakest. *exact*: DDP's result,
to rounding. *delayed*: every gradient is applied once, at most a step late. *lossy*: what codes leave
out is sent later, or is small. *local*: workers' parameters differ between rounds.
*asynchronous*: nobody bounds what is late, or what is left out, for all."""

CONSISTENCIES: tuple[Consistency, ...] = get_args(Consistency)
"""From the strongest promise to the weakest."""


def weaker(first: Consistency, second: Consistency) -> Consistency:
    """What is promised where two things are done to a gradient: the weaker of both."""
    return max(first, second, key=CONSISTENCIES.index)
