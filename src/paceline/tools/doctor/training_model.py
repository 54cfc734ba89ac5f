"""Models the measured training as a job for the simulated runtime, with or without its faults.

Links, uplinks, speeds, input waits and the workload are as measured; `replace` fixes one of them. Equal evidence
gives equal jobs, and equal jobs give bit-equal times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median

from paceline.cluster import Cluster, Processor, Rack, Workload, parse_cluster
from paceline.cluster.cluster import Rule, throttle
from paceline.errors import UsageError
from paceline.spec import parse
from paceline.tools.doctor.network_model import IN, OUT, VARIES, Direction, NetworkModel
from paceline.tools.plan.estimates import Infeasible, lower_bound_seconds
from paceline.tools.plan.predict import (
    FEW,
    TrainingJob,
    merge_tensors,
    predict,
    predict_single,
)

SAME = 0.03
"""Relative difference below which figures count as equal."""

MOST_TENSORS = 1000
"""Tensors of all workers together; larger models run with some tensors merged."""

NO_SCRIPT = Workload(
    names=tuple(f"part{number}" for number in range(16)),
    sizes=(2**22,) * 16,
    forward=(0.0,) * 16,
    backward=(0.0,) * 16,
)
"""Represents a step if no script ran: 64 MiB of gradients, and no computation."""


@dataclass(frozen=True)
class TrainingModel:
    """A training on a cluster, as measured or without some of its faults.

    Attributes:
        out: Bytes per second that leave each host.
        into: Bytes per second that reach each host.
        racks: Hosts by rack.
        uplink: Bytes per second between racks; None if it is never the bottleneck.
        latency: One-way seconds within a rack.
        uplink_latency: Seconds that each end adds beyond its rack.
        processor: Processor time of messages; None if it is not modelled.
        hosts: Host of each worker.
        speeds: Speed of each worker.
        inputs: Seconds per step that each worker waits for its batch.
        workload: The model's workload for one pass.
        spec: The method.
        paths: Source, target and bytes per second of paths that are slower than their links.
        passes: Forward and backward passes per step.
        burst: Bytes that links let through at once after a pause.
    """

    out: tuple[float, ...]
    into: tuple[float, ...]
    racks: tuple[tuple[int, ...], ...]
    uplink: float | None
    latency: float
    uplink_latency: float
    processor: Processor | None
    hosts: tuple[int, ...]
    speeds: tuple[float, ...]
    inputs: tuple[float, ...]
    workload: Workload
    spec: str
    paths: tuple[tuple[int, int, float], ...] = ()
    passes: int = 1
    burst: float = 0.0

    @classmethod
    def of(cls, network: NetworkModel) -> TrainingModel:
        """Return the training as it was measured.

        Raises:
            UsageError: There are fewer than two hosts, paths without a measurement, or different
                numbers of workers on hosts.
        """
        return _measured(network)

    def with_hosts_of(
        self, other: TrainingModel, hosts: Collection[int]
    ) -> TrainingModel:
        """Return this training with *hosts* as in *other*.

        Their links, speeds and inputs, and the paths that begin or end there, come from *other*.
        """

        def rows(
            mine: Sequence[float], theirs: Sequence[float], of: Sequence[int]
        ) -> tuple[float, ...]:
            return tuple(
                theirs[i] if host in hosts else mine[i] for i, host in enumerate(of)
            )

        everywhere = range(len(self.out))
        paths = [
            *(path for path in self.paths if not {*path[:2]} & {*hosts}),
            *(path for path in other.paths if {*path[:2]} & {*hosts}),
        ]
        return replace(
            self,
            out=rows(self.out, other.out, everywhere),
            into=rows(self.into, other.into, everywhere),
            speeds=rows(self.speeds, other.speeds, self.hosts),
            inputs=rows(self.inputs, other.inputs, self.hosts),
            paths=tuple(sorted(paths)),
        )

    def with_links(self, rate: float) -> TrainingModel:
        """Return this training with links of at least *rate*."""
        return replace(
            self,
            out=tuple(max(rate, one) for one in self.out),
            into=tuple(max(rate, one) for one in self.into),
        )

    @cached_property
    def _order(self) -> list[int]:
        """Hosts, rack by rack, in the cluster's numbering."""
        return [host for rack in self.racks for host in rack]

    @cached_property
    def _ranks(self) -> list[int]:
        """Workers in the cluster's numbering."""
        return sorted(
            range(len(self.hosts)), key=lambda rank: self._order.index(self.hosts[rank])
        )

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster: links by their faster direction; rules slow down the other direction and slow paths."""
        rules: list[Rule] = []
        for number, host in enumerate(self._order):
            best = max(self.out[host], self.into[host])
            for way, rate in ((OUT, self.out[host]), (IN, self.into[host])):
                if rate < best:
                    rules.append(throttle(f"host {number} {way}", rate, at=0.0))
        for source, target, rate in self.paths:
            ends = [self._order.index(host) for host in (source, target)]
            name = f"host {ends[0]} to host {ends[1]}"
            rules.append(throttle(name, rate, at=0.0))
        return Cluster(self._made_racks(), tuple(rules), self.processor)

    def _made_racks(self) -> tuple[Rack, ...]:
        counts = Counter(self.hosts)
        racks = []
        for rack in self.racks:
            ranks = [rank for rank in self._ranks if self.hosts[rank] in rack]
            racks.append(
                Rack(
                    workers=len(ranks),
                    workers_per_host=counts[rack[0]],
                    link=tuple(max(self.out[h], self.into[h]) for h in rack),
                    latency=self.latency,
                    uplink=self.uplink,
                    uplink_latency=self.uplink_latency,
                    burst=self.burst,
                    speed=tuple(self.speeds[rank] for rank in ranks),
                )
            )
        return tuple(racks)

    @cached_property
    def job(self) -> TrainingJob:
        """The job for the simulated runtime."""
        workload = self.workload
        if (
            parse(self.spec).values.get("buckets") != "wfbp"
        ):  # wfbp sends one message per tensor, so their number counts.
            workload = merge_tensors(
                workload, max(FEW, MOST_TENSORS // len(self.hosts))
            )
        inputs = tuple(self.inputs[rank] / self.passes for rank in self._ranks)
        return TrainingJob(
            cluster=self.cluster,
            workload=workload,
            accumulate=self.passes,
            inputs=inputs if any(inputs) else (),
        )

    def step_seconds(self, spec: str = "") -> float | None:
        """Return the seconds of a step with *spec* (by default its own); None if it cannot run there."""
        found = predict(self.job, spec or self.spec)
        return None if isinstance(found, Infeasible) else found.step_seconds

    @property
    def lower_bound_seconds(self) -> float:
        """Seconds of the shortest step of any exact method."""
        racks = tuple(
            replace(rack, link=tuple(min(self.out[h], self.into[h]) for h in hosts))
            for rack, hosts in zip(self.cluster.racks, self.racks, strict=True)
        )
        network = lower_bound_seconds(Cluster(racks), self.workload)
        return max(self.compute_seconds, network)

    @cached_property
    def single_seconds(self) -> float:
        """Seconds that one machine needs for the global batch."""
        return predict_single(self.job).step_seconds

    @property
    def compute_seconds(self) -> float:
        """Seconds of a step of the slowest worker, alone."""
        return max(self._computing())

    @property
    def fastest_worker_seconds(self) -> float:
        """Seconds of a step of the fastest worker, alone."""
        return min(self._computing())

    def _computing(self) -> list[float]:
        work = self.workload
        passes = self.passes * (work.forward_seconds + work.backward_seconds)
        return [
            (passes + work.update) / speed + wait
            for speed, wait in zip(self.speeds, self.inputs, strict=True)
        ]


def _measured(network: NetworkModel) -> TrainingModel:
    evidence, hosts = network.evidence, network.hosts
    workers = sorted(evidence.workers, key=lambda one: one.rank)
    _check(network, [one.rank for one in workers], [one.host for one in workers])
    out = [_mean_link(network, host, OUT) for host in hosts]
    into = [_mean_link(network, host, IN) for host in hosts]
    flat = _flat([*out, *into])
    uplinks = [seen[0] for rack in network.racks if (seen := network.uplink(rack))]
    base = parse_cluster(evidence.cluster) if evidence.cluster else None
    within, beyond = _latencies(network)
    if base is not None and base.processor is not None:
        within = base.racks[0].latency
    return TrainingModel(
        out=flat[: len(hosts)],
        into=flat[len(hosts) :],
        racks=network.racks,
        uplink=min(uplinks, default=None),
        latency=within,
        uplink_latency=beyond if len(network.racks) > 1 else 0.0,
        processor=None if base is None else base.processor,
        hosts=tuple(one.host for one in workers),
        speeds=_speeds(network),
        inputs=tuple(network.inputs.get(rank, 0.0) for rank in range(len(workers))),
        # A named workload may belong to another script.
        # Input is measured for each worker; time of hooks is part of its passes.
        workload=replace(
            evidence.workload, passes=network.passes_a_step, input=0.0, overhead=0.0
        )
        if evidence.workload and network.trains
        else NO_SCRIPT,
        spec=evidence.spec,
        paths=tuple((*pair, network.rates[pair]) for pair in network.slow_paths),
        passes=network.passes_a_step,
        burst=0.0 if base is None else base.racks[0].burst,
    )


def _check(network: NetworkModel, ranks: Sequence[int], placed: Sequence[int]) -> None:
    hosts = network.hosts
    if ranks != list(range(len(ranks))) or hosts != tuple(range(len(hosts))):
        raise UsageError(
            f"the evidence: expected ranks and hosts numbered from 0, got ranks {ranks} on "
            f"hosts {list(hosts)}"
        )
    missing = [
        (a, b) for a in hosts for b in hosts if a != b and (a, b) not in network.rates
    ]
    if len(hosts) < 2 or missing:
        raise UsageError(
            "the evidence: expected every path between two or more hosts, got "
            f"{len(hosts)} hosts without {missing}: measure again"
        )
    counts = Counter(placed)
    if len({counts[host] for host in hosts}) > 1:
        raise UsageError(
            "the evidence: expected equally many workers on every host, got "
            f"{dict(sorted(counts.items()))} by host"
        )


def _mean_link(network: NetworkModel, host: int, way: Direction) -> float:
    """Return the bytes per second of a host's link; the mean if it varies."""
    if network.steady(host, way) < VARIES:
        return network.heights(host, way)[0]
    return network.link(host, way)


