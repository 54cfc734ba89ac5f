"""Saves after steps 3, 5, 8 and 10, and at the end; worker 0 dies while it saves after step 5, and comes back
before the others' step 9. Gradients are one: checkpoints tell how many are in them.

Argument: the folder for all of that, in which the checkpoint ``begin`` is loaded.
"""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

import paceline
from paceline.methods.asp import ASP
from paceline.methods.push_pull import PushPullWorker
from paceline.testing.problems import Counting

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


@dataclass(frozen=True, kw_only=True)
class Counts(ASP):
    """asp, whose workers each keep the number of their last step; all of those who save form
    its result together."""

    consolidates_together: ClassVar[bool] = True

    def start(self, run: Any) -> PushPullWorker:
        return CountsWorker(run, self)


class CountsWorker(PushPullWorker):
    def save_state(self) -> dict[str, Any]:
        return {"rank": rank, "step": script.step}

    def load_state(self, saved: dict[str, Any]) -> None:
        assert saved["rank"] == rank

    def consolidate(self) -> Any:
        if script.step:
            (folder / f"{script.step}.with-{rank}").touch()
        return super().consolidate()


script = Script()
if life:
    wait_for("eighth")
paceline.init()
model = Counting()
plain = torch.optim.SGD(model.parameters(), lr=0.25)
optimizer = paceline.distribute(model, plain, buckets="wfbp", method=Counts())
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
