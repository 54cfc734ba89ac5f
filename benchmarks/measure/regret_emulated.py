"""What the planner's choice loses between real processes: 8 hosts of an emulated network.

    python -m benchmarks.measure.regret_emulated                  # cells that have no result yet: 15 minutes in all
    python -m benchmarks.measure.regret_emulated --cell 100mbit
    python -m benchmarks.measure.regret_emulated --table

A plan is made of the network as `paceline probe` measures it there, with what a message costs these
processors, which eight hosts share, and with what the codes in front take here. The chosen of each
class, and the two that come next in it, of other methods or codes if there are such,
train a stand-in of 16 equal layers (1 MB, 20 ms forward and 40 ms backward), one after the other in
one set of processes, and once more in the reverse order. What the plan makes of buckets is measured
and tried first; then steps count, whole rounds of them. Per class: what the chosen takes over what
the fastest takes. Without methods that keep parameters on servers: eight of these on the cores of
one machine are no servers of a network. Results: benchmarks/results/regret_emulated.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median

import msgspec
import torch
import torch.distributed as dist

import paceline
from benchmarks.measure import harness, regret
from paceline.cluster import Workload
from paceline.cluster.cluster_file import cluster_toml, load_cluster
from paceline.cluster.profiling.compressors import coding_times_of_busy, threads_set
from paceline.cluster.profiling.step_profiler import GradientDump
from paceline.core.settings import parse_method
from paceline.interfaces.buckets import nearly_square
from paceline.spec import parse
from paceline.tools.plan import plan
from paceline.tools.plan.predict import TrainingJob
from paceline.tools.plan.predictor import Predictor
from paceline.tools.plan.search import leading_compressors, refine_compression_times

RESULTS = Path(__file__).parents[1] / "results" / "regret_emulated.json"
CLASSES = ("exact", "delayed", "lossy", "local")
EACH = 3
NEAR = 1.5
SETTLING, COUNTED = 45, 12
TURNS = 2
CELLS = {
    "50mbit": regret.one_rack(8, "50mbit"),
    "100mbit": regret.one_rack(8, "100mbit"),
    "200mbit": regret.one_rack(8, "200mbit"),
    "400mbit": regret.one_rack(8, "400mbit"),
    "racks": regret.racks(4, "200mbit", "200mbit"),
    "slow-link": regret.slow_link(8, "200mbit", "50mbit"),
}


def workload():
    made = regret.layers(16, 1.0)
    return Workload(
        names=made.names,
        sizes=made.sizes,
        forward=tuple(seconds / 5 for seconds in made.forward),
        backward=tuple(seconds / 5 for seconds in made.backward),
        batch=made.batch,
        source=made.source,
    )


def run(name, classes):
    """One cell: what each candidate of *classes* takes in each turn, and the regret of each class."""
    cluster = CELLS[name]
    made = planned(probed(cluster), classes)
    chosen = {consistency: row.spec for consistency, row in made.fastest.items()}
    candidates = {
        consistency: near(made, consistency, chosen[consistency])
        for consistency in chosen
    }
    specs = [spec for mine in candidates.values() for spec in mine]
    measured = measure(cluster, specs)
    regrets = {}
    for consistency, mine in candidates.items():
        taken = {spec: median(measured[spec]) for spec in mine}
        best = min(taken, key=taken.__getitem__)
        picked = chosen[consistency]
        regrets[consistency] = {
            "chosen": picked,
            "best": best,
            "regret": taken[picked] / taken[best],
            "predicted": made.estimate(picked).step_seconds,
        }
    return {"measured": measured, "regrets": regrets}


def planned(cluster, classes):
    """The plan, with what codes take that are in front: measured here, as for a script."""
    model = workload()
    with Predictor(2) as predictor:
        made = plan(cluster, model, allowed=classes, predictor=predictor)
        made = without_servers(made)
        job = TrainingJob(cluster=cluster, workload=model)
        for _ in range(2):
            if codes := leading_compressors(made):
                cores = min(cluster.processor.cores, cluster.workers)
                times = times_of(codes, cores)
                made, job = refine_compression_times(made, job, times, predictor)
    return made


def without_servers(made):
    """The plan of those that keep no parameters on servers."""
    rows = tuple(row for row in made.estimates if "servers" not in row.spec)
    return msgspec.structs.replace(made, estimates=rows)


def times_of(codes, cores):
    """What *codes* take for a gradient as large as the stand-in's, while all *cores* code."""
    model = workload()
    shapes = [nearly_square(size // 4) for size in model.sizes]
    with tempfile.TemporaryDirectory() as folder, threads_set(1):
        kept = GradientDump(folder)
        kept.keep(model.names, [torch.randn(shape) for shape in shapes])
        return coding_times_of_busy(codes, folder, cores)


def near(made, consistency, chosen):
    """The chosen and those predicted to be near it: one of each method and code first."""
    best = made.estimate(chosen).step_seconds
    rows = [
        row.spec
        for row in made.estimates
        if row.consistency == consistency
        and row.step_seconds <= NEAR * best
        and not (row.fidelity == "short" and row.spec != chosen)
    ]
    kinds = {}
    for spec in [chosen, *rows]:
        said = parse(spec)
        kinds.setdefault((said.name, said.values.get("compression")), spec)
    first = list(kinds.values())
    return [*first, *(spec for spec in rows if spec not in first)][:EACH]


def probed(cluster):
    """As a probe finds it to be."""
    with tempfile.TemporaryDirectory() as folder:
        described, found = Path(folder) / "described.toml", Path(folder) / "found.toml"
        described.write_text(cluster_toml(cluster))
        command = [sys.executable, "-m", "paceline", "probe", "--runtime=emulated"]
        command += [f"--cluster={described}", f"--output={found}"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return load_cluster(found)


def measure(cluster, specs):
    """Seconds of a step by each of *specs*, in each turn."""
    order = [spec for turn in range(TURNS) for spec in specs[:: 1 - 2 * (turn % 2)]]
    found = harness.on_emulated_hosts(cluster, train_in_turn, order)
    return {
        spec: [taken for one, taken in zip(order, found, strict=True) if one == spec]
        for spec in specs
    }


def past_its_warm_up(spec):
    """*spec* and its code as they step in the long run, which is what a plan predicts: a thousand steps
    of bsp before, or of codes that send much, would be trained here for nothing. What it is to be
    trained with, and the arguments of `distribute` for its code, if it says one."""
    method, settings = parse_method(spec)
    said = parse(spec)
    own = {k: v for k, v in said.values.items() if not k.startswith("compression")}
    settled = getattr(method, "steady_state_keys", {}) | own
    keys = ",".join(f"{key}={value}" for key, value in settled.items())
    coded = {}
    if own != said.values:
        coded = {"compression": settings.compression.steady_state()}
    return f"{said.name}:{keys}" if keys else said.name, coded


def train(spec):
    """Mean seconds of a step, once it has settled."""
    torch.manual_seed(0)
    spec, coded = past_its_warm_up(spec)
    method, _ = parse_method(spec)
    every = getattr(method, "sync_every", 1) or 1
    model = paceline.stand_in(workload())
    # Its gradients are its parameters, less a number: equal ones are no gradient to a code that selects.
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    own = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = paceline.distribute(model, own, method=spec, **coded)
    batch = torch.full((32,), 1.0 + paceline.rank())

    def steps(count):
        for _ in range(count):
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()

    settling = SETTLING + getattr(method, "learns_for", 0)
    steps(-(-settling // every) * every)
    dist.barrier()
    counted = -(-COUNTED // every) * every
    start = time.perf_counter()
    steps(counted)
    dist.barrier()
    seconds = (time.perf_counter() - start) / counted
    optimizer.finish()
    return seconds


def train_in_turn(specs):
    """Seconds of a step by each of *specs*, one after the other."""
    torch.set_num_threads(1)
    found = []
    for spec in specs:
        found.append(train(spec))
        if paceline.rank() == 0:
            print(f"{spec}: {1e3 * found[-1]:.1f} ms", file=sys.stderr, flush=True)
    return found


NAMES = {
    "50mbit": "50 Mbit/s",
    "100mbit": "100 Mbit/s",
    "200mbit": "200 Mbit/s",
    "400mbit": "400 Mbit/s",
    "racks": "two racks of 4, 200 Mbit/s",
    "slow-link": "200 Mbit/s, one link of 50",
}


def regrets_of(result):
    """The regret of each class of a cell; None: not measured."""
    return [result["regrets"].get(one, {}).get("regret") for one in CLASSES]


def lines(results):
    """The table, in Markdown."""
    made = [
        f"| network | {' | '.join(CLASSES)} |",
        "|---" * (1 + len(CLASSES)) + "|",
    ]
    for name, result in results.items():
        cells = (
            "-" if value is None else f"{value:.3f}" for value in regrets_of(result)
        )
        made.append(f"| {NAMES[name]} | {' | '.join(cells)} |")
    return made


def table(results):
    print("\n".join(lines(results)))
    values = [value for one in results.values() for value in regrets_of(one) if value]
    if values:
        print(f"\nworst {max(values):.3f}, mean {fmean(values):.3f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cell", action="append", choices=CELLS)
    parser.add_argument("--consistency", action="append", choices=CLASSES)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wanted = args.cell or [name for name in CELLS if name not in results]
    for name in [] if args.table else wanted:
        found = run(name, args.consistency or CLASSES)
        if args.consistency:
            known = results.get(name, {})
            found = {key: {**known.get(key, {}), **found[key]} for key in found}
        results[name] = found
        ordered = {cell: results[cell] for cell in CELLS if cell in results}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
        print(name, json.dumps(results[name]["regrets"]), flush=True)
    table(results)


if __name__ == "__main__":
    main()
