"""Rank 1 dies in training; rank 0 catches the error and takes longer than others have to write
its emergency checkpoint, or waits for ever in a collective: ``saves_when_lost.py save|hang``."""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

import paceline
from paceline.timeouts import timeouts

paceline.init()
never = dist.new_group(
    [0, 1], backend="gloo"
)  # whose member is alive, and does not come
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = paceline.distribute(model, optimizer, method="bsp:buckets=ddp")
try:
    for step in range(50):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if step == 3 and paceline.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
except Exception:
    if sys.argv[1] == "hang":
        if paceline.rank() == 0:
            dist.all_reduce(torch.zeros(1), group=never)
        threading.Event().wait()  # rank 1 only ends when its grace is over
    if paceline.rank() == 0:
        began = time.monotonic()
        with open("emergency.part", "wb") as file:
            while time.monotonic() < began + 2 * timeouts.collective_grace:
                file.write(b"x" * 1000)
                time.sleep(0.1)
        os.replace("emergency.part", "emergency.pt")
