"""``paceline list``: the methods, compressors or collectives that there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.errors import UnknownNameError, unknown

if TYPE_CHECKING:
    from paceline.cli.registry_entries import Entry
    from paceline.tools.report.model import Table

Kind = Literal["methods", "compressors", "collectives"]


def list_(
    kind: Annotated[Kind, typer.Argument(metavar="KIND", help="What to list.")],
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            show_default=False,
            help="One of them, with its keys and limits. \\[default: a table of all]",
        ),
    ] = None,
) -> None:
    """List methods, compressors or collectives, or describe one of them.

    paceline list methods
    paceline list methods gssp
    """
    from paceline.cli.registry_entries import ENTRIES
    from paceline.tools.report.terminal import print_lines, print_table

    entries = {entry.name: entry for entry in ENTRIES[kind]()}
    if name is None:
        print_table(overview(kind, list(entries.values())))
        return
    if name not in entries:
        raise UnknownNameError(unknown(kind.removesuffix("s"), name, entries))
    entry = entries[name]
    print_lines(introduction(entry))
    for table in tables(entry):
        print_table(table)
    if entry.summary.limits:
        print_lines(["", *(f"- {plain(limit)}" for limit in entry.summary.limits)])


def overview(kind: Kind, entries: list[Entry]) -> Table:
    """Return a table with a row for each entry."""
    from paceline.tools.report.model import Table

    graded = kind != "collectives"
    return Table(
        title="",
        headings=(
            kind.removesuffix("s"),
            *(("consistency",) if graded else ()),
            "purpose",
        ),
        rows=[
            (
                one.name,
                *((one.consistency,) if graded else ()),
                plain(one.summary.purpose),
            )
            for one in entries
        ],
        caption=f"\nKeys, limits and sources of one: paceline list {kind} NAME",
    )


def introduction(entry: Entry) -> list[str]:
    """Return the sentences on an entry."""
    summary = entry.summary
    lines = [f"{entry.name}: {plain(summary.purpose)}"]
    guarantees = getattr(summary, "guarantees", "")
    if guarantees:
        lines.append(plain(guarantees))
    if entry.use_when:
        lines.append(f"Use it when {plain(entry.use_when)}.")
    if summary.source:
        lines.append(f"Source: {plain(summary.source)}.")
    return lines


def tables(entry: Entry) -> list[Table]:
    """Return the tables of an entry's keys and facts."""
    from paceline.tools.report.model import Table

    found = []
    if entry.keys:
        keys = [
            (key.name, key.default, plain(key.meaning or key.type))
            for key in entry.keys
        ]
        found.append(Table(title="", headings=("key", "default", "meaning"), rows=keys))
    for spec, facts in ((entry.name, entry.facts), *entry.forms.items()):
        rows = [(plain(label), plain(text)) for label, text in facts]
        found.append(Table(title="", headings=(spec, ""), rows=rows))
    return found


def plain(text: str) -> str:
    """Return *text* without the marks of Markdown."""
    return text.replace("`", "")
