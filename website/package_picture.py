"""Draws which package imports which, from the source: docs/images/packages.svg.

    python website/package_picture.py

A row is a package, and so is a column, in the order of the layers in pyproject.toml. A mark
says that the row's package imports the column's: so what points down stands right of the
diagonal, and an exception of the contract stands left of it.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "paceline"
PICTURE = ROOT / "docs" / "images" / "packages.svg"
CELL, LEFT, TOP, RIGHT, BOTTOM = 34, 150, 140, 60, 60
STYLE = """
  .paper { fill: #ffffff } text { font: 14px system-ui, sans-serif; fill: #1f2328 }
  .layer { fill: #f3f5f7 } .own { fill: #d3d9df } .line { stroke: #d3d9df }
  .down { fill: #00796b } .up { fill: #c62828 }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #1c1f26 } text { fill: #e6e8eb }
    .layer { fill: #252a33 } .own { fill: #474e5a } .line { stroke: #474e5a }
    .down { fill: #4db6ac } .up { fill: #ef7a76 }
  }
"""


def layers() -> list[list[str]]:
    """The packages of each layer, top first; modules are left out."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = options["tool"]["importlinter"]["contracts"]
    rows = [re.findall(r"paceline\.(\w+)", layer) for layer in contract["layers"]]
    rows = [[name for name in row if (SOURCE / name).is_dir()] for row in rows]
    return [row for row in rows if row]


def imported_packages(package: str) -> set[str]:
    """The packages that *package* imports: at the top of files, in functions, for types."""
    found = set()
    for path in (SOURCE / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module == "paceline":
                names = [f"paceline.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            words = [name.split(".") for name in names]
            found |= {w[1] for w in words if w[0] == "paceline" and len(w) > 1}
    return found - {package}


def picture() -> str:
    """The SVG: equal sources give equal text."""
    rows = layers()
    names = [name for row in rows for name in row]
    layer_of = {name: number for number, row in enumerate(rows) for name in row}
    side = CELL * len(names)
    width, height = LEFT + side + RIGHT, TOP + side + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">',
        "<title>Which package of paceline imports which</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{width}" height="{height}" rx="8"/>',
    ]
    top = TOP
    for number, row in enumerate(rows):
        if number % 2 == 0:
            parts.append(
                f'<rect class="layer" x="10" y="{top}" '
                f'width="{LEFT + side - 10}" height="{CELL * len(row)}"/>'
            )
        top += CELL * len(row)
    for index, name in enumerate(names):
        at = index * CELL
        middle = at + CELL / 2
        parts += [
            f'<text x="{LEFT - 10}" y="{TOP + middle + 5}" text-anchor="end">{name}</text>',
            f'<text transform="translate({LEFT + middle + 5} {TOP - 8}) rotate(-60)">'
            f"{name}</text>",
            f'<line class="line" x1="{LEFT + at}" x2="{LEFT + at}" '
            f'y1="{TOP}" y2="{TOP + side}"/>',
            f'<rect class="own" x="{LEFT + at}" y="{TOP + at}" '
            f'width="{CELL}" height="{CELL}"/>',
        ]
        imported = imported_packages(name)
        for column, other in enumerate(names):
            if other in imported:
                down = layer_of[other] >= layer_of[name]
                kind = "down" if down else "up"
                parts.append(_mark(kind, LEFT + column * CELL, TOP + at))
    bottom = TOP + side + 10
    for x, kind, text in (
        (10, "down", "the row's package imports the column's"),
        (LEFT + 190, "up", "an upward import, which is to go"),
    ):
        parts += [
            _mark(kind, x, bottom),
            f'<text x="{x + CELL}" y="{bottom + CELL / 2 + 5}">{text}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _mark(kind: str, x: float, y: float) -> str:
    """A square, or for what points upward a diamond: told apart without colours, too."""
    turn = (
        f' transform="rotate(45 {x + CELL / 2} {y + CELL / 2})"' if kind == "up" else ""
    )
    return (
        f'<rect class="{kind}" x="{x + 9}" y="{y + 9}" width="{CELL - 18}" '
        f'height="{CELL - 18}" rx="3"{turn}/>'
    )


if __name__ == "__main__":
    PICTURE.write_text(picture())
