"""Trains a little: ``own`` makes the process group itself,
``slow`` lets rank 1's input take its time."""

import sys
import time

import torch
import torch.distributed as dist

import paceline

words = sys.argv[1:]
if "own" in words:
    dist.init_process_group("gloo")
else:
    paceline.init()
torch.manual_seed(1)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
optimizer = paceline.distribute(model, optimizer, buckets="ddp")
for _ in range(8):
    if "slow" in words and paceline.rank() == 1:
        time.sleep(0.05)
    optimizer.zero_grad()
    model(torch.full((8, 64), 1.0 + dist.get_rank())).square().mean().backward()
    optimizer.step()
if "own" in words:
    dist.destroy_process_group()
