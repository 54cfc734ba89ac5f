"""Small charts as SVG that follows its page's colours; equal data make equal text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from markupsafe import Markup, escape

from paceline.tools.report.model import LineChart, Panel, Series

WIDTH, HEIGHT = 240, 180
LEFT, RIGHT, TOP, BOTTOM = 40, 12, 8, 34
MOST_TICKS = 7
_MARKERS = (
    "M{x},{y}m-3.5,0a3.5,3.5 0 1,0 7,0a3.5,3.5 0 1,0 -7,0",
    "M{x},{y}m-3.2,-3.2h6.4v6.4h-6.4z",
    "M{x},{y}m0,-4.2l4,7h-8z",
    "M{x},{y}m0,-4.4l4.4,4.4l-4.4,4.4l-4.4,-4.4z",
    "M{x},{y}m0,4.2l4,-7h-8z",
)

Scale = Callable[[float], float]


def panels_of(chart: LineChart) -> list[Markup]:
    """The SVG of each panel; all have the same axes."""
    xs = [x for panel in chart.panels for one in _lines(panel) for x in one.xs]
    ys = [y for panel in chart.panels for one in _lines(panel) for y in one.ys]
    ys = [y for y in ys if math.isfinite(y) and (y > 0 or "y" not in chart.log)]
    if not xs or not ys:
        return [Markup("") for _ in chart.panels]
    across = _Axis(xs, WIDTH - LEFT - RIGHT, logarithmic="x" in chart.log, exact=True)
    up = _Axis(
        ys if "y" in chart.log else [0.0, *ys, *([chart.top] if chart.top else [])],
        HEIGHT - TOP - BOTTOM,
        logarithmic="y" in chart.log,
    )
    return [_panel(panel, chart, across, up) for panel in chart.panels]


def marker(number: int, x: float, y: float) -> Markup:
    """The path of a line's marker."""
    path = _MARKERS[number % len(_MARKERS)].format(x=_short(x), y=_short(y))
    return Markup('<path class="mark" d="{}"/>').format(path)


class _Axis:
    """From values to pixels, and where its ticks are; *exact*: a tick at each value."""

    def __init__(
        self,
        values: Sequence[float],
        length: float,
        *,
        logarithmic: bool,
        exact: bool = False,
    ) -> None:
        self._to: Scale = math.log2 if logarithmic else float
        low, high = self._to(min(values)), self._to(max(values))
        if low == high:
            low, high = low - 0.5, high + 0.5
        if logarithmic and not exact:
            low, high = math.floor(low), math.ceil(high)
        self._low, self._scale = low, length / (high - low)
        if exact:
            self.ticks = _some(sorted(set(values)))
        elif logarithmic:
            every = max(1, math.ceil((high - low) / (MOST_TICKS - 1)))
            powers = range(int(low), int(high) + 1, every)
            self.ticks = [2.0**power for power in powers]
        else:
            step = _round_step((high - low) / (MOST_TICKS - 2))
            first = math.ceil(low / step)
            count = math.floor(high / step + 1e-9) - first + 1
            self.ticks = [(first + i) * step for i in range(count)]

    def __call__(self, value: float) -> float:
        return (self._to(value) - self._low) * self._scale


def _some(values: Sequence[float]) -> list[float]:
    every = -(-len(values) // (MOST_TICKS + 1))
    return list(values[::every])


def _round_step(least: float) -> float:
    size: float = 10.0 ** math.floor(math.log10(least))
    return next(size * part for part in (1, 2, 5, 10) if size * part >= least * 0.999)


def _lines(panel: Panel) -> list[Series]:
    dotted = [Series("", *panel.dotted)] if panel.dotted else []
    return [*panel.series, *dotted]


def _panel(panel: Panel, chart: LineChart, across: _Axis, up: _Axis) -> Markup:
    def x_of(value: float) -> float:
        return LEFT + across(value)

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - up(value)

    parts = [_grid(chart, across, up, x_of, y_of)]
    if panel.dotted:
        points = _points(*panel.dotted, x_of, y_of, chart)
        parts.append(Markup('<polyline class="dotted" points="{}"/>').format(points))
    for one in panel.series:
        parts.append(_line(one, chart, x_of, y_of))
    said = "; ".join(f"{one.name}: {_spoken(one)}" for one in panel.series)
    return Markup(
        '<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    ).format(
        WIDTH,
        HEIGHT,
        f"{chart.y} by {chart.x}, {panel.title}. {said}",
        Markup("").join(parts),
    )


def _spoken(one: Series) -> str:
    if not one.xs:
        return "nothing"
    return f"{one.ys[0]:.3g} at {one.xs[0]:g} to {one.ys[-1]:.3g} at {one.xs[-1]:g}"


def _grid(
    chart: LineChart, across: _Axis, up: _Axis, x_of: Scale, y_of: Scale
) -> Markup:
    parts = []
    for tick in up.ticks:
        y = y_of(tick)
        parts.append(
            Markup(
                '<path class="grid" d="M{},{}H{}"/>'
                '<text x="{}" y="{}" class="tick end">{}</text>'
            ).format(
                LEFT, _short(y), WIDTH - RIGHT, LEFT - 5, _short(y + 3.5), f"{tick:g}"
            )
        )
    bottom = HEIGHT - BOTTOM
    for tick in across.ticks:
        x = _short(x_of(tick))
        parts.append(
            Markup(
                '<path class="grid" d="M{},{}V{}"/>'
                '<text x="{}" y="{}" class="tick middle">{}</text>'
            ).format(x, TOP, bottom, x, bottom + 13, f"{tick:g}")
        )
    parts.append(
        Markup('<text x="{}" y="{}" class="axis middle">{}</text>').format(
            (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, chart.x
        )
    )
    return Markup("").join(parts)


def _line(one: Series, chart: LineChart, x_of: Scale, y_of: Scale) -> Markup:
    marks = [
        Markup("<g><title>{}</title>{}</g>").format(
            f"{one.name}: {x:g} {chart.x}, {y:.3g} {chart.y}",
            marker(one.colour, x_of(x), y_of(y)),
        )
        for x, y in zip(one.xs, one.ys, strict=True)
        if _drawable(y, chart)
    ]
    return Markup('<g class="line c{}"><polyline points="{}"/>{}</g>').format(
        one.colour, _points(one.xs, one.ys, x_of, y_of, chart), Markup("").join(marks)
    )


def _points(
    xs: Sequence[float], ys: Sequence[float], x_of: Scale, y_of: Scale, chart: LineChart
) -> str:
    return " ".join(
        f"{_short(x_of(x))},{_short(y_of(y))}"
        for x, y in zip(xs, ys, strict=True)
        if _drawable(y, chart)
    )


def _drawable(y: float, chart: LineChart) -> bool:
    return math.isfinite(y) and (y > 0 or "y" not in chart.log)


def _short(value: float) -> str:
    return str(escape(f"{value:.1f}".removesuffix(".0")))
