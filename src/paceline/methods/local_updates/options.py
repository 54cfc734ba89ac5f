"""Hyperparameters of local-update methods, their checks, and groups of workers.

- `Options`: the hyperparameters that all presets share.
- `check_group`, `places_of`, `own_group`: the option `group`, resolved to a group of ranks.
"""

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
"""Rounds of fewer steps than this count as short."""
GAIN_OF_SHORT, GAIN_OF_LONG = 3.0, 7.0
"""The largest recommended eta/(1-b): for short rounds, and for rounds of hundreds of steps."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Holds and checks the hyperparameters of all local-update methods; presets set other defaults.

    Attributes:
        sync_every: H: steps from one average of all workers to the next.
        sync_each_step_until: Step before which workers average after every step.
        outer_learning_rate: eta of the outer optimizer, whose gradient is the change of a round. With 1 and no
            momentum the outer step is plain averaging.
        outer_momentum: b of the outer optimizer, from 0 to less than 1.
        nesterov: Use Nesterov momentum in the outer optimizer.
        rescale: Keep the outer momentum in units of the inner learning rate, so that the momentum decays with that rate.
        group: Groups of workers that also average between two averages of all: ``rack`` or ``host`` of the
            cluster file, or a number of workers in rank order. ``all``: no groups.
        group_every: Steps from one average of a group to the next.
        fragments: P: parts of the model that are sent in turn, each every H steps.
        delay: tau: steps from sending an average to applying it.
        keep_local: alpha: share of its own parameters that a worker keeps when an average is applied, from 0
            (the average) to 1 (its own).
        state: Whether the inner optimizer's state stays on each worker (``local``) or is averaged in each
            round (``average``).
    """

    name: ClassVar[str] = "local-updates"
    symmetric: ClassVar[bool] = True
    differences: ClassVar[bool] = False
    """Whether workers send the change of the parameters since the last average of all workers.

    Otherwise they send the parameters. Compression sets it. It costs one more copy of the model.
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
        """Return a copy of the options in which `differences` is True."""
        changed = copy.copy(self)
        object.__setattr__(changed, "differences", True)
        return changed

    @property
    def keeps_anchor(self) -> bool:
        """Whether workers keep a copy of the parameters from which a round began.

        Without this anchor, the average of the parameters is the result of a round.
        """
        late = self.keep_local > 0 or self.delay > 0
        return self.is_outer or late or self.differences

    @property
    def is_outer(self) -> bool:
        """Whether the outer step differs from plain averaging."""
        return self.outer_momentum != 0 or self.outer_learning_rate != 1

    @property
    def has_groups(self) -> bool:
        """Whether groups of workers average between two averages of all workers."""
        return self.group not in ("", "all")

    @property
    def fragment_interval(self) -> int:
        """Steps from sending one fragment to sending the next."""
        return self.sync_every // self.fragments

    @property
    def gain(self) -> float:
        """How far the same change in every round moves the model, in units of that change."""
        return self.outer_learning_rate / (1 - self.outer_momentum)

    @property
    def learns_for(self) -> int:
        """Steps before the first delayed average is applied; no worker waits before that."""
        return self.fragment_interval + self.delay if self.delay else 0

    def outer_optimizer(self, anchors: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        """Create the outer optimizer.

        Args:
            anchors: The tensors that it updates.

        Returns:
            SGD with the outer learning rate and momentum. With `rescale`, each anchor has a
            parameter group of its own.
        """
        groups = [[anchor] for anchor in anchors] if self.rescale else [list(anchors)]
        return torch.optim.SGD(
            [{"params": group} for group in groups],
            lr=self.outer_learning_rate,
            momentum=self.outer_momentum,
            nesterov=self.nesterov,
        )

    def describe_gain(self) -> str | None:
        """Describe how far the outer optimizer moves the model.

        Returns:
            A sentence for the user, with a recommendation if the gain is large for the length of a
            round. None if the outer step is plain averaging.
        """
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

    # ---- checks of the options and their combinations ----

    def _check_counts(self) -> None:
        for key in ("sync_every", "group_every", "fragments"):
            if getattr(self, key) < 1:
                raise self._wrong(key, "expected 1 or more")
        for key in ("sync_each_step_until", "delay"):
            if getattr(self, key) < 0:
                raise self._wrong(key, "expected 0 or more steps")

    def _check_outer(self) -> None:
        if not 0 <= self.outer_learning_rate < float("inf"):
            raise self._wrong(
                "outer_learning_rate", "expected a finite number, 0 or more"
            )
        if not 0 <= self.outer_momentum < 1:
            raise self._wrong(
                "outer_momentum",
                "expected 0 or more and less than 1, because the momentum never decays from 1 on",
            )
        if self.nesterov and not self.outer_momentum:
            raise self._wrong(
                "nesterov",
                "it needs an outer momentum. Set outer_momentum above 0, or nesterov=false",
            )
        if self.rescale and not self.outer_momentum:
            raise self._wrong(
                "rescale",
                "it needs an outer momentum. Set outer_momentum above 0, or rescale=false",
            )

    def _check_fragments(self) -> None:
        if self.sync_every % self.fragments:
            raise self._wrong(
                "fragments",
                f"expected a divisor of sync_every={self.sync_every}, because fragments are sent at "
                "equal intervals. Change either one",
            )
        if self.delay >= self.fragment_interval and self.delay:
            raise self._wrong(
                "delay",
                f"expected less than {self.fragment_interval} steps (sync_every/fragments), after which "
                f"the next fragment is sent. Set delay={self.fragment_interval - 1} or less, fewer "
                "fragments, or a larger sync_every",
            )
        if not 0 <= self.keep_local <= 1:
            raise self._wrong(
                "keep_local",
                "expected a share from 0 (the average) to 1 (the worker's own parameters)",
            )
        if self.delay and self.state == "average":
            raise self._wrong(
                "state",
                f"it does not work with delay={self.delay}, because delayed moments would overwrite "
                "newer ones. Set state=local or delay=0",
            )
        if self.sync_each_step_until and (
            self.fragments > 1 or self.delay or self.has_groups
        ):
            raise self._wrong(
                "sync_each_step_until",
                "it does not work with fragments, a delay or groups. Set it to 0, or set fragments=1, "
                "delay=0 and group=all",
            )

    def _check_groups(self) -> None:
        if not self.has_groups:
            if self.group_every != 1:
                raise self._wrong(
                    "group_every",
                    "there are no groups. Set group, such as group=8, or group_every=1",
                )
            return
        if self.fragments > 1 or self.delay:
            raise self._wrong(
                "group",
                "groups do not work with fragments or a delay. Set group=all, or fragments=1 and "
                "delay=0",
            )
        check_group(self.name, self.group)
        if self.sync_every % self.group_every:
            raise self._wrong(
                "group_every",
                f"expected a divisor of sync_every={self.sync_every}, because an average of all workers "
                "replaces every so many averages of groups. Change either one",
            )

    def _wrong(self, key: str, expected: str) -> UsageError:
        return UsageError(f"{self.name}:{key}={getattr(self, key)}: {expected}")


# ---- groups of workers ----


def check_group(method: str, group: str) -> None:
    """Raise `UsageError` unless a method's *group* is rack, host, or a number of workers from 2."""
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
    """Return the communicator of this worker's group. Collective.

    It reports to the user if groups have no effect.

    Args:
        options: The method's options, with the group.
        run: The training.

    Returns:
        The communicator; None if the options have no groups.

    Raises:
        UsageError: The group needs a cluster file, and there is none or it is of another job.
    """
    if not options.has_groups:
        return None
    places = places_of(options.name, options.group, run)
    option = f"{options.name}:group={options.group}"
    if len(places) > 1 and len(set(places)) == len(places):
        run.report(
            f"{option}: each worker is alone in its group, so no group averages between two averages of all "
            "workers"
        )
    elif len(places) > 1 and len(set(places)) == 1:
        run.report(
            f"{option}: all workers are in one group, so all average every "
            f"group_every={options.group_every} steps, and sync_every={options.sync_every} has no effect"
        )
    mine = [r for r, place in enumerate(places) if place == places[run.comm.rank]]
    return run.comm.group(mine)


def places_of(method: str, group: str, run: Run) -> list[int]:
    """Return the number of the group to which each rank belongs.

    Args:
        method: The method's name, for errors.
        group: ``rack``, ``host``, or a number of workers in rank order.
        run: The training, with its cluster.

    Returns:
        One group number for each rank.

    Raises:
        UsageError: The group needs a cluster file, and there is none or it has another number of
            workers.
    """
    if group.isdecimal():
        return [rank // int(group) for rank in range(run.comm.size)]
    places = run.comm.placement.racks if group == "rack" else _hosts(run)
    if places is None:
        raise UsageError(
            f"{method}:group={group}: it is not known in which {group} each worker is. Give a cluster file "
            "(paceline run --cluster FILE), or a number of workers, such as group=8"
        )
    if len(places) != run.comm.size:
        raise UsageError(
            f"{method}:group={group}: the cluster file has {len(places)} workers, and this job "
            f"{run.comm.size}. Give the cluster file of this job"
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
