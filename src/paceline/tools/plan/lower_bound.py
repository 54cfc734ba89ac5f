"""What bounds a step whatever the method, and what one machine does alone."""

from __future__ import annotations

from dataclasses import replace

from paceline.cluster import Cluster, Rack, Workload
from paceline.errors import UsageError
from paceline.tools.plan.estimates import Estimate
from paceline.tools.plan.predict import Refused, TrainingJob, predict


def lower_bound_seconds(cluster: Cluster, workload: Workload) -> float:
    """Seconds of a step below which no exact mean of all gradients, sent as they are, comes:
    the slowest worker computes, and meanwhile

    - every link that parts some workers from the others passes the sum of either side, S bytes;
    - where nobody but workers adds up, they send 2 (n - 1) S in all, over all their links.

    What links let through at once after a pause (`Rack.burst`) takes no time.
    """
    slowest = workload.compute_seconds / min(cluster.speeds)
    burst = max(rack.burst for rack in cluster.racks)
    return max(slowest, _network_seconds(cluster, sum(workload.sizes)) - burst)


def _network_seconds(cluster: Cluster, size: float) -> float:
    if cluster.hosts == 1:
        return 0.0
    links = [rate for rack in cluster.racks for rate in rack.links]
    bounds = [size / min(links)]
    if len(cluster.racks) > 1:
        bounds += [size / rack.uplink for rack in cluster.racks if rack.uplink]
    helped = cluster.servers or any(
        getattr(rack, "aggregates", False) for rack in cluster.racks
    )
    if not helped:
        bounds.append(2 * (cluster.hosts - 1) * size / sum(links))
    return max(bounds)


def alone(job: TrainingJob) -> Estimate:
    """One worker, the fastest, with its own part of the batch and nobody to wait for."""
    fastest = max(job.cluster.speeds)
    rack = Rack(workers=1, link=125e6, latency=0.0, speed=(fastest,))
    found = predict(replace(job, cluster=Cluster((rack,))), "bsp", short=True)
    if isinstance(found, Refused):
        raise UsageError(found.why)
    batch = job.workload.batch
    return Estimate(
        spec="one machine",
        consistency="exact",
        step_seconds=found.step_seconds,
        compute_seconds=found.compute_seconds,
        exposed_seconds=found.exposed_seconds,
        bytes_sent=0.0,
        buckets=found.buckets,
        bound_ratio=1.0,
        speedup=1.0,
        samples_per_second=None
        if batch is None
        else job.passes * batch / found.step_seconds,
    )
