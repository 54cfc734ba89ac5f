"""Writes what docs/explanation/parameter-server.md shows of the code: the table of a server's
transitions, and the picture of a worker's states.

    python website/server_page.py
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from paceline.parameter_server.state_machine.members import STATE_CHANGES, STATES
from paceline.parameter_server.state_machine.server import TRANSITIONS

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "explanation" / "parameter-server.md"
PICTURE = DOCS / "images" / "parameter-server-states.svg"
TABLE = re.compile(r"(<!-- transitions -->\n).*?(<!-- end -->\n)", re.DOTALL)
WIDTH, HEIGHT, BOX, ASIDE = 900, 380, (150, 46), 14.0
PLACES = {
    "awaited": (110, 60),
    "training": (450, 60),
    "at a barrier": (790, 190),
    "left": (110, 320),
    "gone": (450, 320),
}
"""The middle of each state's box."""
STYLE = """
  .paper { fill: #ffffff } text { font: 14px system-ui, sans-serif; fill: #1f2328 }
  .box { fill: #e6f2f0; stroke: #00796b } path { fill: none; stroke: #656d76 }
  .tip { fill: #656d76 } .event { font-size: 13px; fill: #4b535c }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #1c1f26 } text { fill: #e6e8eb }
    .box { fill: #203532; stroke: #4db6ac } path { stroke: #9aa4b0 }
    .tip { fill: #9aa4b0 } .event { fill: #b7c0ca }
  }
"""


def table() -> str:
    """The transitions, as Markdown."""
    rows = ["| event | what changes | reply |", "|---|---|---|"]
    for event, transition in TRANSITIONS.items():
        name = event if isinstance(event, str) else f"`{event.__name__}`"
        rows.append(f"| {name} | {transition.changes} | {transition.reply} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """The page, with the table as the code has it."""
    return TABLE.sub(lambda m: m[1] + table() + m[2], PAGE.read_text())


def picture() -> str:
    """The SVG: equal sources give equal text."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img">',
        "<title>The states of a worker, as its server sees them</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" '
        'markerHeight="8" orient="auto"><path class="tip" d="M0 0 L10 5 L0 10 z"/></marker>'
        "</defs>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
    ]
    parts += [_arrow(before, event, after) for before, event, after in STATE_CHANGES]
    for state in STATES:
        x, y = PLACES[state]
        width, height = BOX
        parts += [
            f'<rect class="box" x="{x - width / 2}" y="{y - height / 2}" '
            f'width="{width}" height="{height}" rx="8"/>',
            f'<text x="{x}" y="{y + 5}" text-anchor="middle">{state}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _arrow(before: str, event: str, after: str) -> str:
    """From box to box. Two arrows between the same boxes stand beside each other."""
    (x, y), (to_x, to_y) = PLACES[before], PLACES[after]
    length = math.hypot(to_x - x, to_y - y)
    along = (to_x - x) / length, (to_y - y) / length
    both = (after, before) in {(b, a) for b, _, a in STATE_CHANGES}
    aside = (-along[1] * ASIDE, along[0] * ASIDE) if both else (0.0, 0.0)
    ends = _leaves(before, aside, along), _leaves(after, aside, (-along[0], -along[1]))
    (x, y), (to_x, to_y) = ends
    flat = abs(along[1]) < 0.2
    # Labels of crossing arrows stand near their beginning; others in the middle.
    part = 0.5 if flat or both or before == "at a barrier" else 0.25
    at_x, at_y = x + (to_x - x) * part, y + (to_y - y) * part
    if flat:
        at_y += 18 if both and along[0] > 0 else -8
        anchor = "middle"
    else:
        right = not both or aside[0] > 0
        room = 10 / abs(along[1])  # so that a flat line does not touch its label
        at_x, at_y = at_x + (room if right else -room), at_y + 5
        anchor = "start" if right else "end"
    return (
        f'<path d="M{x:.0f} {y:.0f} L{to_x:.0f} {to_y:.0f}" marker-end="url(#tip)"/>'
        f'<text class="event" x="{at_x:.0f}" y="{at_y:.0f}" text-anchor="{anchor}">'
        f"{event}</text>"
    )


def _leaves(
    state: str, aside: tuple[float, float], along: tuple[float, float]
) -> tuple[float, float]:
    """Where a line, so far beside the middle of a state's box, leaves the box."""
    middle, half = PLACES[state], (BOX[0] / 2, BOX[1] / 2)
    reach = min(
        (math.copysign(half[axis], along[axis]) - aside[axis]) / along[axis]
        for axis in (0, 1)
        if along[axis]
    )
    x, y = (middle[n] + aside[n] + along[n] * reach for n in (0, 1))
    return x, y


if __name__ == "__main__":
    PAGE.write_text(page())
    PICTURE.write_text(picture())
