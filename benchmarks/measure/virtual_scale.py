"""How many simulated workers one process holds: real seconds, processor seconds and memory.

    python -m benchmarks.measure.virtual_scale    # 512 x 5 steps, 2048 x 3; 10,000 x 3 by representatives
    python -m benchmarks.measure.virtual_scale --workers 512 --steps 5
    python -m benchmarks.measure.virtual_scale --workers 10000 --steps 3 --representatives

Each run is a process of its own: a six-tensor model, a bucket per tensor, method bsp.
Bounds that this project keeps on a 2-core machine: 15 s for 512 x 5, 60 s and 8 GiB for
2,048 x 3, 10 s and 600 MB for 10,000 x 3 by representatives.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

from benchmarks.measure import stored

CASES = ((512, 5, False), (2048, 3, False), (10_000, 3, True))


def train(steps):
    import torch

    import paceline

    paceline.init()
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32),
        torch.nn.ReLU(),
        torch.nn.Linear(32, 32),
        torch.nn.ReLU(),
        torch.nn.Linear(32, 4),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = paceline.distribute(model, optimizer, buckets="wfbp")
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 16)
        loss = (model(x) - x[:, :4]).square().mean()
        loss.backward()
        optimizer.step()
    optimizer.finish()


def measure(workers, steps, representatives):
    from paceline.cluster import uniform_cluster
    from paceline.runtimes.simulated import Simulation

    start = time.perf_counter()
    cluster = uniform_cluster(workers, "1gbit", "50us")
    options = {"workers": "classes"} if representatives else {}
    simulation = Simulation(cluster, **options)
    outcome = simulation.run(lambda rank: train(steps))
    return {
        "workers": workers,
        "steps": steps,
        "representatives": representatives,
        "seconds": round(time.perf_counter() - start, 2),
        "processor_seconds": round(time.process_time(), 2),
        "peak_mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "switches": outcome.switches,
        "virtual_seconds": outcome.virtual_seconds,
    }


def row_name(workers, steps, representatives):
    return f"{workers:,} workers, {steps} steps" + ", representatives" * representatives


def table():
    """Rows of the table of docs: what, figure, command."""
    figures = stored.Figures("virtual_scale")
    command = "python -m benchmarks.measure.virtual_scale"
    for workers, steps, representatives in CASES:
        title = row_name(workers, steps, representatives)
        text = (
            f"{workers:,} simulated workers, {steps} steps, a bucket per tensor, "
            + (
                'by representatives (`workers="classes"`)'
                if representatives
                else "all workers run"
            )
        )
        seconds = figures.text(f"{title}, seconds", ".2g")
        memory = figures.text(f"{title}, memory", ".2g")
        yield [text, f"{seconds} s, {memory} GB", f"`{command}`"]


def show(store, row):
    """Prints a row, and adds its figures to a `stored.Store`."""
    print(json.dumps(row), flush=True)
    title = row_name(row["workers"], row["steps"], row["representatives"])
    store.add(f"{title}, seconds", row["seconds"], "s")
    store.add(f"{title}, processor", row["processor_seconds"], "s")
    store.add(f"{title}, memory", row["peak_mebibytes"] * 2**20 / 1e9, "GB")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--representatives", action="store_true")
    stored.add_option(parser)
    args = parser.parse_args()
    with stored.Store("virtual_scale", args.store) as store:
        if args.workers:
            show(store, measure(args.workers, args.steps, args.representatives))
            return
        for workers, steps, representatives in CASES:
            module = "benchmarks.measure.virtual_scale"
            command = [sys.executable, "-m", module, "--workers", workers]
            command += ["--steps", steps, *["--representatives"] * representatives]
            done = subprocess.run(
                [str(word) for word in command],
                cwd=stored.ROOT,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            show(store, json.loads(done.stdout))


if __name__ == "__main__":
    main()
