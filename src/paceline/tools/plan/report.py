"""A plan as a page: the answer, the best of each class, every candidate, a step of two of them."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cluster import Cluster
from paceline.interfaces import CONSISTENCIES
from paceline.tools.plan.estimates import Baseline, Estimate, Plan
from paceline.tools.plan.headline import (
    commands,
    passed_over,
    reasons,
    slow_starts,
    summary,
    verdict,
)
from paceline.tools.plan.pictures import bars_of
from paceline.tools.plan.suggestions import Suggestions
from paceline.tools.plan.tables import MEANS
from paceline.tools.plan.what_if import ScalingPoint
from paceline.tools.report.colours import COLOURS
from paceline.tools.report.model import (
    Bar,
    BarChart,
    Cell,
    LineChart,
    Links,
    Number,
    Panel,
    Report,
    Section,
    Series,
    Table,
    Text,
    TimelineSection,
)
from paceline.tools.report.timeline import Step
from paceline.units import show_bytes, show_rate, show_seconds

_GREY = len(COLOURS) - 1
LEGEND = (
    "step = compute + exposed communication. vs. bound: over the shortest step of any exact "
    "average. vs. 1 machine: samples per second relative to one machine. ~: from a short run "
    "only, since it is too slow in its class, or the budget is spent."
)


def plan_page(
    plan: Plan,
    found: Suggestions,
    points: Sequence[ScalingPoint],
    steps: Sequence[Step],
    *,
    cluster: Cluster,
    script: str,
    arguments: Sequence[str] = (),
    command: str = "",
    notes: Sequence[tuple[str, str]] = (),
    files: Sequence[str] = (),
) -> Report:
    """The page of a plan and what else was asked; *files* are pictures beside it."""
    sections: list[Section | None] = [
        _best(plan),
        _commands(plan, script, arguments),
        TimelineSection(
            title="A step, moment by moment",
            steps=steps,
            caption="One settled step of each, in virtual time.",
        )
        if steps
        else None,
        _helps(found),
        *_what_if(points),
        _candidates(plan),
        _left_out(plan),
        Links(title="Pictures", files=[(name, name) for name in files])
        if files
        else None,
    ]
    return Report(
        title=f"{script}: {plan.cluster}",
        answer=verdict(plan, found),
        details=_details(plan, found, cluster),
        command=command,
        notes=notes,
        sections=[section for section in sections if section is not None],
    )


def _details(plan: Plan, found: Suggestions, cluster: Cluster) -> list[str]:
    """Why; what would help has a table of its own."""
    lines: list[str] = []
    named = ""
    for name, text in summary(plan, cluster, found):
        named = name or named
        if named == "would help":
            continue
        if name:
            lines.append(f"{name}: {text}")
        else:
            lines[-1] += f"; {text}"
    return [*lines, *filter(None, (passed_over(plan), slow_starts(plan)))]


def _best(plan: Plan) -> BarChart:
    rows = bars_of(plan)
    return BarChart(
        title="Best of each class",
        parts=("compute", "exposed"),
        rows=[
            Bar(
                name=f"{name}: {row.spec}" if place else name,
                values=(row.compute_seconds, row.exposed_seconds),
                text=show_seconds(row.step_seconds)
                + (
                    f", {plan.baseline.speedup(row):.2f} x one machine" if place else ""
                ),
                colour=CONSISTENCIES.index(row.consistency) if place else _GREY,
            )
            for place, (name, row) in enumerate(rows)
        ],
        limit=plan.baseline.lower_bound_seconds,
        limit_name="no exact mean is faster",
        caption="; ".join(
            f"{consistency}: {MEANS[consistency]}" for consistency in plan.recommended
        ),
    )


def _commands(plan: Plan, script: str, arguments: Sequence[str]) -> Text | None:
    lines = list(commands(plan, script, arguments).values())
    if not lines:
        return None
    return Text(title="Commands that run them", lines=lines, kind="code")


def _candidates(plan: Plan) -> Table:
    colours = {consistency: place for place, consistency in enumerate(CONSISTENCIES)}
    estimated_compression = any(row.estimated_compression for row in plan.estimates)
    caption = LEGEND
    if estimated_compression:
        caption += (
            " What codes take is an estimate from bytes where the workload does not say it: "
            "paceline profile SCRIPT --compression NAME measures it."
        )
    if plan.skipped:
        caption += f" {plan.skipped} were not looked at: --budget is spent."
    return Table(
        title=f"All {len(plan.estimates)} candidates",
        headings=(
            *("method", "consistency", "step", "compute", "exposed"),
            *("sent", "buckets", "vs. bound", "vs. 1 machine", "samples/s"),
        ),
        rows=[_figures(row, plan.baseline) for row in plan.estimates],
        sort=2,
        caption=caption,
        colours=[colours[row.consistency] for row in plan.estimates],
    )


def _figures(row: Estimate, baseline: Baseline) -> list[Cell]:
    rate = baseline.samples_per_second(row)
    ratio, speedup = baseline.bound_ratio(row), baseline.speedup(row)
    return [
        row.spec,
        row.consistency,
        Number(
            row.step_seconds,
            ("~ " if row.fidelity == "short" else "") + show_seconds(row.step_seconds),
            title="; ".join(row.notes),
        ),
        _seconds(row.compute_seconds),
        _seconds(row.exposed_seconds),
        Number(row.bytes_sent, show_bytes(row.bytes_sent)),
        Number(row.buckets, str(row.buckets)),
        Number(ratio, f"{ratio:.2f}"),
        Number(speedup, f"{speedup:.2f}"),
        None
        if rate is None
        else Number(rate, f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"),
    ]


def _left_out(plan: Plan) -> Table | None:
    if not plan.infeasible:
        return None
    return Table(
        title="Left out, and why",
        headings=("why", "methods"),
        rows=[(why, ", ".join(specs)) for why, specs in reasons(plan).items()],
        folded=True,
    )


def _helps(found: Suggestions) -> Table | None:
    if not found.helps:
        return None
    return Table(
        title="What would help",
        headings=("do", "step", "vs. 1 machine"),
        rows=[
            (
                each.what,
                _seconds(each.step_seconds),
                Number(each.speedup, f"{each.speedup:.2f}"),
            )
            for each in found.helps
        ],
        caption=f"Each run with {found.helps[0].spec}. Larger batches are another training: "
        "whether they learn as well, nobody has asked.",
    )


# ---- what if ----


def _what_if(points: Sequence[ScalingPoint]) -> list[Section]:
    if not points:
        return []
    counts = sorted({float(point.workers) for point in points})
    caption = (
        "The best of each class by the number of workers, each with a part of the batch as "
        "large as here, on one switch."
    )
    return [
        LineChart(
            title="What more workers and faster links give",
            panels=_panels(points, "speedup", 1.0, dotted=(counts, counts)),
            x="workers",
            y="times one machine",
            log="xy",
            caption=f"{caption} Dotted: as many times one machine as there are workers.",
            table=_points(points),
        ),
        LineChart(
            title="Efficiency",
            panels=_panels(points, "efficiency", 100.0),
            x="workers",
            y="per cent of as many machines as there are workers",
            log="x",
            top=100.0,
        ),
    ]


def _panels(
    points: Sequence[ScalingPoint],
    field: str,
    factor: float,
    dotted: tuple[Sequence[float], Sequence[float]] | None = None,
) -> list[Panel]:
    """A panel for each link."""
    panels = []
    for rate in sorted({point.rate for point in points}):
        series = []
        for number, consistency in enumerate(CONSISTENCIES):
            mine = sorted(
                (p for p in points if p.consistency == consistency and p.rate == rate),
                key=lambda point: point.workers,
            )
            if mine:
                xs = [float(point.workers) for point in mine]
                ys = [factor * getattr(point, field) for point in mine]
                series.append(Series(consistency, xs, ys, number))
        panels.append(Panel(show_rate(rate), series, dotted))
    return panels


def _points(points: Sequence[ScalingPoint]) -> Table:
    """A row for each class and number of workers, a column for each link."""
    rates = sorted({point.rate for point in points})
    rows: dict[tuple[str, int], dict[float, ScalingPoint]] = {}
    for point in points:
        rows.setdefault((point.consistency, point.workers), {})[point.rate] = point
    return Table(
        title="Times one machine",
        headings=("consistency", "workers", *map(show_rate, rates)),
        rows=[
            [
                consistency,
                Number(workers, str(workers)),
                *(
                    Number(
                        by_rate[rate].speedup,
                        f"{by_rate[rate].speedup:.2f}",
                        title=by_rate[rate].spec,
                    )
                    if rate in by_rate
                    else None
                    for rate in rates
                ),
            ]
            for (consistency, workers), by_rate in rows.items()
        ],
    )


def _seconds(value: float) -> Number:
    return Number(value, show_seconds(value))
