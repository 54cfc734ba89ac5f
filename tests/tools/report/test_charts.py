"""Charts: what they show, in both themes, and that they are the same every time."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import matplotlib as mpl
import pytest

from paceline.tools.report.charts import MARKERS, THEMES, svg_of
from paceline.tools.report.model import (
    COLOURS,
    GROUND,
    INK,
    Bar,
    BarChart,
    LineChart,
    Panel,
    Series,
)

NAMESPACE = "{http://www.w3.org/2000/svg}"
LONG = "bsp:" + ",".join(f"option{i}=value" for i in range(9)) + "x" * 90
WILD = "$\\frac$\x07 <b>&'\" 漢字"
BARS = BarChart(
    title="bars",
    parts=("compute", "exposed"),
    rows=[
        Bar(name="bsp", values=(0.03, 0.02), text="50 ms", colour=0),
        Bar(name=WILD, values=(0.03, math.nan), text="no steps", colour=2),
    ],
    limit=0.04,
    limit_name="lower bound",
)
XS = [1.0, 2.0, 4.0, 8.0]
LINES = LineChart(
    title="lines",
    panels=[
        Panel(f"{rate} Mbit/s", [Series("exact", XS, XS, 0), Series(WILD, XS, XS, 3)])
        for rate in (100, 500, 1000)
    ],
    x="workers",
    y="times one machine",
    log="xy",
)


def texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{NAMESPACE}svg"
    return ["".join(element.itertext()) for element in root.iter(f"{NAMESPACE}text")]


def curve(*ys: float, log: str = "", name: str = "bsp") -> LineChart:
    series = Series(name, [float(i) for i in range(len(ys))], ys)
    return LineChart(
        title="loss",
        panels=[Panel("", [series])],
        x="time (s)",
        y="loss",
        log=log,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("chart", [BARS, LINES], ids=["bars", "lines"])
def test_each_theme_has_its_own_colours(chart: BarChart | LineChart) -> None:
    used = {0, 2} if chart is BARS else {0, 3}
    for place, theme in enumerate(THEMES):
        svg = svg_of(chart, theme)
        assert INK[place] in svg
        assert GROUND[place] in svg
        for number, colour in enumerate(COLOURS):
            assert (colour[place] in svg) == (number in used)


def test_bars_say_what_they_are_in_text_and_hatch_exposed_communication() -> None:
    svg = svg_of(BARS, "light")
    assert "<pattern" in svg
    words = texts(svg)
    assert {"compute", "exposed", "lower bound", "bsp", "50 ms", "ms"} <= set(words)
    assert "20" in words  # of the axis, in milliseconds


def test_lines_share_axes_and_have_one_key_each() -> None:
    words = texts(svg_of(LINES, "light"))
    assert {"100 Mbit/s", "1000 Mbit/s", "times one machine"} <= set(words)
    assert words.count("exact") == 1
    assert words.count("workers") == 2  # below each column
    assert {"1", "2", "4", "8"} <= set(words)


@pytest.mark.parametrize("chart", [BARS, LINES], ids=["bars", "lines"])
def test_names_are_text_whatever_they_hold(chart: BarChart | LineChart) -> None:
    svg = svg_of(chart, "dark")
    assert not re.search(r"<(script|b)\b", svg)
    assert WILD.replace("\x07", "\N{REPLACEMENT CHARACTER}") in texts(svg)


def test_equal_data_make_equal_text_whatever_the_users_settings() -> None:
    before = [svg_of(chart, "light") for chart in (BARS, LINES)]
    own = {"font.size": 30.0, "axes.facecolor": "red", "svg.fonttype": "path"}
    with mpl.rc_context(own):
        assert [svg_of(chart, "light") for chart in (BARS, LINES)] == before
        assert mpl.rcParams["font.size"] == 30.0


def test_long_names_are_broken_into_lines() -> None:
    bars = BarChart(title="b", parts=("s",), rows=[Bar(name=LONG, values=(1.0,))])
    for chart in (bars, curve(1.0, 2.0, name=LONG)):
        lines = [
            t for t in texts(svg_of(chart, "light")) if "option" in t or "xxx" in t
        ]
        assert "".join(lines) == LONG
        assert max(map(len, lines)) <= 52


def test_a_logarithmic_axis_has_plain_numbers() -> None:
    wide = texts(svg_of(curve(*(10.0**i for i in range(5)), log="y"), "light"))
    assert {"1", "100", "10000"} <= set(wide)


def test_values_that_are_not_finite_leave_gaps() -> None:
    nan = math.nan
    assert "no finite value" in texts(svg_of(curve(nan, nan), "light"))
    assert "no finite value" not in texts(svg_of(curve(1.0, nan, 2.0), "light"))


def test_many_lines_look_different() -> None:
    assert len({(i % len(COLOURS), i % len(MARKERS)) for i in range(28)}) == 28


def test_points_of_long_lines_are_not_all_marked() -> None:
    svg = svg_of(curve(*map(float, range(300))), "light")
    assert svg.count("<use") < 60
    assert len(svg) < 30_000
