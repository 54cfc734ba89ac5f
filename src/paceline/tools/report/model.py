"""A report as plain data: an answer, and sections of text, tables and charts.

`paceline.tools.report.html` shows it as a page and `paceline.tools.report.terminal` on a terminal.
Nothing here draws, and nothing here is markup: all texts are escaped when they are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from paceline.tools.report.timeline import Step

COLOURS = (
    ("#0072b2", "#56b4f5"),
    ("#d55e00", "#ff8c42"),
    ("#009e73", "#2fd6a3"),
    ("#cc79a7", "#f09ccb"),
    ("#e69f00", "#ffc53d"),
    ("#56b4e9", "#b3e0ff"),
    ("#6b7078", "#b4bac2"),
)
"""Colours on light and on dark background: Okabe and Ito's, which colour-blind readers can tell
apart, without yellow (too pale on white) and with grey for black. A consistency's colour is its
number in `CONSISTENCIES`."""

GREY = len(COLOURS) - 1
"""The colour of rows without a consistency, such as one machine."""

INK, GRID, GROUND = (
    ("#24292f", "#e6e9ed"),
    ("#d8dee4", "#3a414a"),
    ("#ffffff", "#14181d"),
)
"""Text and axes, grid lines, and background: for light and for dark."""


class Number(NamedTuple):
    """A figure in a table.

    Attributes:
        value: The number by which it is sorted.
        text: The text that is shown.
        bad: Whether it is marked by a sign and a colour.
        title: Explains the mark.
    """

    value: float | None
    text: str
    title: str = ""
    bad: bool = False


Cell = str | Number | None
Level = Literal["summary", "details"]
"""Where a section is shown: a terminal prints the summary, and the details on request."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """Sentences in one of several forms.

    - A list.
    - A numbered list, whose items have a title and more lines.
    - Paragraphs.
    - Lines of *code*, each with a copy button.
    """

    title: str
    lines: Sequence[str]
    kind: Literal["list", "numbered", "paragraphs", "code"] = "list"
    caption: str = ""
    level: Level = "details"


@dataclass(frozen=True, kw_only=True)
class Links:
    """Files beside the page: their names and paths."""

    title: str
    files: Sequence[tuple[str, str]]
    caption: str = ""
    level: Level = "details"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows that can be sorted by any column.

    They are sorted by column number *sort*, or unsorted. *colours*: by row, the number of the
    colour beside its first cell. *notes* are numbered. *folded*: shown on demand.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    sort: int | None = None
    colours: Sequence[int] | None = None
    notes: Sequence[str] = ()
    folded: bool = False
    level: Level = "details"

    def number_columns(self) -> frozenset[int]:
        """Columns that hold only numbers."""
        return frozenset(
            column
            for column in range(len(self.headings))
            if any(isinstance(row[column], Number) for row in self.rows)
            and not any(isinstance(row[column], str) for row in self.rows)
        )


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Seconds for each part, and a *text* after the bar.

    *colour* is the number of one colour for all parts; otherwise each part has its own.
    """

    name: str
    values: Sequence[float]
    text: str = ""
    colour: int | None = None


@dataclass(frozen=True, kw_only=True)
class BarChart:
    """Stacked bars of seconds.

    A part with the name *exposed* is hatched. *limit* has the seconds of a vertical line with the name
    *limit_name*.
    """

    title: str
    parts: Sequence[str]
    rows: Sequence[Bar]
    caption: str = ""
    limit: float | None = None
    limit_name: str = "limit"
    level: Level = "details"


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A figure for each pair, shaded from the best to the worst.

    Differences smaller than *least* are hardly visible as shades (None: half of the largest).
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[Number | None]]
    corner: str = "from \\ to"
    caption: str = ""
    low_is_bad: bool = True
    least: float | None = None
    level: Level = "details"


class Series(NamedTuple):
    """A line of a panel, with the numbers of its *colour* and *marker* (None: the colour's)."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    marker: int | None = None


class Panel(NamedTuple):
    """A small chart. *dotted*: a line for comparison."""

    title: str
    series: Sequence[Series]
    dotted: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """Small charts of one kind side by side, on equal axes, with their figures as a *table*.

    *x* and *y* name the axes, and *log* the logarithmic ones. *top* is the end of the vertical axis.
    """

    title: str
    panels: Sequence[Panel]
    x: str
    y: str
    log: Literal["", "x", "y", "xy"] = ""
    top: float | None = None
    caption: str = ""
    table: Table | None = None
    level: Level = "details"


@dataclass(frozen=True, kw_only=True)
class TimelineSection:
    """Steps of several runs, of which two are shown at a time, on one scale.

    *first* has the numbers of the two that are shown first.
    """

    title: str
    steps: Sequence[Step]
    first: tuple[int, int] = (0, 1)
    caption: str = ""
    level: Level = "details"


Section = Text | Links | Table | BarChart | Matrix | LineChart | TimelineSection


@dataclass(frozen=True, kw_only=True)
class Report:
    """*answer* is the main result; *details* follow it. *notes*: named lines, such as the network."""

    title: str
    answer: str
    details: Sequence[str] = ()
    command: str = ""
    notes: Sequence[tuple[str, str]] = ()
    sections: Sequence[Section] = field(default=())
