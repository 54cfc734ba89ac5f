"""What would help beside another method: each answer is a run in virtual time.

With what is recommended of the strongest class: gradients of several passes sent as one, larger batches, fewer
workers. All is compared in samples a second, and only what gives more is told; whether a larger batch trains as well is for people to judge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from paceline.cluster import Cluster, Rack
from paceline.tools.plan.break_even import BreakEven, break_evens
from paceline.tools.plan.estimates import DDP, Infeasible, Plan
from paceline.tools.plan.merged_tensors import coarse
from paceline.tools.plan.predict import TrainingJob
from paceline.tools.plan.prediction_cost import UNBOUNDED, Budget, cost
from paceline.tools.plan.predictor import Predict, in_this_process

PASSES = (4, 16)
"""Passes that an update takes, or times the batch."""


HELPS = 1.02
"""Times as many samples a second: less is no help."""
MANY = 16
"""Workers; of more a run with all tensors takes too long."""


class Suggestion(msgspec.Struct, frozen=True, kw_only=True):
    """*what* to do, with which *spec*; the *step_seconds* that come of it, and samples a second over those of one
    machine."""

    what: str
    spec: str
    step_seconds: float
    speedup: float


class Suggestions(msgspec.Struct, frozen=True, kw_only=True):
    """What would help, from the most to the least. *tried*: how many changes were run; *untried*: how many the
    budget left no time for."""

    break_even: tuple[BreakEven, ...]
    helps: tuple[Suggestion, ...]
    tried: int = 0
    untried: int = 0


def helps(
    plan: Plan,
    job: TrainingJob,
    predict: Predict = in_this_process,
    budget: Budget = UNBOUNDED,
) -> Suggestions:
    """For *plan*, which was made of *job*'s cluster and workload, as far as *budget* goes. Nothing where one
    worker is all. Of many workers with fewer tensors."""
    if not plan.recommended:
        return Suggestions(break_even=(), helps=())
    row = next(iter(plan.recommended.values()))
    baseline, spec = plan.baseline, row.spec
    one = baseline.single.step_seconds / baseline.workers
    if job.cluster.workers > MANY:
        job = replace(job, workload=coarse(job.workload))
    usual = [DDP] if plan.estimate(DDP) is not None else []
    links = list(dict.fromkeys((*usual, spec)))
    even = break_evens(job, links, one, predict, budget)
    wanted = [*_larger(job), *_fewer(job)]
    asked = [
        (what, more)
        for what, more in wanted
        if budget.takes(cost(more, spec, short=False))
    ]
    said = predict.each([(more, spec) for _, more in asked])
    found = []
    for (what, more), answer in zip(asked, said, strict=True):
        if isinstance(answer, Infeasible):
            continue
        seconds, workers = answer.step_seconds, more.cluster.workers
        passes = more.passes / job.passes
        speedup = passes * more.batches * workers * one / seconds
        if speedup >= HELPS * baseline.speedup(row):
            found.append(
                Suggestion(what=what, spec=spec, step_seconds=seconds, speedup=speedup)
            )
    found.sort(key=lambda one: -one.speedup)
    return Suggestions(
        break_even=tuple(even),
        helps=tuple(found),
        tried=len(asked),
        untried=len(wanted) - len(asked) + (len(even) < len(links)),
    )


def _larger(job: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
    """More samples an update."""
    for count in PASSES:
        if count > job.passes:
            more = replace(job, accumulate=count)
            yield f"gradient accumulation over {count} batches", more
        yield f"{count}x larger batches", replace(job, batches=count)


def _fewer(job: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
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
