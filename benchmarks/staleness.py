"""What bounded staleness gains where compute times differ, and no communication counts.

    python benchmarks/staleness.py                  # the table
    python benchmarks/staleness.py --json

16 workers in four speed classes, 1 : 1.5 : 2 : 3 (and all equal), in virtual time, over a
network that never is the limit; 400 steps each; the parameter server takes no time. The
figure is steps a second, from the first step's start to the slowest worker's end, over
those of bsp. With persistent differences ssp ends at the slowest worker's pace, whatever
its bound: it gains what jitter costs a barrier. asp is given 400 steps of its slowest
worker, and counts the steps of all.
"""

import argparse
import json

import torch

import paceline
from paceline.cluster import Cluster, Rack
from paceline.runtimes.simulated import ComputeModel, Simulation

STEPS = 400
STEP_SECONDS = 0.1
METHODS = ("bsp:collective=parameter-server", "ssp", "ssp:staleness=10", "asp")
CLASSES = {"1 : 1.5 : 2 : 3": (1.0, 1.5, 2.0, 3.0), "all equal": (1.0,) * 4}


def throughput(method, slownesses, jitter, workers=16, steps=STEPS, seed=0):
    """Steps a second of all workers together, until the slowest has done *steps*."""
    speeds = tuple(1 / slownesses[w * 4 // workers] for w in range(workers))
    rack = Rack(workers=workers, link=1e15, latency=0.0, speed=speeds)
    slowest = max(slownesses)
    ends = {}

    def train(rank):
        model = torch.nn.Linear(2, 2)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
        optimizer = paceline.distribute(model, sgd, method=method, buckets="single")
        start = paceline.now()
        # Who waits for nobody does as many more steps as it is faster.
        own = steps
        if method == "asp":
            own = round(steps * slowest * speeds[rank])
        x = torch.ones(1, 2)
        for _ in range(own):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        ends[rank] = own, paceline.now() - start
        optimizer.finish()

    compute = ComputeModel(
        forward=STEP_SECONDS / 3,
        backward=2 * STEP_SECONDS / 3,
        jitter=jitter,
        seed=seed,
    )
    Simulation(Cluster((rack,)), compute=compute).run(train)
    return sum(own / seconds for own, seconds in ends.values())


def rows():
    for name, slownesses in CLASSES.items():
        for jitter in (0.0, 0.05, 0.2):
            figures = {m: throughput(m, slownesses, jitter) for m in METHODS}
            base = figures[METHODS[0]]
            yield {
                "classes": name,
                "jitter": jitter,
                **{method: value / base for method, value in figures.items()},
            }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = []
    if not arguments.json:
        print("| classes | jitter | ssp | ssp:staleness=10 | asp |")
        print("|---|---|---|---|---|")
    for row in rows():
        found.append(row)
        if not arguments.json:
            cells = " | ".join(f"{row[m]:.3f}" for m in METHODS[1:])
            print(f"| {row['classes']} | {row['jitter']:.0%} | {cells} |", flush=True)
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
