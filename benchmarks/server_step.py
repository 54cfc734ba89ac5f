"""A step of bsp over a parameter server against PyTorch DDP's, 25 MB over loopback.

    python benchmarks/server_step.py                       # 2 and 4 processes
    python benchmarks/server_step.py --processes 2 --pairs 60

The model has 16 equal layers and nothing to compute: all that is compared is moving and
adding up. The server is a process of its own, beside rank 0. Sides take turns in short
blocks of steps in one job (see overhead.py); 2 cores are shared by all processes.
"""

import argparse
import os
import subprocess
import sys

import overhead
import torch
import torch.distributed as dist

import paceline

METHODS = (
    "bsp:collective=parameter-server,buckets=wfbp",
    "bsp:collective=parameter-server,buckets=ddp",
)


def make_layers():
    model = overhead.example("layers").Layers(16, 25.0, 0.0, 0.0)
    x = torch.zeros(())
    return model, lambda model: (model(x) - 1.0) ** 2


def ours(method):
    def wrap(model, optimizer):
        return model, paceline.distribute(model, optimizer, method=method)

    return wrap


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--method", nargs="+", default=METHODS)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5, help="steps a block")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        for count in arguments.processes:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc-per-node={count}", __file__, *sys.argv[1:]]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environment, check=False)
            if done.returncode:
                sys.exit(done.returncode)
        return
    paceline.init()
    for method in arguments.method:
        overhead.compare(
            f"{dist.get_world_size()} processes, {method}",
            make_layers,
            ours(method),
            overhead.ddp(None),
            arguments.pairs,
            arguments.steps,
            warm_up=5,
        )


if __name__ == "__main__":
    main()
