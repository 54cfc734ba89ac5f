"""``paceline methods``: what each method waits for, sends and guarantees."""

from __future__ import annotations


def methods() -> None:
    """Print the page on all methods (docs/methods.md is made by this)."""
    from paceline.methods.table import methods_page

    print(methods_page(), end="")
