"""Which candidates to look at first: what each comes to on a few hosts, with a few tensors.

Many workers cost much to simulate. Should the budget end, it has gone to those that are fast on
`HOSTS` of the hosts. Nothing is left out for that, and no figure of it is shown.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.cluster import Cluster
from paceline.tools.plan.merged_tensors import coarse
from paceline.tools.plan.predict import TrainingJob
from paceline.tools.plan.suggestions import fastest_first, with_hosts

HOSTS, TENSORS = 4, 4


def rough(job: TrainingJob) -> TrainingJob:
    """*job*, of few tensors on few hosts."""
    cluster = fewer(job.cluster, HOSTS)
    return replace(job, cluster=cluster, workload=coarse(job.workload, TENSORS))


def fewer(cluster: Cluster, most: int) -> Cluster:
    """At most so many hosts of *cluster*: the slowest of each of its first two racks, and as large a part
    of the uplinks."""
    if cluster.hosts <= most:
        return cluster
    slowest_first = fastest_first(cluster)[::-1]
    racks = range(min(2, len(cluster.racks)))
    kept: list[int] = []
    scales = []
    for rack in racks:
        mine = [host for host in slowest_first if cluster.rack_of_host(host) == rack]
        share = mine[: most // len(racks)]
        kept += share
        scales.append(len(share) / len(mine))
    smaller = with_hosts(cluster, kept)
    scaled = tuple(
        replace(rack, uplink=None if rack.uplink is None else rack.uplink * scale)
        for rack, scale in zip(smaller.racks, scales, strict=True)
    )
    return Cluster(scaled, processor=smaller.processor, servers=smaller.servers)
