"""Ranks racks by the gain of an aggregating switch, and reports it.

For each collective, switches are upgraded greedily. Each time the switch with the shortest step is chosen; of equal
ones, the switch with the shortest mean of the whole gradient. The result need not be optimal. Tests compare it with
all orders on small clusters.

Each collective is priced on the cluster as in the simulated runtime. A step is the gradient in
DDP's buckets of 25 MB. Each bucket is sent when it is ready, one after the other, beside backward.
If sums are integers, workers agree on a bucket's exponents while earlier buckets are sent.
Rounding, and processor time of messages in switches, cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import msgspec

from paceline.bucketing.cost_models import AffineCost
from paceline.bucketing.rules import plan_buckets
from paceline.bucketing.timeline import finish_time
from paceline.cluster import Cluster, Workload
from paceline.collectives.algorithms import Hierarchical, Ring
from paceline.collectives.in_network.algorithms import (
    ATP,
    InNetworkAllReduce,
    Rina,
    agreement_of_ranks,
)
from paceline.collectives.timing import seconds
from paceline.errors import UsageError
from paceline.interfaces import AllReduceAlgorithm, Placement
from paceline.interfaces.schedules import aggregating_racks
from paceline.tools.report.model import (
    Cell,
    LineChart,
    Number,
    Panel,
    Report,
    Series,
    Table,
)
from paceline.units import show_count, show_seconds

SMALL, LARGE = 1_000_000, 100_000_000
"""Bytes at which a collective is priced; a line through both prices other sizes."""
ENOUGH = 0.9
"""Share of the largest gain that fewer switches should give."""


@dataclass(frozen=True)
class CollectiveOption:
    """One collective to compare.

    Attributes:
        name: Its name in tables.
        collective: The algorithm.
        dedicated: Whether it uses the cluster's dedicated server hosts.
    """

    name: str
    collective: AllReduceAlgorithm
    dedicated: bool = True

    @property
    def upgrades(self) -> bool:
        """Whether it gains by aggregating switches."""
        return isinstance(self.collective, InNetworkAllReduce)


class UpgradeStep(msgspec.Struct, frozen=True, kw_only=True):
    """A number of aggregating switches, and the resulting times.

    Attributes:
        switches: Number of aggregating switches.
        racks: Their racks, the newest last.
        step_seconds: Seconds of a training step.
        gradient_seconds: Seconds of the mean of the whole gradient.
        throughput: Samples of all workers per second (None: the workload has no batch).
    """

    switches: int
    racks: tuple[int, ...]
    step_seconds: float
    gradient_seconds: float
    throughput: float | None


class UpgradePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The results for each number of upgraded switches.

    Attributes:
        workers: Number of workers in the cluster.
        racks: Number of racks in the cluster.
        ready: How many switches aggregate already.
        compute_seconds: Compute time of a step on the slowest worker; no network makes a step shorter.
        options: Steps by collective; one step for a collective that needs no switches.
    """

    workers: int
    racks: int
    ready: int
    compute_seconds: float
    options: dict[str, tuple[UpgradeStep, ...]]


class Upgrade(NamedTuple):
    """An upgraded switch.

    Attributes:
        rate: Bytes per second that it receives from all its workers together; None: no limit.
        slots: Sums of packets that it holds; None: no limit.
    """

    rate: float | None = None
    slots: int | None = None


UNLIMITED = Upgrade()

OnProgress = Callable[[str, int], None]
"""Receives a collective's name, and the number of upgraded switches."""


def collective_options(cluster: Cluster) -> tuple[CollectiveOption, ...]:
    """Return the collectives to compare on a cluster."""
    options = [
        CollectiveOption("ring", Ring()),
        CollectiveOption("hierarchical", Hierarchical()),
    ]
    if cluster.servers:
        options.append(CollectiveOption("atp", ATP()))
    return (
        *options,
        CollectiveOption("atp beside workers", ATP(), False),
        CollectiveOption("rina", Rina()),
    )


def plan_upgrades(
    cluster: Cluster,
    workload: Workload,
    upgrade: Upgrade = UNLIMITED,
    on_progress: OnProgress = lambda name, switches: None,
) -> UpgradePlan:
    """Rank the racks of *cluster* for training *workload*.

    Args:
        cluster: Racks that aggregate already come first, and stay as they are.
        workload: Gradient sizes and compute times.
        upgrade: The upgraded switch.
        on_progress: Called before each number of switches.

    Raises:
        UsageError: The cluster has one worker.
    """
    if cluster.workers < 2:
        raise UsageError(
            "a cluster of one worker sends nothing: expected two workers or more"
        )
    pace = 1 / min(cluster.speeds)
    return UpgradePlan(
        workers=cluster.workers,
        racks=len(cluster.racks),
        ready=len(aggregating_racks(cluster)),
        compute_seconds=pace * workload.ready_seconds[-1],
        options={
            option.name: _steps(option, cluster, workload, upgrade, on_progress)
            for option in collective_options(cluster)
        },
    )


