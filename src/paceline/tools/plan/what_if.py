"""What more workers, or faster links, would give: the best of each class, predicted for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from paceline.cluster import Cluster, Rack
from paceline.interfaces import Consistency
from paceline.spec import parse
from paceline.tools.plan.estimates import Estimate, Plan
from paceline.tools.plan.merged_tensors import coarse, unplanned
from paceline.tools.plan.predict import TrainingJob
from paceline.tools.plan.prediction_cost import cost
from paceline.tools.plan.predictor import Predict, in_this_process
from paceline.tools.plan.search import NOTHING
from paceline.units import show_rate

WORKERS = (1, 2, 4, 8, 16, 32, 64)
RATES = (12.5e6, 125e6, 312.5e6, 1.25e9, 3.125e9)
"""0.1, 1, 2.5, 10 and 25 Gbit/s."""
EACH = 2
"""Of each class so many are tried at each point: what is best here need not be there."""


class ScalingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """So many *workers* on one switch, each with a link of *rate* bytes a second. *speedup*: samples a second
    over one worker's; *efficiency* is that over *workers*. *samples_per_second*: None where nobody
    knows a batch."""

    workers: int
    rate: float
    consistency: Consistency
    spec: str
    step_seconds: float
    speedup: float
    efficiency: float
    samples_per_second: float | None = None


def shortlist(plan: Plan) -> dict[Consistency, list[str]]:
    """The fastest specs of each class, each of another method or with another code: those that differ
    in less are alike elsewhere, too."""
    found: dict[Consistency, dict[tuple[str, object], str]] = {}
    rows: list[Estimate] = [
        *plan.recommended.values(),
        *(row for row in plan.estimates if not row.rejected),
    ]
    for row in rows:
        mine = found.setdefault(row.consistency, {})
        spec = parse(row.spec)
        if len(mine) < EACH:
            mine.setdefault((spec.name, spec.values.get("compression")), row.spec)
    return {consistency: list(specs.values()) for consistency, specs in found.items()}


def runs(plan: Plan) -> dict[str, str]:
    """What is run, and the spec of the plan that it stands for."""
    return {
        run: spec
        for among in shortlist(plan).values()
        for spec in among
        for run in unplanned(spec)
    }


def seconds_at_most(
    plan: Plan,
    job: TrainingJob,
    workers: Sequence[int] = WORKERS,
    rates: Sequence[float] = RATES,
) -> float:
    """About how many seconds of a core `what_if` takes, if all methods wait at all rates."""
    quick = replace(job, workload=coarse(job.workload))
    clusters = [_cluster(plan, job, count, rates[0]) for count in workers if count > 1]
    return len(rates) * sum(
        cost(replace(quick, cluster=cluster), spec, short=True)
        for cluster in clusters
        for spec in runs(plan)
    )


def what_if(
    plan: Plan,
    job: TrainingJob,
    workers: Sequence[int] = WORKERS,
    rates: Sequence[float] = RATES,
    told: Callable[[str, int, int], None] = lambda what, number, count: None,
    predict: Predict = in_this_process,
) -> list[ScalingPoint]:
    """The best of each class at each number of workers and each rate, in short runs; racks are one, latency
    is that of the first worker, and speeds are those of the one machine. What hardly gains by a
    faster link is not run with yet faster ones."""
    quick = replace(job, workload=coarse(job.workload))
    named = runs(plan)
    every = sum(workers) * len(rates)
    done = 0
    points: list[ScalingPoint] = []
    for count in sorted(workers):
        curves: dict[str, Curve] = {spec: [] for spec in named}
        for rate in sorted(rates):
            told(f"{count} workers, {show_rate(rate)}", done, every)
            there = replace(quick, cluster=_cluster(plan, job, count, rate))
            if count > 1:
                _go_on(predict, there, rate, curves)
            points += _best(plan, named, curves, count, rate)
            done += count
    return points


def _cluster(plan: Plan, job: TrainingJob, workers: int, rate: float) -> Cluster:
    """So many workers in one rack, of the speed of the one machine."""
    first = job.cluster.racks[0]
    speed = (max(job.cluster.speeds),) * workers
    rack = Rack(
        workers=workers,
        link=rate,
        latency=first.latency,
        speed=speed,
        burst=first.burst,
    )
    servers = job.cluster.servers and (replace(job.cluster.servers[0], rack=0),)
    return Cluster((rack,), processor=job.cluster.processor, servers=servers)


Curve = list[tuple[float, float]]
"""Seconds of a step by rates, the slowest first, as far as it was run."""


def _go_on(
    predict: Predict, job: TrainingJob, rate: float, curves: Mapping[str, Curve]
) -> None:
    """One point more for each that can still gain."""
    open_ = [spec for spec, curve in curves.items() if not _settled(curve)]
    for spec, said in zip(open_, predict(job, open_, short=True), strict=True):
        if isinstance(said, Estimate):
            curves[spec].append((rate, said.step_seconds))


def _settled(curve: Curve) -> bool:
    """Whether no link makes it shorter by more than `NOTHING`: a step is a convex function of what a
    byte takes, so that it falls to zero bytes at most as steeply as between the last two."""
    if len(curve) < 2:
        return False
    (slow, before), (fast, after) = curve[-2:]
    slope = (before - after) / (1 / slow - 1 / fast)
    return slope / fast < NOTHING * after


def _best(
    plan: Plan,
    named: Mapping[str, str],
    curves: Mapping[str, Curve],
    workers: int,
    rate: float,
) -> Iterator[ScalingPoint]:
    baseline = plan.baseline
    one = baseline.single.step_seconds / baseline.workers
    for consistency, among in shortlist(plan).items():
        found = [("one machine", one)] if workers == 1 else []
        found += [
            (spec, curve[-1][1])
            for run, curve in curves.items()
            if curve and (spec := named[run]) in among
        ]
        if found:
            spec, seconds = min(found, key=lambda pair: pair[1])
            yield ScalingPoint(
                workers=workers,
                rate=rate,
                consistency=consistency,
                spec=spec,
                step_seconds=seconds,
                speedup=workers * one / seconds,
                efficiency=one / seconds,
                samples_per_second=None
                if baseline.batch is None
                else workers * baseline.batch / baseline.workers / seconds,
            )
