"""Divide: the groups of every step, for equal links and for a cluster's uneven ones.

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

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median_high

from paceline.cluster import Cluster
from paceline.errors import UsageError, unknown
from paceline.methods.ds_sync.cost import check_members, ring_bytes
from paceline.methods.ds_sync.plan import (
    NONE,
    Contention,
    Groups,
    Plan,
    check_connected,
    cut,
    in_order,
    parts,
)

DESIGNS = ("auto", "digits", "topology")
SLOW = 0.6
"""A host is slow whose link, or whose speed, is at most this share of its rack's median."""
NEARLY = 1 + 1e-9
"""Times that differ by rounding alone are the same."""
MANY = 100_000
"""More phases than any division needs."""
MOST_SELDOM = 4
"""The most that contention lengthens the time between two phases in which racks meet."""


def make_plan(
    members: Sequence[int],
    *,
    groups: str = "auto",
    size: int = 2,
    seed: int = 0,
    cluster: Cluster | None = None,
    bytes: float = 0,  # noqa: A002 - as in the interfaces
    cross_rack_every: int = 1,
    version: int = 0,
    begins: int = 0,
    contention: Contention = NONE,
) -> Plan:
    """Return the plan of *members*: the same on every worker.

    Args:
        members: Ranks.
        groups: ``digits`` (see `digits`), ``topology`` (see `divide`), or ``auto``: topology where
            the cluster has several racks or a slow host, else digits.
        size: Workers of a group. Where it does not divide them, groups are as equal as
            possible, and an odd worker makes a group of three.
        seed: Of the groups inside racks.
        cluster: The network, where it is known.
        bytes: Averaged in each step by each worker.
        cross_rack_every: Racks meet in every so many phases: see `divide`.
        version: Of the plan. The first one, 0, has all workers of the cluster.
        begins: The step of its first phase.
        contention: On the cluster's links.

    Raises:
        UsageError: For groups of one, for groups of more workers than there are, for a cluster of
            other workers, and where some workers never reach others.
    """
    if groups not in DESIGNS:
        raise UsageError(unknown("value for groups", groups, DESIGNS))
    ordered = tuple(sorted(set(members)))
    _check_size(size, len(ordered))
    if cross_rack_every < 1:
        raise UsageError(
            f"cross_rack_every: expected 1 or more phases, got {cross_rack_every}"
        )
    phases: tuple[Groups, ...]
    if len(ordered) <= 1:
        phases = ((ordered,),) if ordered else ()
    elif groups == "topology" or (groups == "auto" and cluster is not None):
        phases = _for_network(
            ordered,
            _known(cluster, ordered, version),
            contention,
            bytes,
            only_uneven=groups == "auto",
            size=size,
            seed=seed,
            cross_rack_every=cross_rack_every,
        )
    else:
        phases = digits(ordered, size)
    plan = Plan(
        phases,
        version,
        begins,
        ordered,
        groups,
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
        return digits(members, size)
    every = _cross_rack_every(cross_rack_every, members, cluster, contention)
    return divide(
        members, network, payload, size=size, seed=seed, cross_rack_every=every
    )


def _known(cluster: Cluster | None, members: Sequence[int], version: int) -> Cluster:
    """Raises `UsageError` unless there is a cluster, and it is that of *members*."""
    if cluster is None:
        raise UsageError(
            "groups='topology' needs a description of the network, and there is none. Give a cluster "
            "file (paceline run --cluster FILE), or use groups='digits'"
        )
    if version == 0 and cluster.workers != len(members):
        raise UsageError(
            f"expected a cluster of {len(members)} workers, got one of {cluster.workers}. Give the "
            "cluster file of this job"
        )
    return cluster


def digits(members: Sequence[int], size: int) -> tuple[Groups, ...]:
    """Return groups of workers whose numbers differ in one digit, another digit in each phase.

    Workers are numbered in base *size*. Where their count is a product of factors up to *size* (or
    *size* + 1, where needed), the factors are the radices and the sizes of groups. All workers
    then agree exactly after as many steps as there are digits: n = g^d takes d. Else groups
    are as equal as possible, and workers agree nearly.

    For 16 workers and a size of 4: the rows, then the columns of a 4x4 grid
    (Wang et al. 2020 ran 16; the grouping is our generalisation).
    """
    radices = _radices(len(members), size)
    if not radices:  # a prime factor is too large
        radices = [size] * max(1, _digits_of(len(members), size))
    strides = itertools.accumulate(radices[:-1], lambda a, b: a * b, initial=1)
    return tuple(
        in_order(cut([m for i in range(s) for m in members[i::s]], radix))
        for s, radix in zip(strides, radices, strict=True)
    )


def _digits_of(count: int, base: int) -> int:
    """The digits that number *count* workers."""
    return next(d for d in itertools.count() if base**d >= count)


def _radices(count: int, size: int) -> list[int]:
    """Factors of *count* from 2 to *size*, the largest first; empty if there are none.

    *size* + 1 is one only where nothing else divides.
    """
    found = []
    while count > 1:
        fits = [*range(min(size, count), 1, -1), size + 1]
        factor = next((radix for radix in fits if count % radix == 0), None)
        if factor is None:
            return []
        found.append(factor)
        count //= factor
    return found or [1]


def shuffled(workers: Sequence[int], key: str) -> list[int]:
    """Return *workers* in a pseudo-random order that depends on *key* alone."""

    def place(worker: int) -> bytes:
        return hashlib.blake2b(f"{key} {worker}".encode(), digest_size=16).digest()

    return sorted(workers, key=place)


def _check_size(size: int, count: int) -> None:
    """Raises `UsageError` for groups that *count* workers cannot form."""
    if size < 2:
        raise UsageError(f"size: expected two or more workers in a group, got {size}")
    if count > 1 and size > count:
        raise UsageError(
            f"size: expected 2 to {count} workers in a group, got {size}. Use {count} to average "
            "over all workers in each step"
        )


@dataclass(frozen=True)
class Site:
    """A rack, as groups are made for it.

    Attributes:
        others: The workers that are not on slow hosts.
        slow: The workers of each slow host, the slowest host first.
        best: Those of *others* with the best links.
        link: Bytes per second of a host.
        slow_link: Bytes per second of the slowest host.
        uplink: Bytes per second of the rack.
        latency: Seconds.
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
        """The number of its workers."""
        return len(self.others) + sum(len(host) for host in self.slow)

    @property
    def crossings(self) -> int:
        """The pairs that its uplink carries in the time of an average inside the rack, at least 1."""
        if self.uplink == math.inf:
            return self.count
        # B_x T_in / M: the bytes cancel
        fits = self.uplink * ring_bytes(self.count, 1.0) / self.link
        return max(1, math.floor(fits * NEARLY))

    def largest_group(self, seconds: float, least: int, size: float) -> int:
        """Return the largest group that averages *size* bytes in *seconds*; at least *least*."""
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
    """Return the phases of *members* on *cluster*: see the theory of operation above.

    Args:
        members: Ranks.
        cluster: The network.
        bytes: Averaged in each step by each worker.
        size: Workers of a group where links are not scarce. Where they are, the least in a group
            inside a rack.
        seed: Shuffles the groups of a rack.
        cross_rack_every: Racks meet in every so many phases, racks of two workers in every second
            one at least. More is faster where the uplink is the limit, and workers agree more
            slowly.

    Raises:
        UsageError: For a worker that the cluster does not have.
    """
    check_members(members, cluster)
    sites = list(sites_of(members, cluster).values())
    if not any(site.slow for site in sites) and all(
        site.crossings >= site.count for site in sites
    ):
        return grid(sites, size)
    return _Division(sites, bytes, size, seed, cross_rack_every).phases()


def is_uneven(members: Sequence[int], cluster: Cluster) -> bool:
    """Return whether a cluster has several racks, or a slow host."""
    check_members(members, cluster)
    sites = sites_of(members, cluster)
    return len(sites) > 1 or any(site.slow for site in sites.values())


def sites_of(members: Sequence[int], cluster: Cluster) -> dict[int, Site]:
    """Return the racks of *members*, by the rack's number."""
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
    """Return `digits` inside the racks, and then across them, of workers with the same place.

    For racks of different sizes, `digits` over all workers.
    """
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
        """Return phases until all workers have crossed and reach each other.

        Each of the best-connected workers has then been with a slow host, too.
        """
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
        """Add a group of each slow host and a neighbour to *groups*; return the other workers.

        Those come first whose turn it is to cross.
        """
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


def _cross_rack_every(
    asked: int, members: Sequence[int], cluster: Cluster, contention: Contention
) -> int:
    """The phases from one meeting of racks to the next, under contention; *asked* without.

    Contention first lowers the number of groups that cross an uplink together, and then how
    often any does.
    """
    before = sites_of(members, cluster)
    now = sites_of(members, contention.on(cluster))
    lost = 1.0
    for rack, part in contention.racks:
        if rack in now:
            fewer = before[rack].crossings / now[rack].crossings
            lost = max(lost, 1 / (part * fewer))
    return min(MOST_SELDOM, round(lost)) * asked
