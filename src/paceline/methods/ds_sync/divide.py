"""Designs the groups of every step, for equal links and for uneven networks.

- `make_plan`: the plan of a training; start here.
- `digits`: groups for equal links; `divide`: groups for a cluster's racks and slow hosts.

Theory of operation (Wang et al. 2022; its text is not public, so this is a reconstruction)
-------------------------------------------------------------------------------------------
A ring of g workers sends 2(g-1)/g of the bytes over its slowest link. A pair sends half as much as a
long ring. So groups are large inside racks, and pairs where a link is scarce.

* No scarce links: `digits` inside the racks, then across them. For R racks of R workers and groups
  of R, these are the rows and the columns of a grid.
* Scarce uplinks: in each phase, a few workers of each rack form pairs with workers of another rack.
  The rest average inside their rack. The pairs change from phase to phase until each worker has been
  in one. Their number is what an uplink carries during an average inside the rack.
* A host that is much slower than the others of its rack forms a pair with one of its best-connected
  neighbours, in turn. So it delays one worker, not a ring.
* Groups inside a rack are as large as the duration of the phase allows.

There is no barrier between groups, so a pair across racks delays its racks only in the next phase.
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
"""A host is slow if its bandwidth or its speed is at most this share of its rack's median."""
NEARLY = 1 + 1e-9
"""Times that differ by at most this factor are equal, apart from rounding."""
MANY = 100_000
"""More phases than any division needs."""
MOST_SELDOM = 4
"""The largest factor by which contention lengthens the time between two averages across racks."""


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
    """Make the plan of *members*, which is the same on every worker.

    Args:
        members: The workers' ranks.
        groups: ``digits`` (see `digits`), ``topology`` (see `divide`), or ``auto``: topology if
            the cluster has several racks or a slow host, else digits.
        size: Workers of a group. If it does not divide their number, groups are as equal as possible,
            and an odd worker makes a group of three.
        seed: Seed of the groups inside racks.
        cluster: The network; None if it is not known.
        bytes: Bytes that each worker averages in each step.
        cross_rack_every: Phases from one average across racks to the next (see `divide`).
        version: Number of the plan. Plan 0 has all workers of the cluster.
        begins: The step of its first phase.
        contention: Contention on the cluster's links.

    Raises:
        UsageError: A group would have one worker, or more workers than there are; the cluster has
            other workers; or some workers never reach others.
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


# Cached, since simulated workers of one process make the same plan.
@lru_cache(maxsize=16)
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
    """Return *cluster*; raise `UsageError` if there is none, or if it has other workers."""
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
    """Group workers whose numbers differ in one digit only, in another digit in each phase.

    Workers are numbered in base *size*. If their number is a product of factors up to *size* (or *size* + 1,
    if needed), these factors are the radices and the sizes of groups. Then all workers agree exactly after
    one step for each digit: n = g^d workers take d steps. Otherwise groups are as equal as possible, and
    workers agree approximately.

    For 16 workers and a size of 4 these are the rows, then the columns of a 4x4 grid. Wang et al. (2020)
    ran 16 workers; this generalizes their groups.

    Args:
        members: The workers' ranks.
        size: Workers of a group.

    Returns:
        The groups of each phase.
    """
    radices = _radices(len(members), size)
    if not radices:
        # A prime factor is too large.
        radices = [size] * max(1, _digits_of(len(members), size))
    strides = itertools.accumulate(radices[:-1], lambda a, b: a * b, initial=1)
    return tuple(
        in_order(cut([m for i in range(s) for m in members[i::s]], radix))
        for s, radix in zip(strides, radices, strict=True)
    )


def _digits_of(count: int, base: int) -> int:
    """Return how many digits number *count* workers."""
    return next(d for d in itertools.count() if base**d >= count)


def _radices(count: int, size: int) -> list[int]:
    """Factorize *count* into factors from 2 to *size*, the largest first; empty if that is impossible.

    *size* + 1 is used only if no smaller factor divides.
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
    """Raise `UsageError` if *count* workers cannot form groups of *size*."""
    if size < 2:
        raise UsageError(f"size: expected two or more workers in a group, got {size}")
    if count > 1 and size > count:
        raise UsageError(
            f"size: expected 2 to {count} workers in a group, got {size}. Use {count} to average "
            "over all workers in each step"
        )


