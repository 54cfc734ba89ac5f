"""One rank ends in a way of its own; ``dies.py "kill 1 barrier"``."""

import os
import signal
import sys

import torch
import torch.distributed as dist

import paceline

HOW, WHO, WHERE = sys.argv[1].split()

paceline.init()
chosen = paceline.rank() == int(WHO)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = paceline.distribute(model, optimizer)


def end():
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("boom")


steps = 5 if HOW == "early" and chosen else 40
with optimizer.join():
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if step == 10 and chosen and WHERE == "training" and HOW != "early":
            end()
if WHERE == "barrier":
    if chosen:
        end()
    dist.barrier()
