"""Predicted step times as data, and which methods they recommend.

`recommend` is the only rule of recommendation: plan, compare, auto and doctor call it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from paceline.cluster import Cluster, Workload
from paceline.interfaces import CONSISTENCIES, Consistency
from paceline.spec import parse

DDP = "bsp:buckets=ddp"
"""What PyTorch's DDP does: the baseline of every comparison."""
Fidelity = Literal["full", "short"]

LOSSLESS: tuple[Consistency, ...] = ("exact", "delayed")
"""Classes in which every gradient is applied unchanged."""
GENTLE = 1.2
"""Times the fastest of its class: so much longer may a step take that sends more of the gradient."""
AS_MUCH = 0.9
"""Of the most bytes that such methods send: of those that send as much, the fastest is taken."""
CLEARLY = 1.02
"""Times as fast as DDP: a method that gains less is not worth a change."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted step of one method.

    Attributes:
        spec: The method, as `paceline.distribute` takes it.
        consistency: Its class.
        step_seconds: Time for one global batch in steady state. Workers of an asynchronous
            method have rates of their own: these are added up.
        compute_seconds: The part of it that computes, averaged over workers.
        exposed_seconds: The part of it that waits for communication.
        bytes_sent: By each worker, for each step.
        buckets: In how many pieces the gradient travels.
        fidelity: ``"short"``: of few steps, fewer tensors and without planned buckets.
        rejected: The short run was too slow in its class for a full one.
        steady_after: Steps of a training before its steps take this long (0: not known).
        estimated_compression: The compressor's time is derived from bytes, not measured.
        events: Simulated events that the prediction took.
        notes: What the training logged.
    """

    spec: str
    consistency: Consistency
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    bytes_sent: float
    buckets: int
    fidelity: Fidelity = "full"
    rejected: bool = False
    steady_after: int = 0
    estimated_compression: bool = False
    events: int = 0
    notes: tuple[str, ...] = ()


class Infeasible(msgspec.Struct, frozen=True, kw_only=True):
    """A method that cannot run on this cluster or with this script, and the reason."""

    spec: str
    consistency: Consistency
    reason: str


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """What estimates of one plan are compared with.

    Attributes:
        workers: How many there are.
        batch: Samples of the global batch (None: not known).
        single: One machine that computes the same global batch alone, part after part.
        lower_bound_seconds: No exact average of all gradients makes a step shorter.
    """

    workers: int
    batch: float | None
    single: Estimate
    lower_bound_seconds: float

    def speedup(self, estimate: Estimate) -> float:
        """Samples per second relative to one machine."""
        return self.single.step_seconds / estimate.step_seconds

    def samples_per_second(self, estimate: Estimate) -> float | None:
        """Samples per second; None where nobody knows a batch."""
        return None if self.batch is None else self.batch / estimate.step_seconds

    def bound_ratio(self, estimate: Estimate) -> float:
        """The step over `lower_bound_seconds`; below 1 where less than the gradient is sent."""
        return estimate.step_seconds / self.lower_bound_seconds


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Estimates of every candidate on one cluster with one workload.

    Attributes:
        cluster: The network, described.
        workload: Where the compute times come from.
        baseline: What estimates are compared with.
        estimates: From the fastest to the slowest.
        infeasible: Candidates that cannot run.
        skipped: How many candidates were not predicted, as the search had reached its limit.
        events: Simulated events of all predictions.
    """

    cluster: str
    workload: str
    baseline: Baseline
    estimates: tuple[Estimate, ...]
    infeasible: tuple[Infeasible, ...]
    skipped: int = 0
    events: int = 0

    @property
    def fastest(self) -> dict[Consistency, Estimate]:
        """The fastest method of each class that was not rejected, the strongest class first."""
        return fastest(self.estimates)

    @property
    def recommended(self) -> dict[Consistency, Estimate]:
        """See `recommend`."""
        return recommend(self.estimates)

    def estimate(self, spec: str) -> Estimate | None:
        """The estimate of that spec."""
        return next((one for one in self.estimates if one.spec == spec), None)


def fastest(
    estimates: Sequence[Estimate], allowed: Collection[Consistency] = CONSISTENCIES
) -> dict[Consistency, Estimate]:
    """The fastest estimate of each allowed class, the strongest class first. A rejected one
    counts only in a class that has no other."""
    found: dict[Consistency, Estimate] = {}
    for one in sorted(estimates, key=lambda one: (one.rejected, one.step_seconds)):
        found.setdefault(one.consistency, one)
    return {c: found[c] for c in CONSISTENCIES if c in found and c in allowed}


def recommend(
    estimates: Sequence[Estimate], allowed: Collection[Consistency] = CONSISTENCIES
) -> dict[Consistency, Estimate]:
    """The method to use in each class, the strongest class first.

    - Where no gradient is lost (`LOSSLESS`): the fastest.
    - In other classes, what is not sent is not learned from. Of the methods whose step takes at
      most `GENTLE` times the fastest one's, the one that sends most.
    - DDP's rule stands for its class where that has nothing that is `CLEARLY` faster. Then a
      weaker class is recommended only if it is clearly faster than DDP.

    Args:
        estimates: Of one cluster and workload.
        allowed: Classes that may be recommended.

    Returns:
        At most one estimate for each allowed class. The first one is of the strongest class.
    """
    found = {
        consistency: best if consistency in LOSSLESS else _sends_most(estimates, best)
        for consistency, best in fastest(estimates, allowed).items()
    }
    ddp = next((one for one in estimates if one.spec == DDP), None)
    if ddp is None or ddp.consistency not in found:
        return found

    def gains(one: Estimate) -> bool:
        return ddp.step_seconds >= CLEARLY * one.step_seconds

    if gains(found[ddp.consistency]):
        return found
    weaker = {c: one for c, one in found.items() if c != ddp.consistency}
    return {ddp.consistency: ddp} | {c: one for c, one in weaker.items() if gains(one)}


def _sends_most(estimates: Sequence[Estimate], best: Estimate) -> Estimate:
    near: dict[tuple[str, object], Estimate] = {}
    for one in sorted(estimates, key=lambda one: one.step_seconds):
        if (
            one.consistency == best.consistency
            and one.rejected <= best.rejected
            and one.step_seconds <= GENTLE * best.step_seconds
        ):
            # Another collective or bucket rule sends the same in another way.
            spec = parse(one.spec)
            near.setdefault((spec.name, spec.values.get("compression")), one)
    most = max(one.bytes_sent for one in near.values())
    return next(one for one in near.values() if one.bytes_sent >= AS_MUCH * most)


def lower_bound_seconds(cluster: Cluster, workload: Workload) -> float:
    """The shortest step of any exact average of all uncompressed gradients.

    The slowest worker computes, and meanwhile

    - every link that parts some workers from the others passes the sum of either side, S bytes;
    - where only workers add up, they send 2 (n - 1) S in all, over all their links.

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
