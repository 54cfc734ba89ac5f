"""Predicted step times as data, and the rule that recommends methods.

`recommend` is the only such rule: plan, compare, auto and doctor call it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

from paceline.cluster import Cluster, Workload
from paceline.interfaces import CONSISTENCIES, Consistency
from paceline.spec import parse

DDP = "bsp:buckets=ddp"
"""The equivalent of PyTorch's DDP: the baseline of every comparison."""
Fidelity = Literal["full", "short"]

LOSSLESS: tuple[Consistency, ...] = ("exact", "delayed")
"""Consistencies that apply every gradient unchanged."""
GENTLE = 1.2
"""Factor over the fastest step of its consistency, up to which a method that sends more of the
gradient is preferred."""
AS_MUCH = 0.9
"""Share of the most bytes of such methods: of methods that send at least this share, the fastest is taken."""
CLEARLY = 1.02
"""Speed relative to DDP: a method with a smaller gain is not worth a change."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted step of one method.

    Attributes:
        spec: The method, as `paceline.distribute` takes it.
        consistency: Its consistency.
        step_seconds: Time for one global batch in steady state. Workers of an asynchronous
            method have rates of their own: these are added up.
        compute_seconds: The part of it that computes, averaged over workers.
        exposed_seconds: The part of it that waits for communication.
        bytes_sent: By each worker, for each step.
        buckets: Number of buckets.
        fidelity: ``"short"``: of few steps, fewer tensors and without planned buckets.
        rejected: The short run was too slow for its consistency to be followed by a full run.
        steady_after: Steps of a training before its steps take this long (0: not known).
        estimated_compression: The compressor's time is derived from bytes, not measured.
        events: Simulated events that the prediction took.
        notes: Messages that the training logged.
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
    """The values that estimates of one plan are compared with.

    Attributes:
        workers: Number of workers.
        batch: Samples of the global batch (None: not known).
        single: One machine that computes the same global batch alone, sequentially.
        lower_bound_seconds: The shortest step of any exact average of all gradients.
    """

    workers: int
    batch: float | None
    single: Estimate
    lower_bound_seconds: float

    def speedup(self, estimate: Estimate) -> float:
        """Samples per second relative to one machine."""
        return self.single.step_seconds / estimate.step_seconds

    def samples_per_second(self, estimate: Estimate) -> float | None:
        """Samples per second; None if the batch is not known."""
        return None if self.batch is None else self.batch / estimate.step_seconds

    def bound_ratio(self, estimate: Estimate) -> float:
        """Return the step over `lower_bound_seconds`; below 1 if a method sends less than the gradient."""
        return estimate.step_seconds / self.lower_bound_seconds


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Estimates of every candidate on one cluster with one workload.

    Attributes:
        cluster: Description of the network.
        workload: Source of the compute times.
        baseline: The values that estimates are compared with.
        estimates: From the fastest to the slowest.
        infeasible: Candidates that cannot run.
        skipped: Number of candidates without a prediction, since the search reached its limit.
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
        """The fastest method of each consistency that was not rejected, the strongest consistency first."""
        return fastest(self.estimates)

    @property
    def recommended(self) -> dict[Consistency, Estimate]:
        """See `recommend`."""
        return recommend(self.estimates)

    def estimate(self, spec: str) -> Estimate | None:
        """Return the estimate of *spec*."""
        return next((one for one in self.estimates if one.spec == spec), None)


def fastest(
    estimates: Sequence[Estimate], allowed: Collection[Consistency] = CONSISTENCIES
) -> dict[Consistency, Estimate]:
    """Return the fastest estimate of each allowed consistency, the strongest first.

    A rejected estimate counts only if its consistency has no other.
    """
    found: dict[Consistency, Estimate] = {}
    for one in sorted(estimates, key=lambda one: (one.rejected, one.step_seconds)):
        found.setdefault(one.consistency, one)
    return {c: found[c] for c in CONSISTENCIES if c in found and c in allowed}


def recommend(
    estimates: Sequence[Estimate], allowed: Collection[Consistency] = CONSISTENCIES
) -> dict[Consistency, Estimate]:
    """Return the method to use for each consistency, the strongest first.

    - If every gradient is applied unchanged (`LOSSLESS`): the fastest.
    - Otherwise gradients that are not sent are lost. Methods compete whose step takes at most `GENTLE` times the
      fastest one's. The one that sends most is taken.
    - DDP stands for its consistency if that has no method that is `CLEARLY` faster. Then a weaker consistency is
      recommended only if it is clearly faster than DDP.

    Args:
        estimates: Estimates for one cluster and workload.
        allowed: Consistencies that may be recommended.

    Returns:
        At most one estimate for each allowed consistency, the strongest first.
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
            # Another collective or bucket rule sends the same bytes.
            spec = parse(one.spec)
            near.setdefault((spec.name, spec.values.get("compression")), one)
    most = max(one.bytes_sent for one in near.values())
    return next(one for one in near.values() if one.bytes_sent >= AS_MUCH * most)


def lower_bound_seconds(cluster: Cluster, workload: Workload) -> float:
    """Return the shortest step of any exact average of all uncompressed gradients.

    The slowest worker computes, and meanwhile

    - every link that separates some workers from the others carries the sum of either side, S bytes;
    - if only workers add up, they send 2 (n - 1) S in all, over all their links.

    Bytes that links let through at once after a pause (`Rack.burst`) take no time.
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
