"""Adjust: a new plan where contention has moved, from the seconds that groups took.

Theory of operation
-------------------
Every worker has the same times, as they were summed over all, and works out the same plan
from them: nothing else is sent. A group's time says what each of its links carried at
least, so a link is judged by the best that any of its groups got through it, against the
best that they would get through a free one. A worker in a slow group is not slow: one of
its other groups shows it.

What counts is how much slower a group is than others are: the cluster's rates need be right
only in proportion. Contention is taken up from `ENTERS` on and dropped from `LEAVES` on,
and taken anew only when it has changed by `CHANGES`, so that noise does not make plans flap.
Where the plan in use asks little of an uplink, only this little has been learnt: an uplink whose
contention is over may stay spared. Plans that tried it from time to time would flap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from paceline.cluster import Cluster, Rack
from paceline.errors import UsageError
from paceline.methods.ds_sync.contention import NONE, Contention
from paceline.methods.ds_sync.cost import group_seconds, ring_bytes
from paceline.methods.ds_sync.plan import Plan, make_plan

ENTERS = 0.6
"""A link with this part left, or less, is contended."""
LEAVES = 0.8
"""A contended link with this part left, or more, is free again."""
CHANGES = 2.0
"""A contended link has changed when it has this many times more left, or less."""
LEAST = 1e-3
"""A link has no less than this part left, whatever was measured."""
Times = Sequence[Sequence[float]]
"""Seconds of each group of each phase, as `Plan.phases` has them; 0 (or no finite number)
where none were measured."""


def decide(
    plan: Plan,
    times: Times,
    cluster: Cluster | None,
    bytes: float,  # noqa: A002 - as in the interfaces
    *,
    begins: int = 0,
) -> Plan | None:
    """The plan to go on with from step *begins*, the next version; None if this one will do.

    *times*: what each group took from when its last member had come; the same numbers on all
    workers. *cluster*: None if it is not known: all links are then taken to be alike. Designs
    that were asked for by name are left as they are: only ``auto`` and ``topology`` adjust.

    Raises `UsageError` for times that are not those of the plan's phases and groups.
    """
    if plan.shuffle not in ("auto", "topology") or len(plan.members) < 2:
        return None
    _check(plan, times)
    network = cluster or _even(plan.members)
    measured = tuple(tuple(seconds) for seconds in times)
    contention = _contention(plan, measured, network, bytes)
    if contention == plan.contention:
        return None
    adjusted = _again(plan, plan.members, network, bytes, begins, contention)
    return None if adjusted.phases == plan.phases else adjusted


def for_members(
    plan: Plan,
    members: Sequence[int],
    cluster: Cluster | None,
    bytes: float,  # noqa: A002 - as in the interfaces
    *,
    begins: int = 0,
) -> Plan:
    """The next version, for those who remain: made as *plan* was, with groups no larger than
    there are workers. Raises as `make_plan` does."""
    return _again(plan, members, cluster, bytes, begins, plan.contention)


def _again(
    plan: Plan,
    members: Sequence[int],
    cluster: Cluster | None,
    payload: float,
    begins: int,
    contention: Contention,
) -> Plan:
    if contention != NONE and cluster is None:
        cluster = _even(plan.members)
    return make_plan(
        members,
        shuffle=plan.shuffle,
        size=max(2, min(plan.size, len(members))),
        seed=plan.seed,
        cluster=cluster,
        bytes=payload,
        cross_rack_every=plan.cross_rack_every,
        version=plan.version + 1,
        begins=begins,
        contention=contention,
    )


def _even(members: Sequence[int]) -> Cluster:
    """One rack of equal hosts."""
    return Cluster((Rack(workers=max(members) + 1, link=1e9, latency=0.0),))


class _Group(NamedTuple):
    """A group in a phase, and the bytes a second that each of its workers sends: as
    *measured*, and on a *free* network."""

    phase: int
    workers: tuple[int, ...]
    measured: float
    free: float


def _groups(plan: Plan, times: Times, cluster: Cluster, payload: float) -> list[_Group]:
    """Those that were measured, and that send anything through a link."""
    found = []
    seconds = group_seconds(plan, cluster, payload)
    for phase, groups in enumerate(plan.phases):
        for number, workers in enumerate(groups):
            took, free = times[phase][number], seconds[phase][number]
            if 0 < took < math.inf and free > 0:
                sent = ring_bytes(len(workers), payload)
                found.append(_Group(phase, workers, sent / took, sent / free))
    # The network may be faster or slower throughout than it is said to be. Contention only
    # slows: the faster groups say what the network is.
    slower = sorted(group.free / group.measured for group in found)
    scale = slower[len(slower) // 4] if slower else 1.0
    return [group._replace(measured=group.measured * scale) for group in found]


@lru_cache(maxsize=4)  # workers of one process decide by the same numbers
def _contention(
    plan: Plan, times: tuple[tuple[float, ...], ...], cluster: Cluster, payload: float
) -> Contention:
    groups = _groups(plan, times, cluster, payload)

    def hosts_of(group: _Group) -> set[int]:
        return {cluster.host_of(worker) for worker in group.workers}

    def uplinks_of(group: _Group) -> set[int]:
        racks = {cluster.rack_of_host(host) for host in hosts_of(group)}
        return racks & capacities.keys() if len(racks) > 1 else set()

    capacities = {
        number: rack.uplink
        for number, rack in enumerate(cluster.racks)
        if rack.uplink is not None
    }
    racks = _judged(groups, uplinks_of, dict(plan.contention.racks), capacities)
    # A busy uplink explains why groups on it are slow, and a slow host why those with it are:
    # they say nothing of the others in them.
    clear = [group for group in groups if racks.keys().isdisjoint(uplinks_of(group))]
    known = dict(plan.contention.hosts)
    hosts = {
        host: part
        for host, part in _judged(clear, hosts_of, known, {}).items()
        if host in known
    }
    while True:
        clear = [group for group in clear if hosts.keys().isdisjoint(hosts_of(group))]
        found = _judged(clear, hosts_of, {}, {})
        if not found:
            break
        slowest = min(found, key=lambda host: (found[host], host))
        hosts[slowest] = found[slowest]
    return Contention(tuple(sorted(hosts.items())), tuple(sorted(racks.items())))


def _judged(
    groups: Sequence[_Group],
    links_of: Callable[[_Group], set[int]],
    before: Mapping[int, float],
    capacities: Mapping[int, float],
) -> dict[int, float]:
    """The parts that are left of contended links: of *capacities*, or where there is none of
    what groups would send if the links were free. *links_of*: those a group goes through."""
    through: dict[int, list[_Group]] = {}
    for group in groups:
        for link in links_of(group):
            through.setdefault(link, []).append(group)
    left = {link: part for link, part in before.items() if link not in through}
    for link, mine in through.items():
        seen = _most(mine, lambda group: group.measured)
        free = _most(mine, lambda group: group.free)
        part = min(1.0, max(LEAST, seen / capacities.get(link, free)))
        was = before.get(link)
        if was is None:
            if seen <= ENTERS * free:
                left[link] = part
        elif seen < LEAVES * free:  # so this is all that it has left
            left[link] = was if 1 / CHANGES < part / was < CHANGES else part
        elif part < LEAVES:  # it has this, and may have more: nothing asked for it
            left[link] = part if part >= CHANGES * was else was
    return left


def _most(groups: Sequence[_Group], rate: Callable[[_Group], float]) -> float:
    """The most that these groups send at once: in the phase where they send most."""
    of_phase: dict[int, float] = {}
    for group in groups:
        of_phase[group.phase] = of_phase.get(group.phase, 0.0) + rate(group)
    return max(of_phase.values())


def _check(plan: Plan, times: Times) -> None:
    shape = [len(groups) for groups in plan.phases]
    if [len(row) for row in times] != shape:
        raise UsageError(
            f"times: expected seconds of each group of {len(shape)} phases, {shape} groups, "
            f"got {[len(row) for row in times]}"
        )
