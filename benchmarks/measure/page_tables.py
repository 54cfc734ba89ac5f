"""Writes the tables of docs that are made of stored measurements.

    python -m benchmarks.measure.page_tables

A table stands between ``<!-- measured NAME -->`` and ``<!-- end -->``. `TABLES` has a function for each
name; it returns lines of Markdown and reads files of ``benchmarks/results/`` alone.
`python -m benchmarks.papers --show` writes these tables, too, beside those of the papers.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import (
    accuracy,
    aggregator,
    agreement,
    auto,
    collectives,
    compression,
    compression_accuracy,
    ddp_over_emulated_links,
    ddp_over_loopback,
    doctor,
    exact_overlap,
    faults,
    gradient_hooks,
    import_time,
    local_accuracy,
    local_updates,
    planned_buckets,
    planning_time,
    readme_tables,
    regret,
    regret_emulated,
    server,
    stored,
    virtual_scale,
)
from benchmarks.papers import load, mg_wfbp, stored_rows
from benchmarks.papers.results import Results, cell, table

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PLACE = re.compile(r"(<!-- measured ([\w .-]+?) -->\n).*?<!-- end -->", re.DOTALL)

Row = dict[str, Any]


def markdown(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    heads = list(heads)
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return lines + [f"| {' | '.join(cells)} |" for cells in rows]


def made_of(rows: Callable[[], Iterable[Row]]) -> Callable[[], list[str]]:
    """The table of *rows*, each by column."""
    return lambda: table(rows()).splitlines()


# ---- predictions ----

SUMMARY = {
    "`bsp`, servers, OSP": ("main",),
    "held-out networks": ("held-out",),
    "parameter averaging, racks": ("averaging",),
    "`priority`, `dear`": ("past-backward",),
    "compression": ("compression",),
    "workers that share cores": ("shared-cores",),
    "the same, held out": ("held-out-cores",),
    "group servers": ("groups",),
    "**all**": tuple(agreement.GROUPS),
}
"""Rows of the summary: each has the cells of one group, or of all."""


def rows_of(groups: Iterable[str]) -> list[Row]:
    stored = agreement.stored()
    return [row for group in groups for row in stored[group]]


def agreement_summary() -> list[str]:
    def cells(name: str, groups: tuple[str, ...]) -> list[str]:
        rows = rows_of(groups)
        within, enough = agreement.within_bounds(rows)
        worst = max((row["off"] for row in rows), key=abs)
        option = f"`{groups[0]}`" if len(groups) == 1 else ""
        figures = [
            str(len(rows)),
            str(within),
            str(enough),
            agreement.median_error(rows),
        ]
        return [name, option, *figures, f"{worst:+.1%}"]

    heads = ("cells of", "`--group`", "cells", "within 10 %")
    heads += ("within 10 % plus spread", "median error", "worst error")
    return markdown(heads, (cells(*one) for one in SUMMARY.items()))


HEADLINE = {
    "all": (tuple(agreement.GROUPS), "the groups below"),
    "`bsp`, servers and OSP": (("main",), "`python -m benchmarks.measure.agreement`"),
    "held-out networks": (
        ("held-out",),
        "`python -m benchmarks.measure.agreement --group held-out`",
    ),
}
"""Rows of the shorter summary: groups, and the command that measures them."""


def agreement_headline() -> list[str]:
    def cells(name: str, groups: tuple[str, ...], command: str) -> list[str]:
        rows = rows_of(groups)
        figures = map(str, (len(rows), *agreement.within_bounds(rows)))
        return [name, *figures, agreement.median_error(rows), command]

    heads = ("cells of", "cells", "within 10 %", "within 10 % plus spread")
    heads += ("median error", "command")
    return markdown(heads, (cells(name, *one) for name, one in HEADLINE.items()))


def agreement_beyond() -> list[str]:
    """The cells that are off by more than 10 %, the worst first."""
    rows = [row for row in rows_of(agreement.GROUPS) if abs(row["off"]) > 0.1]
    rows.sort(key=lambda row: -abs(row["off"]))
    return [*agreement.HEAD.splitlines(), *map(agreement.row_text, rows)]


OSP_KEYS = "budget=constant,buckets=ddp,order=importance"
OSP_CELLS = {
    ("by all-reduce", "200 Mbit/s", "`optimal`"): (
        ("past-8-200", "bsp:buckets=optimal"),
        ("osp-8-200", f"osp:collective=native,{OSP_KEYS}"),
    ),
    ("by all-reduce", "1 Gbit/s", "`ddp`"): (
        ("layers-8-1000", "bsp:buckets=ddp"),
        ("osp-8-1000", f"osp:collective=native,{OSP_KEYS}"),
    ),
    ("over a server", "1 Gbit/s", "`ddp`"): (
        ("server-8-1000", "bsp:collective=parameter-server,buckets=ddp"),
        ("osp-server-1000", f"osp:{OSP_KEYS}"),
    ),
}
"""Cells of bsp and of osp over the same network: how it averages, its links, and bsp's buckets."""


