"""A page as one file: no request leaves it, and its own script is the only one that runs.

What it shows are `paceline.tools.report.model`; ``page.html`` says how each looks, ``page.css`` in
which colours, ``page.js`` and ``timeline.js`` what people can do with it. Tables, bars and charts
are there without any script.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path

import msgspec
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from paceline.errors import UsageError
from paceline.tools.report.charts import marker, panels_of
from paceline.tools.report.colours import COLOURS, GRID, GROUND, INK
from paceline.tools.report.model import (
    Bar,
    BarChart,
    LineChart,
    Matrix,
    Number,
    Report,
    Section,
    TimelineSection,
)
from paceline.tools.report.run_files import claim, make_folder
from paceline.units import show_seconds

NAME = "index.html"
_HATCHED = "exposed"
_DARKEST = 45.0
"""Per cent of colour in a matrix's worst cell: its figures stay readable."""


def write_page(path: Path, page: Report) -> Path:
    """Write *page* to *path*, and return that. Raises `UsageError` where it cannot be
    written."""
    make_folder(str(path.parent), "the page")
    claim(str(path.parent), path.name)
    try:
        path.write_text(text_of(page), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the page {path}: {error}") from error
    return path


def text_of(page: Report) -> str:
    """The page's text."""
    script = _file("page.js") + _file("timeline.js")
    digest = hashlib.sha256(script.encode()).digest()
    return _template("page.html", escape=True).render(
        page=page,
        styles=Markup(_styles()),
        script=Markup(script),
        script_hash=f"sha256-{base64.b64encode(digest).decode()}",
        kind_of=_kind_of,
        data_of=_data_of,
        fill_of=_fill_of,
        percent=_percent,
        spoken=_spoken,
        shades_of=_shades,
        names_of=_names_of,
        panels_of=panels_of,
        marker=marker,
        trusted=Markup,
        comma=Markup(",<wbr>"),  # where long specs are best broken
    )


def _file(name: str) -> str:
    return (resources.files("paceline.tools.report") / name).read_text(encoding="utf-8")


@cache
def _template(name: str, *, escape: bool) -> Template:
    environment = Environment(autoescape=escape, undefined=StrictUndefined)
    return environment.from_string(_file(name))


@cache
def _styles() -> str:
    return _template("page.css", escape=False).render(
        colours=COLOURS, ink=INK, grid=GRID, ground=GROUND
    )


def _kind_of(section: Section) -> str:
    return type(section).__name__


def _data_of(section: TimelineSection) -> Markup:
    """JSON that stays inside its element, whatever names there are: no ``<`` is in it."""
    text = msgspec.json.encode(section.steps).decode()
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)


# ---- bars ----


def _fill_of(bars: BarChart, part: int, own: int | None = None) -> str:
    if bars.parts[part] == _HATCHED:
        return "hatched"
    if own is not None:
        return "own"
    colourful = all(row.colour is None for row in bars.rows)
    return f"p{part % len(COLOURS)}" if colourful else "grey"


def _longest(bars: BarChart) -> float:
    return max([*(sum(row.values) for row in bars.rows), bars.limit or 0.0]) or 1.0


def _percent(bars: BarChart, value: float) -> str:
    return f"{100 * max(0.0, value) / _longest(bars):.2f}"


def _spoken(bars: BarChart, row: Bar) -> str:
    parts = zip(bars.parts, row.values, strict=True)
    return ", ".join(f"{name} {show_seconds(value)}" for name, value in parts)


# ---- matrices and charts ----


def _shades(matrix: Matrix) -> list[list[str]]:
    """Per cent of colour of each cell: the worst has most."""
    values = [
        number.value
        for row in matrix.cells
        for number in row
        if number is not None and number.value is not None
    ]
    low, high = min(values, default=0.0), max(values, default=0.0)
    least = high / 2 if matrix.least is None else matrix.least
    reach = max(high - low, least) or 1.0

    def shade(one: Number | None) -> str:
        if one is None or one.value is None:
            return "0"
        off = high - one.value if matrix.low_is_bad else one.value - low
        return f"{_DARKEST * off / reach:.0f}"

    return [[shade(one) for one in row] for row in matrix.cells]


def _names_of(chart: LineChart) -> Sequence[tuple[str, int]]:
    """Each line's name and colour, once."""
    pairs = ((one.name, one.colour) for panel in chart.panels for one in panel.series)
    return list(dict.fromkeys(pairs))
