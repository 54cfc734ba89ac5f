"""Charts of a report, drawn by matplotlib: one SVG for light and one for dark background.

Equal data give equal files, whatever the user's own matplotlib settings are.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import matplotlib as mpl
import matplotlib.style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator

from paceline.tools.report.model import (
    COLOURS,
    GRID,
    GROUND,
    INK,
    Bar,
    BarChart,
    LineChart,
    Panel,
    Series,
)

Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")
MARKERS = "os^DvPX*<"  # fewer than colours, so that pairs rarely repeat
HATCHED = "exposed"
"""The part of a bar that is hatched."""

_WIDTH = 5.0  # inches: text stays readable on a phone
_LINE_OF_TEXT = 0.19  # inches
_LETTER = 0.075  # inches, of an average letter
_LETTERS = 52  # letters in the chart's width
_LETTERS_OF_LEGEND = 46  # letters beside a line's sample
_LETTERS_OF_AXIS = 36
_MOST_TICKS = 8
_DECADES = 3
"""Decades from which a logarithmic axis has powers of ten, else powers of two."""


def svg_of(chart: BarChart | LineChart, theme: Theme) -> str:
    """Return the chart as an SVG document."""
    with house_style(theme):
        figure = draw(chart, theme)
        # A fixed salt gives equal ids in every run.
        with mpl.rc_context({"svg.hashsalt": f"{theme} {chart.title}"}):
            text = io.StringIO()
            # Without a date, equal data give equal files.
            none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            figure.savefig(text, format="svg", metadata=none)
    return text.getvalue()


def draw(chart: BarChart | LineChart, theme: Theme = "light") -> Figure:
    """Return the chart as a figure, to be made and saved within `house_style`."""
    if isinstance(chart, BarChart):
        return _bars(chart, theme)
    return _lines(chart, theme)


@contextmanager
def house_style(theme: Theme = "light") -> Iterator[None]:
    """matplotlib's defaults and paceline's style, whatever the user's own settings are."""
    place = THEMES.index(theme)
    ink = INK[place]
    style: dict[str, object] = {
        "axes.axisbelow": True,
        "axes.edgecolor": ink,
        "axes.grid": True,
        "axes.labelcolor": ink,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 9.0,
        "figure.facecolor": GROUND[place],
        "axes.facecolor": "none",
        "font.family": ["sans-serif"],
        "font.sans-serif": ["DejaVu Sans"],  # part of matplotlib, so always the same
        "font.size": 9.0,
        "grid.color": GRID[place],
        "grid.linewidth": 0.6,
        "hatch.linewidth": 1.0,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
        "lines.markersize": 4.5,
        "svg.fonttype": "none",  # keeps text as text, and files small
        "text.color": ink,
        "text.parse_math": False,  # names may contain dollar signs
        "xtick.color": ink,
        "ytick.color": ink,
    }
    # Browsers replace glyphs that the font lacks; matplotlib would warn of each.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        with matplotlib.style.context(["default", style]):
            yield


def colour_of(number: int, theme: Theme) -> str:
    """Return the colour with that number on the theme's ground."""
    return COLOURS[number % len(COLOURS)][THEMES.index(theme)]


# ---- bars ----


