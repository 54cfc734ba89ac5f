"""Hyperparameters of local updates, the checks on them, and groups of workers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch

from paceline.errors import UsageError
from paceline.interfaces import Comm, Run

OptimizerState = Literal["local", "average"]

SHORT_ROUNDS = 50
"""Rounds of fewer steps are short."""
GAIN_OF_SHORT, GAIN_OF_LONG = 3.0, 7.0
"""The most that eta/(1-b) should be for short rounds, and for those of hundreds of steps."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The hyperparameters of all local-update methods; presets have other defaults.

    Attributes:
        sync_every: H: steps from one average of all workers to the next.
        sync_each_step_until: Average after every step before this one.
        outer_learning_rate: eta of the outer optimizer, whose gradient is the change of a round. With 1 and no
            momentum the average is the model.
        outer_momentum: b of the outer optimizer.
        nesterov: Use Nesterov momentum in the outer optimizer.
        rescale: Keep the outer momentum in units of the inner learning rate, so that it decays with it.
        group: Workers that also average between two averages of all: ``rack`` or ``host`` of the cluster
            file, or a number of workers in rank order. ``all``: none do.
        group_every: Steps from one average of a group to the next.
        fragments: P: parts of the model that are sent in turn, each every H steps.
        delay: tau: steps from sending an average to applying it.
        keep_local: alpha: share of its own parameters that a worker then keeps.
        state: The inner optimizer's state stays on each worker (``local``), or is averaged in each round
            (``average``).
    """

    name: ClassVar[str] = "local-updates"
    symmetric: ClassVar[bool] = True
    differences: ClassVar[bool] = False
    """Workers send what parameters have moved since the last average of all, not the parameters.

    Compression sets it. It keeps one more copy of the model.
    """

    sync_every: int = 8
    sync_each_step_until: int = 0
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
        """Return the same options with *differences*."""
        changed = copy.copy(self)
        object.__setattr__(changed, "differences", True)
        return changed

    @property
    def keeps_anchor(self) -> bool:
        """Whether workers keep the parameters from which a round began.

        Without an anchor a round's result is the average itself.
        """
        late = self.keep_local > 0 or self.delay > 0
        return self.is_outer or late or self.differences

    @property
    def is_outer(self) -> bool:
        """Whether the outer optimizer does anything but take the plain average."""
        return self.outer_momentum != 0 or self.outer_learning_rate != 1

    @property
    def has_groups(self) -> bool:
        """Whether groups of workers average between the averages of all."""
        return self.group not in ("", "all")

    @property
    def fragment_interval(self) -> int:
        """Steps from sending one fragment to sending the next."""
        return self.sync_every // self.fragments

    @property
    def gain(self) -> float:
        """How far a lasting change per round moves the model, in units of that change."""
        return self.outer_learning_rate / (1 - self.outer_momentum)

    @property
    def learns_for(self) -> int:
        """Steps before the first delayed average is applied: until then no worker waits."""
        return self.fragment_interval + self.delay if self.delay else 0

    def outer_optimizer(self, anchors: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        """Return the optimizer of the anchors: SGD, with a parameter group each under *rescale*."""
        groups = [[anchor] for anchor in anchors] if self.rescale else [list(anchors)]
        return torch.optim.SGD(
            [{"params": group} for group in groups],
            lr=self.outer_learning_rate,
            momentum=self.outer_momentum,
            nesterov=self.nesterov,
        )

    def describe_gain(self) -> str | None:
        """Return a sentence on the outer optimizer; None where it takes the plain average."""
        if not self.is_outer:
            return None
        first = 1 + (self.outer_momentum if self.nesterov else 0.0)
        sentence = (
            f"{self.name}: outer learning rate {self.outer_learning_rate:g} and momentum "
            f"{self.outer_momentum:g} move the model {first * self.outer_learning_rate:.3g} "
            f"times as far as plain averaging in the first round, and {self.gain:.3g} "
            "times, eta/(1-b), where workers go on in one direction"
        )
        most = GAIN_OF_SHORT if self.sync_every < SHORT_ROUNDS else GAIN_OF_LONG
        if self.gain <= most + 1e-9:
            return sentence
        fitting = most * (1 - self.outer_momentum)
        return (
            f"{sentence}. That is much for rounds of {self.sync_every} steps: it overshoots when "
            f"the learning rate falls; outer_learning_rate={fitting:.2g} would make it "
            f"{most:g}"
        )

    # ---- what goes with what ----

    def _check_counts(self) -> None:
        for key in ("sync_every", "group_every", "fragments"):
            if getattr(self, key) < 1:
                raise self._wrong(key, "expected 1 or more")
        for key in ("sync_each_step_until", "delay"):
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
        if self.sync_every % self.fragments:
            raise self._wrong(
                "fragments",
                f"expected a divisor of sync_every={self.sync_every}: each fragment travels once "
                "in so many steps, and all at even distances",
            )
        if self.delay >= self.fragment_interval and self.delay:
            raise self._wrong(
                "delay",
                f"expected less than {self.fragment_interval} steps, sync_every/fragments: then the next "
                f"fragment leaves. Take delay={self.fragment_interval - 1}, fewer fragments or longer "
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
        if self.sync_each_step_until and (
            self.fragments > 1 or self.delay or self.has_groups
        ):
            raise self._wrong(
                "sync_each_step_until",
                "expected neither fragments, nor a delay or a group",
            )

    def _check_groups(self) -> None:
        if not self.has_groups:
            if self.group_every != 1:
                raise self._wrong("group_every", "expected a group with it")
            return
        if self.fragments > 1 or self.delay:
            raise self._wrong("group", "expected neither fragments nor a delay")
        check_group(self.name, self.group)
        if self.sync_every % self.group_every:
            raise self._wrong(
                "group_every",
                f"expected a divisor of sync_every={self.sync_every}: a mean of all workers is "
                "also one of each group",
            )

    def _wrong(self, key: str, expected: str) -> UsageError:
        return UsageError(f"{self.name}:{key}={getattr(self, key)}: {expected}")


# ---- groups of workers ----


def check_group(method: str, group: str) -> None:
    """Raise `UsageError` unless a method's *group* is a place, or a number of workers."""
    if group in ("rack", "host"):
        return
    if not group.isdecimal():
        raise UsageError(
            f"{method}:group={group}: expected rack, host, or a number of workers"
        )
    if int(group) < 2:
        raise UsageError(
            f"{method}:group={group}: expected 2 or more workers in a group"
        )


