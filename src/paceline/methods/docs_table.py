"""The page on all methods, made from the registry."""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.errors import UsageError
from paceline.interfaces import Method, MethodSummary
from paceline.methods import METHODS
from paceline.spec import parse

_HEAD = """# Methods

Made by `paceline list methods` from the registry; do not edit. *Updates on*: where the optimizer
runs. *Consistency*: what becomes of a gradient, with the settings of the row; a code or a collective can weaken
it ([plan.md](plan.md#classes)). *Visible gradient*: what `.grad` holds between `backward()` and `step()`. *Clips*: whose norm
`distribute(clip_norm=...)` limits, that of the mean gradient, or of each worker's own before it is sent.

| method | consistency | keys | updates on | visible gradient | clips | waits for | sends | guarantees |
|---|---|---|---|---|---|---|---|---|
"""


def methods_page() -> str:
    """Markdown: one row per registered method."""
    rows = []
    for name, cls in sorted(METHODS.items()):
        shape: Any = cls
        keys = ", ".join(
            [*map(_key, dataclasses.fields(shape)), *_own_compression(cls)]
        )
        words = summary_of(cls)
        # A method whose properties depend on a key has a row for each of its forms.
        for form in ({}, *getattr(cls, "forms", ())):
            method: Method = cls(**form)
            written = ",".join(f"{key}={value}" for key, value in form.items())
            cells = [
                f"`{name}:{written}`" if form else f"`{name}`",
                getattr(method, "consistency", "asynchronous"),
                "as above" if form else keys or "-",
                method.updates_on,
                method.visible_gradient,
                method.clips,
                *words,
            ]
            rows.append("| " + " | ".join(cells) + " |")
    return _HEAD + "\n".join(rows) + "\n"


def _key(field: dataclasses.Field[Any]) -> str:
    return f"`{field.name}={str(field.default).lower()}`"


def _own_compression(cls: type[Method]) -> list[str]:
    """The settings that a method has by itself."""
    own: str | None = getattr(cls, "default_compression", None)
    if own is None:
        return []
    code = parse(own)
    said = {"compression": code.name}
    said |= {f"compression.{key}": value for key, value in code.values.items()}
    return [f"`{key}={value}`" for key, value in said.items()]


def summary_of(cls: type[Method]) -> MethodSummary:
    """A method's row in words. Raises `UsageError` for one that has none."""
    summary: MethodSummary | None = getattr(cls, "summary", None)
    if summary is None:
        raise UsageError(
            f"method {cls.name!r} has no `summary`, which stands in the table of methods: expected "
            "a `paceline.interfaces.MethodSummary` as an attribute of its class"
        )
    return summary
