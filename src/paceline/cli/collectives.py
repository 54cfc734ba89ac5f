"""``paceline collectives``: how each collective forms an average, and what it sends."""

from __future__ import annotations


def collectives() -> None:
    """Print the page on all collectives (docs/collectives.md is made by this)."""
    from paceline.collectives.table import collectives_page

    print(collectives_page(), end="")
