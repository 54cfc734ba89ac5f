"""Puts the tables that `paceline list` prints into docs/reference/methods.md, compressors.md and collectives.md.

python website/docs_tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

from paceline.cli.list import TABLES

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"


def fresh(kind: str, page: str) -> str:
    """The page's text with the table of today between its two markers."""
    place = rf"(<!-- paceline list {kind} -->\n).*?(<!-- end -->\n)"
    text, count = re.subn(
        place,
        lambda marks: f"{marks[1]}\n{TABLES[kind]()}\n{marks[2]}",
        page,
        flags=re.DOTALL,
    )
    assert count == 1, (
        f"docs/reference/{kind}.md: expected one place for the table, found {count}"
    )
    return text


def main() -> None:
    for kind in TABLES:
        page = REFERENCE / f"{kind}.md"
        page.write_text(fresh(kind, page.read_text()))


if __name__ == "__main__":
    main()
