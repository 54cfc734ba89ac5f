"""When a method communicates."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import UsageError


@dataclass(frozen=True)
class Rounds:
    """A round is a step in which workers communicate; there is one every so many steps.
    What training itself sends (buffers, the planner's trials, who still trains) goes with
    rounds: steps between two rounds send nothing.

    *every*: steps from one round to the next; 0 means that workers never meet by
    themselves, but at servers. *each_until*: before that step there is a round in each,
    and *every* counts from there. *groups*: a round is of groups of workers.
    *after_update*: rounds are held once the optimizer has stepped, also where they are in
    each step: workers' optimizers differ, and so may models between two rounds. It follows
    from each of the others.

    *agree_every*: all workers say who still trains every so many rounds, and use what was
    said at the next such round, so that nobody waits. By default groups do so every
    `AGREE_EVERY` rounds, and all others ask in each round, which waits for all.

    Examples: ``Rounds()`` is bsp's; ``Rounds(every=8)`` averages parameters after every
    eighth step; ``Rounds(groups=True)`` averages within other groups in each step;
    ``Rounds(every=8, agree_every=1)`` begins something after every eighth step whose result
    is waited for later.
    """

    every: int = 1
    groups: bool = False
    each_until: int = 0
    after_update: bool = False
    agree_every: int | None = None

    def __post_init__(self) -> None:
        if self.every < 0:
            raise UsageError(
                f"rounds of every={self.every} steps: expected 1 or more, or 0 for "
                "workers that meet at servers alone"
            )
        if self.each_until < 0 or (self.agree_every or 1) < 1:
            raise UsageError(
                f"rounds with each_until={self.each_until} and agree_every="
                f"{self.agree_every}: expected a step, 0 or more, and rounds, 1 or more"
            )
        if self.groups and self.agree_every is None:
            object.__setattr__(self, "agree_every", AGREE_EVERY)
        together = self.every <= 1 and not self.each_until
        if not together or self.groups or self.agree_every is not None:
            object.__setattr__(self, "after_update", True)

    def meets(self, step: int) -> bool:
        """Whether step number *step*, from 0, is one of a round."""
        return self.every == 0 or self.next_round(step) == step

    def next_round(self, step: int) -> int:
        """The first step of a round, at or after *step*."""
        if step < self.each_until or not self.every:
            return step
        return step + self.every - 1 - (step - self.each_until) % self.every

    @property
    def is_every_step(self) -> bool:
        """Whether all workers meet in every step, before the update."""
        return self.every == 1 and not self.after_update

    @property
    def models_may_differ(self) -> bool:
        """Whether workers' models, or their optimizers, may differ between two steps."""
        return self.after_update

    @property
    def is_nonblocking(self) -> bool:
        """Whether a round begins without knowing who takes part in it."""
        return self.agree_every is not None


AGREE_EVERY = 16
"""Rounds of groups from one agreement of all workers to the next: an agreement takes a
small message and waits for nobody, since its answer is used at the next one."""

EVERY_STEP = Rounds()
ON_SERVERS = Rounds(every=0)