def upgrade_step(
    option: CollectiveOption,
    cluster: Cluster,
    workload: Workload,
    racks: Collection[int],
    upgrade: Upgrade = UNLIMITED,
) -> UpgradeStep:
    """Return a step with *option* where the switches of *racks* aggregate; their order is kept."""
    sizes, pace = workload.gradient_bytes, 1 / min(cluster.speeds)
    price, later = _cost(option, _upgraded(cluster, racks, upgrade))
    ready = [pace * seconds_of + later for seconds_of in workload.ready_seconds]
    step = finish_time(plan_buckets("ddp", sizes), sizes, ready, price)
    batch = workload.batch
    return UpgradeStep(
        switches=len(racks),
        racks=tuple(racks),
        step_seconds=step,
        gradient_seconds=later + price(sum(sizes)),
        throughput=None if batch is None else cluster.workers * batch / step,
    )


def _steps(
    option: CollectiveOption,
    cluster: Cluster,
    workload: Workload,
    upgrade: Upgrade,
    on_progress: OnProgress,
) -> tuple[UpgradeStep, ...]:
    chosen = tuple(sorted(aggregating_racks(cluster)))
    found = [upgrade_step(option, cluster, workload, chosen, upgrade)]
    while option.upgrades and len(chosen) < len(cluster.racks):
        on_progress(option.name, len(chosen) + 1)
        tried = [
            upgrade_step(option, cluster, workload, (*chosen, rack), upgrade)
            for rack in _different(cluster, chosen)
        ]
        best = min(tried, key=lambda one: (one.step_seconds, one.gradient_seconds))
        found.append(best)
        chosen = best.racks
    return tuple(found)


def _different(cluster: Cluster, chosen: Collection[int]) -> list[int]:
    """Return the first of each kind of remaining rack: equal racks gain the same."""
    hosts = [server.rack for server in cluster.servers]
    kinds: dict[Hashable, int] = {}
    for number, rack in enumerate(cluster.racks):
        if number not in chosen:
            kind = replace(rack, names=(), group=""), hosts.count(number)
            kinds.setdefault(kind, number)
    return list(kinds.values())


def _upgraded(cluster: Cluster, racks: Collection[int], upgrade: Upgrade) -> Cluster:
    new = [number for number in racks if not cluster.racks[number].aggregates]
    changed = list(cluster.racks)
    for number in new:
        changed[number] = replace(
            changed[number],
            aggregates=True,
            aggregation_rate=upgrade.rate,
            slots=upgrade.slots,
        )
    return replace(cluster, racks=tuple(changed))


def _cost(option: CollectiveOption, cluster: Cluster) -> tuple[AffineCost, float]:
    """Time of a mean by its bytes, and the delay in which workers first agree on exponents."""
    at, row = _placement(option, cluster), option.collective

    def whole(size: int) -> float:
        return seconds(row.schedule(size, at), cluster)

    found = _line(whole)
    if not isinstance(row, InNetworkAllReduce) or row.uses_ring_only(at):
        return found, 0.0
    more = _agreement(row, at, cluster)
    slope = found.seconds_per_byte + more.seconds_per_byte
    return AffineCost(found.start_up, slope), more.start_up


