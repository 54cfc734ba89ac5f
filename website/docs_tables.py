"""Make the generated parts of docs/reference/methods.md, compressors.md and collectives.md.

python website/docs_tables.py
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.registry_entries import ENTRIES, Entry, Key, settings_keys

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"

EXPLANATION = {
    "priority-dear": ("priority", "dear"),
    "osp": ("osp",),
    "ds-sync": ("ds-sync",),
    "gssp": ("gssp", "grouping-sgd"),
    "rina": ("rina", "switchml", "atp"),
    "local-updates": (
        *("local-sgd", "post-local-sgd", "hierarchical-local-sgd", "slowmo"),
        *("diloco", "streaming-diloco", "sparse-loco", "sel-sync", "daso"),
    ),
}
"""The pages of docs/explanation/papers, and what they explain."""
PAGE_OF = {name: page for page, names in EXPLANATION.items() for name in names}
ON_SERVERS = "[parameter servers](../how-to/run-parameter-servers.md)"


def overview(kind: str) -> str:
    """A table with a row for each entry."""
    entries = ENTRIES[kind]()
    graded = kind != "collectives"
    head = [kind.removesuffix("s"), *(["consistency"] if graded else [])]
    rows = [
        [
            f"[`{one.name}`](#{one.name})",
            *([one.consistency] if graded else []),
            one.summary.purpose,
            one.summary.source or "-",
        ]
        for one in entries
    ]
    return _table([*head, "purpose", "source"], rows)


def sections(kind: str) -> str:
    """A section for each entry, in order of names."""
    known = {one.name: one for one in ENTRIES[kind]()}
    return "\n".join(
        _section(one, known, kind) for _, one in sorted(known.items())
    ).lstrip("\n")


def keys_of_all_methods() -> str:
    """A table of the keys that every method has."""
    return _keys(settings_keys())


def _section(entry: Entry, known: dict[str, Entry], kind: str) -> str:
    summary = entry.summary
    guarantees = getattr(summary, "guarantees", "")
    lines = [
        f"## {entry.name}",
        "",
        " ".join(filter(None, [summary.purpose, guarantees])),
        "",
    ]
    more = (
        [f"[explanation](../explanation/papers/{PAGE_OF[entry.name]}.md)"]
        if entry.name in PAGE_OF
        else []
    )
    if ("`--survive`", "yes") in entry.facts:
        more.append(ON_SERVERS)
    if entry.use_when:
        lines.append(f"- **Use it when** {entry.use_when}.")
    if summary.source:
        lines.append(f"- **Source**: {summary.source}.")
    if more:
        lines.append(f"- **More**: {', '.join(more)}.")
    lines += [f"- {limit}" for limit in summary.limits]
    lines.append("")
    if entry.inherits:
        others = {key.name: key.default for key in known[entry.inherits].keys}
        differ = [key for key in entry.keys if others[key.name] != key.default]
        lines.append(
            f"Keys of [`{entry.inherits}`](#{entry.inherits}), with these defaults:"
        )
        lines += ["", _keys(differ)]
    elif entry.keys:
        lines.append(_keys(entry.keys))
    elif kind != "collectives":
        lines += ["No keys of its own.", ""]
    lines.append(_table(["property", "value"], entry.facts))
    for spec, facts in entry.forms.items():
        lines += [
            f"With `{spec}` these differ:",
            "",
            _table(["property", "value"], facts),
        ]
    return "\n".join(lines)


def _keys(keys: Sequence[Key]) -> str:
    return _table(
        ["key", "type", "default", "meaning"],
        [(f"`{key.name}`", key.type, _value(key.default), key.meaning) for key in keys],
    )


def _value(text: str) -> str:
    return f"`{text}`" if re.fullmatch(r"[\w.-]+", text) else text


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join(lines) + "\n"


def fresh(kind: str, page: str) -> str:
    """The page's text with the parts of today between their markers."""
    parts = {
        f"overview of {kind}": overview(kind),
        f"each of the {kind}": sections(kind),
    }
    if kind == "methods":
        parts["keys of every method"] = keys_of_all_methods()
    for name, text in parts.items():
        place = rf"(<!-- generated: {name} -->\n).*?(<!-- end -->\n)"
        page, count = re.subn(
            place,
            lambda marks, text=text: f"{marks[1]}\n{text}\n{marks[2]}",  # type: ignore[misc]
            page,
            flags=re.DOTALL,
        )
        assert count == 1, (
            f"docs/reference/{kind}.md: expected one place for {name!r}, found {count}"
        )
    return page


def main() -> None:
    for kind in ENTRIES:
        page = REFERENCE / f"{kind}.md"
        page.write_text(fresh(kind, page.read_text()))


if __name__ == "__main__":
    main()
