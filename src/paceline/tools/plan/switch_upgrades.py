"""Which racks' switches to upgrade first, so that what workers send is added up there.

For each way to form means, one switch is upgraded after the other: each time the one with which a
step is the shortest, of equal ones the one with which the whole gradient's mean is. So an
order never takes back what it has bought; that it is the best one is tested for small
clusters against all orders, and not promised.

Every way is its row of the registry, priced on the cluster as the simulated runtime would: a step is
the gradient in DDP's buckets of 25 MB, each sent when it is ready, one after the
other, beside backward. Where sums are integers, a bucket's exponents are agreed on first,
while buckets before it move. Rounding, and messages' processor time in switches, cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import msgspec

from paceline.bucketing.cost_models import AffineCost
from paceline.bucketing.rules import plan_buckets
from paceline.bucketing.timeline import finish_time
from paceline.cluster import Cluster, Workload
from paceline.collectives.algorithms import Hierarchical, Ring
from paceline.collectives.in_network.algorithms import (
    ATP,
    InNetworkAllReduce,
    Rina,
    agreement_of_ranks,
)
from paceline.collectives.timing import seconds
from paceline.errors import UsageError
from paceline.interfaces import AllReduceAlgorithm, Placement
from paceline.interfaces.schedules import aggregating_racks

SMALL, LARGE = 1_000_000, 100_000_000
"""Bytes at which a collective is priced: between and beyond, its price is a line."""


@dataclass(frozen=True)
class Way:
    """One way to form means: *name* for people, its *collective*, and whether hosts of their own
    for servers count (*dedicated*)."""

    name: str
    collective: AllReduceAlgorithm
    dedicated: bool = True

    @property
    def upgrades(self) -> bool:
        """Whether switches that add up matter to it."""
        return isinstance(self.collective, InNetworkAllReduce)


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """So many *switches* add up: those of *racks*, the last of which is the newest; with
    *step_seconds* a step, *gradient_seconds* for the mean of the whole gradient, and *throughput*,
    samples of all workers a second (None: the workload does not say its batch)."""

    switches: int
    racks: tuple[int, ...]
    step_seconds: float
    gradient_seconds: float
    throughput: float | None


class Purchase(msgspec.Struct, frozen=True, kw_only=True):
    """By way, what each number of upgraded switches gives; of ways that need none, one stage.

    *ready*: how many add up already. *compute_seconds*: of a step on the slowest worker, which no
    network can go below.
    """

    workers: int
    racks: int
    ready: int
    compute_seconds: float
    ways: dict[str, tuple[Stage, ...]]


class Upgrade(NamedTuple):
    """What one buys: something at a switch that takes in *rate* bytes a second of all its workers
    together, and has *slots* sums of packets under way (None: all that comes)."""

    rate: float | None = None
    slots: int | None = None


ALL_THAT_COMES = Upgrade()

Told = Callable[[str, int], None]
"""Gets a way's name, and how many of its switches are upgraded."""


def ways_for(cluster: Cluster) -> tuple[Way, ...]:
    """What is compared on *cluster*."""
    ways = [Way("ring", Ring()), Way("hierarchical", Hierarchical())]
    if cluster.servers:
        ways.append(Way("atp", ATP()))
    return (*ways, Way("atp beside workers", ATP(), False), Way("rina", Rina()))


def plan_switches(
    cluster: Cluster,
    workload: Workload,
    upgrade: Upgrade = ALL_THAT_COMES,
    told: Told = lambda name, switches: None,
) -> Purchase:
    """What each number of switches with *upgrade* is worth on *cluster* to train *workload*.

    Racks that aggregate already are the start, and stay as they are. Raises `UsageError` for one
    worker.
    """
    if cluster.workers < 2:
        raise UsageError(
            "a cluster of one worker has nothing to add up: expected two workers or more"
        )
    pace = 1 / min(cluster.speeds)
    return Purchase(
        workers=cluster.workers,
        racks=len(cluster.racks),
        ready=len(aggregating_racks(cluster)),
        compute_seconds=pace * workload.ready_seconds[-1],
        ways={
            way.name: _stages(way, cluster, workload, upgrade, told)
            for way in ways_for(cluster)
        },
    )


