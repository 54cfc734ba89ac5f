"""Predicted step times against measured ones, of real processes on an emulated network.

    python -m benchmarks.measure.agreement                    # the group "main"; prints a table
    python -m benchmarks.measure.agreement --only layers-8-1000 --repeats 1
    python -m benchmarks.measure.agreement --group held-out --keep   # and stores its rows
    python -m benchmarks.measure.agreement --show             # measures nothing: all stored rows

For each network, `paceline probe` measures the emulated cluster and writes a cluster file. For each
script, `paceline profile` measures the compute times of a step, with the same number of workers.
`paceline simulate` predicts the step time from these two files alone. `paceline emulate` measures it,
several times. Each cell has two bounds: 10 % of the median, and 10 % plus the spread (largest less
smallest) of the measurements.

Groups of cells (`--group`):

- ``main``: `bsp` by bucket rule and network, parameter servers, OSP. The model was developed beside them.
- ``held-out``: written down before the network model was last changed, measured after it.
- ``averaging``: methods that average parameters, and collectives that know racks. The step time is the
  mean over whole rounds.
- ``past-backward``: `priority` and `dear`, which wait in the next forward pass. Buckets are tuned while
  the job trains.
- ``compression``: compressed gradients of square weight matrices. PowerSGD compresses from the first
  step (``warmup_steps=0``), since a cell has too few steps for its default warm-up.
- ``shared-cores``, ``held-out-cores``: workers without paced compute, more of them than cores or as many.
- ``groups``: two speed classes of workers; each class is a group with its server.

``benchmarks/results/agreement.jsonl`` has one line a cell. Its figures have the digits that were printed.
Its OSP cells were measured while ``order=importance`` was OSP's default, so their methods name it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.cluster import Cluster, Rack, ServerHost, Workload, cluster_toml

EXAMPLES = Path(__file__).parents[2] / "examples"
RESULTS = Path(__file__).parents[1] / "results" / "agreement.jsonl"
MBIT = 1e6 / 8
FIXED = ("ddp", "single", "wfbp")
RULES = (*FIXED, "optimal")


def equal(workers, mbit):
    return Cluster((Rack(workers=workers, link=mbit * MBIT, latency=50e-6),))


def one_slow(workers, mbit):
    links = (mbit * MBIT,) * (workers - 1) + (mbit / 4 * MBIT,)
    return Cluster((Rack(workers=workers, link=links, latency=50e-6),))


def with_server(workers, mbit):
    return replace(equal(workers, mbit), servers=(ServerHost(),))


def two_racks(workers, mbit, uplink):
    rack = Rack(
        workers=workers // 2, link=mbit * MBIT, latency=50e-6, uplink=uplink * MBIT
    )
    return Cluster((rack, rack))


def two_classes(workers, mbit):
    """The second half of workers is half as fast."""
    speed = (1.0,) * (workers // 2) + (0.5,) * (workers // 2)
    link = mbit * MBIT
    return Cluster((Rack(workers=workers, link=link, latency=50e-6, speed=speed),))


@dataclass(frozen=True)
class Cell:
    """A script on a network under a method; *pace* multiplies the profiled times that
    workers take instead of their own (None: their own)."""

    name: str
    script: str
    arguments: tuple[str, ...]
    cluster: Cluster
    method: str
    pace: float | None = None
    steps: int = 6


LAYERS = ("layers", ())
LONGER = ("--train-steps", "80")
CELLS = [
    *(
        Cell(f"layers-8-{mbit}", *LAYERS, equal(8, mbit), f"bsp:buckets={rule}")
        for mbit in (100, 400, 1000)
        for rule in RULES
    ),
    *(
        Cell(
            f"digits-8-{mbit}", "digits", (), equal(8, mbit), f"bsp:buckets={rule}", 30
        )
        for mbit in (100, 400, 1000)
        for rule in FIXED
    ),
    *(
        Cell(
            *(f"digits-2-{mbit}", "digits", (), equal(2, mbit), f"bsp:buckets={rule}"),
            steps=80,
        )
        for mbit in (100, 400, 1000)
        for rule in FIXED
    ),
    *(
        Cell("layers-8-slow", *LAYERS, one_slow(8, 400), f"bsp:buckets={rule}")
        for rule in FIXED
    ),
    *(
        Cell("server-8-1000", *LAYERS, with_server(8, 1000), method)
        for method in (
            "bsp:collective=parameter-server,buckets=ddp",
            "bsp:collective=parameter-server,overlap=false,buckets=ddp",
            "asp:buckets=ddp",
            "ssp:buckets=ddp",
        )
    ),
    # Budgets have settled after two decisions, of which one comes every 20 steps.
    *(
        Cell(
            f"osp-8-{mbit}",
            *("layers", LONGER, equal(8, mbit)),
            method="osp:collective=native,budget=constant,buckets=ddp",
            steps=60,
        )
        for mbit in (200, 1000)
    ),
    *(
        Cell(
            f"osp-server-{mbit}",
            *("layers", (*LONGER, "--megabytes", size), with_server(8, mbit)),
            method=method,
            steps=60,
        )
        for mbit, size in ((200, "2"), (1000, "8"))
        for method in ("osp:budget=constant,buckets=ddp", "r2sp:buckets=ddp")
    ),
    *(
        Cell("layers-8-racks", *LAYERS, two_racks(8, 1000, 400), f"bsp:buckets={rule}")
        for rule in FIXED
    ),
]
# `optimal` plans for some 29 steps before it settles.
CELLS = [
    replace(cell, steps=36) if cell.method.endswith("optimal") else cell
    for cell in CELLS
]
HELD_OUT = [
    Cell("unseen-5-250", *LAYERS, equal(5, 250), "bsp:buckets=ddp"),
    Cell("unseen-6-racks", *LAYERS, two_racks(6, 600, 150), "bsp:buckets=wfbp"),
    Cell("unseen-4-slow", "digits", (), one_slow(4, 300), "bsp:buckets=single", 20),
]
MIDDLE = two_racks(8, 400, 200)
AVERAGING = [
    *(
        Cell(name, *("layers", LONGER, cluster), f"{method},buckets=ddp", steps=steps)
        for name, cluster, method, steps in (
            ("local-8-100", equal(8, 100), "local-sgd:sync_every=8", 33),
            ("local-8-100", equal(8, 100), "diloco:sync_every=8", 33),
            (
                "local-8-100",
                equal(8, 100),
                "streaming-diloco:sync_every=16,fragments=4,delay=2",
                49,
            ),
            ("local-8-racks", MIDDLE, "hierarchical-local-sgd:sync_every=8", 33),
            ("ds-sync-8-100", equal(8, 100), "ds-sync:overlap=none", 13),
            ("ds-sync-8-100", equal(8, 100), "ds-sync:overlap=forward", 13),
            ("ds-sync-8-racks", MIDDLE, "ds-sync:overlap=none", 13),
            ("ds-sync-8-racks", MIDDLE, "ds-sync:overlap=forward", 13),
            ("hierarchical-8-racks", MIDDLE, "bsp:collective=hierarchical", 6),
            ("hierarchical-8-racks", MIDDLE, "bsp:collective=ring", 6),
        )
    ),
]
PAST_BACKWARD = [
    Cell(
        f"past-8-{mbit}",
        *("layers", ("--train-steps", "140"), equal(8, mbit)),
        method=method,
        steps=120,
    )
    for mbit in (200, 400)
    for method in (
        "bsp:buckets=optimal",
        "dear:buckets=optimal",
        "priority:buckets=optimal",
    )
]
COMPRESSION = [
    Cell(
        f"codes-8-{mbit}",
        *("layers", ("--square",), equal(8, mbit)),
        method=f"bsp:buckets=ddp,compression={code}",
    )
    for mbit in (100, 400)
    for code in (
        *("bf16", "int8", "top-k,compression.density=0.01"),
        "powersgd,compression.rank=2,compression.warmup_steps=0",
    )
]
SERVERS_OF_GROUPS = [
    Cell("groups-8-400", *("layers", LONGER, two_classes(8, 400)), method, steps=40)
    for method in ("gssp:members=0-3+4-7,buckets=ddp", "ssp:buckets=ddp")
]
# Workers without paced compute, more of them than cores or as many: computing and messages share the
# cores. The held-out cells were written down before the model of shared cores.
SHARED_CORES = [
    Cell(
        f"cores-{workers}-{mbit}", "digits", (), equal(workers, mbit), method, steps=80
    )
    for workers, mbit, method in (
        (2, 1000, "bsp:buckets=wfbp"),
        (2, 100, "bsp:buckets=ddp,compression=bf16"),
        (4, 1000, "bsp:buckets=ddp"),
        (4, 100, "bsp:buckets=wfbp"),
        (8, 400, "bsp:buckets=ddp"),
        (8, 400, "bsp:buckets=wfbp"),
    )
]
HELD_OUT_CORES = [
    Cell(
        *(f"unseen-cores-{workers}-{mbit}", "digits", (), equal(workers, mbit), method),
        steps=80,
    )
    for workers, mbit, method in (
        (2, 600, "bsp:buckets=wfbp"),
        (2, 200, "bsp:buckets=ddp,compression=int8"),
        (4, 400, "bsp:buckets=ddp"),
        (4, 1000, "bsp:buckets=wfbp"),
        (4, 200, "bsp:buckets=ddp,compression=top-k,compression.density=0.01"),
        (8, 1000, "bsp:buckets=ddp"),
        (8, 1000, "bsp:buckets=wfbp"),
        (8, 200, "bsp:buckets=single"),
    )
]
GROUPS = {
    "main": CELLS,
    "held-out": HELD_OUT,
    "shared-cores": SHARED_CORES,
    "held-out-cores": HELD_OUT_CORES,
    "averaging": AVERAGING,
    "past-backward": PAST_BACKWARD,
    "compression": COMPRESSION,
    "groups": SERVERS_OF_GROUPS,
}
WAYS = {"layers": ("--train-steps", "40"), "digits": ("--epochs", "4")}


BOUND = 0.10


def judge(off, spread):
    """Within which bound a prediction is: "", of 10 %; "spread", of 10 % plus the spread;
    "off", of neither."""
    if abs(off) <= BOUND:
        return ""
    return "spread" if abs(off) <= BOUND + spread else "off"


def within_bounds(rows):
    """How many cells are within 10 %, and within 10 % plus the spread."""
    judged = [judge(row["off"], row["spread"]) for row in rows]
    return judged.count(""), len(rows) - judged.count("off")


def median_error(rows):
    """The median of absolute errors, a half rounded up."""
    median = statistics.median(abs(row["off"]) for row in rows)
    return f"{100 * median + 1e-6:.1f}%"


def summary(rows):
    within, enough = within_bounds(rows)
    return (
        f"median cell off by {median_error(rows)}; of {len(rows)} cells {within} within "
        f"{BOUND:.0%}, {enough} within {BOUND:.0%} plus the spread"
    )


class Bench:
    """Probes and profiles, each made once, in a folder."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.networks = {}

    def files(self, cell):
        """The probe's cluster file and the workload for a cell."""
        key = cluster_toml(cell.cluster)
        if key not in self.networks:
            number = len(self.networks)
            described = self.folder / f"network-{number}.toml"
            described.write_text(key)
            probed = self.folder / f"probed-{number}.toml"
            paceline(
                *("probe", "--runtime=emulated", f"--cluster={described}"),
                f"--output={probed}",
            )
            self.networks[key] = described, probed
        described, probed = self.networks[key]
        workers = cell.cluster.workers
        name = "".join([f"{cell.script}-{workers}", *cell.arguments])
        profile = self.folder / f"{name}.json"
        script = EXAMPLES / f"{cell.script}.py"
        if not profile.exists():
            paceline(
                *("profile", script, f"--workers={workers}", "--steps=30"),
                *(f"--output={profile}", "--", *WAYS[cell.script], *cell.arguments),
            )
        if cell.pace is None:
            return described, probed, profile
        paced = self.folder / f"{name}-x{cell.pace}.json"
        if not paced.exists():
            slower(Workload.load(profile), cell.pace).save(paced)
        return described, probed, paced

    def predicted(self, cell):
        _, probed, workload = self.files(cell)
        return paceline(
            *("simulate", EXAMPLES / f"{cell.script}.py", f"--cluster={probed}"),
            *(f"--workload={workload}", f"--method={cell.method}", "--json"),
            *(f"--steps={cell.steps}", "--", *WAYS[cell.script], *cell.arguments),
        )["step_seconds"]

    def measured(self, cell):
        described, _, workload = self.files(cell)
        pace = () if cell.pace is None else (f"--pace={workload}",)
        return paceline(
            *("emulate", EXAMPLES / f"{cell.script}.py", f"--cluster={described}"),
            *(*pace, f"--method={cell.method}", "--json"),
            *(f"--steps={cell.steps}", "--", *WAYS[cell.script], *cell.arguments),
        )["step_seconds"]


