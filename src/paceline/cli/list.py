"""``paceline list``: the methods, compressors or collectives that there are."""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def list_(
    kind: Annotated[
        Literal["methods", "compressors", "collectives"],
        typer.Argument(metavar="KIND", help="What to list."),
    ],
) -> None:
    """Print the page on all methods, compressors or collectives.

    docs/methods.md, docs/compressors.md and docs/collectives.md are made by this.
    """
    if kind == "methods":
        from paceline.methods.docs_table import methods_page

        print(methods_page(), end="")
    elif kind == "compressors":
        from paceline.compression.docs_table import compression_page

        print(compression_page(), end="")
    else:
        from paceline.collectives.docs_table import collectives_page

        print(collectives_page(), end="")