def osp_emulated() -> list[str]:
    """Steps of osp and of bsp between emulated hosts, and the predicted speed-up."""
    rows = {(row["cell"], row["method"]): row for row in rows_of(agreement.GROUPS)}

    def cells(names: tuple[str, ...]) -> list[str]:
        base, ours = (rows[cell] for cell in OSP_CELLS[names])
        seconds = [base["measured_seconds"], ours["measured_seconds"]]
        predicted = base["predicted_seconds"] / ours["predicted_seconds"]
        texts = [f"{one:.3f}" for one in seconds]
        return [*names, *texts, f"{seconds[0] / seconds[1]:.2f}", f"{predicted:.2f}"]

    heads = ("averages", "links", "buckets of bsp", "bsp, s", "osp, s")
    heads += ("speed-up", "predicted")
    return markdown(heads, map(cells, OSP_CELLS))


LOCAL_CELLS = {
    "local-8-100": "100 Mbit/s",
    "local-8-racks": "two racks, 400 Mbit/s, uplinks of 200 Mbit/s",
}


def rounds_emulated() -> list[str]:
    """Predicted and measured steps of local updates between emulated hosts."""
    rows = [row for row in rows_of(["averaging"]) if row["cell"] in LOCAL_CELLS]
    cells = (
        [
            f"`{row['method'].removesuffix(',buckets=ddp')}`",
            LOCAL_CELLS[row["cell"]],
            f"{row['predicted_seconds']:.3f}",
            f"{row['measured_seconds']:.3f}",
            f"{row['off']:+.1%}",
        ]
        for row in rows
    )
    heads = ("method", "8 hosts", "predicted, s a step", "measured", "off by")
    return markdown(heads, cells)


# ---- compression ----

MODELS = (*compression.LARGE, *compression.SMALL)
COMPRESSORS = ("bf16", "int8", "int4", "powersgd", "top-k", "gd-top-k", "dgc")


def compression_gains(gigabits: float) -> Callable[[], list[str]]:
    def make() -> list[str]:
        kept = compression.Kept(compression.RESULTS)
        texts = ["none", *COMPRESSORS]
        columns = [
            compression.Column(kept, model, 8, gigabits, texts) for model in MODELS
        ]
        rows = [["none", *(f"{column.dense:.3g} s" for column in columns)]]
        rows += [
            [text, *(column.cell(text) for column in columns)] for text in COMPRESSORS
        ]
        return markdown((f"8 x {gigabits:g} Gbit/s", *MODELS), rows)

    return make


def compression_coding() -> list[str]:
    """Seconds of encoding and decoding in a step, on one core, 8 workers."""
    kept = compression.Kept(compression.RESULTS)

    def takes(model: str, text: str) -> str:
        key = compression.full_spec(compression.make(text))
        found = compression.CompressorTimes(**kept.get("coding", model, key))
        return f"{found.encode + found.after(8):.2g} s"

    rows = ([text, *(takes(model, text) for model in MODELS)] for text in COMPRESSORS)
    return markdown(("encoding and decoding", *MODELS), rows)


