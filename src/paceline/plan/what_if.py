"""What more workers, or faster links, would give: the best of each class, predicted for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec

from paceline.interfaces import Quality
from paceline.network import Cluster, Rack
from paceline.plan.found import Plan
from paceline.plan.predict import Job, Refused, predict

WORKERS = (1, 2, 4, 8, 16, 32, 64)
RATES = (12.5e6, 125e6, 312.5e6, 1.25e9, 3.125e9)
"""0.1, 1, 2.5, 10 and 25 Gbit/s."""
EACH = 2
"""Of each class so many are tried at each point: what is best here need not be there."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """So many *workers* on one switch, each with a link of *rate* bytes a second. *speed_up*: samples a second
    over one worker's; *efficiency* is that over *workers*."""

    workers: int
    rate: float
    quality: Quality
    spec: str
    step_seconds: float
    speed_up: float
    efficiency: float


def shortlist(plan: Plan) -> dict[Quality, list[str]]:
    """The fastest specs of each class, of different methods or codes."""
    found: dict[Quality, list[str]] = {}
    for row in plan.rows:
        mine = found.setdefault(row.quality, [])
        if not row.cut and len(mine) < EACH:
            mine.append(row.spec)
    return found


def what_if(
    plan: Plan,
    job: Job,
    workers: Sequence[int] = WORKERS,
    rates: Sequence[float] = RATES,
    told: Callable[[str, int, int], None] = lambda what, number, count: None,
) -> list[Point]:
    """The best of each class at each number of workers and each rate, in short runs; racks are one, latency
    and speed as those of the first worker."""
    first = job.cluster.racks[0]
    specs = shortlist(plan)
    one = plan.one_machine.step_seconds
    grid = [(count, rate) for count in workers for rate in rates]
    points = []
    for number, (count, rate) in enumerate(grid):
        told(f"{count} workers", number, len(grid))
        rack = Rack(workers=count, link=rate, latency=first.latency)
        servers = job.cluster.servers and (replace(job.cluster.servers[0], rack=0),)
        cluster = Cluster((rack,), processor=job.cluster.processor, servers=servers)
        points += _best(specs, replace(job, cluster=cluster), rate, one)
    return points


def _best(
    specs: Mapping[Quality, Sequence[str]], job: Job, rate: float, one: float
) -> list[Point]:
    points = []
    workers = job.cluster.workers
    for quality, among in specs.items():
        found = [("one machine", one)] if workers == 1 else []
        for spec in among if workers > 1 else ():
            said = predict(job, spec, short=True)
            if not isinstance(said, Refused):
                found.append((spec, said.step_seconds))
        if found:
            spec, seconds = min(found, key=lambda pair: pair[1])
            points.append(
                Point(
                    workers=workers,
                    rate=rate,
                    quality=quality,
                    spec=spec,
                    step_seconds=seconds,
                    speed_up=workers * one / seconds,
                    efficiency=one / seconds,
                )
            )
    return points
