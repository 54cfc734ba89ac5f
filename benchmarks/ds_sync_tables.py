"""The tables of `ds_sync.py`."""

import math

TARGET = 96.0
"""Per cent of the test images."""
BASE = "bsp, ring"
OURS = ("ds-sync", "ds-sync, forward", "ds-sync, step", "ds-sync, rare")


def show(workers, cell_rows, ways):
    """Seconds to the accuracy, and how many times as fast ds-sync is as each of the others."""
    print(f"\n## {workers} workers\n\nSeconds to {TARGET:g} %\n")
    print(f"| network | {' | '.join(ways)} |\n|{'---|' * (len(ways) + 1)}")
    for cell, rows in cell_rows:
        by_name = {row["method"]: row for row in rows}
        cells = [seconds(by_name.get(name)) for name in ways]
        print(f"| {cell.name} | {' | '.join(cells)} |")
    others = [name for name in ways if name not in OURS]
    print("\nTimes as fast: the best ds-sync over\n")
    head = " | ".join([f"{BASE}, at as many steps", *others])
    print(f"| network | which | {head} |\n|{'---|' * (len(others) + 3)}")
    for cell, rows in cell_rows:
        best = fastest(rows)
        cells = [ratio(at_as_many_steps(best, rows))]
        cells += [ratio(best["over"].get(name)) for name in others]
        print(f"| {cell.name} | {best['method']} | {' | '.join(cells)} |")
    print("\nSteps to it, and milliseconds a step\n")
    print(f"| network | {' | '.join(ways)} |\n|{'---|' * (len(ways) + 1)}")
    for cell, rows in cell_rows:
        by_name = {row["method"]: row for row in rows}
        cells = [parts(by_name.get(name)) for name in ways]
        print(f"| {cell.name} | {' | '.join(cells)} |")


def fastest(rows):
    return min((r for r in rows if r["method"] in OURS), key=lambda r: r["seconds"])


def at_as_many_steps(row, rows):
    """How many times as fast a step is as the ring's."""
    ring = next(r for r in rows if r["method"] == BASE)
    return ring["step_seconds"] / row["step_seconds"]


def seconds(row):
    if row is None:
        return ""
    if row["seconds"] == math.inf:
        return "not reached"
    return f"{'> ' if row['least'] else ''}{row['seconds']:.1f}"


def parts(row):
    if row is None:
        return ""
    steps = f"> {row['steps']:.0f}" if row["least"] else f"{row['steps']:.0f}"
    if row["steps"] == math.inf:
        steps = "not reached"
    elif row["steps_error"]:
        steps += f" ± {row['steps_error']:.0f}"
    return f"{steps}; {1e3 * row['step_seconds']:.0f}"


def ratio(value):
    return "" if value is None or not math.isfinite(value) else f"{value:.2f}"


def conclude(found):
    """Where ds-sync gains most over the ring, to the accuracy and step by step."""
    for name in OURS:
        best = None
        for workers, cell, rows in found:
            row = next((r for r in rows if r["method"] == name), None)
            if row is None or row["seconds"] == math.inf:
                continue
            gains = row["over"][BASE], at_as_many_steps(row, rows)
            if best is None or gains[0] > best[0][0]:
                best = gains, workers, cell.name
        if best is not None:
            (gain, each), workers, cell = best
            print(
                f"\n{name}: at most {gain:.2f} times as fast as {BASE} ({each:.2f} at as many "
                f"steps), {workers} workers, {cell}"
            )
