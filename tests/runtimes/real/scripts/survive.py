"""Trains until the file ``enough`` is there, or for some steps; notes each that is done.

Arguments: the folder for all of that; what to do: ``until``, or ``steps:N`` (waits before
step 20 until the file ``go`` is there), or ``evaluate`` (as ``until``; worker 1 evaluates
before its step 20 until ``go`` is there).
"""

import os
import sys
import time
from itertools import count
from pathlib import Path

folder, what = Path(sys.argv[1]), sys.argv[2]
rank = int(os.environ["RANK"])
life = os.environ.get("LIFE") or os.environ.get("PACELINE_INCARNATION", "0")
PAUSE = float(os.environ.get("PAUSE", "0.002"))
part = folder / f"part-{rank}"
part.write_text(f"{os.getpid()} {life}")
part.replace(folder / f"process-{rank}")

# Only now: a worker may be killed while it imports.
import torch  # noqa: E402

import paceline  # noqa: E402
from paceline.testing.problems import (  # noqa: E402
    Quadratic,
    centers_of,
    flat_parameters,
)


def wait_for(name: str) -> None:
    while not (folder / name).exists():
        time.sleep(0.002)


paceline.init()
torch.manual_seed(10 * rank + int(life))  # no two lives make the same
task = Quadratic()
plain = torch.optim.SGD(task.parameters(), lr=0.05, momentum=0.9)
model = torch.nn.Sequential(task)
model.frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
model.register_buffer("features", torch.randn(5))
optimizer = paceline.distribute(model, plain, buckets="wfbp", method="asp")
# As a script does that loads a checkpoint: in each of its lives.
model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
steps = int(what.removeprefix("steps:")) if what.startswith("steps:") else None
with open(folder / f"steps-{rank}-{life}", "a", buffering=1) as record:
    for step in count(optimizer.first_step):
        if step == steps or (steps is None and (folder / "enough").exists()):
            break
        if step == 20 and steps is not None:
            wait_for("go")
        if step == 20 and rank == 1 and what == "evaluate":
            (folder / "evaluating").touch()
            while not (folder / "go").exists():
                with torch.no_grad():
                    model(centers_of(rank, step))
        optimizer.zero_grad()
        model(centers_of(rank, step)).backward()
        time.sleep(PAUSE)  # what a larger model computes
        optimizer.step()
        print(step, file=record)
optimizer.finish()
result = torch.cat([flat_parameters(task), model.frozen, model.features])
torch.save(result, folder / f"result-{rank}")