def accuracy_of_compression() -> list[str]:
    results = accuracy.Results(compression_accuracy.RESULTS)
    tables = [
        accuracy.Table(task=task.name, workers=4, rows=compression_accuracy.rows(task))
        for task in accuracy.TASKS.values()
    ]
    return compression_accuracy.lines(tables, results, accuracy.SEEDS)


# ---- virtual time ----


def of_paper(name: str, table: str) -> tuple[list[Row], str]:
    """The stored rows of a paper's table, and the command that measures them."""
    return stored_rows(name, table), f"`{load(name).command(table)}`"


def ratios(figures: Iterable[float], digits: int = 2) -> str:
    return ", ".join(f"{figure:.{digits}f}" for figure in figures)


def methods_in_virtual_time() -> list[str]:
    """Speed-ups of methods, a line for each comparison; all are stored rows of papers."""
    found = []
    native, command = of_paper("osp", "native")
    column = "osp:collective=native, until step 540"
    loads = joined(f"{row['r']:g}" for row in native)
    text = "`osp:collective=native` over `bsp` with its best plan, steps 501 to 540"
    text += f"; all-reduces take {loads} times the compute time"
    found.append([text, ratios(row[column] for row in native), command])

    gains, command = of_paper("ds_sync", "gains-8")
    for racks in ("2 racks", "4 racks"):
        rows = [row for row in gains if row["network"].startswith(racks)]
        uplinks = joined(row["network"].split()[-1] for row in rows)
        text = "best `ds-sync` over `bsp` by ring, time to 96 % of digits; "
        text += f"{racks} with uplinks of {uplinks} of a host's link"
        found.append([text, ratios((row["bsp, ring"] for row in rows), 1), command])

    stale, command = of_paper("baselines", "staleness")
    jitters = joined(row["jitter"] for row in stale)
    for column, name in (("ssp", "`ssp` (bound 3)"), ("asp", "`asp`")):
        text = f"{name} over `bsp`, steps per second; step times as "
        text += f"{stale[0]['classes']}, jitter of {jitters}"
        found.append([text, ratios(row[column] for row in stale), command])

    classes, command = of_paper("gssp", "classes")
    classes = [row for row in classes if row["classes"] != "all equal"]
    times = " or ".join(row["classes"] for row in classes)
    text = f"`gssp` over `ssp` (bound 3), steps per second; step times as {times}"
    found.append([text, ratios(row["over ssp"] for row in classes), command])
    return markdown(("speed-up of", "figure", "command"), found)


UPLINK_METHODS = {
    "bsp, ring": "`bsp`, ring",
    "bsp, hierarchical": "`bsp`, hierarchical",
    "ds-sync": "`ds-sync`",
    "ds-sync, rare": "`ds-sync`, across racks every 4th step",
    "local-sgd": "`local-sgd`",
    "hierarchical-local-sgd": "`hierarchical-local-sgd`",
}
"""Columns of a paper's table, and their titles."""


def thin_uplinks() -> list[str]:
    """Virtual seconds to an accuracy in two racks, a line for each uplink."""
    rows, _ = of_paper("ds_sync", "seconds-8")
    shown = [row for row in rows if row["network"].startswith("2 racks")]
    cells = (
        [row["network"].split()[-1], *(cell(row[name]) for name in UPLINK_METHODS)]
        for row in shown
    )
    return markdown(("uplink", *UPLINK_METHODS.values()), cells)


SPEED_METHODS = {
    "bsp, shares": "`bsp`, batches by speed",
    **{name: f"`{name}`" for name in ("ssp", "dssp", "asp", "gssp")},
}


def uneven_workers() -> list[str]:
    """Samples a second relative to bsp, a line for each mix of step times."""
    rows, _ = of_paper("gssp", "classes")
    shown = [row for row in rows if row["classes"] != "all equal"]
    cells = (
        [row["classes"], *(cell(row[name]) for name in SPEED_METHODS)] for row in shown
    )
    return markdown(("step times", *SPEED_METHODS.values()), cells)