def slower(workload, factor):
    """The same, to be slept out."""
    return replace(
        workload,
        cores=0,
        forward=tuple(factor * t for t in workload.forward),
        backward=tuple(factor * t for t in workload.backward),
        update=factor * workload.update,
    )


def paceline(*words):
    """Run it; returns its JSON, if it was asked for one."""
    command = [sys.executable, "-m", "paceline", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout) if "--json" in words else None


HEAD = """\
| cell | method | predicted s | measured s | spread | off by | |
|---|---|---|---|---|---|---|"""


def row_text(row):
    """A stored row as a line of a table."""
    return (
        f"| {row['cell']} | `{row['method']}` | {row['predicted_seconds']:.3f} | "
        f"{row['measured_seconds']:.3f} | {row['spread']:.1%} | {row['off']:+.1%} | "
        f"{judge(row['off'], row['spread'])} |"
    )


def stored():
    """The stored rows, by group."""
    rows = {group: [] for group in GROUPS}
    for line in RESULTS.read_text().splitlines():
        row = json.loads(line)
        rows[row["group"]].append(row)
    return rows


def keep(group, rows):
    """Store measured *rows* of a group, in place of older ones of the same cells and methods."""
    new = {
        (row["cell"], row["method"]): {
            "group": group,
            "cell": row["cell"],
            "method": row["method"],
            "predicted_seconds": row["predicted_seconds"],
            "measured_seconds": statistics.median(row["measured_seconds"]),
            "spread": row["spread"],
            "off": row["off"],
        }
        for row in rows
    }
    every = stored()
    for old in every[group]:
        new.setdefault((old["cell"], old["method"]), old)
    every[group] = list(new.values())
    lines = (json.dumps(row) for mine in every.values() for row in mine)
    RESULTS.write_text("".join(f"{line}\n" for line in lines))