def _latencies(network: NetworkModel) -> tuple[float, float]:
    """Return the one-way seconds within a rack, and the addition of each end beyond it."""
    near: list[float] = []
    far: list[float] = []
    rack_of = {host: rack for rack in network.racks for host in rack}
    for path in network.evidence.paths:
        same = rack_of[path.source] is rack_of[path.target]
        (near if same else far).append(path.latency)
    within = median(near or far)
    return within, max(0.0, (median(far) - within) / 2) if far else 0.0


def _speeds(network: NetworkModel) -> tuple[float, ...]:
    """Speeds relative to the workload's times; without a script, those of matrix products."""
    evidence = network.evidence
    workers = sorted(evidence.workers, key=lambda one: one.rank)
    if not network.trains or evidence.workload is None:
        return tuple(one.speed for one in workers)
    usual = evidence.workload.forward_seconds + evidence.workload.backward_seconds
    usual *= network.passes_a_step
    if not usual or not all(network.passes.values()):
        return (1.0,) * len(workers)
    return _flat([usual / network.passes[one.rank] for one in workers], 2 * SAME)


def _flat(values: list[float], same: float = SAME) -> tuple[float, ...]:
    """Set values near the median equal, so that noise is not simulated."""
    middle = median(values)
    near = [value for value in values if abs(value / middle - 1) < same]
    mean = fmean(near) if near else middle
    return tuple(mean if abs(value / middle - 1) < same else value for value in values)
