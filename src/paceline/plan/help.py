"""What would help beside another method: each answer is a run in virtual time.

*Break-even*: the link at which all workers together are as fast as one machine. Then, with the best
exact method: gradients of several passes sent as one, larger batches, fewer workers. All is
compared in samples a second; whether a larger batch trains as well is for people to judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from paceline.network import Cluster, Rack
from paceline.plan.coarse import coarse, unplanned
from paceline.plan.found import Plan
from paceline.plan.predict import Job, Refused
from paceline.plan.together import Predict, in_this_process
from paceline.units import show_rate

DDP = "bsp:fusion=ddp"
MOST_SCALE = 1024.0
"""Times faster, or slower, than the links are: what lies beyond is not looked for."""
PRECISION = 1.02
PASSES = (4, 16)
"""Passes that an update takes, or times the batch."""


MANY = 16
"""Workers; of more a run with all tensors takes too long."""


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


def helps(plan: Plan, job: Job, predict: Predict = in_this_process) -> Helps:
    """For *plan*, which was made of *job*'s cluster and workload. Nothing where one worker is all,
    or no exact candidate could run. Of many workers with fewer tensors."""
    exact = plan.best.get("exact")
    if exact is None:
        return Helps(break_even=(), helps=())
    one, spec = plan.one_machine.step_seconds, exact.spec
    if job.cluster.workers > MANY:
        job = replace(job, workload=coarse(job.workload))
    asked = [*_larger(job), *_fewer(job)]
    said = predict.each([(more, spec) for _, more in asked])
    found = []
    for (what, more), answer in zip(asked, said, strict=True):
        if isinstance(answer, Refused):
            continue
        seconds, workers = answer.step_seconds, more.cluster.workers
        speed_up = more.accumulate * more.batches * workers * one / seconds
        found.append(
            Help(what=what, spec=spec, step_seconds=seconds, speed_up=speed_up)
        )
    found.sort(key=lambda one: -one.speed_up)
    return Helps(
        break_even=tuple(
            break_evens(job, list(dict.fromkeys((DDP, spec))), one, predict)
        ),
        helps=tuple(found),
    )


def _larger(job: Job) -> Iterator[tuple[str, Job]]:
    """More samples an update."""
    for count in PASSES:
        yield f"accumulate {count} batches an update", replace(job, accumulate=count)
        yield f"batches {count} times as large", replace(job, batches=count)


def _fewer(job: Job) -> Iterator[tuple[str, Job]]:
    """Half of the hosts, and all but the slowest one: those whose links, and processors, are
    fastest; of equal ones the first, which stand together."""
    cluster = job.cluster
    hosts = fastest_first(cluster)
    counts = {cluster.hosts // 2}
    if len({_of_host(cluster, host) for host in hosts}) > 1:
        counts.add(cluster.hosts - 1)
    for count in sorted(counts):
        if count < 2:
            continue
        smaller = with_hosts(cluster, hosts[:count])
        what = f"{smaller.workers} workers instead of {cluster.workers}"
        yield what, replace(job, cluster=smaller)


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
    second a batch, found by halving, in short runs."""
    (found,) = break_evens(job, [spec], one)
    return found


def break_evens(
    job: Job, specs: Sequence[str], one: float, predict: Predict = in_this_process
) -> list[BreakEven]:
    """The same of each of *specs*, side by side."""
    slowest = min(rate for rack in job.cluster.racks for rate in rack.links)
    quick = replace(job, workload=coarse(job.workload))

    def gain(scales: Mapping[str, float]) -> dict[str, bool]:
        asked = [
            (spec, replace(quick, cluster=with_links(job.cluster, scale)), each)
            for spec, scale in scales.items()
            for each in unplanned(spec)
        ]
        said = predict.each([(there, each) for _, there, each in asked], short=True)
        enough = dict.fromkeys(scales, False)
        for (spec, _, _), answer in zip(asked, said, strict=True):
            enough[spec] |= (
                not isinstance(answer, Refused)
                and answer.step_seconds <= job.cluster.workers * one
            )
        return enough

    found: dict[str, BreakEven] = {}
    at_most, at_least = (
        gain(dict.fromkeys(specs, scale)) for scale in (MOST_SCALE, 1 / MOST_SCALE)
    )
    for spec in specs:
        words = f"faster than one machine even at {show_rate(slowest / MOST_SCALE)}"
        if not at_most[spec]:
            words = "no link makes it as fast as one machine"
        if not at_most[spec] or at_least[spec]:
            found[spec] = BreakEven(spec=spec, rate=None, words=words)
    between = {s: (1 / MOST_SCALE, MOST_SCALE) for s in specs if s not in found}
    while any(high / low > PRECISION for low, high in between.values()):
        middle = {spec: (low * high) ** 0.5 for spec, (low, high) in between.items()}
        for spec, enough in gain(middle).items():
            low, high = between[spec]
            between[spec] = (low, middle[spec]) if enough else (middle[spec], high)
    for spec, (_, high) in between.items():
        rate = high * slowest
        words = f"as fast as one machine at {show_rate(float(f'{rate * 8:.2g}') / 8)}"
        found[spec] = BreakEven(spec=spec, rate=rate, words=words)
    return [found[spec] for spec in specs]


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
