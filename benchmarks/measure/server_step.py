"""A step of bsp over a parameter server against PyTorch DDP's, 25 MB over loopback.

    python -m benchmarks.measure.server_step                       # 2 and 4 processes
    python -m benchmarks.measure.server_step --processes 2 --pairs 60

The model has 16 equal layers and nothing to compute: all that is compared is moving and
adding up. The server is a process of its own, beside rank 0. Sides take turns in short
blocks of steps in one job (see overhead.py); 2 cores are shared by all processes.
"""

import argparse

import torch
import torch.distributed as dist

from benchmarks.measure import overhead
from benchmarks.measure.harness import ddp, example, on_processes, ours

METHODS = (
    "bsp:collective=parameter-server,buckets=wfbp",
    "bsp:collective=parameter-server,buckets=ddp",
)


def make_layers():
    model = example("layers").Layers(16, 25.0, 0.0, 0.0)
    x = torch.zeros(())
    return model, lambda model: (model(x) - 1.0) ** 2


def measure(method, pairs, steps):
    overhead.compare(
        f"{dist.get_world_size()} processes, {method}",
        make_layers,
        ours(method=method),
        ddp(),
        pairs,
        steps,
        warm_up=5,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--method", nargs="+", default=METHODS)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5, help="steps a block")
    given = parser.parse_args()
    for count in given.processes:
        for method in given.method:
            on_processes(count, measure, method, given.pairs, given.steps)


if __name__ == "__main__":
    main()
