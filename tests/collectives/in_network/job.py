"""A job whose gradients are summed by aggregators: COLLECTIVE STEPS [stop at step N until FILE
is there (0: trains until then)] [what goes wrong at step 3]. Says each step, and at its end
what it has learnt."""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch

import paceline
from paceline.collectives.in_network.server import AggregatorServer

collective, steps = sys.argv[1], int(sys.argv[2])
stops, file = (int(sys.argv[3]), Path(sys.argv[4])) if len(sys.argv) > 4 else (0, None)
wrong = sys.argv[5] if len(sys.argv) > 5 else ""

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(40, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = paceline.distribute(
    model, optimizer, method="bsp", collective=collective, buckets="wfbp"
)
rank = paceline.rank()


def fail_once():
    """The next frames that come to a server beside this worker end its thread."""
    take = AggregatorServer._take

    def failing(server, *words):
        AggregatorServer._take = take
        raise RuntimeError("no room for sums")

    AggregatorServer._take = failing


scaler = torch.amp.GradScaler("cpu", enabled=wrong == "scaled infinity")
generator = torch.Generator().manual_seed(rank)
for step in range(1, steps + 1):
    inputs = torch.randn(16, 40, generator=generator)
    loss = model(inputs).square().mean()
    if step == 3 and rank == 1:
        if wrong == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif wrong == "server fails":
            fail_once()
        elif wrong:
            loss = loss * float("inf")
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step}", flush=True)
    while step == stops and not file.exists():
        time.sleep(0.01)
    if stops == 0 and file is not None and not wrong:
        over = torch.tensor(float(file.exists()))
        torch.distributed.all_reduce(over)
        if over:
            break
learnt = torch.cat([p.detach().flatten() for p in model.parameters()])
print("finite", bool(learnt.isfinite().all()))
print("digest", hashlib.sha256(learnt.numpy().tobytes()).hexdigest())
