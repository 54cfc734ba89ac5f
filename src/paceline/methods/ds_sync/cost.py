"""What a plan's averages cost on a cluster, in seconds.

A group averages round a ring, in the order of its ranks: each of *g* workers sends
2(g-1)/g of the bytes to the next. Groups that share a link share its bandwidth max-min fairly.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from paceline.cluster import Cluster
from paceline.cluster.bandwidth import Sharing
from paceline.cluster.flow import Activity
from paceline.errors import UsageError
from paceline.methods.ds_sync.groups import Groups

MEASURED_STEPS = 16
"""A steady state is measured over whole periods, and no fewer steps than these."""


class Phases(Protocol):
    """The part of a `Plan` that costs depend on."""

    @property
    def members(self) -> tuple[int, ...]: ...

    @property
    def phases(self) -> tuple[Groups, ...]: ...


def ring_bytes(workers: int, size: float) -> float:
    """What each worker of a ring sends to average *size* bytes."""
    return 2 * (workers - 1) / workers * size


def group_seconds(
    plan: Phases,
    cluster: Cluster,
    bytes: float,  # noqa: A002 - as in the interfaces
) -> tuple[tuple[float, ...], ...]:
    """Seconds of each group of each phase, where all groups of a phase begin together.

    Raises `UsageError` for a plan with workers that the cluster does not have.
    """
    check_members(plan.members, cluster)
    return tuple(_together(groups, cluster, bytes) for groups in plan.phases)


def step_seconds(
    plan: Phases,
    cluster: Cluster,
    bytes: float,  # noqa: A002 - as in the interfaces
) -> tuple[float, ...]:
    """Seconds of each phase: of its slowest group, all having begun together.

    Raises as `group_seconds` does.
    """
    return tuple(max(seconds) for seconds in group_seconds(plan, cluster, bytes))


def steady_seconds(
    plan: Phases,
    cluster: Cluster,
    bytes: float,  # noqa: A002 - as in the interfaces
    compute: float = 0.0,
) -> float:
    """Seconds of a step in the long run: *compute* (of a worker of speed 1) and averaging.

    There is no barrier: a group begins when its members have arrived, so a slow group delays
    only those who meet its members later, and this is less than the phases' slowest groups
    take in the mean. A worker does nothing while it averages. Raises as `group_seconds` does.
    """
    check_members(plan.members, cluster)
    phases, speeds = plan.phases, cluster.speeds
    measured = len(phases) * math.ceil(MEASURED_STEPS / len(phases))
    ends = [0.0] * (2 * measured)  # of each step, for the last of its workers
    sharing, travelling = Sharing(cluster.capacities), dict[Activity, _Meeting]()
    ordered = itertools.count()  # who came first goes first: the same on every worker
    coming = [(compute / speeds[w], next(ordered), w, 0) for w in plan.members]
    heapq.heapify(coming)
    there: Counter[_Meeting] = Counter()
    while coming or travelling:
        now = min(sharing.next_end(), coming[0][0] if coming else math.inf)
        for activity in sharing.settle(now):
            step, group = travelling.pop(activity)
            arrived = now + _ring_latency(group, cluster)
            ends[step] = max(ends[step], arrived)
            if step + 1 < len(ends):
                for worker in group:
                    ready = arrived + compute / speeds[worker]
                    heapq.heappush(coming, (ready, next(ordered), worker, step + 1))
        while coming and coming[0][0] <= now:
            _, _, worker, step = heapq.heappop(coming)
            groups = phases[step % len(phases)]
            meeting = (step, next(group for group in groups if worker in group))
            there[meeting] += 1
            if there[meeting] == len(meeting[1]):
                activity = _ring(meeting[1], cluster, bytes)
                travelling[activity] = meeting
                sharing.start(activity)
        sharing.settle(now)  # what has just begun shares from now on
    return (ends[-1] - ends[measured - 1]) / measured


_Meeting = tuple[int, tuple[int, ...]]
"""A step, and a group in it."""


def _together(groups: Groups, cluster: Cluster, size: float) -> tuple[float, ...]:
    """Seconds of groups that begin together."""
    sharing, rings = Sharing(cluster.capacities), dict[Activity, tuple[int, ...]]()
    for group in groups:
        rings[_ring(group, cluster, size)] = group
    for activity in rings:
        sharing.start(activity)
    sharing.settle(0.0)
    seconds: dict[tuple[int, ...], float] = {}
    while len(seconds) < len(groups):
        now = sharing.next_end()
        for activity in sharing.settle(now):
            group = rings[activity]
            seconds[group] = now + _ring_latency(group, cluster)
    return tuple(seconds[group] for group in groups)


def _ring(group: Sequence[int], cluster: Cluster, size: float) -> Activity:
    demand = Counter(link for pair in _hops(group) for link in cluster.path(*pair))
    return Activity(demand, ring_bytes(len(group), size), lambda now: None)


def _ring_latency(group: Sequence[int], cluster: Cluster) -> float:
    """2(g-1) messages come one after another, each as late as the longest way makes it."""
    longest = max(cluster.latency(*pair) for pair in _hops(group))
    return 2 * (len(group) - 1) * longest


def _hops(group: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise([*group, group[0]]))


def check_members(members: Sequence[int], cluster: Cluster) -> None:
    """Raises `UsageError` for workers that the cluster does not have."""
    beyond = [worker for worker in members if not 0 <= worker < cluster.workers]
    if beyond:
        raise UsageError(
            f"expected the cluster to describe every worker, got one of {cluster.workers} "
            f"workers, and there is a worker {beyond[0]}: describe the cluster that this "
            "training runs on"
        )