def _bars(chart: BarChart, theme: Theme) -> Figure:
    """Return a name, and below it its bar with a text at the end."""
    names = [_wrapped(row.name, _LETTERS) for row in chart.rows]
    bar = 1.3  # heights in lines of text
    heights = [len(name) + bar + 0.7 for name in names]
    keys = _keys_of(chart, theme)
    figure = Figure(
        figsize=(_WIDTH, (sum(heights) + 0.6 * len(keys)) * _LINE_OF_TEXT + 0.6),
        layout="constrained",
    )
    axes = figure.add_subplot()
    ends = [sum(map(_length, row.values)) for row in chart.rows]
    most = max([*ends, chart.limit or 0.0])
    scale, unit = unit_of(most)
    # Keep text readable where the limit's line crosses it.
    ground = {"facecolor": GROUND[THEMES.index(theme)], "edgecolor": "none", "pad": 0.5}
    box = None if chart.limit is None else ground
    top = 0.0
    for row, name, height, end in zip(chart.rows, names, heights, ends, strict=True):
        axes.text(
            0.0,
            top + len(name) - 0.1,
            "\n".join(name),
            transform=axes.get_yaxis_transform(),
            va="bottom",
            bbox=box,
        )
        middle, left = top + len(name) + bar / 2, 0.0
        for part, value in enumerate(row.values):
            look = _fill(chart, part, row, theme)
            axes.barh(middle, _length(value) * scale, bar, left=left, **look)  # type: ignore[arg-type]
            left += _length(value) * scale
        axes.annotate(
            _plain(row.text),
            (end * scale, middle),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            bbox=box,
        )
        top += height
    if chart.limit is not None:
        axes.axvline(chart.limit * scale, color=INK[THEMES.index(theme)], ls=":")
    axes.set_ylim(top, 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    letters = max((len(row.text) for row in chart.rows), default=0)
    room = min(0.5, (letters * _LETTER + 0.1) / _WIDTH)
    axes.set_xlim(0, most * scale / (1 - room) or 1.0)
    axes.set_xlabel(unit)
    axes.grid(visible=False, axis="y")
    if keys:
        figure.legend(handles=keys, loc="outside upper left", ncols=3)
    return figure


def _fill(chart: BarChart, part: int, row: Bar, theme: Theme) -> dict[str, object]:
    own = part if row.colour is None else row.colour
    return _hatch_or_fill(chart.parts[part], colour_of(own, theme))


def _hatch_or_fill(part: str, colour: str) -> dict[str, object]:
    if part == HATCHED:
        return {
            "facecolor": "none",
            "edgecolor": colour,
            "hatch": "////",
            "linewidth": 1.0,
        }
    return {"color": colour}


def _keys_of(chart: BarChart, theme: Theme) -> list[Artist]:
    """Return a legend entry for each of several parts, and one for the limit."""
    ink = INK[THEMES.index(theme)]
    by_part = all(row.colour is None for row in chart.rows)
    keys: list[Artist] = []
    if len(chart.parts) > 1:
        keys += [
            Patch(
                label=_plain(part),
                **_hatch_or_fill(part, colour_of(i, theme) if by_part else ink),  # type: ignore[arg-type]
            )
            for i, part in enumerate(chart.parts)
        ]
    if chart.limit is not None:
        keys.append(Line2D([], [], color=ink, ls=":", label=_plain(chart.limit_name)))
    return keys


def _length(value: float) -> float:
    return max(0.0, value) if math.isfinite(value) else 0.0


# ---- lines ----


def _lines(chart: LineChart, theme: Theme) -> Figure:
    """Panels on equal axes, two in a row; the lines' names below them."""
    columns = min(2, len(chart.panels))
    rows = math.ceil(len(chart.panels) / columns)
    keys, width, lines = _names_of(chart, theme)
    high = 2.8 if columns == 1 else 1.9
    figure = Figure(
        figsize=(_WIDTH, rows * high + 0.3 + lines * _LINE_OF_TEXT),
        layout="constrained",
    )
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    places = list(grid.flat)
    for panel, axes in zip(chart.panels, places, strict=False):
        _panel(axes, panel, theme)
    for axes in places[len(chart.panels) :]:
        axes.set_axis_off()
    _scales(places[0], chart)
    for axes in places[len(chart.panels) - columns : len(chart.panels)]:
        axes.tick_params(labelbottom=True)  # also above an empty place
        axes.set_xlabel(_plain(chart.x))
    figure.supylabel(_shortened(chart.y), fontsize="medium")
    figure.legend(handles=keys, loc="outside lower left", ncols=width)
    return figure


def _panel(axes: Axes, panel: Panel, theme: Theme) -> None:
    axes.set_title(_plain(panel.title))
    place = THEMES.index(theme)
    if panel.dotted is not None:
        axes.plot(*panel.dotted, color=INK[place], ls=":", lw=1.2)
    for number, one in enumerate(panel.series):
        axes.plot(one.xs, one.ys, **_look(one, theme), markevery=_marked(one, number))  # type: ignore[arg-type]
    if panel.series and not any(math.isfinite(y) for s in panel.series for y in s.ys):
        axes.text(
            *(0.5, 0.5, "no finite value"),
            transform=axes.transAxes,
            ha="center",
            va="center",
        )


def _look(one: Series, theme: Theme) -> dict[str, object]:
    marker = one.colour if one.marker is None else one.marker
    return {
        "color": colour_of(one.colour, theme),
        "marker": MARKERS[marker % len(MARKERS)],
    }


def _marked(one: Series, place: int) -> list[int]:
    """Return the points with a marker.

    If there are few, all have one. Otherwise isolated points have one, and some points at other places than those
    of neighbouring lines.
    """
    count = len(one.ys)
    if count <= 12:
        return list(range(count))
    every = count // 8
    some = set(range(place * 5 % every, count, every))
    padded = [math.nan, *one.ys, math.nan]
    alone = {
        i for i in range(count) if math.isnan(padded[i]) and math.isnan(padded[i + 2])
    }
    return sorted(some | alone)


def _scales(axes: Axes, chart: LineChart) -> None:
    """Set both axes, which all panels share."""
    every = [
        pair
        for panel in chart.panels
        for pair in [(s.xs, s.ys) for s in panel.series]
        + ([panel.dotted] if panel.dotted else [])
    ]
    xs = [x for some, _ in every for x in some]
    ys = [y for _, some in every for y in some if math.isfinite(y)]
    if "x" in chart.log and xs:
        axes.set_xscale("log", base=2)
        ticks = sorted(set(xs))
        axes.set_xticks(ticks[:: -(-len(ticks) // _MOST_TICKS)])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(_number))
    elif xs:
        axes.set_xlim(0, max(xs) * 1.04 or 1.0)
    positive = [y for y in ys if y > 0]
    if "y" in chart.log and positive:
        wide = max(positive) > 10**_DECADES * min(positive)
        axes.set_yscale("log", base=10 if wide else 2)
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(_number))
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
        if chart.top is not None:
            axes.set_ylim(0, max(chart.top, *ys) * 1.04)
    if not ys:
        axes.set_yticks([])


def _number(value: float, _place: int | None = None) -> str:
    return f"{value:g}"


def _names_of(chart: LineChart, theme: Theme) -> tuple[list[Artist], int, int]:
    """Return a legend entry for each line, the number of columns, and the number of text lines."""
    series = {one.name: one for panel in chart.panels for one in panel.series}
    names = ["\n".join(_wrapped(name, _LETTERS_OF_LEGEND)) for name in series]
    keys: list[Artist] = [
        Line2D([], [], label=name, **_look(one, theme))  # type: ignore[arg-type]
        for name, one in zip(names, series.values(), strict=True)
    ]
    longest = max((len(name) for name in series), default=1)
    # A legend entry's line sample and gaps take half an inch.
    columns = max(1, min(len(names), int(_WIDTH / (0.5 + longest * _LETTER))))
    per_column = [names[i::columns] for i in range(columns)]
    lines = max(sum(text.count("\n") + 1 for text in one) for one in per_column)
    return keys, columns, lines


# ---- text ----


def unit_of(most: float) -> tuple[float, str]:
    """Return the unit of an axis up to *most* seconds, and its number in a second."""
    for size, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if most >= size:
            return 1 / size, name
    return 1.0, "s"


def _wrapped(text: str, width: int) -> list[str]:
    """*text* in lines of at most *width* letters, broken between a spec's parts if possible."""
    lines = [""]
    for part in re.findall(r"[^,:+ ]*[,:+ ]?", _plain(text)):
        if len(lines[-1]) + len(part) > width and lines[-1]:
            lines.append("")
        lines[-1] += part
        while len(lines[-1]) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return lines


def _shortened(text: str) -> str:
    short = text if len(text) <= _LETTERS_OF_AXIS else f"{text[:_LETTERS_OF_AXIS]}…"
    return _plain(short)


def _plain(text: str) -> str:
    """*text* without characters that XML forbids or a line cannot show."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