@dataclass(frozen=True)
class Site:
    """The workers of a rack, with the properties that determine its groups.

    Attributes:
        others: The workers that are not on slow hosts.
        slow: The workers of each slow host, the slowest host first.
        best: The workers among *others* with the fastest links.
        link: Bytes per second of a host that is not slow.
        slow_link: Bytes per second of the slowest host.
        uplink: Bytes per second of the rack's uplink.
        latency: Seconds of a message inside the rack.
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
        """Number of workers of the rack."""
        return len(self.others) + sum(len(host) for host in self.slow)

    @property
    def crossings(self) -> int:
        """Pairs across racks that the uplink carries during an average inside the rack, at least 1."""
        if self.uplink == math.inf:
            return self.count
        # It is B_x T_in / M, in which the bytes M cancel.
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
    """Return the groups of each phase on *cluster*, by the theory of operation above.

    Args:
        members: The workers' ranks.
        cluster: The network.
        bytes: Bytes that each worker averages in each step.
        size: Workers of a group if no link is scarce. Otherwise, the fewest workers of a group inside
            a rack.
        seed: Seed that shuffles the groups of a rack.
        cross_rack_every: Phases from one average across racks to the next; racks of two workers take 2
            or more. With more, steps are faster if uplinks are the bottleneck, but workers agree more
            slowly.

    Raises:
        UsageError: The cluster does not have all workers.
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
    # Each slow host needs a neighbour, and one more host must average with the other racks.
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
    """Return `digits` inside the racks, then across them among workers in the same place.

    If racks differ in size, return `digits` over all workers.

    Args:
        sites: The racks, none with slow hosts or a scarce uplink.
        size: Workers of a group.
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
    """Makes the phases for racks with slow hosts or scarce uplinks."""

    def __init__(
        self, sites: Sequence[Site], payload: float, size: int, seed: int, every: int
    ) -> None:
        self.sites, self.seed = sites, seed
        # The racks that average with each other: two at a time, so that an uplink carries one pair's bytes.
        self.meetings = digits(range(len(sites)), 2) if len(sites) > 1 else ()
        # A single worker cannot average in its rack. Of two, neither can while the other one crosses.
        fewest = min(site.count for site in sites)
        self.every = {1: 1, 2: max(2, every)}.get(fewest, every)
        self.group_sizes = [self._size_in(site, payload, size) for site in sites]
        # How often all workers of a rack have crossed.
        self.cycles = [0] * len(sites)
        # The workers in the order in which they cross.
        self.queues = [list(site.others) for site in sites]
        # The workers in the order in which they join a slow host. Reversed: those that have just crossed
        # come last.
        self.neighbours = [list(reversed(site.best)) for site in sites]
        self.due = {w for site in sites if site.slow for w in site.best}

    def _size_in(self, site: Site, payload: float, least: int) -> int:
        """Return the workers of a group of that rack: as many as the duration of a phase allows."""
        seconds = [payload / site.slow_link] if site.slow else [0.0]
        if self.meetings:
            crossing = min(site.crossings, len(site.others))
            seconds.append(crossing * payload / site.uplink)
        return site.largest_group(max(seconds), least, payload)

    def phases(self) -> tuple[Groups, ...]:
        """Return the fewest phases in which all workers cross, and reach each other.

        In them, each of the best-connected workers is also with a slow host once.
        """
        found: list[Groups] = []
        while not self._is_over(found):
            assert len(found) < MANY, "some racks never average with each other"
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
            # There is nothing to cross. Move the queue on, so that another worker is free each time.
            self._have_crossed(0, self.queues[0][:1])
        elif phase % self.every == 0:
            racks = self.meetings[phase // self.every % len(self.meetings)]
            for met in racks:
                groups += self._cross(met, rest)
        for number, workers in enumerate(rest):
            if len(workers) == 1:
                # A single worker joins a group of its rack.
                rack = set(self.sites[number].others)
                next(g for g in groups if not rack.isdisjoint(g)).extend(workers)
            elif workers:
                mixed = shuffled(workers, f"{self.seed} {phase} {number}")
                groups += [list(g) for g in cut(mixed, self.group_sizes[number])]
        return in_order(groups)

    def _beside_the_slow(self, number: int, groups: list[list[int]]) -> list[int]:
        """Add a group of each slow host and a neighbour to *groups*; return the other workers.

        The workers that cross next come first.
        """
        site, queue = self.sites[number], self.queues[number]
        neighbours = self.neighbours[number]
        left = queue + [worker for worker in site.others if worker not in queue]
        for host in site.slow:
            # The first one has to cross. Otherwise its turn might never come.
            free = left[1:]
            neighbour = next((w for w in neighbours if w in free), free[0])
            if neighbour in neighbours:
                neighbours.remove(neighbour)
                neighbours.append(neighbour)
                self.due.discard(neighbour)
            left.remove(neighbour)
            groups.append([*host, neighbour])
        return left

    def _cross(self, met: Sequence[int], rest: list[list[int]]) -> list[list[int]]:
        """Return groups of one worker of each of these racks, taken from the *rest*."""
        count = min(min(self.sites[r].crossings, len(rest[r])) for r in met)
        # Leave no single worker behind.
        while count > 1 and any(len(rest[r]) - count == 1 for r in met):
            count -= 1
        groups = [[rest[r][place] for r in met] for place in range(count)]
        for r in met:
            if len(rest[r]) - count == 1:
                groups[0].append(rest[r].pop())
            self._have_crossed(r, rest[r][:count])
            del rest[r][:count]
        return groups

    def _have_crossed(self, number: int, workers: Sequence[int]) -> None:
        """Remove workers of a rack from its queue; refill it once all have crossed."""
        queue = [worker for worker in self.queues[number] if worker not in workers]
        if not queue:
            # Shuffle again: one fixed order could keep two halves apart for ever.
            self.cycles[number] += 1
            key = f"{self.seed} {self.cycles[number]} {number}"
            queue = shuffled(self.sites[number].others, key)
        self.queues[number] = queue


def _cross_rack_every(
    asked: int, members: Sequence[int], cluster: Cluster, contention: Contention
) -> int:
    """Return the phases from one average across racks to the next; without contention it is *asked*.

    Contention first reduces the number of pairs that cross an uplink together, then how often they do.
    """
    before = sites_of(members, cluster)
    now = sites_of(members, contention.on(cluster))
    lost = 1.0
    for rack, part in contention.racks:
        if rack in now:
            fewer = before[rack].crossings / now[rack].crossings
            lost = max(lost, 1 / (part * fewer))
    return min(MOST_SELDOM, round(lost)) * asked
