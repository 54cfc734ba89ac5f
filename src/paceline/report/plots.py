"""Pictures of a comparison: where a step's time goes, and each metric against time.

Drawn on matplotlib's own figures and canvases, without pyplot's global state, and always
in the same bytes from the same data. A variant has the same colour (and marker, for print)
in all pictures. `for_page` makes a picture's colours the page's own: they follow its light
and dark schemes.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import matplotlib as mpl
import matplotlib.style
import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from paceline.errors import UsageError
from paceline.report.files import claim, make_folder
from paceline.report.result import Outcome, Result
from paceline.report.variants import VariantStep
from paceline.units import show_seconds

COLOURS = (
    ("#0072b2", "#56b4f5"),
    ("#d55e00", "#ff8c42"),
    ("#009e73", "#2fd6a3"),
    ("#cc79a7", "#f09ccb"),
    ("#e69f00", "#ffc53d"),
    ("#56b4e9", "#b3e0ff"),
    ("#6b7078", "#b4bac2"),
)
"""On light and on dark ground: Okabe and Ito's colours, which people who see fewer colours
can tell apart, without yellow (too pale on white) and with grey for black."""

INK, GRID, GROUND = "#24292f", "#d8dee4", "#ffffff"
"""Text and axes, grid lines, and what is below them."""

_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1, 1.5)))
_MARKERS = "os^DvPX*<"  # not as many as colours: their pairs do not repeat soon
_WIDTH = 4.6  # inches: on a telephone's screen its letters can still be read
_LINE_OF_TEXT = 0.19  # inches
_LETTERS = 48  # that fit in the width
_LETTERS_OF_LEGEND = 42  # that fit beside a line's sample
_MOST_LETTERS = 36  # of a metric's name beside its axis
_MOST_POINTS = 500  # of a line; more would be a big file of dots
_MOST = 1e300  # of a value: beyond it axes overflow

_STYLE: dict[str, object] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": GROUND,
    "axes.facecolor": "none",
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: equal everywhere
    "font.size": 9.0,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 1.0,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",  # text stays text: to be searched, copied and read aloud
    "text.color": INK,
    "text.parse_math": False,  # names may hold dollar signs
    "xtick.color": INK,
    "ytick.color": INK,
}


class Picture(NamedTuple):
    """A drawn picture: its files' *name*, a *title* and a *caption*, and its SVG text."""

    name: str
    title: str
    caption: str
    svg: str


class Look(NamedTuple):
    """How a variant is drawn in all pictures."""

    label: str
    colour: str
    dashes: str | tuple[int, tuple[float, ...]]
    marker: str


@dataclass
class Curve:
    """One variant's values of one metric: *seconds* since training began, and the mean
    over its workers. NaN: something that is no number was logged there."""

    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


def read_steps(folder: str) -> list[VariantStep]:
    """The records that `merge_records` left in *folder*."""
    lines = (Path(folder) / "records.jsonl").read_bytes()
    return msgspec.json.Decoder(VariantStep).decode_lines(lines)


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
    with _style():
        results, looks = [], []
        for look, (spec, outcome) in zip(
            looks_of([spec for spec, _ in outcomes]), outcomes, strict=True
        ):
            if isinstance(outcome, Result):
                results.append((spec, outcome))
                looks.append(look)
        figure, caption = draw_time(looks, [result for _, result in results])
        pictures.append(_write(path, "time-per-step", "Time per step", caption, figure))
        world = results[0][1].world
        taken: set[str] = set()
        for metric, curves in curves_of(results, steps).items():
            figure, caption = draw_metric(metric, looks, curves, world)
            name = _file_name(metric, taken)
            pictures.append(_write(path, name, _plain(metric), caption, figure))
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


def curves_of(
    results: Sequence[tuple[str, Result]], steps: Iterable[VariantStep]
) -> dict[str, list[Curve]]:
    """For each metric, in the order of first mention, a curve per variant.

    A point is the mean over the workers that logged the metric in a step, at the mean of
    the step's ends. What is logged after the last step is in no record: where a metric is
    logged now and then (an accuracy, once an epoch), the last value that rank 0 logged
    makes one more point, at the end.
    """
    points: dict[str, list[dict[int, list[tuple[float, float]]]]] = {}
    by_spec: dict[str, list[int]] = {}
    for i, (spec, result) in enumerate(results):
        by_spec.setdefault(spec, []).append(i)
        for metric in result.metrics:
            points.setdefault(metric, [{} for _ in results])
    ends = [0.0] * len(results)
    last_of_rank_0: dict[tuple[str, int], float | None] = {}
    seen: Counter[tuple[str, int, int]] = Counter()
    for record in steps:
        # A spec that was given twice has each step twice, in the variants' order.
        key = (record.variant, record.worker, record.step)
        variant = by_spec[record.variant][seen[key]]
        seen[key] += 1
        ends[variant] = max(ends[variant], record.end_seconds)
        for metric, value in record.metrics.items():
            runs = points.setdefault(metric, [{} for _ in results])
            point = (record.end_seconds, _finite(value))
            runs[variant].setdefault(record.step, []).append(point)
            if record.worker == 0:
                last_of_rank_0[metric, variant] = value
    curves: dict[str, list[Curve]] = {}
    for metric, runs in points.items():
        curves[metric] = []
        for variant, (_, result) in enumerate(results):
            curve = Curve()
            for _, values in sorted(runs[variant].items()):
                curve.seconds.append(fmean(second for second, _ in values))
                curve.values.append(fmean(value for _, value in values))
            if (
                metric in result.metrics
                and 2 * len(curve.values) <= result.steps
                and last_of_rank_0.get((metric, variant), math.nan)
                != result.metrics[metric]
            ):
                curve.seconds.append(ends[variant])
                curve.values.append(_finite(result.metrics[metric]))
            curves[metric].append(curve)
    return curves


