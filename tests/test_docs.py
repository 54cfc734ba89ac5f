"""Pages that are made from the code, and README's commands, are up to date."""

import re
from pathlib import Path

from paceline.collectives.table import collectives_page
from paceline.compression.table import compression_page
from paceline.methods.table import methods_page

ROOT = Path(__file__).parent.parent


def test_methods_page_is_the_registry():
    page = (ROOT / "docs" / "methods.md").read_text()
    assert page == methods_page(), "run: paceline methods > docs/methods.md"


def test_compressors_page_is_the_registry():
    page = (ROOT / "docs" / "compressors.md").read_text()
    assert page == compression_page(), "run: paceline compression > docs/compressors.md"


def test_the_page_on_compression_is_another_one():
    page = (ROOT / "docs" / "compression.md").read_text()
    assert page != compression_page(), "this one is written by hand"
    assert "(compressors.md)" in page


def test_collectives_page_is_the_registry():
    page = (ROOT / "docs" / "collectives.md").read_text()
    assert page == collectives_page(), "run: paceline collectives > docs/collectives.md"


def test_files_that_pages_name_exist():
    pages = ("design.md", "use.md", "measured.md", "plan.md")
    for page in (ROOT / "README.md", *(ROOT / "docs" / name for name in pages)):
        for path in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / path).exists(), f"{page.name} names {path}"


PLACES = ("", "src/paceline", "benchmarks", "tests", "examples")


def test_modules_that_pages_name_exist():
    missing = [
        f"{page.name} names {path}"
        for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        for path in re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", page.read_text())
        if not any((ROOT / place / path).exists() for place in PLACES)
    ]
    assert not missing


def test_numbers_in_readme_have_a_command():
    readme = (ROOT / "README.md").read_text()
    table = (ROOT / "docs" / "measured.md").read_text()
    for path in re.findall(r"python (benchmarks/\S+\.py)", readme + table):
        assert (ROOT / path).exists()
