"""Pictures: what they name, what they show, and that they are the same every time."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib as mpl
import pytest

from paceline.errors import UsageError
from paceline.tools.compare.curves import Curve, curves_of, thinned
from paceline.tools.report.colours import COLOURS
from paceline.tools.report.pictures import for_page
from paceline.tools.report.plots import looks_of, write_plots
from tests.tools.report.cases import Comparison, falling, three, wild

NAMESPACE = "{http://www.w3.org/2000/svg}"


def draw(comparison: Comparison, folder: Path) -> dict[str, str]:
    """Each picture's SVG by its name."""
    pictures = write_plots(str(folder), comparison.results, comparison.steps)
    return {picture.name: picture.svg for picture in pictures}


@pytest.fixture(scope="module")
def folder_of_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the pictures of three variants were written."""
    folder = tmp_path_factory.mktemp("three")
    draw(three(), folder)
    return folder


def svgs_in(folder: Path) -> dict[str, str]:
    return {
        path.stem: path.read_text(encoding="utf-8")
        for path in sorted(folder.glob("*.svg"))
    }


def texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{NAMESPACE}svg"
    return ["".join(element.itertext()) for element in root.iter(f"{NAMESPACE}text")]


def test_a_picture_of_times_and_one_per_metric(tmp_path: Path) -> None:
    comparison = three()
    pictures = draw(comparison, tmp_path)
    assert list(pictures) == ["time-per-step", "metric-loss", "metric-accuracy"]
    for name, svg in pictures.items():
        assert (tmp_path / f"{name}.svg").read_text(encoding="utf-8") == svg
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        for variant in comparison.variants:
            assert variant.spec in texts(svg), name
    words = texts(pictures["time-per-step"])
    assert {"compute", "exposed communication", "time per step (ms)"} <= set(words)
    assert {"30 ms", "40 ms", "50 ms"} <= set(words)  # at the ends of the bars
    words = texts(pictures["metric-loss"])
    assert {"loss", "virtual time since training began (s)"} <= set(words)


def test_a_variant_has_one_colour_in_all_pictures(folder_of_three: Path) -> None:
    for svg in svgs_in(folder_of_three).values():
        for colour, _ in COLOURS[:3]:
            assert colour in svg
        for colour, _ in COLOURS[3:]:
            assert colour not in svg


def test_many_variants_look_different() -> None:
    looks = looks_of([f"bsp:number={i}" for i in range(28)])
    assert len({(look.colour, look.dashes) for look in looks}) == 28
    assert len({(look.colour, look.marker) for look in looks}) == 28
    assert looks_of(["bsp"])[0] == looks_of(["bsp", "ssp"])[0]


def test_equal_data_make_equal_files_whatever_the_user_s_settings(
    tmp_path: Path, folder_of_three: Path
) -> None:
    own = {"font.size": 30.0, "axes.facecolor": "red", "svg.fonttype": "path"}
    with mpl.rc_context(own):
        draw(three(), tmp_path)
        assert mpl.rcParams["font.size"] == 30.0
    files = sorted(path.name for path in folder_of_three.iterdir())
    assert len(files) == 7  # with the list of what was made
    for name in files:
        assert (folder_of_three / name).read_bytes() == (tmp_path / name).read_bytes()


def test_names_are_text_whatever_they_hold(tmp_path: Path) -> None:
    pictures = draw(wild(), tmp_path)
    assert list(pictures) == [
        "time-per-step",
        "metric--script-src-http-bad-x_1-",
        "metric-loss",
    ]
    for svg in pictures.values():
        assert not re.search(r"<(script|b)\b", svg)
        words = " ".join(texts(svg))
        assert "bsp:a=<b>&'\"" in words
        assert "$\\frac$\N{REPLACEMENT CHARACTER} 漢字" in words
    words = " ".join(texts(pictures["metric--script-src-http-bad-x_1-"]))
    assert '<script src="http://bad">&$x_1$' in words
    assert "time since training began (ms)" in words  # a real runtime's, not virtual
    assert "漢字 (no finite value)" in words
    assert "no finite value was logged" in texts(pictures["metric-loss"])


def test_no_picture_names_an_address(folder_of_three: Path) -> None:
    for svg in svgs_in(folder_of_three).values():
        without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", svg)
        assert "http" not in without_namespaces


def test_metrics_whose_names_differ_little_have_files_of_their_own(
    tmp_path: Path,
) -> None:
    comparison = Comparison()
    comparison.add("bsp", [{"a/b": 1.0, "A b": 2.0, "a b": 3.0, "漢": 4.0, "字": 5.0}])
    names = list(draw(comparison, tmp_path))
    assert len({name.lower() for name in names}) == 6
    assert names[1:4] == ["metric-a-b", "metric-A-b-2", "metric-a-b-3"]


def test_long_names_are_broken_into_lines(tmp_path: Path) -> None:
    spec = "bsp:" + ",".join(f"option{i}=value" for i in range(9)) + "x" * 90
    comparison = Comparison()
    comparison.add(spec, falling(3))
    for svg in draw(comparison, tmp_path).values():
        lines = [line for line in texts(svg) if "option" in line or "xxx" in line]
        assert "".join(lines) == spec
        assert max(len(line) for line in lines) <= 48


def test_a_variant_without_steps(tmp_path: Path) -> None:
    comparison = Comparison()
    comparison.add("bsp", [])
    pictures = draw(comparison, tmp_path)
    assert "no steps" in texts(pictures["time-per-step"])
    assert list(pictures) == ["time-per-step"]


def test_values_that_axes_cannot_hold(tmp_path: Path) -> None:
    comparison = Comparison()
    comparison.add("bsp", [{"loss": 1.0}, {"loss": 1e308}, {"loss": -math.inf}])
    assert "metric-loss" in draw(comparison, tmp_path)


def test_a_metric_over_many_decades_has_a_log_scale(tmp_path: Path) -> None:
    comparison = Comparison()
    comparison.add("bsp", [{"loss": 10.0**i} for i in range(5)])
    words = texts(draw(comparison, tmp_path)["metric-loss"])
    assert {"loss, log scale", "1", "100", "10000"} <= set(words)


# ---- what the lines are ----


def test_a_point_is_the_mean_over_the_workers_of_its_step() -> None:
    comparison = Comparison()
    comparison.add("bsp", [{"loss": 0.0}, {"loss": 0.0}])
    comparison.steps.clear()
    comparison.record("bsp", 0, 1, 1.0, {"loss": 4.0})
    comparison.record("bsp", 1, 1, 3.0, {"loss": 2.0})
    comparison.record("bsp", 2, 1, 9.0, {})  # this worker logged nothing
    comparison.record("bsp", 0, 2, 4.0, {"loss": 1.0})
    curves = curves_of(comparison.results, comparison.steps)
    assert curves == {"loss": [Curve([2.0, 4.0], [3.0, 1.0])]}


def test_what_is_no_number_leaves_a_gap() -> None:
    comparison = Comparison()
    comparison.add("bsp", [{"loss": 4.0}, {}, {"loss": None}, {"loss": 1.0}])
    (curve,) = curves_of(comparison.results, comparison.steps)["loss"]
    assert curve.seconds == pytest.approx([0.04, 0.12, 0.16])
    assert curve.values == pytest.approx([4.0, math.nan, 1.0], nan_ok=True)


def test_what_is_logged_now_and_then_also_counts_after_the_last_step() -> None:
    comparison = Comparison()
    logged = falling(20)
    comparison.add("bsp", logged, last={"accuracy": 0.9, "loss": 0.5, "end": 7.0})
    curves = curves_of(comparison.results, comparison.steps)
    (accuracy,), (loss,), (end,) = curves["accuracy"], curves["loss"], curves["end"]
    assert accuracy.values == [0.1, 0.2, 0.9]
    assert accuracy.seconds == pytest.approx([0.4, 0.8, 0.8])
    assert len(loss.values) == 20  # logged in every step: one more adds nothing
    assert end == Curve([accuracy.seconds[-1]], [7.0])


def test_a_last_value_that_is_recorded_is_no_further_point() -> None:
    comparison = Comparison()
    comparison.add("bsp", [{}, {"accuracy": 0.5}, {}, {}])
    (curve,) = curves_of(comparison.results, comparison.steps)["accuracy"]
    assert curve.values == [0.5]


def test_a_spec_that_is_given_twice_has_two_lines() -> None:
    comparison = Comparison()
    comparison.add("bsp", [{"loss": 2.0}, {"loss": 1.0}], workers=2)
    comparison.add("bsp", [{"loss": 5.0}, {"loss": 4.0}], workers=2)
    curves = curves_of(comparison.results, comparison.steps)["loss"]
    assert [curve.values for curve in curves] == [[2.0, 1.0], [5.0, 4.0]]
    labels = [look.label for look in looks_of(["bsp", "bsp"])]
    assert labels == ["bsp (number 1)", "bsp (number 2)"]


def test_a_variant_that_does_not_log_a_metric_has_an_empty_line() -> None:
    comparison = Comparison()
    comparison.add("bsp", [{"loss": 2.0}])
    comparison.add("ssp", [{"loss": 3.0, "staleness": 1.0}])
    curves = curves_of(comparison.results, comparison.steps)
    assert curves["staleness"][0] == Curve()


def test_long_runs_are_drawn_in_few_points(tmp_path: Path) -> None:
    comparison = Comparison()
    comparison.add("bsp", [{"loss": math.sin(i)} for i in range(20_000)])
    (picture,) = write_plots(str(tmp_path), comparison.results, comparison.steps)[1:]
    assert len(picture.svg) < 100_000
    assert "means of neighbouring ones" in picture.caption


def test_in_few_points_one_that_is_no_number_hides_no_others(tmp_path: Path) -> None:
    values = [1.0, math.nan, 3.0, math.nan, math.nan, math.nan, 5.0, 7.0, 6.0]
    few = thinned(Curve([float(i) for i in range(9)], values), most=3)
    assert few.seconds == [1.0, 4.0, 7.0]
    assert few.values == pytest.approx([2.0, math.nan, 6.0], nan_ok=True)
    comparison = Comparison()
    now_and_then = [{"accuracy": None if i % 10 else 0.5} for i in range(6000)]
    comparison.add("bsp", now_and_then)
    words = texts(draw(comparison, tmp_path)["metric-accuracy"])
    assert "no finite value was logged" not in words


# ---- in a page ----


def test_in_a_page_colours_are_the_page_s(tmp_path: Path) -> None:
    for picture in write_plots(str(tmp_path), three().results, three().steps):
        svg = for_page(picture)
        root = ElementTree.fromstring(svg)
        assert root.attrib["role"] == "img"
        assert "width" not in root.attrib
        assert not re.search(r"#[0-9a-f]{6}\b", svg)
        for name in ("--ink", "--grid", "--method-0", "--method-2"):
            assert f"var({name})" in svg
        # what an id is asked for exists
        ids = set(re.findall(r'\bid="([^"]+)"', svg))
        asked = re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', svg)
        assert asked
        assert set(asked) <= ids


# ---- bad luck ----


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="cannot write records to"):
        draw(three(), tmp_path / "file")
    (tmp_path / "time-per-step.svg").mkdir()
    with pytest.raises(UsageError, match=r"cannot write plots to .*time-per-step\.svg"):
        draw(three(), tmp_path)
