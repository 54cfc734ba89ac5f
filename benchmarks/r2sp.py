"""What turns gain over barriers, and over none, where workers share a server's link.

    python benchmarks/r2sp.py                  # the table
    python benchmarks/r2sp.py --json

8 equal workers with links like the server's, 8 layers of 100 kB, in virtual time. Computing
takes T_compute a step; T_sync is what textbook bsp over the server (one bucket, sent after
backward) spends beyond it: everybody's gradient to the server, then all parameters back.
The figure is steps a second of all workers together, over those of textbook bsp, while all of
them are at work and r2sp's warm-up is over. Every other column takes each method at its
best: a bucket for each layer, sent while backward runs.

With jitter of 0 nothing but the network pushes workers of asp out of step; with 5 % they
spread by themselves. That bsp with 8 buckets gains as much as textbook r2sp with 8 workers is no
law: one leaves an eighth of T_sync exposed, the last bucket's, and the other one its own.
"""

import argparse
import json

import torch

import paceline
from paceline.cluster import Cluster, Rack, ServerHost
from paceline.runtimes.simulated import ComputeModel, Simulation

WORKERS = 8
LAYERS, LAYER_BYTES = 8, 100_000
RATE = 12.5e6
STEPS = 100
MEASURED = 40
TEXTBOOK = "overlap=false,buckets=single"
BEST = "buckets=wfbp"
METHODS = {
    "bsp, textbook": f"bsp:collective=parameter-server,{TEXTBOOK}",
    "bsp": f"bsp:collective=parameter-server,{BEST}",
    "asp, textbook": f"asp:{TEXTBOOK}",
    "asp": f"asp:{BEST}",
    "ssp, textbook": f"ssp:{TEXTBOOK}",
    "ssp": f"ssp:{BEST}",
    "r2sp, textbook": f"r2sp:{TEXTBOOK}",
    "r2sp": f"r2sp:{BEST}",
}
BASE = next(iter(METHODS))
RATIOS = (0.25, 0.5, 1.0, 2.0)
JITTERS = (0.0, 0.05)


def throughput(method, compute, jitter, steps=STEPS, measured=MEASURED):
    """Steps a second of all workers, from when each has *measured* steps to go until the
    first has none."""
    rack = Rack(workers=WORKERS, link=RATE, latency=0.0)
    cluster = Cluster((rack,), servers=(ServerHost(),))
    ends = [[] for _ in range(WORKERS)]

    def train(rank):
        model = torch.nn.Module()
        model.layers = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(LAYER_BYTES // 4)) for _ in range(LAYERS)
        )
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
        optimizer = paceline.distribute(model, sgd, method=method)
        for _ in range(steps):
            optimizer.zero_grad()
            sum(layer.sum() for layer in model.layers).backward()
            optimizer.step()
            ends[rank].append(paceline.now())
        optimizer.finish()

    # A model that is never called has no forward pass to charge for.
    model = ComputeModel(forward=0.0, backward=compute, jitter=jitter)
    Simulation(cluster, compute=model).run(train)
    start = max(mine[-1 - measured] for mine in ends)
    stop = min(mine[-1] for mine in ends)
    done = sum(start < end <= stop for mine in ends for end in mine)
    return done / (stop - start)


def rows():
    # Textbook bsp with nothing to compute: its step is T_sync.
    sync = WORKERS / throughput(METHODS[BASE], 0.0, 0.0, steps=12, measured=10)
    for jitter in JITTERS:
        for ratio in RATIOS:
            figures = {
                name: throughput(method, sync / ratio, jitter)
                for name, method in METHODS.items()
            }
            relative = {name: value / figures[BASE] for name, value in figures.items()}
            yield {"jitter": jitter, "sync_over_compute": ratio, **relative}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    shown = [name for name in METHODS if name != BASE]
    if not arguments.json:
        print(f"| jitter | T_sync/T_compute | {' | '.join(shown)} |")
        print("|---" * (len(shown) + 2) + "|")
    found = []
    for row in rows():
        found.append(row)
        if not arguments.json:
            cells = " | ".join(f"{row[name]:.2f}" for name in shown)
            ratio = row["sync_over_compute"]
            print(f"| {row['jitter']:.0%} | {ratio:g} | {cells} |", flush=True)
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