def stage(
    way: Way,
    cluster: Cluster,
    workload: Workload,
    racks: Collection[int],
    upgrade: Upgrade = ALL_THAT_COMES,
) -> Stage:
    """What *way* comes to where the switches of *racks* add up; the order of these is kept."""
    sizes, pace = workload.gradient_bytes, 1 / min(cluster.speeds)
    price, later = _cost(way, _upgraded(cluster, racks, upgrade))
    ready = [pace * seconds_of + later for seconds_of in workload.ready_seconds]
    step = finish_time(plan_buckets("ddp", sizes), sizes, ready, price)
    batch = workload.batch
    return Stage(
        switches=len(racks),
        racks=tuple(racks),
        step_seconds=step,
        gradient_seconds=later + price(sum(sizes)),
        throughput=None if batch is None else cluster.workers * batch / step,
    )


def _stages(
    way: Way, cluster: Cluster, workload: Workload, upgrade: Upgrade, told: Told
) -> tuple[Stage, ...]:
    chosen = tuple(sorted(aggregating_racks(cluster)))
    found = [stage(way, cluster, workload, chosen, upgrade)]
    while way.upgrades and len(chosen) < len(cluster.racks):
        told(way.name, len(chosen) + 1)
        tried = [
            stage(way, cluster, workload, (*chosen, rack), upgrade)
            for rack in _different(cluster, chosen)
        ]
        best = min(tried, key=lambda one: (one.step_seconds, one.gradient_seconds))
        found.append(best)
        chosen = best.racks
    return tuple(found)


def _different(cluster: Cluster, chosen: Collection[int]) -> list[int]:
    """The first of each kind of rack that is left: equal ones are worth the same."""
    hosts = [server.rack for server in cluster.servers]
    kinds: dict[Hashable, int] = {}
    for number, rack in enumerate(cluster.racks):
        if number not in chosen:
            kind = replace(rack, names=(), group=""), hosts.count(number)
            kinds.setdefault(kind, number)
    return list(kinds.values())


def _upgraded(cluster: Cluster, racks: Collection[int], upgrade: Upgrade) -> Cluster:
    new = [number for number in racks if not cluster.racks[number].aggregates]
    changed = list(cluster.racks)
    for number in new:
        changed[number] = replace(
            changed[number],
            aggregates=True,
            aggregation_rate=upgrade.rate,
            slots=upgrade.slots,
        )
    return replace(cluster, racks=tuple(changed))


def _cost(way: Way, cluster: Cluster) -> tuple[AffineCost, float]:
    """Of one mean, by its bytes: how long it keeps the network busy, and how much later it begins
    because exponents are agreed on first."""
    at, row = _placement(way, cluster), way.collective

    def whole(size: int) -> float:
        return seconds(row.schedule(size, at), cluster)

    found = _line(whole)
    if not isinstance(row, InNetworkAllReduce) or row.uses_ring_only(at):
        return found, 0.0
    more = _agreement(row, at, cluster)
    slope = found.seconds_per_byte + more.seconds_per_byte
    return AffineCost(found.start_up, slope), more.start_up


def _agreement(row: InNetworkAllReduce, at: Placement, cluster: Cluster) -> AffineCost:
    """Of agreeing on exponents, by bytes of the gradient."""
    if row.agrees_at_switches(at):
        return _line(lambda size: seconds(row.agreement(size // 4, at), cluster))
    return _agreement_of_ranks(_without_aggregation(cluster))


def _without_aggregation(cluster: Cluster) -> Cluster:
    racks = [
        replace(rack, aggregates=False, aggregation_rate=None, slots=None)
        for rack in cluster.racks
    ]
    return replace(cluster, racks=tuple(racks))


@lru_cache(maxsize=16)
def _agreement_of_ranks(cluster: Cluster) -> AffineCost:
    """No switch matters to that, and it is played message by message, which takes seconds for a
    thousand workers."""
    count = cluster.workers
    return _line(lambda size: seconds(agreement_of_ranks(size // 4, count), cluster))


def _line(price: Callable[[int], float]) -> AffineCost:
    small, large = price(SMALL), price(LARGE)
    slope = (large - small) / (LARGE - SMALL)
    return AffineCost(max(0.0, small - slope * SMALL), slope)


def _placement(way: Way, cluster: Cluster) -> Placement:
    """Of all workers of *cluster*; its own hosts for servers do not count for every way."""
    at = Placement.on(cluster)
    return at if way.dedicated else replace(at, cluster=replace(cluster, servers=()))
