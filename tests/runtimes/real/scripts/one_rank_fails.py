"""Train until something happens to one worker; FOLDER gets each worker's progress.

one_rank_fails.py WHAT FOLDER: WHAT is raise, exit, finally (an exception through a finally that
destroys the group), skip (one worker calls a collective that the others do not), late
(the same after everybody has finished), or wait (for what comes from outside).
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import paceline

WHAT, FOLDER = sys.argv[1], Path(sys.argv[2])
UNLUCKY, STEP = 1, 5
scratch = []
STEPS = 12 if WHAT in ("skip", "late") else 1_000_000


def main():
    paceline.init()
    rank = paceline.rank()
    if rank == UNLUCKY and WHAT not in ("skip", "wait"):  # who is killed cannot tidy up
        scratch.append(tempfile.TemporaryDirectory(prefix="script-"))
    torch.manual_seed(0)
    layers = [torch.nn.Linear(60, 60) for _ in range(6)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = paceline.distribute(model, optimizer, buckets="wfbp")
    for step in range(STEPS):
        note(rank, step)
        if rank == UNLUCKY and step == STEP:
            if WHAT in ("raise", "finally"):
                raise ValueError("this worker has bad luck")
            if WHAT == "exit":
                sys.exit(3)
        optimizer.zero_grad()
        model(torch.ones(16, 60)).square().mean().backward()
        optimizer.step()
    if WHAT == "late":
        optimizer.finish()
    if rank == UNLUCKY:
        dist.all_reduce(torch.ones(7))


def note(rank, step):
    path = FOLDER / f"progress-{rank}"
    unfinished = path.with_suffix(".part")
    unfinished.write_text(f"{os.getpid()} {os.environ['MASTER_PORT']} {step}")
    unfinished.replace(path)


if WHAT == "finally":
    try:
        main()
    finally:
        dist.destroy_process_group()
else:
    main()
