"""Stores which workers average with each other in each step, as a plan of phases that repeat.

- `Plan`: the groups of every step; `Contention`: the network that it was made for.
- `check_partition`, `check_connected`: refuse groups that are not valid.
- `cut`, `in_order`, `parts`: operations on groups.

Every worker computes the same plan from the active workers, the network and a seed. So no messages
are needed to agree on it. Steps count from the first one of the training, and a period continues
through epochs. Otherwise a phase would come twice in a row if the period did not divide the epoch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from paceline.cluster import Cluster, Rack
from paceline.errors import UsageError

Groups = tuple[tuple[int, ...], ...]
"""One phase: the groups that average in a step.

They partition the workers. Each group is sorted, and groups are sorted by their first member.
"""


def in_order(groups: Iterable[Iterable[int]]) -> Groups:
    """Sort groups and their members as `Groups` requires."""
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def cut(workers: Sequence[int], size: int) -> list[Sequence[int]]:
    """Cut *workers* into consecutive groups of about *size*, as equal as possible.

    A group has at least two workers, so an odd worker makes a group of three. Only a single worker
    forms a group by itself.
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
    """Check that each worker is in one group, and that no group has one worker.

    Args:
        groups: The groups.
        members: All workers. If there is only one, it may be alone.
        where: Where the groups come from; the error begins with it.

    Raises:
        UsageError: The check fails.
    """
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
            f"{'; '.join(wrong)}. List each worker once"
        )
    alone = [group[0] for group in groups if len(group) == 1]
    if alone and len(members) > 1:
        raise UsageError(
            f"{where}: expected two or more workers in a group, got worker {_few(alone)} alone. Put it "
            "in another group"
        )


def parts(phases: Iterable[Groups]) -> list[list[int]]:
    """Return the sets of workers that exchange parameters over these phases, directly or indirectly."""
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
    """List the first five workers, for messages."""
    text = ", ".join(str(worker) for worker in workers[:5])
    return text if len(workers) <= 5 else f"{text} and {len(workers) - 5} more"


@dataclass(frozen=True)
class Contention:
    """The share of each link that other traffic leaves free, from 0 to 1.

    Links that are not listed are entirely free. An uplink without a bandwidth is never the bottleneck.

    Attributes:
        hosts: Pairs (host, share) of hosts' links, sorted.
        racks: Pairs (rack, share) of racks' uplinks, sorted.
    """

    hosts: tuple[tuple[int, float], ...] = ()
    racks: tuple[tuple[int, float], ...] = ()

    def on(self, cluster: Cluster) -> Cluster:
        """Return *cluster* with the bandwidth that this contention leaves."""
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
    """The groups of every step: phases that repeat.

    `divide.make_plan` makes a plan. Later plans of a training are made with its options.

    Attributes:
        phases: The groups of each step of a period.
        version: Number of the plan in its training, from 0.
        begins: The step of the first phase, counted from the training's first step.
        members: The workers; by default those of the first phase.
        groups: The requested design, as in `DSSyncOptions`.
        size: The requested number of workers of a group.
        seed: Seed of the groups inside racks.
        cross_rack_every: Phases from one average across racks to the next.
        contention: The contention that the plan was made for.

    Raises:
        UsageError: A phase does not partition *members*, or a group has one worker.
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
        """Return the group of worker *rank* in *step*, which includes *rank*.

        Raises:
            UsageError: The worker is not one of the plan's members.
        """
        for group in self.groups_at(step):
            if rank in group:
                return group
        raise UsageError(
            f"worker {rank} is in no group: plan {self.version} is for {len(self.members)} other workers. "
            "Ask only for the groups of active workers"
        )

    # ---- restarts ----

    def save(self) -> dict[str, Any]:
        """Return the plan's state for a checkpoint."""
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
        """Return the plan whose state `save` returned."""
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
    """Check that all workers exchange parameters, directly or indirectly, over a period.

    Raises:
        UsageError: Some workers never reach others, so their models would drift apart.
    """
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
