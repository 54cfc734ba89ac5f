"""A purchase of switches as a table and as a picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table
from rich.text import Text

from paceline.tools.plan.switch_upgrades import Purchase, Stage
from paceline.tools.report.colours import COLOURS
from paceline.tools.report.pictures import house_style, write
from paceline.tools.report.run_files import make_folder
from paceline.tools.report.terminal import console_for_tables
from paceline.units import show_seconds

NAME = "switches"
ENOUGH = 0.9
"""Of what all switches give."""
_MARKERS = "os^Dv"


def print_purchase(found: Purchase) -> None:
    """A row for each number of switches; what each way gives, and whose switch is the newest."""
    unit = "samples a second" if _counts_samples(found) else "steps a second"
    table = Table(
        title=f"{unit} by switches that add up: {found.workers} workers in {found.racks} "
        f"rack{'s' * (found.racks > 1)}"
    )
    table.add_column("switches", justify="right")
    for name in found.ways:
        table.add_column(name, justify="right")
    for switches in range(found.ready, found.racks + 1):
        cells = [
            _cell(_stage(stages, switches), len(stages) > 1 and switches > found.ready)
            for stages in found.ways.values()
        ]
        table.add_row(str(switches), *(Text(cell) for cell in cells))
    console = console_for_tables()
    console.print(table)
    console.print(
        "(rack n): whose switch is upgraded as the next one; a step computes "
        f"{show_seconds(found.compute_seconds)}, and with the best of these takes "
        f"{show_seconds(_best(found).step_seconds)}"
    )
    for sentence in advice(found):
        console.print(Text(sentence))


def advice(found: Purchase) -> list[str]:
    """What the table says, in sentences."""
    starts = {name: stages[0].step_seconds for name, stages in found.ways.items()}
    start = min(starts, key=starts.__getitem__)  # of equal ones the one without servers
    now = starts[start]
    said = [f"as it is, {start} is the fastest: {show_seconds(now)} a step"]
    for name, stages in found.ways.items():
        if len(stages) == 1:
            continue
        best = min(stages, key=lambda one: one.step_seconds)
        least = best.step_seconds
        if least >= now:
            said.append(
                f"{name}: {show_seconds(least)} with {best.switches} of {found.racks} "
                "switches, which is no better"
            )
            continue
        pays = next(one for one in stages if one.step_seconds < now)
        enough = next(
            one for one in stages if now - one.step_seconds >= ENOUGH * (now - least)
        )
        words = f"{name}: better than that from {_switches(pays.switches)} on"
        if enough.switches < best.switches:
            words += (
                f"; {enough.switches} give {ENOUGH:.0%} of what {best.switches} give"
            )
        words += f"; most with {best.switches}, {show_seconds(least)} a step"
        if best.switches < found.racks:
            words += ", and more of them make it slower"
        said.append(words)
    return said


def _switches(number: int) -> str:
    return f"{number} switch{'es' * (number != 1)}"


def draw_purchase(found: Purchase, folder: Path) -> Path:
    """Throughput by switches, as NAME.svg and NAME.png in *folder*; returns the second."""
    path = make_folder(str(folder))
    with house_style():
        figure = Figure(figsize=(5.6, 3.8), layout="constrained")
        axes = figure.add_subplot()
        _draw(axes, found)
        caption = "Predicted throughput by how many racks' switches add up."
        write(path, NAME, "What switches are worth", caption, figure)
    return path / f"{NAME}.png"


def _draw(axes: Axes, found: Purchase) -> None:
    for (name, stages), (colour, _), marker in zip(
        found.ways.items(), COLOURS, _MARKERS, strict=False
    ):
        values = [_rate(one) for one in stages]
        if len(stages) == 1:
            axes.axhline(values[0], color=colour, linestyle=(0, (5, 2)), label=name)
        else:
            counts = [one.switches for one in stages]
            axes.plot(counts, values, color=colour, marker=marker, label=name)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("switches that add up")
    unit = "samples" if _counts_samples(found) else "steps"
    axes.set_ylabel(f"{unit} a second")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True)
    axes.legend()


def _counts_samples(found: Purchase) -> bool:
    return _best(found).throughput is not None


def _best(found: Purchase) -> Stage:
    every = [one for stages in found.ways.values() for one in stages]
    return min(every, key=lambda one: one.step_seconds)


def _stage(stages: tuple[Stage, ...], switches: int) -> Stage:
    """What a way is with so many switches: one that needs none is the same with all."""
    return next((one for one in stages if one.switches == switches), stages[0])


def _cell(one: Stage, bought: bool) -> str:
    rate = _rate(one)
    text = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    return f"{text} (rack {one.racks[-1]})" if bought else text


def _rate(one: Stage) -> float:
    return 1 / one.step_seconds if one.throughput is None else one.throughput