def joined(texts: Iterable[object]) -> str:
    return ", ".join(map(str, texts))


def overlap_gains() -> list[str]:
    """Speed-ups of exact methods past the end of backward, a line for each network."""
    results = Results(exact_overlap.RESULTS, measures=False)
    others = exact_overlap.METHODS[1:]
    found = []
    for make in exact_overlap.TABLES.values():
        for row in make(results):
            if math.isnan(row["priority"]):
                continue  # not measured yet
            gains = (f"{row['bsp'] / row[method]:.2f}" for method in others)
            limit = f"{row['priority'] / row['limit']:.2f}"
            steps = (f"{1e3 * row[name]:.4g}" for name in ("limit", "bsp"))
            found.append([row["name"], *steps, *gains, limit])
    names = (method.partition(":")[0] for method in others)
    heads = ("network", "limit, ms", "bsp, ms", *names, "priority to the limit")
    return markdown(heads, found)


def simulated_regret() -> list[str]:
    """The worst and the median regret of simulated plans."""
    stored = json.loads(regret.RESULTS.read_text())
    found = [
        (one["regret"], f"{level}, `{cell}`")
        for cell, result in stored.items()
        for level, one in result["regrets"].items()
    ]
    worst, where = max(found)
    median = statistics.median(figure for figure, _ in found)
    heads = ("plans", "worst regret", "its level and cell", "median regret")
    return markdown(heads, [[str(len(stored)), f"{worst:.3f}", where, f"{median:.3f}"]])


# ---- others ----


def accuracy_of_local_updates() -> list[str]:
    results = accuracy.Results(accuracy.RESULTS)
    found = [
        list(one.found(results, accuracy.SEEDS)) for one in local_accuracy.TABLES[:3]
    ]
    return accuracy.lines(found)


SHORT = {f"local-sgd, H = {length}" for length in local_accuracy.LENGTHS} | {
    f"{name}, H = 16"
    for name in ("hierarchical-local-sgd", "diloco, gain 7", "diloco, gain 1")
}


def accuracy_in_short() -> list[str]:
    """The rows of local updates by which a reader chooses."""
    results = accuracy.Results(accuracy.RESULTS)
    tables = [
        [row for row in one.found(results, accuracy.SEEDS) if row["method"] in SHORT]
        for one in local_accuracy.TABLES[:3]
    ]
    return accuracy.lines(tables)


HISTORY = ROOT / "benchmarks" / "results" / "decisions.jsonl"
"""Figures by which decisions were taken, each from the printed table of its time."""


def history(kind: str) -> list[str]:
    """Stored rows ``KIND: ROW: COLUMN: RUN`` as lines; the runs of a cell stand side by side."""
    results = Results(HISTORY, measures=False)
    cells: dict[str, dict[str, list[str]]] = {}
    for name in results.rows():
        if name.startswith(f"{kind}: "):
            _, row, column, _ = name.split(": ")
            runs = cells.setdefault(row, {}).setdefault(column, [])
            runs.append(f"{results.stored(name):g}")
    columns = list(next(iter(cells.values())))
    rows = (
        [row, *(", ".join(found[column]) for column in columns)]
        for row, found in cells.items()
    )
    return markdown((kind, *columns), rows)


def regret_between_processes() -> list[str]:
    stored = json.loads(regret_emulated.RESULTS.read_text())
    return regret_emulated.lines(stored)


