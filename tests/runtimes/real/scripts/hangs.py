"""Ranks that hang, or are slow alike; ``hangs.py "1 training" 0.5``: WHO hangs, and
WHERE, and after which time it is named."""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

import paceline
from paceline.timeouts import timeouts

WHO, WHERE, *METHOD = sys.argv[1].split()
timeouts.rank_hang = float(sys.argv[2])

paceline.init()
chosen = paceline.rank() == int(WHO)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = paceline.distribute(model, optimizer, method=(METHOD or ["bsp"])[0])
go_on = threading.Event()
signal.signal(signal.SIGUSR2, lambda *_: go_on.set())


def slow_function():
    while not go_on.wait(0.05):  # a signal is handled between two waits
        pass
    go_on.clear()


for step in range(8):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).sum()
    if WHERE == "all" and step in (0, 5):
        time.sleep(3 * timeouts.rank_hang)
    if chosen and WHERE == "training" and step in (5, 7):
        slow_function()
    loss.backward()
    optimizer.step()
if WHERE == "barrier":
    if chosen:
        slow_function()
    dist.barrier()
if WHERE == "stopped":
    if chosen:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()
