"""``paceline list``: the methods, compressors or collectives that there are, as a table.

`website/docs_tables.py` puts the tables into docs/reference/methods.md, compressors.md and collectives.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.interfaces import Method


def list_(
    kind: Annotated[
        Literal["methods", "compressors", "collectives"],
        typer.Argument(metavar="KIND", help="What to list."),
    ],
) -> None:
    """List methods, compressors or collectives.

    docs/reference/methods.md, docs/reference/compressors.md and docs/reference/collectives.md explain its columns.
    """
    print(TABLES[kind](), end="")


def methods_table() -> str:
    """Markdown: one row per registered method, and one per other form of it.

    Raises:
        UsageError: A method's class has no `summary`.
    """
    from paceline.methods import METHODS

    columns = "consistency|keys|updates on|visible gradient|clips|waits for|sends"
    return _table(
        f"method|{columns}|guarantees".split("|"),
        (row for _, cls in sorted(METHODS.items()) for row in _method_rows(cls)),
    )


def compressors_table() -> str:
    """Markdown: one row per registered compressor."""
    from paceline.compression import COMPRESSORS, shared_keys

    rows = []
    for name, cls in sorted(COMPRESSORS.items()):
        shared = [f"`{key}={text}`" for key, text in shared_keys(cls).items()]
        shape: Any = cls
        one = shape()
        cells = [
            f"`{name}`",
            one.consistency,
            ", ".join([*_own_keys(cls), *shared]) or "-",
            "yes" if one.linear else "no",
            "yes" if one.unbiased else "no",
            str(one.rounds),
            one.state,
            *one.summary,
        ]
        rows.append(cells)
    columns = "compression|consistency|keys|linear|unbiased|rounds|state|sends|loses"
    return _table(columns.split("|"), rows)


def collectives_table() -> str:
    """Markdown: one row per registered collective."""
    from paceline.collectives.registry import COLLECTIVES

    return _table(
        ["collective", "formed by", "sends", "good for"],
        ([f"`{name}`", *cls.summary] for name, cls in sorted(COLLECTIVES.items())),
    )


TABLES = {
    "methods": methods_table,
    "compressors": compressors_table,
    "collectives": collectives_table,
}


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join(lines) + "\n"


def _method_rows(cls: type[Method]) -> Iterable[Sequence[str]]:
    """A method's row; where its properties depend on a key, one row for each value of that key."""
    summary = getattr(cls, "summary", None)
    if summary is None:
        raise UsageError(
            f"method {cls.name!r} has no `summary`, which stands in the table of methods: expected "
            "a `paceline.interfaces.MethodSummary` as an attribute of its class"
        )
    keys = ", ".join([*_own_keys(cls), *_default_compression(cls)]) or "-"
    for form in ({}, *getattr(cls, "forms", ())):
        method: Method = cls(**form)
        values = ",".join(f"{key}={value}" for key, value in form.items())
        yield [
            f"`{cls.name}:{values}`" if form else f"`{cls.name}`",
            getattr(method, "consistency", "asynchronous"),
            "as above" if form else keys,
            method.updates_on,
            method.visible_gradient,
            method.clips,
            *summary,
        ]


def _own_keys(cls: Any) -> list[str]:
    fields = dataclasses.fields(cls)
    return [f"`{field.name}={str(field.default).lower()}`" for field in fields]


def _default_compression(cls: type[Method]) -> list[str]:
    """Keys of the compressor that a method uses unless another one is named."""
    from paceline.spec import parse

    text: str | None = getattr(cls, "default_compression", None)
    if text is None:
        return []
    spec = parse(text)
    own = [f"`compression.{key}={value}`" for key, value in spec.values.items()]
    return [f"`compression={spec.name}`", *own]
