"""What there is to choose in a program of local updates, and what goes with what."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from paceline.errors import UsageError
from paceline.methods.local_updates.groups import check_group

OptimizerState = Literal["local", "average"]

SHORT_ROUNDS = 50
"""Rounds of fewer steps are short."""
GAIN_OF_SHORT, GAIN_OF_LONG = 3.0, 7.0
"""The most that eta/(1-b) should be for short rounds, and for those of hundreds of steps."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The fields that all programs of local updates have, each with other defaults.

    *every* (H): inner steps from one mean of all workers to the next. *each_until*: until
    this step, a mean after each one. *outer_learning_rate* (eta), *outer_momentum* (b) and
    *nesterov*: the outer optimizer, whose gradient is what the inner steps have moved; with
    1 and 0 the mean is assigned as it is, and nothing is kept. *rescale*: the outer momentum
    is kept in units of the inner learning rate, and decays with that. *group*: who averages
    every *group_every* steps in between: ``"rack"``, ``"host"``, or so many workers, in order
    of ranks; ``"all"``: nobody does. *fragments* (P): so many parts of the model travel by turns, each every H steps.
    *delay* (tau): a mean is used so many steps after it was sent. *keep_local* (alpha): how much
    of its own parameters a worker keeps then. *state*: what the inner optimizer keeps
    (momentum, Adam's moments) stays each worker's own, or is averaged in each round, too.
    """

    name: ClassVar[str] = "local-updates"
    differences: ClassVar[bool] = False
    """Whether workers send what parameters have moved since the last mean of all, and not the
    parameters. Compression sets it. It keeps one more copy of the model."""

    every: int = 8
    each_until: int = 0
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0
    nesterov: bool = False
    rescale: bool = False
    group: str = "all"
    group_every: int = 1
    fragments: int = 1
    delay: int = 0
    keep_local: float = 0.0
    state: OptimizerState = "local"

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_outer()
        self._check_fragments()
        self._check_groups()

    def with_differences(self) -> Self:
        """The same, with *differences*."""
        changed = copy.copy(self)
        object.__setattr__(changed, "differences", True)
        return changed

    @property
    def keeps_anchor(self) -> bool:
        """Whether workers keep the parameters with which a round has begun: else a round's
        result is the mean itself."""
        late = self.keep_local > 0 or self.delay > 0
        return self.is_outer or late or self.differences

    @property
    def is_outer(self) -> bool:
        """Whether there is an outer optimizer, and not the plain mean."""
        return self.outer_momentum != 0 or self.outer_learning_rate != 1

    @property
    def has_groups(self) -> bool:
        """Whether groups of workers average between the means of all."""
        return self.group not in ("", "all")

    @property
    def turn(self) -> int:
        """Steps from one fragment's departure to the next one's."""
        return self.every // self.fragments

    @property
    def gain(self) -> float:
        """How far a lasting change per round moves the model, in units of that change."""
        return self.outer_learning_rate / (1 - self.outer_momentum)

    @property
    def learns_for(self) -> int:
        """Steps until somebody waits where it will always wait: nobody does for a mean that is used later,
        before the first one is used."""
        return self.turn + self.delay if self.delay else 0

    def about_gain(self) -> str | None:
        """A sentence on the outer optimizer; None where there is none."""
        if not self.is_outer:
            return None
        first = 1 + (self.outer_momentum if self.nesterov else 0.0)
        sentence = (
            f"{self.name}: outer learning rate {self.outer_learning_rate:g} and momentum "
            f"{self.outer_momentum:g} move the model {first * self.outer_learning_rate:.3g} "
            f"times as far as plain averaging in the first round, and {self.gain:.3g} "
            "times, eta/(1-b), where workers go on in one direction"
        )
        most = GAIN_OF_SHORT if self.every < SHORT_ROUNDS else GAIN_OF_LONG
        if self.gain <= most + 1e-9:
            return sentence
        fitting = most * (1 - self.outer_momentum)
        return (
            f"{sentence}. That is much for rounds of {self.every} steps: it overshoots when "
            f"the learning rate falls; outer_learning_rate={fitting:.2g} would make it "
            f"{most:g}"
        )

    # ---- what goes with what ----

    def _check_counts(self) -> None:
        for key in ("every", "group_every", "fragments"):
            if getattr(self, key) < 1:
                raise self._wrong(key, "expected 1 or more")
        for key in ("each_until", "delay"):
            if getattr(self, key) < 0:
                raise self._wrong(key, "expected 0 or more steps")

    def _check_outer(self) -> None:
        if not 0 <= self.outer_learning_rate < float("inf"):
            raise self._wrong("outer_learning_rate", "expected 0 or more")
        if not 0 <= self.outer_momentum < 1:
            raise self._wrong(
                "outer_momentum",
                "expected 0 or more, and less than 1: from 1 on it only grows",
            )
        if self.nesterov and not self.outer_momentum:
            raise self._wrong("nesterov", "expected an outer_momentum above 0 with it")
        if self.rescale and not self.outer_momentum:
            raise self._wrong("rescale", "expected an outer_momentum above 0 with it")

    def _check_fragments(self) -> None:
        if self.every % self.fragments:
            raise self._wrong(
                "fragments",
                f"expected a divisor of every={self.every}: each fragment travels once "
                "in so many steps, and all at even distances",
            )
        if self.delay >= self.turn and self.delay:
            raise self._wrong(
                "delay",
                f"expected less than {self.turn} steps, every/fragments: then the next "
                f"fragment leaves. Take delay={self.turn - 1}, fewer fragments or longer "
                "rounds",
            )
        if not 0 <= self.keep_local <= 1:
            raise self._wrong(
                "keep_local", "expected 0 (the mean alone) to 1 (own alone)"
            )
        if self.delay and self.state == "average":
            raise self._wrong(
                "state",
                f"with delay={self.delay}: moments that come late would undo the steps "
                "since; expected state=local, or no delay",
            )
        if self.each_until and (self.fragments > 1 or self.delay or self.has_groups):
            raise self._wrong(
                "each_until", "expected neither fragments, nor a delay or a group"
            )

    def _check_groups(self) -> None:
        if not self.has_groups:
            if self.group_every != 1:
                raise self._wrong("group_every", "expected a group with it")
            return
        if self.fragments > 1 or self.delay:
            raise self._wrong("group", "expected neither fragments nor a delay")
        check_group(self)
        if self.every % self.group_every:
            raise self._wrong(
                "group_every",
                f"expected a divisor of every={self.every}: a mean of all workers is "
                "also one of each group",
            )

    def _wrong(self, key: str, expected: str) -> UsageError:
        return UsageError(f"{self.name}:{key}={getattr(self, key)}: {expected}")
