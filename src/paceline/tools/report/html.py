"""Writes a report as one HTML file, which makes no requests and runs only its own script.

`paceline.tools.report.model` defines reports, ``page.html`` is the markup, ``page.css`` the style. ``page.js`` and
``timeline.js`` sort tables, copy commands and draw timelines. Tables and charts also work without scripts.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from pathlib import Path

import msgspec
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from paceline.errors import UsageError
from paceline.tools.report.model import (
    COLOURS,
    GRID,
    GROUND,
    INK,
    BarChart,
    LineChart,
    Matrix,
    Number,
    Report,
    Section,
    Series,
    Table,
    TimelineSection,
)
from paceline.tools.report.run_files import claim, make_folder
from paceline.units import show_seconds

NAME = "index.html"
_DARKEST = 45.0
"""Per cent of colour in a matrix's worst cell, so that figures stay readable."""


def write_page(path: Path, page: Report) -> Path:
    """Write *page* to *path*, and return the path. Raises `UsageError` if that fails."""
    make_folder(str(path.parent), "the page")
    claim(str(path.parent), path.name)
    try:
        path.write_text(text_of(page), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the page {path}: {error}") from error
    return path


def text_of(page: Report) -> str:
    """Return the page's HTML."""
    script = _file("page.js") + _file("timeline.js")
    digest = hashlib.sha256(script.encode()).digest()
    return _template("page.html", escape=True).render(
        page=page,
        styles=Markup(_styles()),
        script=Markup(script),
        script_hash=f"sha256-{base64.b64encode(digest).decode()}",
        kind_of=_kind_of,
        data_of=_data_of,
        picture_of=_picture,
        figures_of=_figures_of,
        shades_of=_shades,
        comma=Markup(",<wbr>"),  # allows line breaks in long specs
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
    """JSON for an HTML element: it contains no ``<``, whatever the names are."""
    text = msgspec.json.encode(section.steps).decode()
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)


# ---- charts ----


def _picture(chart: BarChart | LineChart) -> Markup:
    """Return the chart for both themes; the browser shows the reader's."""
    from paceline.tools.report import charts  # slow: it imports matplotlib

    light, dark = (_data_url(charts.svg_of(chart, theme)) for theme in charts.THEMES)
    return Markup(
        '<picture><source media="screen and (prefers-color-scheme: dark)" srcset="{}">'
        '<img class="chart" src="{}" alt="{}"></picture>'
    ).format(dark, light, "; ".join([chart.title, *_in_words(chart)]))


def _data_url(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _in_words(chart: BarChart | LineChart) -> list[str]:
    """Return the chart's content as text, for readers who cannot see it."""
    if isinstance(chart, BarChart):
        return [f"{row.name}: {row.text}" for row in chart.rows]
    return [
        f"{', '.join(filter(None, (one.name, panel.title)))}: {_ends(one)}"
        for panel in chart.panels
        for one in panel.series
    ]


def _ends(one: Series) -> str:
    if not one.xs:
        return "no values"
    return f"{one.ys[0]:.3g} at {one.xs[0]:.3g} to {one.ys[-1]:.3g} at {one.xs[-1]:.3g}"


def _figures_of(chart: BarChart | LineChart) -> Table | None:
    """Return the chart's figures as a table, if they are few enough."""
    if isinstance(chart, LineChart):
        return chart.table
    return Table(
        title=chart.title,
        headings=("", *chart.parts),
        rows=[
            (row.name, *(Number(value, show_seconds(value)) for value in row.values))
            for row in chart.rows
        ],
    )


# ---- matrices ----


def _shades(matrix: Matrix) -> list[list[str]]:
    """Per cent of colour of each cell, most for the worst."""
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
