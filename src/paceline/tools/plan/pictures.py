"""A plan as pictures: where a step of each class's best goes, and what more would give."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from paceline.interfaces import CONSISTENCIES
from paceline.tools.plan.estimates import DDP, Estimate, Plan
from paceline.tools.plan.what_if import ScalingPoint
from paceline.tools.report.colours import COLOURS, GROUND, INK
from paceline.tools.report.pictures import Picture, house_style, write
from paceline.tools.report.plots import unit_of
from paceline.tools.report.run_files import make_folder
from paceline.units import show_rate, show_seconds

COLOUR_OF = {q: COLOURS[i][0] for i, q in enumerate(CONSISTENCIES)}
_MARKER_OF = dict(zip(CONSISTENCIES, "os^Dv", strict=True))
_SMALLEST_PART = 0.02
_OPEN = {"facecolor": GROUND, "edgecolor": "none", "pad": 0.5}
"""Below letters, where a line passes."""


def write_pictures(
    folder: str, plan: Plan, points: Sequence[ScalingPoint]
) -> list[Picture]:
    """Draw the plan, and what more would give where that was asked; leaves NAME.svg and NAME.png in *folder*.
    Raises `UsageError` where nothing can be written there."""
    path = make_folder(folder)
    with house_style():
        figure, caption = draw_plan(plan)
        drawn = [write(path, "plan", "Best of each class", caption, figure)]
        if points:
            title = "What more workers and faster links give"
            figure, caption = draw_what_if(points)
            drawn.append(write(path, "what-if", title, caption, figure))
    return drawn


def bars_of(plan: Plan) -> list[tuple[str, Estimate]]:
    """What is drawn, and what each is called: one machine first, then what DDP does where that is
    not recommended anyway."""
    ddp = plan.estimate(DDP)
    recommended = list(plan.recommended.items())
    rows: list[tuple[str, Estimate]] = [("one machine", plan.baseline.single)]
    if ddp is not None and all(row is not ddp for _, row in recommended):
        rows.append(("DDP", ddp))
    return [*rows, *recommended]


def draw_plan(plan: Plan) -> tuple[Figure, str]:
    """A bar per class, and for DDP's rule: computing, then waiting; and a caption."""
    rows = bars_of(plan)
    figure = Figure(figsize=(6.4, 0.55 * len(rows) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    most = max(row.step_seconds for _, row in rows)
    scale, unit = unit_of(most)
    for place, (name, row) in enumerate(rows):
        colour = COLOUR_OF.get(row.consistency, INK) if place else INK
        compute = row.compute_seconds * scale
        axes.barh(place, compute, 0.5, color=colour)
        axes.barh(
            place,
            row.exposed_seconds * scale,
            0.5,
            left=compute,
            facecolor="none",
            edgecolor=colour,
            hatch="////",
        )
        words = show_seconds(row.step_seconds)
        if place:
            words += f", {plan.baseline.speedup(row):.2f} x one machine"
        axes.annotate(
            words,
            (row.step_seconds * scale, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            bbox=_OPEN,
        )
        text = f"{name}: {row.spec}" if place else name
        axes.text(0, place - 0.3, text, va="bottom", bbox=_OPEN)
    axes.set_ylim(len(rows) - 0.5, -0.7)
    axes.set_xlim(0, most * scale * 1.55)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"time a step ({unit})")
    handles: list[Artist] = [
        Patch(color=INK, label="compute"),
        Patch(facecolor="none", edgecolor=INK, hatch="////", label="exposed"),
    ]
    if most * _SMALLEST_PART < plan.baseline.lower_bound_seconds <= 1.5 * most:
        limit = axes.axvline(
            plan.baseline.lower_bound_seconds * scale,
            label="no exact mean is faster",
            color=INK,
            linewidth=0.8,
            linestyle=":",
            zorder=0,
        )
        handles.append(limit)
    figure.legend(handles=handles, loc="outside upper left", ncols=3)
    return figure, (
        f"{plan.cluster}. Dotted: no exact mean is faster "
        f"({show_seconds(plan.baseline.lower_bound_seconds)} a step)."
    )


def draw_what_if(points: Sequence[ScalingPoint]) -> tuple[Figure, str]:
    """Speed-up above, efficiency below, a column for each link; and a caption."""
    rates = sorted({point.rate for point in points})
    counts = sorted({point.workers for point in points})
    figure = Figure(figsize=(2.3 * len(rates) + 0.6, 5.0), layout="constrained")
    grid = figure.subplots(2, len(rates), sharex=True, sharey="row", squeeze=False)
    present = [q for q in CONSISTENCIES if any(p.consistency == q for p in points)]
    for column, rate in enumerate(rates):
        above, below = grid[0][column], grid[1][column]
        above.set_title(show_rate(rate))
        above.plot(counts, counts, color=INK, linewidth=0.8, linestyle=":")
        for consistency in present:
            mine = sorted(
                (p for p in points if p.consistency == consistency and p.rate == rate),
                key=lambda point: point.workers,
            )
            x = [point.workers for point in mine]
            style = {"color": COLOUR_OF[consistency], "marker": _MARKER_OF[consistency]}
            above.plot(x, [p.speedup for p in mine], label=consistency, **style)
            below.plot(x, [100 * p.efficiency for p in mine], **style)
        above.set_xscale("log", base=2)
        above.set_yscale("log", base=2)
        above.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        below.set_xticks(counts, [str(count) for count in counts])
        below.set_xlabel("workers")
        below.set_ylim(0, 105)
        for axes in (above, below):
            axes.grid()
            axes.set_axisbelow(True)
    grid[0][0].set_ylabel("vs. 1 machine")
    grid[1][0].set_ylabel("efficiency (%)")
    handles, _ = grid[0][0].get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles))
    return figure, (
        "The best of each class by the number of workers, each with a part of the batch as "
        "large as here, on one switch. Dotted: as many times one machine as there are workers."
    )