FAULTS = {
    "SIGKILL to a worker": ("KILL to worker",),
    "SIGTERM or SIGINT to a worker": ("TERM to worker", "INT to worker"),
    "SIGSTOP, then SIGCONT, to a worker": ("STOP to worker",),
    "the same signals to a server, aggregator or keeper": tuple(
        f"{signal} to service" for signal in ("KILL", "TERM", "INT", "STOP")
    ),
    "the same signals to the launcher": tuple(
        f"{signal} to launcher" for signal in ("KILL", "TERM", "INT", "STOP")
    ),
    "no further descriptors": tuple(
        f"FILES to {target}" for target in ("worker", "service", "launcher")
    ),
    "a full disk": ("FULL to disk",),
    "closed output": ("CLOSE to stdout",),
    "a cut link": ("CUT to host",),
}
"""Of the campaign's table: the rows that make up one of its own."""
LAUNCHERS = (
    "paceline run",
    "paceline run --survive",
    "paceline serve",
    "paceline serve --survive",
    "torchrun",
    "paceline emulate",
    "ray",
)


def _found_by_campaigns() -> dict[str, int]:
    lines = faults.RESULTS.read_text().splitlines()
    return {row["row"]: row["value"] for row in map(json.loads, lines)}


def random_faults() -> list[str]:
    """Faults of the last campaigns of real jobs, by launcher."""
    found = _found_by_campaigns()

    def cells(kinds: Iterable[str]) -> list[str]:
        return [
            str(sum(found.get(f"{launcher}: {kind}", 0) for kind in kinds))
            for launcher in LAUNCHERS
        ]

    rows = [["jobs", *cells(["jobs"])]]
    rows += [[fault, *cells(kinds)] for fault, kinds in FAULTS.items()]
    return markdown(["fault", *(f"`{launcher}`" for launcher in LAUNCHERS)], rows)


def attacked_ports() -> list[str]:
    """Messages of the last attack on each port, and what they did to its server."""
    found = _found_by_campaigns()
    columns = ("messages", "KiB", "violations")
    ports = [row.split(":")[0] for row in found if row.startswith("port ")]
    rows = [
        [
            port.removeprefix("port "),
            *(f"{found[f'{port}: {column}']:,}" for column in columns),
        ]
        for port in dict.fromkeys(ports)
    ]
    titles = ("messages", "memory grew by KiB", "violations")
    return markdown(["port", *titles], rows)


# ---- stored by `stored.Store` ----


def ddp_exact() -> list[str]:
    heads = ddp_over_emulated_links.heads("seconds per step (over the limit)")
    return markdown(heads, ddp_over_emulated_links.exact_table())


def ddp_compression() -> list[str]:
    heads = ddp_over_emulated_links.heads("seconds per step")
    return markdown(heads, ddp_over_emulated_links.compression_table())


def overhead_steps() -> list[str]:
    heads = ("2 processes", "both with defaults", "added by the first 45 steps")
    heads += ("both with DDP's bucket sizes", "both with their best buckets")
    return markdown(heads, ddp_over_loopback.table())


def overhead_others() -> list[str]:
    """Noise, the bucket plan, imports, and hooks over a whole step."""
    steps, hooks = stored.Figures("ddp_over_loopback"), stored.Figures("gradient_hooks")
    least, largest = (
        hooks.text(f"{gradient_hooks.WHOLE}, {end}", ".2g")
        for end in ("least", "largest")
    )
    rows = [
        [
            "largest difference between the steps of DDP and of a second copy of DDP",
            steps.text(ddp_over_loopback.NOISE, ".0%"),
            "`python -m benchmarks.measure.ddp_over_loopback`",
        ],
        *planned_buckets.table(),
        *import_time.table(),
        [
            "largest difference between the hooks of DDP and of a second copy of DDP",
            hooks.text(gradient_hooks.NOISE, ".0%"),
            "`python -m benchmarks.measure.gradient_hooks`",
        ],
        [
            "processor time of hooks over a whole step, `priority` and `dear`, divided by DDP's: "
            "least; largest",
            f"{least}; {largest}",
            "`python -m benchmarks.measure.gradient_hooks`",
        ],
    ]
    return markdown(("what", "figure", "command"), rows)


def overhead_hooks() -> list[str]:
    heads = ("tensors", *(f"`{method}`" for method in gradient_hooks.EXACT))
    heads += ("Python calls per gradient, `bsp`",)
    return markdown(heads, gradient_hooks.table())


