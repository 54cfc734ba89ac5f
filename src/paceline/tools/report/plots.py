"""Pictures of a comparison: where a step's time goes, and each metric against time.

Drawn on matplotlib's own figures and canvases, without pyplot's global state. A variant has
the same colour (and marker, for print) in all pictures.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from paceline.runtimes.results import Outcome, RunResult
from paceline.tools.compare.curves import (
    Curve,
    curves_of,
    has_values,
    most_points,
    thinned,
)
from paceline.tools.compare.runner import VariantStep
from paceline.tools.report.colours import COLOURS, INK
from paceline.tools.report.pictures import Picture, house_style, write
from paceline.tools.report.run_files import make_folder
from paceline.units import show_seconds

_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1, 1.5)))
_MARKERS = "os^DvPX*<"  # not as many as colours: their pairs do not repeat soon
_WIDTH = 4.6  # inches: on a telephone's screen its letters can still be read
_LINE_OF_TEXT = 0.19  # inches
_LETTERS = 48  # that fit in the width
_LETTERS_OF_LEGEND = 42  # that fit beside a line's sample
_MOST_LETTERS = 36  # of a metric's name beside its axis


class Look(NamedTuple):
    """How a variant is drawn in all pictures."""

    label: str
    colour: str
    dashes: str | tuple[int, tuple[float, ...]]
    marker: str


def write_plots(
    folder: str,
    outcomes: Sequence[tuple[str, Outcome]],
    steps: Sequence[VariantStep],
) -> list[Picture]:
    """Draw everything; each picture is also left in *folder*, as NAME.svg and NAME.png.

    *outcomes* are variants' specs and what they took, of which those that failed are not
    drawn, and at least one has not; *steps* are all their records. Raises `UsageError`
    where *folder* cannot be written.
    """
    path = make_folder(folder)
    pictures = []
    with house_style():
        results, looks = [], []
        for look, (spec, outcome) in zip(
            looks_of([spec for spec, _ in outcomes]), outcomes, strict=True
        ):
            if isinstance(outcome, RunResult):
                results.append((spec, outcome))
                looks.append(look)
        figure, caption = draw_time(looks, [result for _, result in results])
        pictures.append(write(path, "time-per-step", "Time per step", caption, figure))
        runtime = results[0][1].runtime
        taken: set[str] = set()
        for metric, curves in curves_of(results, steps).items():
            figure, caption = draw_metric(metric, looks, curves, runtime)
            name = _file_name(metric, taken)
            pictures.append(write(path, name, _plain(metric), caption, figure))
    return pictures


def looks_of(specs: Sequence[str]) -> list[Look]:
    """Colours, dashes and markers by place; a spec that is given twice is numbered."""
    count = Counter(specs)
    looks = []
    for i, spec in enumerate(specs):
        label = _plain(spec) if count[spec] == 1 else f"{_plain(spec)} (number {i + 1})"
        colour, _ = COLOURS[i % len(COLOURS)]
        dashes = _DASHES[i // len(COLOURS) % len(_DASHES)]
        looks.append(Look(label, colour, dashes, _MARKERS[i % len(_MARKERS)]))
    return looks


# ---- what is drawn ----


def draw_time(
    looks: Sequence[Look], results: Sequence[RunResult]
) -> tuple[Figure, str]:
    """A bar per variant: computing, then waiting for the network; and a caption."""
    labels = [_wrapped(look.label, _LETTERS) for look in looks]
    lines = [len(label) for label in labels]
    bar = 1.5  # heights in lines of text, names above their bars
    rows = [count + bar + 0.9 for count in lines]
    height = sum(rows) * _LINE_OF_TEXT + 1.0
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    times = [
        (_shown(r.compute_seconds), _shown(r.exposed_communication_seconds))
        for r in results
    ]
    most = max(compute + exposed for compute, exposed in times)
    scale, unit = unit_of(most)
    top = 0.0
    for look, label, row, result, (compute, exposed) in zip(
        looks, labels, rows, results, times, strict=True
    ):
        middle = top + len(label) + bar / 2
        axes.text(
            0.0,
            top + len(label) - 0.1,
            "\n".join(label),
            transform=axes.get_yaxis_transform(),
            va="bottom",
        )
        axes.barh(middle, compute * scale, bar, color=look.colour)
        axes.barh(
            middle,
            exposed * scale,
            bar,
            left=compute * scale,
            facecolor="none",
            edgecolor=look.colour,
            hatch="////",
            linewidth=1.2,
        )
        step = result.step_seconds
        axes.annotate(
            "no steps" if step is None else show_seconds(step),
            ((compute + exposed) * scale, middle),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
        )
        top += row
    axes.set_ylim(top, 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlim(0, most * scale * 1.2 or 1.0)  # room for the figures at the ends
    axes.set_xlabel(f"time per step ({unit})")
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    figure.legend(
        handles=[
            Patch(color=INK, label="compute"),
            Patch(
                facecolor="none",
                edgecolor=INK,
                hatch="////",
                label="exposed communication",
            ),
        ],
        loc="outside upper left",
        ncols=2,
    )
    caption = (
        "Compute, then waiting for the network: medians over a worker's steps (of means over "
        "as many as it takes to repeat), then means over workers."
    )
    return figure, caption


def draw_metric(
    metric: str, looks: Sequence[Look], curves: Sequence[Curve], runtime: str
) -> tuple[Figure, str]:
    """A line per variant against the time since training began; and a caption."""
    most = most_points(len(curves))
    drawn = [thinned(curve, most) for curve in curves]
    labels = [
        look.label if has_values(c) else f"{look.label} (no finite value)"
        for look, c in zip(looks, curves, strict=True)
    ]
    wrapped = ["\n".join(_wrapped(label, _LETTERS_OF_LEGEND)) for label in labels]
    longest = max(len(label) for label in labels)
    # A name takes 0.085 inches a letter at most, and 0.5 for its line and the gaps.
    columns = min(len(labels), max(1, int(_WIDTH / (0.5 + 0.085 * longest))))
    per_column = [wrapped[i::columns] for i in range(columns)]
    lines = max(sum(text.count("\n") + 1 for text in texts) for texts in per_column)
    figure = Figure(figsize=(_WIDTH, 2.9 + lines * _LINE_OF_TEXT), layout="constrained")
    axes = figure.add_subplot()
    last = max((s for c in curves for s in c.seconds), default=0.0)
    scale, unit = unit_of(last)
    handles = []
    for i, (look, label, curve) in enumerate(zip(looks, wrapped, drawn, strict=True)):
        style = {"color": look.colour, "linestyle": look.dashes, "marker": look.marker}
        axes.plot(
            [second * scale for second in curve.seconds],
            curve.values,
            **style,  # type: ignore[arg-type]
            markevery=_marked(curve, i),
        )
        handles.append(Line2D([], [], label=label, **style))  # type: ignore[arg-type]
    values = [v for c in drawn for v in c.values if math.isfinite(v)]
    logarithmic = bool(values) and 0 < min(values) < max(values) / 1000
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    else:
        axes.ticklabel_format(useOffset=False)
    if not values:
        _say(axes, "no finite value was logged")
        axes.set_yticks([])
    axes.set_xlim(0, last * scale * 1.04 or 1.0)
    axes.set_ylabel(_shortened(metric) + (", log scale" if logarithmic else ""))
    clock = "virtual time" if runtime == "simulated" else "time"
    axes.set_xlabel(f"{clock} since training began ({unit})")
    axes.grid()
    axes.set_axisbelow(True)
    figure.legend(handles=handles, loc="outside lower left", ncols=columns)
    caption = "Each value is the mean over the workers that logged it in that step."
    if drawn != list(curves):
        caption += (
            f" Lines of over {most} steps: means of neighbouring ones that are finite."
        )
    return figure, caption


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")


def _marked(curve: Curve, place: int) -> list[int]:
    """Where a line shows its marker: at every point where there are few, else at some,
    elsewhere than the lines beside it; and at points that no line leads to."""
    count = len(curve.values)
    if count <= 12:
        return list(range(count))
    every = count // 8
    some = set(range(place * 5 % every, count, every))
    padded = [math.nan, *curve.values, math.nan]
    alone = {
        i for i in range(count) if math.isnan(padded[i]) and math.isnan(padded[i + 2])
    }
    return sorted(some | alone)


def _shown(seconds: float | None) -> float:
    return 0.0 if seconds is None else max(0.0, seconds)


def unit_of(most: float) -> tuple[float, str]:
    """The unit of an axis that reaches to *most* seconds, and its number in a second."""
    for size, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if most >= size:
            return 1 / size, name
    return 1.0, "s"


def _wrapped(text: str, width: int) -> list[str]:
    """*text* in lines of at most *width* letters, broken after what separates a spec's
    parts where that is possible."""
    lines = [""]
    for part in re.findall(r"[^,:+ ]*[,:+ ]?", text):
        if len(lines[-1]) + len(part) > width and lines[-1]:
            lines.append("")
        lines[-1] += part
        while len(lines[-1]) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return lines


def _shortened(text: str) -> str:
    return _plain(text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…")


def _plain(text: str) -> str:
    """*text* without what XML forbids or a line cannot show."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _file_name(metric: str, taken: set[str]) -> str:
    """``metric-NAME`` in safe characters, once: file systems may ignore letters' case."""
    stem = "metric-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", metric)[:80]
    name, number = stem, 1
    while name.lower() in taken:
        number += 1
        name = f"{stem}-{number}"
    taken.add(name.lower())
    return name
