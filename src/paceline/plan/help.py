"""What would help beside another method: each answer is a run in virtual time.

*Break-even*: the link at which all workers together are as fast as one machine. Then, with the best
exact method: gradients of several passes sent as one, larger batches, fewer workers. All is
compared in samples a second; whether a larger batch trains as well is for people to judge.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from paceline.network import Cluster, Rack
from paceline.plan.found import Plan
from paceline.plan.predict import Job, Refused, predict
from paceline.units import show_rate

DDP = "bsp:fusion=ddp"
MOST_SCALE = 1024.0
"""Times faster, or slower, than the links are: what lies beyond is not looked for."""
PRECISION = 1.02
PASSES = (4, 16)
"""Passes that an update takes, or times the batch."""


class Help(msgspec.Struct, frozen=True, kw_only=True):
    """*what* to do, with which *spec*; the *step_seconds* that come of it, and samples a second over those of one
    machine."""

    what: str
    spec: str
    step_seconds: float
    speed_up: float


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """With *spec*, links of *rate* (the slowest of them, bytes a second) make all workers as fast
    as one machine; None: no link does, or every one."""

    spec: str
    rate: float | None
    words: str


class Helps(msgspec.Struct, frozen=True, kw_only=True):
    """What would help, from the most to the least."""

    break_even: tuple[BreakEven, ...]
    helps: tuple[Help, ...]


def helps(plan: Plan, job: Job) -> Helps:
    """For *plan*, which was made of *job*'s cluster and workload. Nothing where one worker is all,
    or no exact candidate could run."""
    exact = plan.best.get("exact")
    if exact is None:
        return Helps(break_even=(), helps=())
    one, spec = plan.one_machine.step_seconds, exact.spec
    found = []
    for count in PASSES:
        for what, more in (
            (f"accumulate {count} batches an update", replace(job, accumulate=count)),
            (f"batches {count} times as large", replace(job, batches=count)),
        ):
            found += _help(what, more, spec, one * count)
    found += _fewer(job, spec, one)
    found.sort(key=lambda one: -one.speed_up)
    specs = dict.fromkeys((DDP, spec))
    return Helps(
        break_even=tuple(break_even(job, spec, one) for spec in specs),
        helps=tuple(found),
    )


def _help(what: str, job: Job, spec: str, one: float) -> list[Help]:
    said = predict(job, spec)
    if isinstance(said, Refused):
        return []
    speed_up = job.cluster.workers * one / said.step_seconds
    return [
        Help(what=what, spec=spec, step_seconds=said.step_seconds, speed_up=speed_up)
    ]


def _fewer(job: Job, spec: str, one: float) -> list[Help]:
    """Half of the hosts, and all but the slowest one: those whose links, and processors, are
    fastest; of equal ones the first, which stand together."""
    cluster = job.cluster
    hosts = fastest_first(cluster)
    counts = {cluster.hosts // 2}
    if len({_of_host(cluster, host) for host in hosts}) > 1:
        counts.add(cluster.hosts - 1)
    found = []
    for count in sorted(counts):
        if count < 2:
            continue
        smaller = with_hosts(cluster, hosts[:count])
        workers = smaller.workers
        what = f"{workers} workers instead of {cluster.workers}"
        found += _help(what, replace(job, cluster=smaller), spec, one)
    return found


def _of_host(cluster: Cluster, host: int) -> tuple[float, float]:
    """Its link and the speed of its slowest worker."""
    mine = [w for w in range(cluster.workers) if cluster.host_of(w) == host]
    link = cluster.capacities[cluster.link_out_of(host)]
    return link, min(cluster.speeds[w] for w in mine)


def fastest_first(cluster: Cluster) -> list[int]:
    """Hosts by links, then speeds; equal ones in their order."""
    return sorted(
        range(cluster.hosts), key=lambda host: _of_host(cluster, host), reverse=True
    )


def with_hosts(cluster: Cluster, hosts: list[int]) -> Cluster:
    """The cluster of these hosts alone: without rules, and with the servers of racks that are
    left."""
    racks: list[Rack] = []
    kept: dict[int, int] = {}
    first = 0
    for number, rack in enumerate(cluster.racks):
        mine = [
            host - first for host in sorted(hosts) if 0 <= host - first < rack.hosts
        ]
        first += rack.hosts
        if not mine:
            continue
        kept[number] = len(racks)
        each = rack.workers_per_host
        workers = [host * each + i for host in mine for i in range(each)]
        racks.append(
            replace(
                rack,
                workers=len(workers),
                link=tuple(rack.links[host] for host in mine),
                speed=tuple(rack.speed[worker] for worker in workers),
                names=tuple(rack.names[host] for host in mine) if rack.names else (),
                group=tuple(rack.groups[worker] for worker in workers),
            )
        )
    servers = tuple(
        replace(server, rack=kept[server.rack])
        for server in cluster.servers
        if server.rack in kept
    )
    return Cluster(tuple(racks), processor=cluster.processor, servers=servers)


# ---- links ----


def break_even(job: Job, spec: str, one: float) -> BreakEven:
    """The link at which as many samples a second come out as on one machine, which takes *one*
    second a batch, found by halving."""
    slowest = min(rate for rack in job.cluster.racks for rate in rack.links)

    def gains(scale: float) -> bool:
        said = predict(
            replace(job, cluster=with_links(job.cluster, scale)), spec, short=True
        )
        return (
            not isinstance(said, Refused)
            and said.step_seconds <= job.cluster.workers * one
        )

    low, high = 1 / MOST_SCALE, MOST_SCALE
    if not gains(high):
        return BreakEven(
            spec=spec, rate=None, words="no link makes it as fast as one machine"
        )
    if gains(low):
        return BreakEven(
            spec=spec,
            rate=None,
            words=f"faster than one machine even at {show_rate(low * slowest)}",
        )
    while high / low > PRECISION:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if gains(middle) else (middle, high)
    rate = high * slowest
    digits = float(f"{rate * 8:.2g}") / 8
    return BreakEven(
        spec=spec, rate=rate, words=f"as fast as one machine at {show_rate(digits)}"
    )


def with_links(cluster: Cluster, scale: float) -> Cluster:
    """The cluster with all links, uplinks and those of servers that many times as fast."""
    racks = tuple(
        replace(
            rack,
            link=tuple(rate * scale for rate in rack.links),
            uplink=None if rack.uplink is None else rack.uplink * scale,
        )
        for rack in cluster.racks
    )
    servers = tuple(
        replace(server, link=None if server.link is None else server.link * scale)
        for server in cluster.servers
    )
    return Cluster(racks, processor=cluster.processor, servers=servers)
