"""The page of a comparison: all is named, escaped, linked, and nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from paceline.errors import UsageError
from paceline.runtimes.results import FailedRun
from paceline.tools.report.html import text_of, write_page
from paceline.tools.report.model import INK, TimelineSection
from paceline.tools.report.model import Report as PageData
from paceline.tools.report.timeline import Step
from tests.support import forked
from tests.tools.compare.cases import Comparison, three

ROOT = Path(__file__).parent.parent.parent.parent
LAYERS = ROOT / "examples" / "layers.py"
WILD = '<script src="http://bad">&$x_1$'
VOID = {"source", "meta", "link", "br", "wbr", "img", "input", "hr"}


class Report(HTMLParser):
    """What a browser would see: tags, attributes, text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.cells: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        if "script" in self._open:
            self.scripts[-1] += data
            return
        self.text += data
        if {"td", "th"} & set(self._open):
            self.cells[-1] += data

    def all_of(self, attribute: str) -> list[str]:
        return [value for _, name, value in self.attributes if name == attribute]


def wild() -> Comparison:
    """Names that mean something in HTML, SVG and mathematical text; values that are no
    numbers."""
    comparison = Comparison()
    comparison.add("bsp:a=<b>&'\"", [{WILD: 1.0, "loss": None}] * 3)
    comparison.add("$\\frac$\x07 漢字", [{WILD: float("nan"), "loss": None}] * 3)
    return comparison


