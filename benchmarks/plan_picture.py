"""The picture of a plan on the README's first screen: docs/plan.png.

    python benchmarks/plan_picture.py

The plan of ``make demo``: examples/digits.py on 8 workers at 100 Mbit/s, with passes of 20 and 40 ms. In
virtual time, so that equal code draws an equal picture. About a minute of one core.
"""

from __future__ import annotations

from pathlib import Path

from paceline.cli.progress import progress
from paceline.cli.script_plan import plan_script
from paceline.cluster import uniform_cluster
from paceline.interfaces import CONSISTENCIES
from paceline.tools.plan.prediction_cost import Budget
from paceline.tools.plan.report import bar_chart
from paceline.tools.report.charts import draw, house_style

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "digits.py"
PICTURE = ROOT / "docs" / "plan.png"
WORKERS, LINK, LATENCY = 8, "100mbit", "50us"
FORWARD, BACKWARD = 0.02, 0.04
BUDGET = 80.0


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
