"""Every gradient is one, so parameters say how many were applied. Trains until the file
``enough`` is there; notes each step that is done.

Argument: the folder for all of that.
"""

import os
import sys
import time
from itertools import count
from pathlib import Path

folder = Path(sys.argv[1])
rank = int(os.environ["RANK"])
life = os.environ.get("PACELINE_INCARNATION", "0")
PAUSE = float(os.environ.get("PAUSE", "0.002"))
part = folder / f"part-{rank}"
part.write_text(f"{os.getpid()} {life}")
part.replace(folder / f"process-{rank}")

# Only now: a worker may be killed while it imports.
import torch  # noqa: E402

import paceline  # noqa: E402
from paceline.testing.problems import Counting, flat_parameters  # noqa: E402

RATE = 2.0**-6
"""Sums of such steps are exact."""

paceline.init()
model = Counting()
plain = torch.optim.SGD(model.parameters(), lr=RATE)
optimizer = paceline.distribute(model, plain, buckets="wfbp", method="asp")
with open(folder / f"steps-{rank}-{life}", "a", buffering=1) as record:
    for step in count(optimizer.first_step):
        if (folder / "enough").exists():
            break
        optimizer.zero_grad()
        model().backward()
        time.sleep(PAUSE)  # what a larger model computes
        optimizer.step()
        print(step, file=record)
optimizer.finish()
applied = -flat_parameters(model) * paceline.world_size() / RATE
torch.save(applied, folder / f"applied-{rank}")
