"""Cluster-based hybrid: bsp inside clusters of workers that compute and communicate alike.

Senyigit and Altilar (PDP 2025): score each worker by how it computes and how it communicates, form
clusters, wait for all inside a cluster, and exchange between clusters without waiting.

Each worker tells how long it computes in a step, and its server measures the whole step from
when it went on: the rest is communication. Workers are alike if neither differs by more than `ratio`: first they are divided by how
long they compute, and each part by how long it communicates. Where that gives more than `most_groups` clusters, they
are divided by whole steps.

Inferred, since the paper's score, its clusters and its merging are not known to us but in outline: all of the above but the
two measures. There clusters stand in a tree with slow ones deeper, and their masters exchange with
their parents; here servers pass on to all others, or with ``topology=root`` to one above all, as under gssp, whose parts this is made of. Who has been put into a
cluster moves only when its whole step has become longer or shorter, with gssp's hysteresis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.interfaces import (
    Discipline,
    Groups,
    MethodSummary,
    ServerRun,
    read_members,
)
from paceline.methods.gssp.discipline import GroupDiscipline, Passing
from paceline.methods.gssp.gates import Rounds
from paceline.methods.gssp.grouping import (
    Hysteresis,
    fewest,
    partition,
    renumbered,
    settled,
)
from paceline.methods.gssp.step_times import Measured
from paceline.methods.gssp.worker import GroupState, InGroups
from paceline.methods.push_pull import PushPullState


@dataclass(frozen=True, kw_only=True)
class ClusterHybrid(InGroups):
    """Mean gradients of clusters, at most *most_groups*, in which nobody takes more than *ratio*
    times as long as another, to compute or to communicate."""

    name: ClassVar[str] = "cluster-hybrid"
    summary: ClassVar[MethodSummary] = MethodSummary(
        waits_for="all workers of its cluster, in every step",
        sends=(
            "the whole gradient, and receives all parameters, to and from its "
            "cluster's server; servers send each other a gradient of all parameters "
            "after each step of their cluster"
        ),
        guarantees=(
            "inside a cluster no gradient is stale; every cluster's mean is applied "
            "once on every server, at a learning rate of its weight (its part of all "
            "workers) times the script's"
        ),
    )
    in_the_long_run: ClassVar[Mapping[str, str]] = {"measure_steps": "2"}

    most_groups: int = 4
    ratio: float = 1.25
    measure_steps: int = 20

    def __post_init__(self) -> None:
        for name, least, what in (
            ("most_groups", 1, "1 or more clusters"),
            ("ratio", 1.0, "a ratio of times, 1 or more"),
            ("measure_steps", 1, "1 or more steps"),
        ):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise UsageError(f"cluster-hybrid:{name}={value}: expected {what}")

    @property
    def learns_for(self) -> int:
        """Steps until workers are in groups of their speed."""
        return self.measure_steps

    def groups(self, workers: int) -> Groups:
        if self.members:
            return read_members(self.members, workers)
        return Groups((0,) * workers, min(self.most_groups, workers))

    def server(self, workers: int) -> Discipline:
        return GroupDiscipline(
            self.groups(workers),
            Rounds(together=True),
            Passing(period=1, topology=self.topology),
            self.measure_steps,
            None if self.members else ByParts(self.most_groups, self.ratio),
        )

    def step_begins(self, state: GroupState, run: ServerRun) -> None:
        state.began = run.stopwatch.mark()

    def backward_ended(self, state: PushPullState, run: ServerRun) -> None:
        assert isinstance(state, GroupState)
        if state.began is not None:
            # Told with the next step's last bucket.
            now = run.stopwatch.mark()
            (state.computed,) = run.stopwatch.seconds(state.began, [now])
            state.began = None
        super().backward_ended(state, run)


class ByParts:
    """Clusters by the two parts of a step: computing, and all else."""

    error = 0.0
    """See `Regroup`: nothing is known of that of each part."""

    def __init__(self, most: int, ratio: float) -> None:
        self._most, self._ratio = most, ratio
        self._hysteresis = Hysteresis(margin=0.15, looks=2)

    def look(self, groups: Groups, times: Mapping[int, Measured]) -> Sequence[int]:
        """See `Regroup`."""
        workers = sorted(times)
        wholes = {worker: times[worker].whole for worker in workers}
        labels = clusters([times[worker].seconds for worker in workers], self._ratio)
        if max(labels) >= self._most:
            labels = partition([wholes[worker] for worker in workers], self._most)
        wanted = renumbered(dict(zip(workers, labels, strict=True)), groups.of)
        return settled(groups, wanted, wholes, self._hysteresis)


def clusters(parts: Sequence[tuple[float, ...]], ratio: float) -> list[int]:
    """The number of each one's cluster: divided by the first of its times, then each of these by
    the second, and so on."""
    labels: list[tuple[int, ...]] = [() for _ in parts]
    for column in range(min(map(len, parts))):
        times = [its[column] for its in parts]
        for before in sorted(set(labels)):
            members = [place for place, label in enumerate(labels) if label == before]
            mine = [times[place] for place in members]
            its = partition(mine, fewest(mine, ratio))
            for place, number in zip(members, its, strict=True):
                labels[place] = *before, number
    numbers = {label: number for number, label in enumerate(sorted(set(labels)))}
    return [numbers[label] for label in labels]