def draw_time(looks: Sequence[Look], results: Sequence[Result]) -> tuple[Figure, str]:
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
    scale, unit = _unit(most)
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
        "Compute, then waiting for the network: medians over a worker's steps, then means "
        "over workers."
    )
    return figure, caption


def draw_metric(
    metric: str, looks: Sequence[Look], curves: Sequence[Curve], world: str
) -> tuple[Figure, str]:
    """A line per variant against the time since training began; and a caption."""
    drawn = [_thinned(curve) for curve in curves]
    labels = [
        look.label if _has_values(c) else f"{look.label} (no finite value)"
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
    scale, unit = _unit(last)
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
    clock = "virtual time" if world == "virtual" else "time"
    axes.set_xlabel(f"{clock} since training began ({unit})")
    axes.grid()
    axes.set_axisbelow(True)
    figure.legend(handles=handles, loc="outside lower left", ncols=columns)
    caption = "Each value is the mean over the workers that logged it in that step."
    if drawn != list(curves):
        caption += f" Lines of over {_MOST_POINTS} steps: means of neighbouring ones."
    return figure, caption


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center")


def _has_values(curve: Curve) -> bool:
    return any(math.isfinite(value) for value in curve.values)


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


def _thinned(curve: Curve) -> Curve:
    """*curve*, or means of neighbouring points where there are too many to draw."""
    width = -(-len(curve.values) // _MOST_POINTS)
    if width <= 1:
        return curve
    parts = [slice(i, i + width) for i in range(0, len(curve.values), width)]
    return Curve(
        [fmean(curve.seconds[part]) for part in parts],
        [fmean(curve.values[part]) for part in parts],
    )


def _finite(value: float | None) -> float:
    """*value*, or NaN: JSON has null for what is not finite, and axes have no room."""
    return math.nan if value is None or not abs(value) < _MOST else value


def _shown(seconds: float | None) -> float:
    return 0.0 if seconds is None else max(0.0, seconds)


def _unit(most: float) -> tuple[float, str]:
    """The unit of an axis that reaches to *most* seconds, and its number in a second."""
    for size, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if most >= size:
            return 1 / size, name
    return 1.0, "s"


def _plain(text: str) -> str:
    """*text* without what XML forbids or a line cannot show."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


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


# ---- files ----


@contextmanager
def _style() -> Iterator[None]:
    """matplotlib's defaults and ours, whatever the user's own settings are."""
    # Letters that the font lacks are left to the browser; matplotlib warns of each.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        with matplotlib.style.context(["default", _STYLE]):
            yield


def _write(
    folder: Path, name: str, title: str, caption: str, figure: Figure
) -> Picture:
    """Leave *figure* in *folder*, twice."""
    svg, png = io.StringIO(), io.BytesIO()
    # The salt makes ids that are the same in every run and differ between pictures.
    with mpl.rc_context({"svg.hashsalt": name, "svg.id": name}):
        # No date, and no creator: equal data make equal files.
        none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(svg, format="svg", metadata={"Title": title, **none})
    figure.savefig(png, format="png", dpi=200, metadata={"Software": None})
    text = _simplified(svg.getvalue())
    claim(str(folder), f"{name}.svg", f"{name}.png")
    try:
        (folder / f"{name}.svg").write_text(text, encoding="utf-8")
        (folder / f"{name}.png").write_bytes(png.getvalue())
    except OSError as error:
        raise UsageError(f"cannot write plots to {folder}: {error}") from error
    return Picture(name, title, caption, text)


def _file_name(metric: str, taken: set[str]) -> str:
    """``metric-NAME`` in safe characters, once: file systems may ignore letters' case."""
    stem = "metric-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", metric)[:80]
    name, number = stem, 1
    while name.lower() in taken:
        number += 1
        name = f"{stem}-{number}"
    taken.add(name.lower())
    return name


def _simplified(svg: str) -> str:
    """Without the document type and the metadata, which name addresses."""
    svg = re.sub(r"<!DOCTYPE[^>]*>\n?", "", svg)
    return re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)


def for_page(picture: Picture) -> str:
    """A picture's SVG to stand in a page: colours are the page's variables ``--ink``,
    ``--grid`` and ``--variant-0`` to 6, ids are the picture's own, the ground is open."""
    svg = picture.svg[picture.svg.index("<svg") :]
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>{picture.name}-", svg)
    svg = re.sub(r'(fill|stroke)="(#[0-9a-f]{6})"', r'style="\1: \2"', svg)
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)  # as wide as there is room
    svg = f'{head} role="img">{rest}'
    names = {INK: "var(--ink)", GRID: "var(--grid)", GROUND: "none"}
    names |= {light: f"var(--variant-{i})" for i, (light, _) in enumerate(COLOURS)}
    return re.sub(
        r"\b(fill|stroke): (#[0-9a-f]{6})",
        lambda found: f"{found[1]}: {names.get(found[2], found[2])}",
        svg,
    )
