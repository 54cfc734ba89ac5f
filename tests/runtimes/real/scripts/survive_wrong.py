"""Workers of a job that survives that go wrong, as the first argument says:

- ``model``: worker 1 has another one;
- ``arguments``: of the script;
- ``use``: a group is added to the optimizer in step 2;
- ``caught``: worker 1's training breaks in its first life, and its script ends as if nothing had been.
"""

import argparse
import os

import torch

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("what", choices=("model", "use", "caught"))
what = parser.parse_args().what
paceline.init()
rank, life = paceline.rank(), os.environ["PACELINE_INCARNATION"]
width = 3 if what == "model" and rank == 1 else 2
model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = paceline.distribute(model, optimizer, method="asp", buckets="wfbp")


def fail(_: torch.Tensor) -> None:
    raise RuntimeError("a gradient that cannot be")


for step in range(optimizer.first_step, 4):
    if step == 2 and what == "use":
        optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    if step == 2 and what == "caught" and (rank, life) == (1, "0"):
        model[0].bias.register_hook(fail)
    try:
        model(torch.ones(1, 4)).sum().backward()
    except RuntimeError:
        print(f"worker {rank} caught it", flush=True)
        break
    optimizer.step()
    optimizer.zero_grad()
print(f"worker {rank} life {life} ends", flush=True)
