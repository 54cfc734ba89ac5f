"""Saves after steps 3, 5, 8 and 10, and at the end; worker 0 dies while it saves after step 5, and comes back
before the others' step 9. Gradients are one: checkpoints tell how many are in them.

Argument: the folder for all of that, in which the checkpoint ``begin`` is loaded.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import paceline
from paceline.testing.task import Counting

folder = Path(sys.argv[1])
rank = int(os.environ["RANK"])
life = int(os.environ.get("PACELINE_INCARNATION", "0"))


def wait_for(name: str) -> None:
    while not (folder / name).exists():
        time.sleep(0.002)


class Script:
    """A state of the script's own: as it is asked for, worker 0 dies, once."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        if self.step == 5 and life == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


script = Script()
if life:
    wait_for("eighth")
paceline.init()
model = Counting()
plain = torch.optim.SGD(model.parameters(), lr=0.25)
optimizer = paceline.distribute(model, plain, fusion="wfbp", method="asp")
paceline.load(folder / "begin", script=script)
for step in range(optimizer.first_step, 12):
    if step == 9:
        if rank == 0:
            (folder / "back").touch()
        wait_for("back")
    optimizer.zero_grad()
    model().backward()
    optimizer.step()
    script.step = step
    if step in (3, 5, 8, 10):
        paceline.save(folder / str(step), script=script)
    if step == 8 and rank == 1:
        (folder / "eighth").touch()
optimizer.finish()
paceline.save(folder / "end", script=script)
