"""How all pictures look, and the files that they are left in.

From the same data come the same bytes. `for_page` makes a picture's colours the page's own:
they follow its light and dark schemes.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import matplotlib.style
from matplotlib.figure import Figure

from paceline.errors import UsageError
from paceline.tools.report.colours import COLOURS, GRID, GROUND, INK
from paceline.tools.report.run_files import claim

_STYLE: dict[str, object] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": GROUND,
    "axes.facecolor": "none",
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: equal everywhere
    "font.size": 9.0,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 1.0,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",  # text stays text: to be searched, copied and read aloud
    "text.color": INK,
    "text.parse_math": False,  # names may hold dollar signs
    "xtick.color": INK,
    "ytick.color": INK,
}


class Picture(NamedTuple):
    """A drawn picture: its files' *name*, a *title* and a *caption*, and its SVG text."""

    name: str
    title: str
    caption: str
    svg: str


@contextmanager
def house_style() -> Iterator[None]:
    """matplotlib's defaults and ours, whatever the user's own settings are."""
    # Letters that the font lacks are left to the browser; matplotlib warns of each.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        with matplotlib.style.context(["default", _STYLE]):
            yield


def write(folder: Path, name: str, title: str, caption: str, figure: Figure) -> Picture:
    """Leave *figure* in *folder*, twice."""
    svg, png = io.StringIO(), io.BytesIO()
    # The salt makes ids that are the same in every run and differ between pictures.
    with mpl.rc_context({"svg.hashsalt": name, "svg.id": name}):
        # No date, and no creator: equal data make equal files.
        none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(svg, format="svg", metadata={"Title": title, **none})
    figure.savefig(png, format="png", dpi=200, metadata={"Software": None})
    text = _simplified(svg.getvalue())
    claim(str(folder), f"{name}.svg", f"{name}.png")
    try:
        (folder / f"{name}.svg").write_text(text, encoding="utf-8")
        (folder / f"{name}.png").write_bytes(png.getvalue())
    except OSError as error:
        raise UsageError(f"cannot write plots to {folder}: {error}") from error
    return Picture(name, title, caption, text)


def _simplified(svg: str) -> str:
    """Without the document type and the metadata, which name addresses."""
    svg = re.sub(r"<!DOCTYPE[^>]*>\n?", "", svg)
    return re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)


def for_page(picture: Picture) -> str:
    """A picture's SVG to stand in a page: colours are the page's variables ``--ink``,
    ``--grid`` and ``--method-0`` to 6, ids are the picture's own, the ground is open."""
    svg = picture.svg[picture.svg.index("<svg") :]
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>{picture.name}-", svg)
    svg = re.sub(r'(fill|stroke)="(#[0-9a-f]{6})"', r'style="\1: \2"', svg)
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)  # as wide as there is room
    svg = f'{head} role="img">{rest}'
    names = {INK: "var(--ink)", GRID: "var(--grid)", GROUND: "none"}
    names |= {light: f"var(--method-{i})" for i, (light, _) in enumerate(COLOURS)}
    return re.sub(
        r"\b(fill|stroke): (#[0-9a-f]{6})",
        lambda found: f"{found[1]}: {names.get(found[2], found[2])}",
        svg,
    )