def _agreement(row: InNetworkAllReduce, at: Placement, cluster: Cluster) -> AffineCost:
    """Time to agree on exponents, by bytes of the gradient."""
    if row.agrees_at_switches(at):
        return _line(lambda size: seconds(row.agreement(size // 4, at), cluster))
    return _agreement_of_ranks(_without_aggregation(cluster))


def _without_aggregation(cluster: Cluster) -> Cluster:
    racks = [
        replace(rack, aggregates=False, aggregation_rate=None, slots=None)
        for rack in cluster.racks
    ]
    return replace(cluster, racks=tuple(racks))


@lru_cache(maxsize=16)
def _agreement_of_ranks(cluster: Cluster) -> AffineCost:
    """Cached: no switch changes it, and it takes seconds to simulate with 1,000 workers."""
    count = cluster.workers
    return _line(lambda size: seconds(agreement_of_ranks(size // 4, count), cluster))


def _line(price: Callable[[int], float]) -> AffineCost:
    small, large = price(SMALL), price(LARGE)
    slope = (large - small) / (LARGE - SMALL)
    return AffineCost(max(0.0, small - slope * SMALL), slope)


def _placement(option: CollectiveOption, cluster: Cluster) -> Placement:
    """Return all workers of *cluster*, with its server hosts if the option uses them."""
    at = Placement.on(cluster)
    return at if option.dedicated else replace(at, cluster=replace(cluster, servers=()))


# ---- report ----


def upgrade_report(
    plan: UpgradePlan, cluster: Cluster, *, title: str, command: str = ""
) -> Report:
    """Return the ranking as a report: throughput by the number of aggregating switches."""
    answer, *details = advice(plan)
    return Report(
        title=f"{title}: {cluster.describe()}",
        answer=answer,
        details=details,
        command=command,
        notes=[("network", cluster.describe())],
        sections=[_table(plan), _chart(plan)],
    )


def advice(plan: UpgradePlan) -> list[str]:
    """Return the fastest collective without upgrades, then the gains of the others by switches."""
    starts = {name: steps[0].step_seconds for name, steps in plan.options.items()}
    start = min(starts, key=starts.__getitem__)  # on a tie the first, without servers
    now = starts[start]
    lines = [f"Without upgrades {start} is the fastest: {show_seconds(now)} per step."]
    for name, steps in plan.options.items():
        if len(steps) == 1:
            continue
        best = min(steps, key=lambda one: one.step_seconds)
        least = best.step_seconds
        if least >= now:
            lines.append(
                f"{name}: not faster; {show_seconds(least)} per step with {best.switches} of "
                f"{plan.racks} switches."
            )
            continue
        pays = next(one for one in steps if one.step_seconds < now)
        enough = next(
            one for one in steps if now - one.step_seconds >= ENOUGH * (now - least)
        )
        line = (
            f"{name}: {show_seconds(least)} per step with {_switches(best.switches)}; "
            f"faster than {start} from {_switches(pays.switches)} on"
        )
        if enough.switches < best.switches:
            line += f"; {_switches(enough.switches)} give {ENOUGH:.0%} of the gain"
        if best.switches < plan.racks:
            line += "; more switches make it slower"
        lines.append(f"{line}.")
    return lines


def _switches(number: int) -> str:
    return f"{number} switch{'es' * (number != 1)}"


def _table(plan: UpgradePlan) -> Table:
    """Return a row for each number of switches, a column for each collective."""
    rows: list[list[Cell]] = []
    for switches in range(plan.ready, plan.racks + 1):
        cells: list[Cell] = [Number(switches, str(switches))]
        for steps in plan.options.values():
            upgraded = len(steps) > 1 and switches > plan.ready
            cells.append(_cell(_with(steps, switches), upgraded))
        rows.append(cells)
    return Table(
        title=f"{_unit(plan)} by aggregating switches: {show_count(plan.workers, 'worker')} in "
        f"{show_count(plan.racks, 'rack')}",
        headings=("switches", *plan.options),
        rows=rows,
        caption="(rack n): the rack to upgrade next. Computing takes "
        f"{show_seconds(plan.compute_seconds)} per step.",
        level="summary",
    )


def _chart(plan: UpgradePlan) -> LineChart:
    counts = [float(number) for number in range(plan.ready, plan.racks + 1)]
    series = [
        Series(
            name,
            counts,
            [_rate(_with(steps, int(count))) for count in counts],
            number,
        )
        for number, (name, steps) in enumerate(plan.options.items())
    ]
    return LineChart(
        title="Gain of aggregating switches",
        panels=[Panel("", series)],
        x="aggregating switches",
        y=_unit(plan),
        caption="Predicted throughput with the best racks upgraded first.",
    )


def _unit(plan: UpgradePlan) -> str:
    steps = next(iter(plan.options.values()))
    return "steps per second" if steps[0].throughput is None else "samples per second"


def _with(steps: Sequence[UpgradeStep], switches: int) -> UpgradeStep:
    """Return the step with that many switches; without switches it is the same for any number."""
    return next((one for one in steps if one.switches == switches), steps[0])


def _cell(one: UpgradeStep, upgraded: bool) -> Number:
    rate = _rate(one)
    text = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    return Number(rate, f"{text} (rack {one.racks[-1]})" if upgraded else text)


def _rate(one: UpgradeStep) -> float:
    return 1 / one.step_seconds if one.throughput is None else one.throughput
