"""Train under asp until FOLDER has a file "enough": its workers end after the same step."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import paceline
from paceline.testing import inspect

folder = Path(sys.argv[1])
paceline.init()
rank = paceline.rank()
model = torch.nn.Linear(4, 1)
plain = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = paceline.distribute(model, plain, method="asp")
[server] = inspect(optimizer).endpoints
port = server.name.rpartition(":")[2]
enough = torch.zeros(())
while not enough:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if not (folder / f"ready-{rank}").exists():
        path = folder / f"ready-{rank}.part"
        path.write_text(f"{os.environ['MASTER_PORT']} {port}")
        path.rename(folder / f"ready-{rank}")
    enough = torch.tensor(float((folder / "enough").exists()))
    dist.all_reduce(enough)
optimizer.finish()
