"""The path of one chunk through a ring of racks, as a picture.

Three racks: the switches of the first and the last add up. What is drawn is every message
that carries one number of part 0: while it is summed, and while the sum is spread.
"""

from typing import NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from paceline.collectives.in_network.topology import ring_of_racks

RACKS = (0, 0, 0, 1, 1, 2, 2, 2)
ADDING = (0, 2)
SWITCH_HEIGHT, WORKER_HEIGHT = 1.0, 0.0
ADDS, PUTS = "#d55e00", "#2f6db5"


class Move(NamedTuple):
    """One message, in step *number*."""

    number: int
    source: int
    destination: int
    adds: bool


def places(groups):
    """Where each node is drawn: workers in a row, rack by rack, switches above them."""
    found = {}
    for rank, rack in enumerate(RACKS):
        found[rank] = (rank + 0.7 * rack, WORKER_HEIGHT)
    for position, group in enumerate(groups):
        if group.rack is not None:
            mine = [found[rank][0] for rank in group.ranks]
            found[node_of(groups, position)] = (sum(mine) / len(mine), SWITCH_HEIGHT)
    return found


def node_of(groups, position):
    """Where a group's sums are formed: its switch, numbered after the ranks, or the worker."""
    if groups[position].rack is None:
        return groups[position].ranks[0]
    return len(RACKS) + sum(one.rack is not None for one in groups[:position])


def moves_of(groups):
    """The moves of the first number of part 0: in stage s group s deals with it, and its first
    worker is the agent."""
    count, found, number = len(groups), [], 0
    for stage in range(2 * count - 1):
        group, node = groups[stage % count], node_of(groups, stage % count)
        adds = stage < count
        enters, leaves = [], []
        if group.rack is not None:
            ranks = group.ranks if adds else group.ranks[:1]
            enters = [(rank, node, adds) for rank in ranks]
            if stage >= count - 1:
                leaves = [(node, rank, False) for rank in group.ranks]
        if stage < 2 * count - 2:
            agent = groups[(stage + 1) % count].ranks[0]
            leaves.append((node, agent, stage < count - 1))
        for moves in (enters, leaves):
            number += bool(moves)
            found += [Move(number, *move) for move in moves]
    return found


def draw(axes, groups, moves, title):
    where = places(groups)
    for rack in sorted(set(RACKS)):
        ends = [where[rank][0] for rank, at in enumerate(RACKS) if at == rack]
        box = (min(ends) - 0.5, -0.42), max(ends) - min(ends) + 1.0, 1.8
        axes.add_patch(
            FancyBboxPatch(*box, boxstyle="round,pad=0.02", fc="#f4f4f4", ec="#cccccc")
        )
        what = "adds up" if rack in ADDING else "passes on"
        axes.text(sum(ends) / len(ends), 1.45, f"switch {what}", ha="center", size=8)
    for node, (x, y) in where.items():
        is_switch = node >= len(RACKS)
        axes.plot(x, y, "s" if is_switch else "o", ms=22, mfc="white", mec="#333333")
        axes.text(x, y, "+" if is_switch else str(node), ha="center", va="center")
    both_ways = {(move.source, move.destination) for move in moves}
    for transfer in moves:
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
            *(x, y, str(transfer.number)),
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


def draw_way(path):
    groups = ring_of_racks(RACKS, ADDING)
    moves = moves_of(groups)
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1)
    whole = next(move.number for move in moves if not move.adds)
    draw(
        upper,
        groups,
        [move for move in moves if move.number < whole],
        "summed: the group before passes its sum on, each rack's switch adds all of its workers'",
    )
    draw(
        lower,
        groups,
        [move for move in moves if move.number >= whole],
        "whole: the last switch gives it to its workers, and each group passes it on",
    )
    figure.savefig(path, dpi=110)
