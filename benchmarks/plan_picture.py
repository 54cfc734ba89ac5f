"""The picture of a plan on the README's first screen: docs/plan.png.

    python benchmarks/plan_picture.py

The plan of ``make demo``: examples/digits.py on 8 workers at 100 Mbit/s, with passes of 20 and 40 ms. In
virtual time, so that equal code draws an equal picture. About a minute of one core.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from paceline.cli.progress import progress
from paceline.cli.script_plan import plan_script
from paceline.cluster import uniform_cluster
from paceline.interfaces import CONSISTENCIES
from paceline.tools.plan.prediction_cost import Budget
from paceline.tools.plan.report import bar_chart
from paceline.tools.report.colours import COLOURS, INK
from paceline.tools.report.model import BarChart
from paceline.tools.report.pictures import house_style

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "digits.py"
PICTURE = ROOT / "docs" / "plan.png"
WORKERS, LINK, LATENCY = 8, "100mbit", "50us"
FORWARD, BACKWARD = 0.02, 0.04
BUDGET = 80.0


def draw(chart: BarChart) -> Figure:
    """The bars of a plan's page: computing, then exposed communication."""
    figure = Figure(figsize=(6.4, 0.5 * len(chart.rows) + 0.9), layout="constrained")
    axes = figure.add_subplot()
    for place, bar in enumerate(chart.rows):
        compute, exposed = (1e3 * value for value in bar.values)
        colour = COLOURS[bar.colour or 0][0]
        axes.barh(place, compute, 0.5, color=colour)
        axes.barh(
            *(place, exposed, 0.5),
            left=compute,
            facecolor="none",
            edgecolor=colour,
            hatch="////",
        )
        axes.annotate(
            bar.text,
            (compute + exposed, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
        )
        axes.text(0, place - 0.3, bar.name, va="bottom")
    limit = 1e3 * (chart.limit or 0.0)
    axes.axvline(limit, color=INK, linewidth=0.8, linestyle=":", zorder=0)
    axes.set_ylim(len(chart.rows) - 0.5, -0.7)
    axes.margins(x=0.4)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"ms per step (hatched: exposed; dotted: {chart.limit_name})")
    return figure


def main() -> None:
    cluster = uniform_cluster(WORKERS, LINK, LATENCY)
    with progress(False) as told:
        made = plan_script(
            SCRIPT,
            [],
            cluster,
            forward=FORWARD,
            backward=BACKWARD,
            allowed=CONSISTENCIES,
            budget=Budget(BUDGET),
            told=told,
        )
    with house_style():
        figure = draw(bar_chart(made.plan))
        figure.savefig(PICTURE, dpi=200, metadata={"Software": None})
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
