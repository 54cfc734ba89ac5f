"""A plan as data: which workers average with whom in each step.

Every worker computes the same plan from what all know (active workers, the network, a seed), so
nothing is sent to agree on it. Steps count from the first of the training, and one period goes on
through epochs: a count that restarts with each epoch would use one phase twice in a row wherever
the period does not divide the epoch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from paceline.cluster import Cluster, Rack
from paceline.errors import UsageError

Groups = tuple[tuple[int, ...], ...]
"""One phase: the groups that average in a step. They partition the workers; each group is sorted,
and groups are sorted by their first member."""


def in_order(groups: Iterable[Iterable[int]]) -> Groups:
    """Return the groups in the order that `Groups` promises."""
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def cut(workers: Sequence[int], size: int) -> list[Sequence[int]]:
    """Cut *workers* into consecutive groups of about *size*, as equal as possible.

    A group has two workers at least: an odd worker makes a group of three. One worker alone is a
    group.
    """
    count = max(1, min(-(-len(workers) // size), len(workers) // 2))
    least, larger = divmod(len(workers), count)
    groups, start = [], 0
    for number in range(count):
        end = start + least + (number < larger)
        groups.append(workers[start:end])
        start = end
    return groups


def check_partition(groups: Groups, members: Sequence[int], where: str) -> None:
    """Raise `UsageError` unless each of *members* is in one group, and none is alone."""
    seen = sorted(worker for group in groups for worker in group)
    if seen != sorted(members):
        twice = sorted({worker for worker in seen if seen.count(worker) > 1})
        missing = sorted(set(members).difference(seen))
        strange = sorted(set(seen).difference(members))
        wrong = [
            f"{what} {_few(workers)}"
            for what, workers in (
                ("twice:", twice),
                ("in none:", missing),
                ("no worker:", strange),
            )
            if workers
        ]
        raise UsageError(
            f"{where}: expected each of the {len(members)} workers in one group, got "
            f"{'; '.join(wrong)}"
        )
    alone = [group[0] for group in groups if len(group) == 1]
    if alone and len(members) > 1:
        raise UsageError(
            f"{where}: expected two or more workers in a group, got worker {_few(alone)} alone. Put it "
            "in another group"
        )


def parts(phases: Iterable[Groups]) -> list[list[int]]:
    """Return the sets of workers that reach each other over these phases, in one or more steps."""
    leader: dict[int, int] = {}

    def find(worker: int) -> int:
        while leader.setdefault(worker, worker) != worker:
            leader[worker] = worker = leader[leader[worker]]
        return worker

    for groups in phases:
        for group in groups:
            for worker in group:
                first, second = sorted((find(group[0]), find(worker)))
                leader[second] = first
    found: dict[int, list[int]] = {}
    for worker in sorted(leader):
        found.setdefault(find(worker), []).append(worker)
    return list(found.values())


def _few(workers: Sequence[int]) -> str:
    """The first few, for messages."""
    text = ", ".join(str(worker) for worker in workers[:5])
    return text if len(workers) <= 5 else f"{text} and {len(workers) - 5} more"


@dataclass(frozen=True)
class Contention:
    """The share of links that other traffic leaves free, from 0 to 1.

    Links that are not listed are free. An uplink without a rate is never the limit.

    Attributes:
        hosts: Pairs (host, share) of hosts' links, sorted.
        racks: Pairs (rack, share) of racks' uplinks, sorted.
    """

    hosts: tuple[tuple[int, float], ...] = ()
    racks: tuple[tuple[int, float], ...] = ()

    def on(self, cluster: Cluster) -> Cluster:
        """Return the cluster with the bandwidth that this contention leaves."""
        if not self.hosts and not self.racks:
            return cluster
        of_hosts, of_racks = dict(self.hosts), dict(self.racks)
        racks: list[Rack] = []
        first = 0
        for number, rack in enumerate(cluster.racks):
            links = tuple(
                link * of_hosts.get(first + place, 1.0)
                for place, link in enumerate(rack.links)
            )
            uplink = rack.uplink
            if uplink is not None:
                uplink *= of_racks.get(number, 1.0)
            racks.append(dataclasses.replace(rack, link=links, uplink=uplink))
            first += rack.hosts
        return dataclasses.replace(cluster, racks=tuple(racks))


NONE = Contention()
"""No other traffic on any link."""


@dataclass(frozen=True)
class Plan:
    """Phases that repeat: the groups of every step.

    `divide.make_plan` makes one; a later plan is made from its options.

    Attributes:
        phases: The groups of each step of a period.
        version: Counts the plans of a training, from 0.
        begins: The step of the first phase, counted from the training's first step.
        members: The workers; left out: those of the first phase.
        groups: The design that was asked for, as `DSSyncOptions` have it.
        size: Workers of a group, as asked for.
        seed: Of the groups inside racks.
        cross_rack_every: Racks meet in every so many phases.
        contention: The contention that the plan was made for.

    Raises:
        UsageError: For a phase that does not partition *members*, or that has a group of one.
    """

    phases: tuple[Groups, ...]
    version: int = 0
    begins: int = 0
    members: tuple[int, ...] = ()
    groups: str = "digits"
    size: int = 2
    seed: int = 0
    cross_rack_every: int = 1
    contention: Contention = NONE

    def __post_init__(self) -> None:
        if not self.members and self.phases:
            first = sorted(worker for group in self.phases[0] for worker in group)
            object.__setattr__(self, "members", tuple(dict.fromkeys(first)))
        if not self.members:
            raise UsageError("a plan needs workers: expected one or more, got none")
        for number, groups in enumerate(self.phases):
            check_partition(groups, self.members, f"phase {number}")

    def groups_at(self, step: int) -> Groups:
        """Return all groups of *step*, counted from the training's first step."""
        return self.phases[(step - self.begins) % len(self.phases)]

    def mine(self, step: int, rank: int) -> tuple[int, ...]:
        """Return the group of worker *rank* in *step*; *rank* is in it."""
        for group in self.groups_at(step):
            if rank in group:
                return group
        raise UsageError(
            f"worker {rank} is in no group: this plan (version {self.version}) is for "
            f"{len(self.members)} others"
        )

    # ---- restarts ----

    def save(self) -> dict[str, Any]:
        """Return the plan as a checkpoint keeps it."""
        contention = self.contention
        return {
            "phases": [[list(group) for group in groups] for groups in self.phases],
            "version": self.version,
            "begins": self.begins,
            "members": list(self.members),
            "groups": self.groups,
            "size": self.size,
            "seed": self.seed,
            "cross_rack_every": self.cross_rack_every,
            "contention": [
                list(map(list, contention.hosts)),
                list(map(list, contention.racks)),
            ],
        }

    @classmethod
    def load(cls, saved: Mapping[str, Any]) -> Self:
        """Return the plan that `save` has kept."""
        hosts, racks = saved["contention"]
        return cls(
            **{
                **saved,
                "phases": tuple(map(_tuples, saved["phases"])),
                "members": tuple(saved["members"]),
                "contention": Contention(_tuples(hosts), _tuples(racks)),
            }
        )


def _tuples(rows: Iterable[Iterable[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, rows))


def check_connected(plan: Plan) -> None:
    """Raise `UsageError` unless all workers reach each other over a period."""
    apart = parts(plan.phases)
    if len(apart) > 1:
        named = " and ".join(
            "{"
            + ", ".join(str(worker) for worker in part[:6])
            + (", ...}" if len(part) > 6 else "}")
            for part in apart[:3]
        )
        raise UsageError(
            f"over the plan's period of {len(plan.phases)} phases the workers form "
            f"{len(apart)} parts that never meet, {named}, so their models would drift apart. Add a "
            "phase with a group across them"
        )
