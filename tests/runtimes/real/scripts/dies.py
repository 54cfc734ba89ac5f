"""One rank ends in a way of its own; ``dies.py "kill 1 barrier"``. With a method as one more
word that is trained, and each rank has a forked helper that lives until it is killed."""

import os
import signal
import sys

import torch
import torch.distributed as dist

import paceline

HOW, WHO, WHERE, *METHOD = sys.argv[1].split()

paceline.init()
chosen = paceline.rank() == int(WHO)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = paceline.distribute(model, optimizer, method=(METHOD or ["bsp"])[0])
if METHOD and os.fork() == 0:
    signal.pause()
    os._exit(0)


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
