"""The colours of all pictures and pages."""

from __future__ import annotations

COLOURS = (
    ("#0072b2", "#56b4f5"),
    ("#d55e00", "#ff8c42"),
    ("#009e73", "#2fd6a3"),
    ("#cc79a7", "#f09ccb"),
    ("#e69f00", "#ffc53d"),
    ("#56b4e9", "#b3e0ff"),
    ("#6b7078", "#b4bac2"),
)
"""On light and on dark ground: Okabe and Ito's colours, which people who see fewer colours
can tell apart, without yellow (too pale on white) and with grey for black."""

INK, GRID, GROUND = "#24292f", "#d8dee4", "#ffffff"
"""Text and axes, grid lines, and what is below them."""
