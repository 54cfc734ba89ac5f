"""The automatic plan against DDP's bucket rule over loopback, 4 processes, in one job.

    python benchmarks/automatic_plan.py
    python benchmarks/automatic_plan.py --model digits --pairs 100

Both sides are paceline: ``buckets="optimal"`` once it has settled (it keeps DDP's rule where
a trial says that this is faster) and ``buckets="ddp"``. Sides take turns as in
``overhead.py``, whose pairing and bounds these are.
"""

import argparse
import os
import subprocess
import sys

import overhead
import torch
import torch.distributed as dist
import torch.nn.functional as F

import paceline


def make_bytes_lm():
    module = overhead.example("bytes_lm")
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (8, module.CONTEXT + 1))

    def loss(model):
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return module.ByteModel(), loss


def make_many():
    """100 tensors: 50 linear layers."""
    layers = [torch.nn.Linear(96, 96) for _ in range(50)]
    x = torch.randn(32, 96)
    return torch.nn.Sequential(*layers), lambda model: model(x).square().mean()


MODELS = {
    "digits": overhead.make_digits,
    "bytes_lm": make_bytes_lm,
    "many": make_many,
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=150)
    parser.add_argument("--steps", type=int, default=8, help="steps a block")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={args.workers}", __file__, *sys.argv[1:]]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        sys.exit(subprocess.run(command, env=environment, check=False).returncode)
    dist.init_process_group("gloo")
    paceline.init()
    for name in args.model or MODELS:
        overhead.compare(
            f"{name}, automatic plan against DDP's rule",
            MODELS[name],
            overhead.ours("optimal"),
            overhead.ours("ddp"),
            args.pairs,
            args.steps,
            warm_up=overhead.SETTLING_STEPS,
            noise="DDP's rule / itself",
        )


if __name__ == "__main__":
    main()
