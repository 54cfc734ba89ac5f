"""When a method communicates."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import UsageError


@dataclass(frozen=True)
class Rhythm:
    """A round is a step in which workers communicate; there is one every so many steps.
    What training itself sends (buffers, the planner's trials, who still trains) goes with
    rounds: steps between two rounds send nothing.

    *every*: steps from one round to the next; 0 means that workers never meet by
    themselves, but at servers. *groups*: a round is of groups of workers. All of them
    agree on who still trains only every `AGREE_EVERY` rounds then.

    Examples: ``Rhythm()`` is bsp's; ``Rhythm(every=8)`` averages parameters after every
    eighth step; ``Rhythm(groups=True)`` averages within other groups in each step.
    """

    every: int = 1
    groups: bool = False

    def __post_init__(self) -> None:
        if self.every < 0:
            raise UsageError(
                f"a rhythm of every={self.every} steps: expected 1 or more, or 0 for "
                "workers that meet at servers alone"
            )

    def meets(self, step: int) -> bool:
        """Whether step number *step*, from 0, is one of a round."""
        return self.every == 0 or (step + 1) % self.every == 0

    @property
    def is_every_step(self) -> bool:
        """Whether all workers meet in every step."""
        return self.every == 1 and not self.groups

    @property
    def lets_models_differ(self) -> bool:
        """Whether workers' models may differ between two steps."""
        return self.every > 1 or self.groups


EVERY_STEP = Rhythm()
ON_SERVERS = Rhythm(every=0)

AGREE_EVERY = 16
"""Rounds of groups from one agreement of all workers to the next: an agreement takes a
small message and waits for nobody, since its answer is used at the next one."""
