"""The page on all collectives, made from the registry and from their docstrings."""

from __future__ import annotations

import inspect

from paceline.collectives import COLLECTIVES

_HEAD = """# Collectives

Made by `paceline collectives` from the registry; do not edit. How the mean of a buffer over n workers is formed:
`distribute(collective="hierarchical")`, or `--method bsp:collective=hierarchical`.

| collective | formed by | sends | good for |
|---|---|---|---|
"""


def collectives_page() -> str:
    """Markdown: one row per registered collective."""
    rows = []
    for name, cls in sorted(COLLECTIVES.items()):
        page = " ".join((inspect.getdoc(cls) or "").split())
        words = [_sentence(page, label) for label in ("Formed by", "Sends", "Good for")]
        rows.append("| " + " | ".join([f"`{name}`", *words]) + " |")
    return _HEAD + "\n".join(rows) + "\n"


def _sentence(page: str, label: str) -> str:
    """The sentence ``Label: ... .`` of a collective's docstring."""
    start = page.index(f"{label}: ") + len(label) + 2
    end = page.find(". ", start)
    return page[start:end].removesuffix(".") if end >= 0 else page[start:].rstrip(".")
