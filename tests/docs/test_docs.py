"""Pages that are made from the code, and README's commands, are up to date."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel

from paceline.cli.registry_entries import ENTRIES
from paceline.run_options import RunOptions

TEXTS = ("method", "records", "report_to", "cluster")

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("kind", ENTRIES)
def test_tables_of_the_registries_are_up_to_date(kind, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "website")
    import docs_tables

    page = (ROOT / "docs" / "reference" / f"{kind}.md").read_text()
    assert page == docs_tables.fresh(kind, page), "run: python website/docs_tables.py"


def test_the_page_on_compression_names_the_table():
    assert (
        "reference/compressors.md)"
        in (ROOT / "docs" / "explanation" / "papers" / "compression.md").read_text()
    )


def test_files_that_pages_name_exist():
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        for path in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / path).exists(), f"{page.name} names {path}"
        for path in re.findall(r"\b(?:tests|benchmarks|examples)/[\w/]+\.py", text):
            assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_the_map_has_every_package_and_stays_short():
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    package = ROOT / "src" / "paceline"
    packages = {one.parent.name for one in package.glob("*/__init__.py")}
    modules = {one.stem for one in package.glob("*.py")} - {"__init__", "__main__"}
    assert set(re.findall(r"^\| `(\w+)` \|.*\]\(", page, re.MULTILINE)) == packages
    assert modules <= set(re.findall(r"`(\w+)`", page))
    for path in re.findall(r"`((?:tests|cluster|methods|cli)/[a-z_/]*)/`", page):
        assert (ROOT / path).is_dir() or (package / path).is_dir(), path
    assert page.count("\n") <= 400


def test_decisions_are_short_records_listed_by_area():
    page = (ROOT / "docs" / "explanation" / "decisions.md").read_text()
    areas = re.findall(r"^## (.+)$", page, re.MULTILINE)
    listed = re.findall(r"^\| \[(.+?)\]\(#", page, re.MULTILINE)
    assert listed == [area for area in areas if area != "Figures"]
    _, *records = re.split(
        r"^### ", page.partition("\n## Figures")[0], flags=re.MULTILINE
    )
    for record in records:
        title, _, text = record.partition("\n")
        text = re.split(r"^(?:## |\*\*Also)", text, flags=re.MULTILINE)[0]
        parts = re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE)
        assert parts == ["Context", "Decision", "Consequence"], title
        assert 60 <= len(text.split()) <= 150, title


def test_the_page_on_variables_has_all_of_them_and_no_other():
    ours = r"\bPACELINE_[A-Z_]*[A-Z]\b"
    sources = (ROOT / "src").rglob("*.py")
    known = {name for file in sources for name in re.findall(ours, file.read_text())}
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(known)


def test_each_variable_of_an_option_is_named_after_it():
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    pairs = re.findall(r"^\| `PACELINE_(\w+)` \| `--([a-z-]+)` \|", page, re.MULTILINE)
    assert [name.lower().replace("_", "-") for name, _ in pairs] == [
        o for _, o in pairs
    ]
    names = {f"PACELINE_{name}" for name, _ in pairs}
    options = RunOptions(steps=1, seed=1, json=True, **dict.fromkeys(TEXTS, "x"))
    assert names <= set(options.to_environment())


def test_every_argument_of_ddp_has_a_counterpart():
    page = (ROOT / "docs" / "reference" / "ddp-compatibility.md").read_text()
    section = page.split("## Arguments of DDP")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(
        inspect.signature(DistributedDataParallel).parameters
    )


# What a reader writes.
YOURS = ("src/paceline/methods/outer_momentum.py", "ternary.py", "line.py", "check.py")

PLACES = ("src", "benchmarks", "tests", "examples", "website")


def test_modules_that_pages_name_exist():
    modules = [f"/{file}" for place in PLACES for file in (ROOT / place).rglob("*.py")]
    missing = [
        f"{page.name} names {path}"
        for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
        for path in re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", page.read_text())
        if path not in YOURS and not any(one.endswith(f"/{path}") for one in modules)
    ]
    assert not missing


def test_numbers_in_readme_have_a_command():
    readme = (ROOT / "README.md").read_text()
    table = (ROOT / "docs" / "reference" / "measurements.md").read_text()
    for path in re.findall(r"python (benchmarks/\S+\.py)", readme + table):
        assert (ROOT / path).exists()
    for name in re.findall(r"python -m (benchmarks(?:\.\w+)+)", readme + table):
        assert importlib.util.find_spec(name) is not None, name