def run(cells, repeats, folder):
    bench, rows = Bench(folder), []
    print(HEAD)
    for cell in cells:
        predicted = bench.predicted(cell)
        times = [bench.measured(cell) for _ in range(repeats)]
        middle = statistics.median(times)
        spread = (max(times) - min(times)) / middle
        off = predicted / middle - 1
        judged = judge(off, spread)
        rows.append(
            {
                "cell": cell.name,
                "method": cell.method,
                "predicted_seconds": predicted,
                "measured_seconds": times,
                "spread": spread,
                "off": off,
                "judged": judged,
            }
        )
        print(
            f"| {cell.name} | {cell.method} | {predicted:.3f} | {middle:.3f} | "
            f"{spread:.1%} | {off:+.1%} | {judged} |",
            flush=True,
        )
    print(f"\n{summary(rows)}")
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", help="cells whose name begins so")
    parser.add_argument("--method", help="methods that contain this")
    parser.add_argument("--group", choices=GROUPS, default="main")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="keep probes and profiles here")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--keep", action="store_true", help=f"store in {RESULTS.name}")
    parser.add_argument("--show", action="store_true", help="print stored rows only")
    args = parser.parse_args()
    if args.show:
        for group, rows in stored().items():
            print(f"\n## {group}\n\n{HEAD}")
            print("\n".join(map(row_text, rows)))
            print(f"\n{summary(rows)}")
        return
    cells = [c for c in GROUPS[args.group] if c.name.startswith(args.only or "")]
    cells = [c for c in cells if (args.method or "") in c.method]
    with tempfile.TemporaryDirectory() as scratch:
        rows = run(cells, args.repeats, args.folder or scratch)
    if args.keep:
        keep(args.group, rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
