"""How many simulated workers one process holds: real seconds and memory.

    python benchmarks/virtual_scale.py                 # 512 x 5 steps, 2048 x 3 steps
    python benchmarks/virtual_scale.py --workers 512 --steps 5

Each run is a process of its own: a six-tensor model, a bucket per tensor, method bsp.
Bounds that this project keeps on a 2-core machine: 15 s for 512 x 5, 60 s and 8 GiB for
2,048 x 3.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

CASES = ((512, 5), (2048, 3))


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


def measure(workers, steps):
    from paceline.cluster import uniform_cluster
    from paceline.runtimes.simulated import Simulation

    start = time.perf_counter()
    simulation = Simulation(uniform_cluster(workers, "1gbit", "50us"))
    outcome = simulation.run(lambda rank: train(steps))
    print(
        json.dumps(
            {
                "workers": workers,
                "steps": steps,
                "seconds": round(time.perf_counter() - start, 2),
                "peak_mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                // 1024,
                "switches": outcome.switches,
                "virtual_seconds": outcome.virtual_seconds,
            }
        )
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    if args.workers:
        measure(args.workers, args.steps)
        return
    for workers, steps in CASES:
        command = [sys.executable, __file__, "--workers", workers, "--steps", steps]
        subprocess.run([str(word) for word in command], check=True)


if __name__ == "__main__":
    main()
