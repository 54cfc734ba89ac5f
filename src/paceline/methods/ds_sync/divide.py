"""Divide: groups for a cluster whose links are not alike.

Theory of operation (Wang et al. 2022; its text is not public, so this is a reconstruction)
-------------------------------------------------------------------------------------------
A ring of g workers sends 2(g-1)/g of the bytes over its slowest link: a pair half of what a
long ring does. So groups are large inside racks and pairs where a link is scarce.

* Links that are nowhere scarce: `digits` in the racks, then across them. For R racks of R
  workers and groups of R these are the rows and the columns of a grid.
* Scarce uplinks: in each phase a few workers of each rack meet one of another rack each, and
  the rest average inside their rack. Those who cross change from phase to phase, until each
  has. So many cross as an uplink carries in the time of a mean inside the rack.
* A host much slower than its rack's others is in a pair, with one of its best-connected
  neighbours in turn: it delays one worker, not a ring.
* Groups inside a rack are as large as fits into the time that the phase takes anyway.

There is no barrier between groups, so a crossing delays its rack only in the next phase.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high

from paceline.cluster import Cluster
from paceline.methods.ds_sync.cost import check_members, ring_bytes
from paceline.methods.ds_sync.groups import Groups, cut, in_order, parts
from paceline.methods.ds_sync.shuffle import digits, shuffled

SLOW = 0.6
"""A host whose link, or whose speed, is at most this part of its rack's median is slow."""
NEARLY = 1 + 1e-9
"""Times that differ by rounding alone are the same."""
MANY = 100_000
"""More phases than any division needs."""


@dataclass(frozen=True)
class Site:
    """A rack as groups are made for it: its workers, those of slow hosts apart.

    *slow*: hosts' workers, the slowest host first. *best*: of the *others*, those with the
    best links. *link*, *slow_links* and *uplink*: bytes per second; *latency*: seconds.
    """

    others: tuple[int, ...]
    slow: tuple[tuple[int, ...], ...]
    best: tuple[int, ...]
    link: float
    slow_link: float
    uplink: float
    latency: float

    @property
    def count(self) -> int:
        """Number of its workers."""
        return len(self.others) + sum(len(host) for host in self.slow)

    @property
    def crossings(self) -> int:
        """So many pairs its uplink carries in the time of a mean inside the rack; at
        least one."""
        if self.uplink == math.inf:
            return self.count
        # B_x T_in / M: the bytes cancel
        fits = self.uplink * ring_bytes(self.count, 1.0) / self.link
        return max(1, math.floor(fits * NEARLY))

    def largest_group(self, seconds: float, least: int, size: float) -> int:
        """The largest group in the rack that averages *size* bytes in that time; at least
        *least*."""
        group = least
        while group < self.count and self._mean(group + 1, size) <= seconds * NEARLY:
            group += 1
        return group

    def _mean(self, workers: int, size: float) -> float:
        return ring_bytes(workers, size) / self.link + 2 * (workers - 1) * self.latency


def divide(
    members: Sequence[int],
    cluster: Cluster,
    bytes: float,  # noqa: A002 - as in the interfaces
    *,
    size: int = 2,
    seed: int = 0,
    cross_rack_every: int = 1,
) -> tuple[Groups, ...]:
    """The phases for *members* on *cluster*: see above.

    *size*: workers in a group where links are not scarce, and the fewest in one inside a rack
    where they are. *bytes* are averaged in each step; *seed* shuffles who is in which
    group of a rack. *cross_rack_every*: racks meet in each phase, or in every so-manieth (racks of
    two at least in every second): faster where the uplink is the limit, and agreeing more
    slowly.

    Raises `UsageError` for a worker that the cluster does not have.
    """
    check_members(members, cluster)
    sites = list(sites_of(members, cluster).values())
    if not any(site.slow for site in sites) and all(
        site.crossings >= site.count for site in sites
    ):
        return grid(sites, size)
    return _Division(sites, bytes, size, seed, cross_rack_every).phases()


def is_uneven(members: Sequence[int], cluster: Cluster) -> bool:
    """Whether `divide` has anything to go by: several racks, or a slow host."""
    check_members(members, cluster)
    sites = sites_of(members, cluster)
    return len(sites) > 1 or any(site.slow for site in sites.values())


def sites_of(members: Sequence[int], cluster: Cluster) -> dict[int, Site]:
    """The racks that *members* stand in, by their number."""
    racks: dict[int, dict[int, list[int]]] = {}
    for worker in sorted(members):
        host = cluster.host_of(worker)
        rack = racks.setdefault(cluster.rack_of_host(host), {})
        rack.setdefault(host, []).append(worker)
    return {number: _site(cluster, number, racks[number]) for number in sorted(racks)}