def rounds_of_local_updates() -> list[str]:
    heads = ("method", "step / (compute time + all-reduce / 8)")
    return markdown(heads, local_updates.rounds_table())


def server_loopback() -> list[str]:
    return markdown(("what", "figure", "command"), server.table())


def simulator_and_planner() -> list[str]:
    rows = [*virtual_scale.table(), *planning_time.table()]
    return markdown(("what", "figure", "command"), [*rows, trace_both_ways()])


def trace_both_ways() -> list[str]:
    """The largest difference between formulas and virtual time. Figures have seven digits."""
    results = Results(load("mg_wfbp").path, measures=False)
    steps = [
        mg_wfbp.figures(results, workers, rule)
        for workers in mg_wfbp.WORKERS
        for rule in mg_wfbp.RULES
    ]
    largest = max(abs(one["virtual"] / one["formula"] - 1) for one in steps)
    text = "GoogLeNet's published trace in virtual time against its formulas, "
    text += (
        f"{len(steps)} steps on {mg_wfbp.WORKERS[0]} to {mg_wfbp.WORKERS[-1]:,} workers"
    )
    figure = "equal in seven digits" if largest < 1e-7 else f"within {largest:.0e}"
    command = load("mg_wfbp").command("both-ways")
    return [text, figure, f"`{command}`"]


def diagnoses() -> list[str]:
    return markdown(("fault made", "runtime", "right"), doctor.table())


def systems() -> list[str]:
    return markdown(("paper", "use", "measured here"), readme_tables.systems())


def trust() -> list[str]:
    return markdown(("what", "figure", "command"), readme_tables.trust())


TABLES: dict[str, Callable[[], list[str]]] = {
    "auto": made_of(auto.evidence),
    "overlap emulated": made_of(exact_overlap.emulated_table),
    "collective times": made_of(collectives.times_table),
    "collective pairs": made_of(collectives.pairs_table),
    "aggregator rates": made_of(aggregator.rates_table),
    "rounds emulated": rounds_emulated,
    "local accuracy in short": accuracy_in_short,
    "thin uplinks": thin_uplinks,
    "uneven workers": uneven_workers,
    "history of hooks": partial(history, "processor time over DDP's"),
    "history of shared memory": partial(history, "a server and its workers"),
    "agreement headline": agreement_headline,
    "agreement summary": agreement_summary,
    "agreement beyond 10 percent": agreement_beyond,
    "osp emulated": osp_emulated,
    "methods in virtual time": methods_in_virtual_time,
    "overlap gains": overlap_gains,
    "compression 0.1 Gbit": compression_gains(0.1),
    "compression 1 Gbit": compression_gains(1),
    "compression 10 Gbit": compression_gains(10),
    "compression coding": compression_coding,
    "compression accuracy": accuracy_of_compression,
    "local accuracy": accuracy_of_local_updates,
    "regret simulated": simulated_regret,
    "regret emulated": regret_between_processes,
    "random faults": random_faults,
    "attacked ports": attacked_ports,
    "ddp exact": ddp_exact,
    "ddp compression": ddp_compression,
    "overhead steps": overhead_steps,
    "overhead others": overhead_others,
    "overhead hooks": overhead_hooks,
    "rounds of local updates": rounds_of_local_updates,
    "server loopback": server_loopback,
    "simulator and planner": simulator_and_planner,
    "diagnoses": diagnoses,
    "systems": systems,
    "trust": trust,
}


def refreshed(text: str) -> str:
    """A page's text with its tables as the stored figures make them."""

    def fresh(match: re.Match[str]) -> str:
        lines = "\n".join(TABLES[match[2]]())
        return f"{match[1]}\n{lines}\n\n<!-- end -->"

    return PLACE.sub(fresh, text)


def write_pages() -> None:
    for path in PAGES:
        text = path.read_text()
        if (new := refreshed(text)) != text:
            path.write_text(new)
            print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    write_pages()
