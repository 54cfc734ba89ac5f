"""A plan: who averages with whom in each step, the same on every worker.

It is a pure function of what every worker knows (who trains, the network, a seed), so
nobody sends anything to agree on it. One period goes on through epochs: steps are counted
from the training's first, since a count that restarts with each epoch would use one phase
twice in a row wherever the period does not divide the epoch. A run that is shorter than a
period is no error: its workers have then met less, and the mean at the end is over all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from paceline.cluster import Cluster
from paceline.errors import UsageError, unknown
from paceline.methods.ds_sync import shuffle as designs
from paceline.methods.ds_sync.contention import NONE, Contention
from paceline.methods.ds_sync.divide import divide, is_uneven
from paceline.methods.ds_sync.groups import Groups, check_partition, parts

SHUFFLES = ("auto", "digits", "topology")


@dataclass(frozen=True)
class Plan:
    """Phases in turn, from step *begins* on; *version* counts the plans of a run.

    *shuffle*, *size*, *seed* and *cross_rack_every* are what was asked for, *contention* what the
    network was taken to be: what a later plan is made from. Raises `UsageError` for a phase that
    is no partition of *members* (left out: those of the first phase), or with a group of one.
    """

    phases: tuple[Groups, ...]
    version: int = 0
    begins: int = 0
    members: tuple[int, ...] = ()
    shuffle: str = "digits"
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

    def groups(self, step: int) -> Groups:
        """Who averages with whom in *step* (counted from the training's first)."""
        return self.phases[(step - self.begins) % len(self.phases)]

    def mine(self, step: int, rank: int) -> tuple[int, ...]:
        """The group of worker *rank* in *step*, itself among them."""
        for group in self.groups(step):
            if rank in group:
                return group
        raise UsageError(
            f"worker {rank} is in no group: this plan (version {self.version}) is for "
            f"{len(self.members)} others"
        )


def make_plan(
    members: Sequence[int],
    *,
    shuffle: str = "auto",
    size: int = 2,
    seed: int = 0,
    cluster: Cluster | None = None,
    bytes: float = 0,  # noqa: A002 - as in the interfaces
    cross_rack_every: int = 1,
    version: int = 0,
    begins: int = 0,
    contention: Contention = NONE,
) -> Plan:
    """The plan for *members*, workers by their rank.

    *shuffle*: ``digits``: see `paceline.methods.ds_sync.shuffle`; ``topology``: made for the
    *cluster*, with *contention* on its links: see `divide`, also for *cross_rack_every*; ``auto``: ``topology`` where the cluster has several racks or a slow host,
    else ``digits``. *size*: workers in a group; where it does not divide them, groups are as
    equal as can be, and an odd worker makes a group of three. *bytes* are averaged in each
    step. One worker alone has a plan, too: nothing to average.

    Raises `UsageError` for groups of one, groups of more workers than there are, a cluster
    that is not that of *members* (which a run's first plan, version 0, has all of), and a
    period over which some workers never reach others.
    """
    if shuffle not in SHUFFLES:
        raise UsageError(unknown("value for shuffle", shuffle, SHUFFLES))
    ordered = tuple(sorted(set(members)))
    designs.check_size(size, len(ordered))
    if cross_rack_every < 1:
        raise UsageError(
            f"cross_rack_every: expected 1 or more phases, got {cross_rack_every}"
        )
    phases: tuple[Groups, ...]
    if len(ordered) <= 1:
        phases = ((ordered,),) if ordered else ()
    elif shuffle == "topology" or (shuffle == "auto" and cluster is not None):
        phases = _for_network(
            ordered,
            _known(cluster, ordered, version),
            contention,
            bytes,
            only_uneven=shuffle == "auto",
            size=size,
            seed=seed,
            cross_rack_every=cross_rack_every,
        )
    else:
        phases = designs.digits(ordered, size)
    plan = Plan(
        phases,
        version,
        begins,
        ordered,
        shuffle,
        size,
        seed,
        cross_rack_every,
        contention,
    )
    check_connected(plan)
    return plan


@lru_cache(maxsize=16)  # workers of one process make the same plan
def _for_network(
    members: tuple[int, ...],
    cluster: Cluster,
    contention: Contention,
    payload: float,
    *,
    only_uneven: bool,
    size: int,
    seed: int,
    cross_rack_every: int,
) -> tuple[Groups, ...]:
    network = contention.on(cluster)
    if only_uneven and not is_uneven(members, network):
        return designs.digits(members, size)
    every = contention.cross_rack_every(cross_rack_every, members, cluster)
    return divide(
        members, network, payload, size=size, seed=seed, cross_rack_every=every
    )


def _known(cluster: Cluster | None, members: Sequence[int], version: int) -> Cluster:
    """Raises `UsageError` unless there is a cluster, and it is that of *members*."""
    if cluster is None:
        raise UsageError(
            "shuffle='topology' divides workers by their network, and nobody has said what it "
            "is: give a cluster (paceline run --cluster FILE), or use shuffle='digits'"
        )
    if version == 0 and cluster.workers != len(members):
        raise UsageError(
            f"expected a cluster of {len(members)} workers, as many as train, got one of "
            f"{cluster.workers}: describe the cluster that this training runs on"
        )
    return cluster


def check_connected(plan: Plan) -> None:
    """Raises `UsageError` unless everybody reaches everybody over a period."""
    apart = parts(plan.phases)
    if len(apart) > 1:
        named = " and ".join(
            "{"
            + ", ".join(str(worker) for worker in part[:6])
            + (", ...}" if len(part) > 6 else "}")
            for part in apart[:3]
        )
        raise UsageError(
            f"over the plan's period of {len(plan.phases)} phases the workers fall into "
            f"{len(apart)} parts that never meet, {named}: their models would drift apart; "
            "add a phase with a group across them"
        )
