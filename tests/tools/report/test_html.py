"""The page of a comparison: all is named, escaped, linked, and nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from paceline.errors import UsageError
from paceline.runtimes.results import FailedRun
from paceline.tools.compare.report import write_report
from paceline.tools.compare.runner import Variant
from paceline.tools.report.html import text_of
from paceline.tools.report.model import Report as PageData
from paceline.tools.report.model import TimelineSection
from paceline.tools.report.timeline import Step
from tests.support.hanging import SECONDS
from tests.tools.report.cases import Comparison, three, wild

ROOT = Path(__file__).parent.parent.parent.parent
LAYERS = ROOT / "examples" / "layers.py"
VOID = {"meta", "link", "br", "wbr", "img", "input", "hr"}


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


def write(comparison: Comparison, folder: Path) -> str:
    comparison.leave(folder)
    path = write_report(
        str(folder),
        comparison.variants,
        comparison.results,
        title="digits.py: <3 variants",
        command="paceline compare digits.py --method 'a<b>'",
        notes=[("network", "4 workers & more"), ("compute", "paced")],
    )
    assert path == folder / "index.html"
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder_of_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the report of three variants was written."""
    folder = tmp_path_factory.mktemp("three")
    write(three(), folder)
    return folder


@pytest.fixture(scope="module")
def text_of_three(folder_of_three: Path) -> str:
    return (folder_of_three / "index.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def text_of_wild(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(wild(), tmp_path_factory.mktemp("wild"))


def test_the_page_holds_everything(text_of_three: str) -> None:
    page = Report(text_of_three)
    for word in (
        "digits.py: <3 variants",
        "paceline compare digits.py --method 'a<b>'",
        "4 workers & more",
        "paced",
        "simulated, 2 workers",
        "open ui.perfetto.dev in a browser and load",
    ):
        assert word in page.text
    headings = "variant buckets settled step compute exposed sent loss accuracy ratio"
    assert page.cells[:10] == headings.split()
    first = "bsp|3|-|30 ms|30 ms|0 s|1 MB|0.1|0.9|1.000"
    assert page.cells[10:20] == first.split("|")
    assert page.cells[30] == "bsp:buckets=single"
    assert page.cells[-1] == "1.667"
    assert (page.tags["svg"], page.tags["figure"]) == (3, 3 + 2)
    # the answer, the table, plots, what two lists offer, traces
    assert page.text.count("bsp:buckets=wfbp") == 1 + 1 + 3 + 2 + 1
    assert "bsp has the shortest step, 30 ms" in page.text


def test_links_lead_to_files_that_are_there(
    folder_of_three: Path, text_of_three: str
) -> None:
    page = Report(text_of_three)
    links = [
        value for tag, name, value in page.attributes if (tag, name) == ("a", "href")
    ]
    files = [link for link in links if not link.startswith("#")]
    assert len(files) == 3 * 2 + 3 + 1
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
    assert not {"img", "iframe", "object", "embed", "base", "image"} & set(page.tags)
    assert not page.all_of("src")
    assert page.tags["link"] == 1  # the icon, else a browser asks for one
    for tag, name, value in page.attributes:
        if not name.startswith("xmlns"):
            assert "//" not in value, (name, value)
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
    assert page.cells.count("bsp:a=<b>&'\"") == 1
    assert page.cells.count('<script src="http://bad">&$x_1$') == 1
    assert page.text.count("漢字") >= 1 + 3 + 2 + 1


def test_ids_are_unique(text_of_three: str) -> None:
    ids = Report(text_of_three).all_of("id")
    assert len(ids) == len(set(ids)) > 10


def test_light_and_dark_name_every_colour(text_of_three: str) -> None:
    text = text_of_three
    roots = re.findall(r":root[^{]*\{(.*?)\}", text, flags=re.DOTALL)
    light, by_system, forced_light, by_hand = map(_variables, roots)
    assert len(light) > 10
    assert light.keys() == by_system.keys() == by_hand.keys()
    assert by_system == by_hand
    assert not forced_light
    own = {"--own", "--s"}  # a class's, a cell's
    assert set(re.findall(r"var\((--[a-z0-9-]+)", text)) <= {*light, *own}


def _variables(block: str) -> dict[str, str]:
    return dict(re.findall(r"(--[a-z0-9-]+): (#[0-9a-f]+);", block))


def test_equal_data_make_an_equal_page(text_of_three: str, tmp_path: Path) -> None:
    assert write(three(), tmp_path) == text_of_three


def test_classes_stand_beside_their_variants(tmp_path: Path) -> None:
    comparison = three()
    comparison.leave(tmp_path)
    path = write_report(
        str(tmp_path),
        comparison.variants,
        comparison.results,
        title="three",
        command="",
        notes=[],
        consistencies=["exact", "local", ""],
    )
    page = Report(path.read_text(encoding="utf-8"))
    assert page.cells[:3] == ["variant", "consistency", "buckets"]
    assert page.cells[11:13] == ["bsp", "exact"]
    assert page.cells[33:35] == ["bsp:buckets=single", "-"]
    assert "local: bsp:buckets=wfbp, 40 ms" in page.text


def test_one_variant_has_no_ratio_and_no_metrics_no_plots(tmp_path: Path) -> None:
    comparison = Comparison()
    comparison.add("bsp", [{}] * 3)
    page = Report(write(comparison, tmp_path))
    assert page.cells[:7] == [
        "variant",
        "buckets",
        "settled",
        "step",
        "compute",
        "exposed",
        "sent",
    ]
    assert len(page.cells) == 14
    assert page.tags["svg"] == 1
    assert "simulated, 1 worker" in page.text
    assert "workers logged" not in page.text


def test_figures_are_sorted_by_their_own_values(tmp_path: Path) -> None:
    comparison = Comparison()
    for spec, compute in (("bsp", 0.03), ("asp", 0.01)):
        comparison.add(spec, [{"loss": 0.5}] * 3, compute=compute)
    page = Report(write(comparison, tmp_path))
    values = [
        float(value)
        for tag, name, value in page.attributes
        if (tag, name) == ("td", "data-v")
    ]
    # Buckets, step, compute, exposed, sent, loss, and the step that ratios are of.
    assert values == [
        *(3, 0.04, 0.03, 0.01, 1e6, 0.5, 0.04),
        *(3, 0.02, 0.01, 0.01, 1e6, 0.5, 0.02),
    ]


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "index.html").mkdir()
    comparison = Comparison()
    comparison.add("bsp", [{}])
    with pytest.raises(UsageError, match=r"cannot write the page .*index\.html"):
        write(comparison, tmp_path)