def own_group(options: Options, run: Run) -> Comm | None:
    """Return this worker's group; None where there are none. Collective."""
    if not options.has_groups:
        return None
    places = places_of(options.name, options.group, run)
    said = f"{options.name}:group={options.group}"
    if len(places) > 1 and len(set(places)) == len(places):
        run.report(
            f"{said}: each worker is alone in its group, so no group averages between two averages of all "
            "workers"
        )
    elif len(places) > 1 and len(set(places)) == 1:
        run.report(
            f"{said}: all workers are in one group, so all average every "
            f"group_every={options.group_every} steps, and sync_every={options.sync_every} has no effect"
        )
    mine = [r for r, place in enumerate(places) if place == places[run.comm.rank]]
    return run.comm.group(mine)


def places_of(method: str, group: str, run: Run) -> list[int]:
    """Return the number of each rank's group.

    Raises:
        UsageError: Where the network is not known, or is one of other workers.
    """
    if group.isdecimal():
        return [rank // int(group) for rank in range(run.comm.size)]
    places = run.comm.placement.racks if group == "rack" else _hosts(run)
    if places is None:
        raise UsageError(
            f"{method}:group={group}: it is not known in which {group} each worker is. Describe the network "
            "(paceline run --cluster FILE), or give a number of workers, such as group=8"
        )
    if len(places) != run.comm.size:
        raise UsageError(
            f"{method}:group={group}: the described network "
            f"has {len(places)} workers, and this job {run.comm.size}. Give the cluster file of this job"
        )
    return list(places)


def _hosts(run: Run) -> list[int] | None:
    if run.cluster is None:
        return None
    hosts: list[int] = []
    for rack in run.cluster.racks:
        first = hosts[-1] + 1 if hosts else 0
        hosts += [first + n // rack.workers_per_host for n in range(rack.workers)]
    return hosts
