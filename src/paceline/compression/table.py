"""The page on all compressors, made from the registry and from their docstrings."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from paceline.compression import COMPRESSORS, shared_keys
from paceline.compression.residuals import Residuals

_HEAD = """# Compressors

Made by `paceline compression` from the registry; do not edit. What each costs and gains is in
[compression.md](compression.md). What is sent of a mean of gradients:
`distribute(compression="int8:residuals=true")`, or `--method bsp:compression=int8,compression.residuals=true`.
*Class*: what a mean of gradients so coded promises ([plan.md](plan.md#classes)).
A gradient is divided by the number of workers (or weighted by its samples) before it is coded.

*Linear*: sums of codes are codes of sums, so codes are all-reduced; others are gathered, and every worker adds up
all of them. *Unbiased*: the expected result is the mean itself. *State*: what is kept between steps; each worker's
*own* is saved in each worker's part of a checkpoint.

| compression | class | keys | linear | unbiased | rounds | state | sends | loses |
|---|---|---|---|---|---|---|---|---|
"""

_RESIDUALS = """
## Residuals

`residuals=true` goes with every row that has that key: what a code leaves out of a gradient is added to the next one. It
keeps as many elements again as the model has parameters, on every worker. `dense_steps=100` sends gradients as they are in the
first 100 steps.

"""


def compression_page() -> str:
    """Markdown: one row per registered compressor."""
    rows = []
    for name, cls in sorted(COMPRESSORS.items()):
        page = " ".join((inspect.getdoc(cls) or "").split())
        shape: Any = cls
        keys = [
            f"`{f.name}={str(f.default).lower()}`" for f in dataclasses.fields(shape)
        ]
        keys += [f"`{key}={text}`" for key, text in shared_keys(cls).items()]
        one = shape()
        cells = [
            f"`{name}`",
            one.quality,
            ", ".join(keys) or "-",
            "yes" if one.linear else "no",
            "yes" if one.unbiased else "no",
            str(one.rounds),
            one.state,
            _sentence(page, "Sends"),
            _sentence(page, "Loses"),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return _HEAD + "\n".join(rows) + "\n" + _RESIDUALS + _theory() + "\n"


def _sentence(text: str, label: str) -> str:
    """The sentence ``Label: ... .`` of a docstring."""
    start = text.index(f"{label}: ") + len(label) + 2
    end = text.find(". ", start)
    return text[start : end if end >= 0 else None].removesuffix(".")


def _theory() -> str:
    """What the wrapper's own page says."""
    return inspect.getdoc(inspect.getmodule(Residuals)) or ""
