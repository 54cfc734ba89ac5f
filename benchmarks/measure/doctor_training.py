"""What `benchmarks/measure/doctor.py` has examined: a stand-in of equal layers, with a fault if one is asked for.

    paceline doctor benchmarks/measure/doctor_training.py --runtime simulated --link 400mbit \\
        -- --wait 2 --seconds 0.1
"""

import argparse
import time

import torch

import paceline
from paceline.interfaces import current_runtime

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--megabytes", type=float, default=8.0)
parser.add_argument("--forward", type=float, default=0.05)
parser.add_argument("--backward", type=float, default=0.1)
parser.add_argument(
    "--at-end", action="store_true", help="all gradients come at the end"
)
parser.add_argument(
    "--wait", type=int, default=-1, help="this worker waits for batches"
)
parser.add_argument("--seconds", type=float, default=0.1)
parser.add_argument("--steps", type=int, default=12)
arguments = parser.parse_args()

count = arguments.layers
size = int(arguments.megabytes * 1e6 / 4 / count) * 4
backward = [arguments.backward / count] * count
if arguments.at_end:
    backward = [0.0] * (count - 1) + [arguments.backward]  # the last is ready first

paceline.init()
model = paceline.stand_in(
    paceline.Workload(
        names=tuple(f"layer{i}" for i in range(count)),
        sizes=(size,) * count,
        forward=(arguments.forward / count,) * count,
        backward=tuple(backward),
        batch=8.0,
    )
)
plain = torch.optim.SGD(model.parameters(), lr=1e-6)
optimizer = paceline.distribute(model, plain)
runtime = current_runtime()
for _ in range(arguments.steps):
    if runtime.rank == arguments.wait:
        if runtime.clock.is_virtual:
            runtime.clock.charge(
                arguments.seconds * runtime.cluster.speeds[runtime.rank], "input"
            )
        else:
            time.sleep(arguments.seconds)
    optimizer.zero_grad()
    model(torch.full((8,), 1.0 + runtime.rank)).backward()
    optimizer.step()
optimizer.finish()
