"""The page on all methods, made from the registry and from their docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import Any

from paceline.errors import UsageError
from paceline.interfaces import Method
from paceline.methods import METHODS
from paceline.spec import parse

_HEAD = """# Methods

Made by `paceline methods` from the registry; do not edit. *Updates on*: where the optimizer
runs. *Class*: what becomes of a gradient, with the settings of the row; a code or a collective can weaken
it ([plan.md](plan.md#classes)). *Gradient seen*: what `.grad` holds between `backward()` and `step()`. *Clips*: whose norm
`distribute(clip_norm=...)` limits, that of the mean gradient, or of each worker's own before it is sent.

| method | class | keys | updates on | gradient seen | clips | waits for | sends | guarantees |
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
        words = [
            sentence_of(cls, word) for word in ("Waits for", "Sends", "Guarantees")
        ]
        # A method whose properties depend on a key has a row for each of its forms.
        for form in ({}, *getattr(cls, "forms", ())):
            method: Method = cls(**form)
            written = ",".join(f"{key}={value}" for key, value in form.items())
            cells = [
                f"`{name}:{written}`" if form else f"`{name}`",
                getattr(method, "quality", "asynchronous"),
                "as above" if form else keys or "-",
                method.updates_on,
                method.gradient_seen_by_user,
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


def sentence_of(cls: type[Method], label: str) -> str:
    """The sentence ``Label: ... .`` of the docstring of a method's file."""
    page = inspect.getdoc(sys.modules.get(cls.__module__)) or ""
    text = " ".join(page.split())
    _, label_found, rest = text.partition(f"{label}: ")
    sentence, stop, _ = rest.partition(".")
    if not (label_found and stop):
        raise UsageError(
            f"method {cls.name!r}: the docstring of its file ({cls.__module__}) has no "
            f'sentence "{label}: ... ."; it stands in the table of methods'
        )
    return sentence
