"""The evidence as a job that virtual time can run, and that can be mended.

Links, uplinks, speeds, waits for input and the model are each as they were measured; `replace`
mends one of them. Equal evidence makes equal jobs, and equal jobs take equal times, to the bit.
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
from paceline.tools.doctor.network_model import IN, OUT, NetworkModel
from paceline.tools.doctor.thresholds import VARIES
from paceline.tools.plan.estimates import Infeasible, lower_bound_seconds
from paceline.tools.plan.merged_tensors import FEW, coarse
from paceline.tools.plan.predict import TrainingJob, predict

SAME = 0.03
"""Figures that differ by less are one, their median's."""

MOST_TENSORS = 1000
"""On all workers together that a run has; larger models run with some of theirs merged."""

NO_SCRIPT = Workload(
    names=tuple(f"part{number}" for number in range(16)),
    sizes=(2**22,) * 16,
    forward=(0.0,) * 16,
    backward=(0.0,) * 16,
)
"""What stands for a step where no script ran: 64 MiB of gradients, and nothing to compute."""


@dataclass(frozen=True)
class TrainingModel:
    """*out*, *into*: bytes per second of each host's link; *racks*: hosts; *uplink*: bytes per second
    between racks (None: never the limit). *hosts*: of each worker; *speeds*, *inputs*: of each worker,
    these of a whole step. *burst*: as all racks have it. *workload*: of a pass, of which a step has *passes*.
    *paths*: from which host to which one less goes than over their links, and how much."""

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

    def as_in(self, other: TrainingModel, hosts: Collection[int]) -> TrainingModel:
        """With *hosts*, and what runs there, as they are in *other*: their links, speeds and waits for
        input, and paths that begin or end there."""

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

    @cached_property
    def _order(self) -> list[int]:
        """Hosts, rack by rack, as the cluster numbers them."""
        return [host for rack in self.racks for host in rack]

    @cached_property
    def _ranks(self) -> list[int]:
        """Workers as the cluster numbers them."""
        return sorted(
            range(len(self.hosts)), key=lambda rank: self._order.index(self.hosts[rank])
        )

    @cached_property
    def cluster(self) -> Cluster:
        """With the better direction of each link, and a rule that slows the other one down; and one
        for each path."""
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
        """What runs."""
        workload = self.workload
        if (
            parse(self.spec).values.get("buckets") != "wfbp"
        ):  # there they are what counts
            workload = coarse(workload, max(FEW, MOST_TENSORS // len(self.hosts)))
        inputs = tuple(self.inputs[rank] / self.passes for rank in self._ranks)
        return TrainingJob(
            cluster=self.cluster,
            workload=workload,
            accumulate=self.passes,
            inputs=inputs if any(inputs) else (),
        )

    def step_seconds(self, spec: str = "") -> float | None:
        """With *spec*, or with its own, whose buckets are planned as in a training; None where that
        cannot run there."""
        found = predict(self.job, spec or self.spec)
        return None if isinstance(found, Infeasible) else found.step_seconds

    def about_seconds(self, spec: str) -> float | None:
        """As `step_seconds`, in a short run of few tensors: to be compared with others of these."""
        job = replace(self.job, workload=coarse(self.workload))
        found = predict(job, spec, "short")
        return None if isinstance(found, Infeasible) else found.step_seconds

    @property
    def lower_bound_seconds(self) -> float:
        """Of any exact mean."""
        racks = tuple(
            replace(rack, link=tuple(min(self.out[h], self.into[h]) for h in hosts))
            for rack, hosts in zip(self.cluster.racks, self.racks, strict=True)
        )
        network = lower_bound_seconds(Cluster(racks), self.workload)
        return max(self.compute_seconds, network)

    @property
    def compute_seconds(self) -> float:
        """The slowest worker's, alone."""
        return max(self._computing())

    @property
    def least_seconds(self) -> float:
        """The fastest worker's, alone."""
        return min(self._computing())

    def _computing(self) -> list[float]:
        work = self.workload
        passes = self.passes * (work.forward_seconds + work.backward_seconds)
        return [
            (passes + work.update) / speed + wait
            for speed, wait in zip(self.speeds, self.inputs, strict=True)
        ]


def patient_of(picture: NetworkModel) -> TrainingModel:
    """As it was measured. Raises `UsageError` for evidence of fewer than two hosts, with paths
    that nobody measured, or with workers that are not spread evenly."""
    evidence, hosts = picture.evidence, picture.hosts
    workers = sorted(evidence.workers, key=lambda one: one.rank)
    _check(picture, [one.rank for one in workers], [one.host for one in workers])
    out = [_mean_link(picture, host, OUT) for host in hosts]
    into = [_mean_link(picture, host, IN) for host in hosts]
    flat = _flat([*out, *into])
    uplinks = [seen[0] for rack in picture.racks if (seen := picture.uplink(rack))]
    base = parse_cluster(evidence.cluster) if evidence.cluster else None
    within, beyond = _latencies(picture)
    if base is not None and base.processor is not None:
        within = base.racks[0].latency
    return TrainingModel(
        out=flat[: len(hosts)],
        into=flat[len(hosts) :],
        racks=picture.racks,
        uplink=min(uplinks, default=None),
        latency=within,
        uplink_latency=beyond if len(picture.racks) > 1 else 0.0,
        processor=None if base is None else base.processor,
        hosts=tuple(one.host for one in workers),
        speeds=_speeds(picture),
        inputs=tuple(picture.inputs.get(rank, 0.0) for rank in range(len(workers))),
        # A workload that was named may be of another script.
        # Input is measured, of each worker.
        workload=replace(evidence.workload, passes=picture.passes_a_step, input=0.0)
        if evidence.workload and picture.trains
        else NO_SCRIPT,
        spec=evidence.spec,
        paths=tuple((*pair, picture.rates[pair]) for pair in picture.slow_paths),
        passes=picture.passes_a_step,
        burst=0.0 if base is None else base.racks[0].burst,
    )


def _check(picture: NetworkModel, ranks: Sequence[int], placed: Sequence[int]) -> None:
    hosts = picture.hosts
    if ranks != list(range(len(ranks))) or hosts != tuple(range(len(hosts))):
        raise UsageError(
            f"the evidence: expected ranks and hosts numbered from 0, got ranks {ranks} on "
            f"hosts {list(hosts)}"
        )
    missing = [
        (a, b) for a in hosts for b in hosts if a != b and (a, b) not in picture.rates
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


def _mean_link(picture: NetworkModel, host: int, way: str) -> float:
    """A host's link; where it varies, what it gives on average."""
    if picture.steady(host, way) < VARIES:
        return picture.heights(host, way)[0]
    return picture.link(host, way)


def _latencies(picture: NetworkModel) -> tuple[float, float]:
    """One-way seconds in a rack, and what each end adds beyond it."""
    near: list[float] = []
    far: list[float] = []
    rack_of = {host: rack for rack in picture.racks for host in rack}
    for path in picture.evidence.paths:
        same = rack_of[path.source] is rack_of[path.target]
        (near if same else far).append(path.latency)
    within = median(near or far)
    return within, max(0.0, (median(far) - within) / 2) if far else 0.0


def _speeds(picture: NetworkModel) -> tuple[float, ...]:
    """Over those that the workload is charged at; without a script, as products of matrices say."""
    evidence = picture.evidence
    workers = sorted(evidence.workers, key=lambda one: one.rank)
    if not picture.trains or evidence.workload is None:
        return tuple(one.speed for one in workers)
    usual = evidence.workload.forward_seconds + evidence.workload.backward_seconds
    usual *= picture.passes_a_step
    if not usual or not all(picture.passes.values()):
        return (1.0,) * len(workers)
    return _flat([usual / picture.passes[one.rank] for one in workers], 2 * SAME)


def _flat(values: list[float], same: float = SAME) -> tuple[float, ...]:
    """Those that are near the median are alike: so the noise of each is not simulated."""
    middle = median(values)
    near = [value for value in values if abs(value / middle - 1) < same]
    mean = fmean(near) if near else middle
    return tuple(mean if abs(value / middle - 1) < same else value for value in values)