def compare(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", "compare", str(LAYERS)]
    command += ["--workers", "2", "--steps", "3", "--method", "bsp:buckets=wfbp"]
    command += ["--forward", "0.1", "--backward", "0.1", *words]
    command += ["--", "--layers", "2", "--megabytes", "0.1", "--forward", "0.1"]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
        cwd=folder,
    )


@pytest.mark.slow
def test_compare_writes_the_page_and_names_it(tmp_path: Path) -> None:
    done = compare(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "page: paceline-runs/index.html"
    page = Report((tmp_path / "paceline-runs" / "index.html").read_text())
    assert "2 workers, 1 Gbit/s, 50 us latency" in page.text
    assert "--method bsp:buckets=wfbp" in page.text
    assert f"{LAYERS}: 1 variant" in page.text
    assert (tmp_path / "paceline-runs" / "metric-loss.svg").is_file()


@pytest.mark.slow
def test_compare_without_plots(tmp_path: Path) -> None:
    done = compare(tmp_path, "--no-plots", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["variants"]
    suffixes = {path.suffix for path in (tmp_path / "paceline-runs").iterdir()}
    assert suffixes == {".json", ".jsonl", ""}  # and the list of what was made


def test_a_variant_that_failed_is_in_the_table_and_in_no_picture(
    tmp_path: Path,
) -> None:
    comparison = three()
    comparison.leave(tmp_path)
    failed = FailedRun(failed="it <broke>", exit_status=1)
    results = [("asp", failed), *comparison.results]
    path = write_report(
        str(tmp_path),
        [Variant(i, spec) for i, (spec, _) in enumerate(results)],
        results,
        title="four",
        command="paceline compare",
        notes=[],
    )
    text = path.read_text(encoding="utf-8")
    page = Report(text)
    assert "asp [1]" in page.cells
    assert "failed: it <broke>" in page.text
    assert page.text.count("asp") == 1  # in no list of steps, no picture, no trace
    # bsp comes second: its colour is the second one, in the table as in the pictures
    colour = next(d for d in page.all_of("style") if d.startswith("fill: var(--meth"))
    assert colour == "fill: var(--method-1)"