def _site(cluster: Cluster, number: int, hosts: dict[int, list[int]]) -> Site:
    rack = cluster.racks[number]
    link = {host: cluster.capacities[cluster.link_out_of(host)] for host in hosts}
    speed = {host: min(cluster.speeds[w] for w in hosts[host]) for host in hosts}
    usual_link, usual_speed = median_high(link.values()), median_high(speed.values())
    pace = {h: min(link[h] / usual_link, speed[h] / usual_speed) for h in hosts}
    by_pace = sorted((h for h in hosts if pace[h] <= SLOW), key=lambda h: pace[h])
    # One neighbour for each, and one that is left to average with the rest.
    slow = by_pace[: max(0, (len(hosts) - 1) // 2)]
    others = [host for host in hosts if host not in slow]
    second = sorted((link[host] for host in others), reverse=True)[:2][-1]
    best = [host for host in others if link[host] >= second]
    return Site(
        others=tuple(worker for host in others for worker in hosts[host]),
        slow=tuple(tuple(hosts[host]) for host in slow),
        best=tuple(worker for host in best for worker in hosts[host]),
        link=min(link[host] for host in others),
        slow_link=min((link[host] for host in slow), default=math.inf),
        uplink=math.inf if rack.uplink is None else rack.uplink,
        latency=rack.latency,
    )


def grid(sites: Sequence[Site], size: int) -> tuple[Groups, ...]:
    """`digits` inside the racks, then across them: those with the same place in their rack.
    Racks of different sizes: `digits` over all."""
    racks = [site.others for site in sites]
    if len({len(rack) for rack in racks}) > 1:
        return digits([worker for rack in racks for worker in rack], size)
    inside = [digits(rack, size) for rack in racks if len(rack) > 1]
    rows = [
        in_order(g for groups in phase for g in groups)
        for phase in zip(*inside, strict=True)
    ]
    columns = [
        in_order(
            [racks[r][place] for r in met]
            for met in phase
            for place in range(len(racks[0]))
        )
        for phase in (digits(range(len(racks)), size) if len(racks) > 1 else ())
    ]
    return (*rows, *columns)


class _Division:
    """Phases for racks of which some have slow hosts, or scarce uplinks."""

    def __init__(
        self, sites: Sequence[Site], payload: float, size: int, seed: int, every: int
    ) -> None:
        self.sites, self.seed = sites, seed
        # Which racks meet: two at a time, so that an uplink carries one pair's bytes.
        self.meetings = digits(range(len(sites)), 2) if len(sites) > 1 else ()
        # One worker cannot stay in its rack; of two, none can stay while the other crosses.
        fewest = min(site.count for site in sites)
        self.every = {1: 1, 2: max(2, every)}.get(fewest, every)
        self.group_sizes = [self._size_in(site, payload, size) for site in sites]
        self.cycles = [0] * len(sites)  # how often all of a rack have crossed
        self.queues = [list(site.others) for site in sites]  # who crosses next
        # Who is with a slow host next: backwards, since who has just crossed comes late.
        self.neighbours = [list(reversed(site.best)) for site in sites]
        self.due = {w for site in sites if site.slow for w in site.best}

    def _size_in(self, site: Site, payload: float, least: int) -> int:
        """Workers in a group of that rack: as many as the phase has time for."""
        seconds = [payload / site.slow_link] if site.slow else [0.0]
        if self.meetings:
            crossing = min(site.crossings, len(site.others))
            seconds.append(crossing * payload / site.uplink)
        return site.largest_group(max(seconds), least, payload)

    def phases(self) -> tuple[Groups, ...]:
        """Until everybody has crossed and reaches everybody, and each of the best has been with
        a slow host."""
        found: list[Groups] = []
        while not self._is_over(found):
            assert len(found) < MANY, "the racks' workers do not come to meet"
            found.append(self._phase(len(found)))
        return tuple(found)

    def _is_over(self, found: Sequence[Groups]) -> bool:
        rounds, rest = divmod(len(found), self.every)
        if not found or rest or self.due:
            return False
        if self.meetings and (rounds % len(self.meetings) or min(self.cycles) == 0):
            return False
        return len(parts(found)) == 1

    def _phase(self, phase: int) -> Groups:
        groups: list[list[int]] = []
        rest = [
            self._beside_the_slow(number, groups) for number in range(len(self.sites))
        ]
        if not self.meetings:
            self._have_crossed(
                0, self.queues[0][:1]
            )  # who is free is another each time
        elif phase % self.every == 0:
            racks = self.meetings[phase // self.every % len(self.meetings)]
            for met in racks:
                groups += self._cross(met, rest)
        for number, workers in enumerate(rest):
            if len(workers) == 1:  # not alone: with a group of its rack
                rack = set(self.sites[number].others)
                next(g for g in groups if not rack.isdisjoint(g)).extend(workers)
            elif workers:
                mixed = shuffled(workers, f"{self.seed} {phase} {number}")
                groups += [list(g) for g in cut(mixed, self.group_sizes[number])]
        return in_order(groups)

    def _beside_the_slow(self, number: int, groups: list[list[int]]) -> list[int]:
        """A rack's slow hosts go to *groups*, each with a neighbour; who is left comes back,
        those first whose turn it is to cross."""
        site, queue = self.sites[number], self.queues[number]
        neighbours = self.neighbours[number]
        left = queue + [worker for worker in site.others if worker not in queue]
        for host in site.slow:
            free = left[1:]  # the first has to cross, or its turn might never come
            neighbour = next((w for w in neighbours if w in free), free[0])
            if neighbour in neighbours:
                neighbours.remove(neighbour)
                neighbours.append(neighbour)
                self.due.discard(neighbour)
            left.remove(neighbour)
            groups.append([*host, neighbour])
        return left

    def _cross(self, met: Sequence[int], rest: list[list[int]]) -> list[list[int]]:
        """Groups of one worker of each of these racks, taken from the *rest*."""
        count = min(min(self.sites[r].crossings, len(rest[r])) for r in met)
        while count > 1 and any(len(rest[r]) - count == 1 for r in met):
            count -= 1  # or somebody would be left alone
        groups = [[rest[r][place] for r in met] for place in range(count)]
        for r in met:
            if len(rest[r]) - count == 1:
                groups[0].append(rest[r].pop())
            self._have_crossed(r, rest[r][:count])
            del rest[r][:count]
        return groups

    def _have_crossed(self, number: int, workers: Sequence[int]) -> None:
        queue = [worker for worker in self.queues[number] if worker not in workers]
        if not queue:
            # Another order each time: the same one could keep two halves apart for ever.
            self.cycles[number] += 1
            key = f"{self.seed} {self.cycles[number]} {number}"
            queue = shuffled(self.sites[number].others, key)
        self.queues[number] = queue
