"""The way of one datagram through a ring of racks, drawn from the schedule.

    python benchmarks/rina_picture.py docs/rina_way.png

Three racks: the switches of the first and the last add up. What is drawn is every transfer of the schedule
that carries one number of part 0: while it is summed, and while the sum is spread.
"""

import sys

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from paceline.collectives.in_network.rina import RingOfRacks
from paceline.collectives.in_network.topology import ring_of_racks

RACKS = (0, 0, 0, 1, 1, 2, 2, 2)
ADDING = (0, 2)
SWITCH_HEIGHT, WORKER_HEIGHT = 1.0, 0.0
ADDS, PUTS = "#d55e00", "#2f6db5"


def places(schedule):
    """Where each node is drawn: workers in a row, rack by rack, switches above them."""
    found = {}
    for rank, rack in enumerate(RACKS):
        found[rank] = (rank + 0.7 * rack, WORKER_HEIGHT)
    for number, rack in enumerate(schedule.switches):
        mine = [found[rank][0] for rank, at in enumerate(RACKS) if at == rack]
        found[schedule.ranks + number] = (sum(mine) / len(mine), SWITCH_HEIGHT)
    return found


def way(schedule, unit):
    """The transfers that carry that number, and the number of each one's step, without
    those in which it does not move."""
    moving = []
    for number in range(schedule.steps):
        step = [
            t for t in schedule.step(number) if t.offset <= unit < t.offset + t.size
        ]
        if step:
            moving.append(step)
    return [(number, t) for number, step in enumerate(moving, 1) for t in step]


def draw(axes, schedule, moves, title):
    where = places(schedule)
    for rack in sorted(set(RACKS)):
        ends = [where[rank][0] for rank, at in enumerate(RACKS) if at == rack]
        box = (min(ends) - 0.5, -0.42), max(ends) - min(ends) + 1.0, 1.8
        axes.add_patch(
            FancyBboxPatch(*box, boxstyle="round,pad=0.02", fc="#f4f4f4", ec="#cccccc")
        )
        what = "adds up" if rack in ADDING else "passes on"
        axes.text(sum(ends) / len(ends), 1.45, f"switch {what}", ha="center", size=8)
    for node, (x, y) in where.items():
        is_switch = node >= schedule.ranks
        axes.plot(x, y, "s" if is_switch else "o", ms=22, mfc="white", mec="#333333")
        axes.text(x, y, "+" if is_switch else str(node), ha="center", va="center")
    both_ways = {(t.source, t.destination) for _, t in moves}
    for number, transfer in moves:
        start, end = where[transfer.source], where[transfer.destination]
        across = abs(start[0] - end[0]) > 1.5
        bend = 0.0
        if across:
            bend = 0.38 if start[0] > end[0] else -0.25
        elif (transfer.destination, transfer.source) in both_ways:
            bend = 0.2
        colour = ADDS if transfer.adds else PUTS
        axes.add_patch(
            FancyArrowPatch(
                *(start, end),
                arrowstyle="-|>",
                mutation_scale=12,
                color=colour,
                connectionstyle=f"arc3,rad={bend}",
                shrinkA=12,
                shrinkB=12,
            )
        )
        x = start[0] + 0.42 * (end[0] - start[0])
        y = start[1] + 0.42 * (end[1] - start[1]) - 0.48 * bend * (end[0] - start[0])
        x += 0.48 * bend * (end[1] - start[1])
        axes.text(
            *(x, y, str(number)),
            color=colour,
            size=8,
            weight="bold",
            ha="center",
            va="center",
            bbox={"fc": "white", "ec": "none", "pad": 0.8},
        )
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlim(-0.8, max(x for x, _ in where.values()) + 0.8)
    axes.set_ylim(-0.6, 2.7)
    axes.axis("off")


def main():
    groups = ring_of_racks(RACKS, ADDING)
    schedule = RingOfRacks(groups, 6 * len(groups))
    moves = way(schedule, 0)
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1)
    whole = next(number for number, t in moves if not t.adds)
    draw(
        upper,
        schedule,
        [m for m in moves if m[0] < whole],
        "summed: the group before passes its sum on, each rack's switch adds all of its workers'",
    )
    draw(
        lower,
        schedule,
        [m for m in moves if m[0] >= whole],
        "whole: the last switch gives it to its workers, and each group passes it on",
    )
    figure.savefig(sys.argv[1], dpi=110)


if __name__ == "__main__":
    main()
