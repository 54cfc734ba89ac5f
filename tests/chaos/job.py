"""The script of each job: a training whose parameters count the gradients of each worker.

``job.py FOLDER STEPS SAVE_EVERY``. FOLDER gets a file with each worker process's number, the steps that it has done, the checkpoint
on its disk, and each worker's result.
"""

import os
import sys
from pathlib import Path

folder, steps, save_every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

import torch  # noqa: E402 - a worker may be killed while it imports

import paceline  # noqa: E402
from tests.chaos.counting import Counting, counted  # noqa: E402


class Progress:
    """The number of steps done, as a checkpoint keeps it."""

    done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


paceline.init()
rank, workers = paceline.rank(), paceline.world_size()
process = os.getpid()
(folder / f"process-{rank}-{process}").touch()
model = Counting(workers)
plain = torch.optim.SGD(model.parameters(), lr=1.0)
# `auto` chooses buckets itself.
own = {} if os.environ.get("PACELINE_METHOD") == "auto" else {"buckets": "wfbp"}
optimizer = paceline.distribute(model, plain, **own)
progress = Progress()
progress.done = optimizer.first_step
if save_every and (folder / "disk" / "checkpoint").exists():
    paceline.load(folder / "disk" / "checkpoint", progress=progress)
with (folder / f"steps-{rank}-{process}").open("w", buffering=1) as notes:
    for step in range(progress.done, steps):
        optimizer.zero_grad()
        model(rank).backward()
        optimizer.step()
        progress.done = step + 1
        print(step, file=notes)
        print(f"step {step}", flush=True)
        if save_every and progress.done % save_every == 0 and progress.done < steps:
            paceline.save(folder / "disk" / "checkpoint", progress=progress)
optimizer.finish()
# Renamed, so that a worker that is killed meanwhile has no result.
part = folder / f"part-{rank}"
torch.save(counted(model), part)
part.replace(folder / f"result-{rank}")