@pytest.fixture(scope="module")
def folder_of_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page of three variants was written."""
    folder = tmp_path_factory.mktemp("three")
    three().write(folder, "digits.py: <3 methods", "paceline compare 'a<b>'")
    return folder


@pytest.fixture(scope="module")
def text_of_three(folder_of_three: Path) -> str:
    return (folder_of_three / "index.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def text_of_wild(tmp_path_factory: pytest.TempPathFactory) -> str:
    return wild().write(tmp_path_factory.mktemp("wild")).read_text(encoding="utf-8")


def test_the_page_holds_everything(text_of_three: str) -> None:
    page = Report(text_of_three)
    for word in (
        "digits.py: <3 methods",
        "paceline compare 'a<b>'",
        "simulated, 2 workers",
        "Shortest step: bsp",
        "open ui.perfetto.dev in a browser and load",
    ):
        assert word in page.text
    table = page.cells[:40]
    assert table[:5] == ["consistency", "method", "step", "exposed", "vs. first"]
    assert table[7:14] == ["exact", "bsp", "30 ms", "0 s", "1.00x", "0.1", "0.9"]
    assert table[22] == "bsp:buckets=single"
    # bars and two metrics; each has its figures in words
    assert page.tags["picture"] == page.tags["img"] == 3
    assert '"steps":' not in text_of_three
    assert all("bsp:buckets=wfbp: " in text for text in page.all_of("alt"))
    assert "Time per step; bsp: 30 ms; bsp:buckets=wfbp: 40 ms" in page.all_of("alt")[0]


def test_a_chart_has_a_picture_for_each_theme(text_of_three: str) -> None:
    page = Report(text_of_three)
    light = [v for tag, name, v in page.attributes if (tag, name) == ("img", "src")]
    dark = page.all_of("srcset")
    prefix = "data:image/svg+xml;base64,"
    for ink, urls in zip(INK, (light, dark), strict=True):
        for url in urls:
            svg = base64.b64decode(url.removeprefix(prefix)).decode()
            ElementTree.fromstring(svg)
            assert ink in svg
    assert page.all_of("media") == ["screen and (prefers-color-scheme: dark)"] * 3
    assert len(text_of_three) < 400_000


def test_links_lead_to_files_that_are_there(
    folder_of_three: Path, text_of_three: str
) -> None:
    page = Report(text_of_three)
    links = [
        value for tag, name, value in page.attributes if (tag, name) == ("a", "href")
    ]
    files = [link for link in links if not link.startswith("#")]
    assert len(files) == 3 + 1
    assert "2-bsp-buckets-wfbp.trace.json" in files
    assert {link[1:] for link in {*links} - {*files}} <= set(page.all_of("id"))
    for link in files:
        assert (folder_of_three / unquote(link)).is_file(), link


@pytest.mark.parametrize("which", ["text_of_three", "text_of_wild"])
def test_nothing_is_fetched_and_no_other_script_runs(
    which: str, request: pytest.FixtureRequest
) -> None:
    text: str = request.getfixturevalue(which)
    page = Report(text)
    assert not {"iframe", "object", "embed", "base", "image"} & set(page.tags)
    pictures = [*page.all_of("src"), *page.all_of("srcset")]
    assert all(value.startswith("data:image/svg+xml;") for value in pictures)
    assert page.tags["link"] == 1  # the icon, else a browser asks for one
    for tag, name, value in page.attributes:
        if not name.startswith("xmlns"):
            assert "://" not in value.replace(WILD, ""), (name, value)
        assert not name.startswith("on"), name
        assert (tag, name) != ("link", "href") or value == "data:,"
    styles = re.findall(r"<style>(.*?)</style>", text, flags=re.DOTALL)
    assert len(styles) == 1
    assert "url(" not in styles[0]
    assert "@import" not in styles[0]
    policy = next(value for value in page.all_of("content") if "default-src" in value)
    digest = base64.b64encode(hashlib.sha256(page.scripts[-1].encode()).digest())
    assert f"script-src 'sha256-{digest.decode()}'" in policy
    assert policy.startswith("default-src 'none'")
    kinds = [v for tag, name, v in page.attributes if (tag, name) == ("script", "type")]
    assert kinds == ["application/json"] * (len(page.scripts) - 1)


@pytest.mark.parametrize("name", ["</script><b>", "a'\"b", "<!--<script>", "\u2028 漢"])
def test_data_keep_their_names_and_stay_where_they_are(name: str) -> None:
    step = Step(name=name, what="", seconds=1.0, workers=(), names=(name,))
    timelines = TimelineSection(title="t", steps=(step,))
    text = text_of(PageData(title="t", answer="", sections=[timelines]))
    page = Report(text)
    assert len(page.scripts) == 2
    assert json.loads(page.scripts[0])[0]["names"] == [name]
    assert "<" not in page.scripts[0]


def test_names_are_escaped(text_of_wild: str) -> None:
    page = Report(text_of_wild)
    assert "<b>" not in text_of_wild
    assert page.cells.count("bsp:a=<b>&'\"") == 2 + 1  # also of the chart's table
    assert page.cells.count(WILD) == 2
    assert page.text.count("漢字") >= 1 + 1 + 2 + 1


def test_ids_are_unique(text_of_three: str) -> None:
    ids = Report(text_of_three).all_of("id")
    assert len(ids) == len(set(ids)) > 10


def test_light_and_dark_name_every_colour(text_of_three: str) -> None:
    text = text_of_three
    roots = re.findall(r":root[^{]*\{(.*?)\}", text, flags=re.DOTALL)
    light, dark = map(_variables, roots)
    assert len(light) > 10
    assert light.keys() == dark.keys()
    own = {"--own", "--s"}  # a class's, a cell's
    assert set(re.findall(r"var\((--[a-z0-9-]+)", text)) <= {*light, *own}


def _variables(block: str) -> dict[str, str]:
    return dict(re.findall(r"(--[a-z0-9-]+): (#[0-9a-f]+);", block))


def test_equal_data_make_an_equal_page(text_of_three: str, tmp_path: Path) -> None:
    path = three().write(tmp_path, "digits.py: <3 methods", "paceline compare 'a<b>'")
    assert path.read_text(encoding="utf-8") == text_of_three


def test_figures_are_sorted_by_their_own_values(tmp_path: Path) -> None:
    comparison = Comparison()
    for spec, compute in (("bsp", 0.03), ("asp", 0.01)):
        comparison.add(spec, [{"loss": 0.5}] * 3, compute=compute)
    page = Report(comparison.write(tmp_path).read_text(encoding="utf-8"))
    values = [
        float(value)
        for tag, name, value in page.attributes
        if (tag, name) == ("td", "data-v")
    ]
    # Step, exposed, vs. first, loss.
    assert values[:8] == [0.04, 0.01, 1, 0.5, 0.02, 0.01, 2, 0.5]
    # Buckets, step, compute, exposed, sent, loss.
    assert [3, 0.04, 0.03, 0.01, 1e6, 0.5] in [values[i : i + 6] for i in range(20)]


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "index.html").mkdir()
    comparison = Comparison()
    comparison.add("bsp", [{}])
    with pytest.raises(UsageError, match=r"cannot write the page .*index\.html"):
        comparison.write(tmp_path)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match=r"the page to .*file"):
        write_page(tmp_path / "file" / "x.html", comparison.report())


def compare(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "paceline", "compare", LAYERS, "--method", "bsp:buckets=wfbp"]
    command += ["--workers", 2, "--steps", 3, "--forward", 0.1, *words]
    command += ["--", "--layers", 2, "--megabytes", 0.1, "--forward", 0.1]
    return forked.run(command, folder=folder)


@pytest.mark.slow
def test_compare_writes_the_page_and_names_it(tmp_path: Path) -> None:
    done = compare(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Page: paceline-runs/index.html"
    page = Report((tmp_path / "paceline-runs" / "index.html").read_text())
    assert "2 workers, 1 Gbit/s, 50 us latency" in page.text
    assert "--method bsp:buckets=wfbp" in page.text
    assert f"{LAYERS}: 1 method" in page.text
    assert page.tags["picture"] == 1 + 1


@pytest.mark.slow
def test_compare_without_a_page(tmp_path: Path) -> None:
    done = compare(tmp_path, "--no-html", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["variants"]
    suffixes = {path.suffix for path in (tmp_path / "paceline-runs").iterdir()}
    assert suffixes == {".json", ".jsonl", ""}  # and the list of what was made


def test_a_variant_that_failed_is_in_the_table_and_in_no_chart(tmp_path: Path) -> None:
    comparison = Comparison()
    failed = FailedRun(failed="it <broke>", exit_status=1)
    comparison.end("asp", failed, consistency="asynchronous")
    comparison.add("bsp", [{"loss": 1.0}] * 3)
    page = Report(comparison.write(tmp_path).read_text(encoding="utf-8"))
    assert page.cells[7:9] == ["asp", "failed"]
    assert "asp: failed: it <broke>" in page.text
    assert not any("asp" in text for text in page.all_of("alt"))
    assert page.text.count("asp") == 2  # the table, the note
    # Colours of rows, in the table as in the charts, are their consistency's.
    rows = [v for tag, name, v in page.attributes if (tag, name) == ("tr", "class")]
    assert rows == ["c4", "c0", "c0"]
