"""`job.py` with a defect, the control of an invariant: ``broken_job.py FOLDER STEPS SAVE_EVERY DEFECT``."""

import itertools
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import paceline
from tests.chaos import counting

STEP = 7
"""The step of each process in which a defect of the training shows."""


def hangs() -> None:
    after_finish(lambda: time.sleep(10_000))


def ends_early() -> None:
    torch.save = lambda *_: sys.exit(0)


def leaves_a_process() -> None:
    after_finish(lambda: subprocess.Popen(["sleep", "10000"], start_new_session=True))


def leaves_a_file() -> None:
    after_finish(lambda: Path(tempfile.gettempdir(), "left").touch())


def refuses_to_start_again() -> None:
    if os.environ.get("PACELINE_INCARNATION", "0") != "0":
        sys.exit(2)


def counts_a_gradient_twice() -> None:
    in_step(lambda loss: loss * 2)


def loses_a_gradient() -> None:
    in_step(lambda loss: loss * 0)


def replicas_differ() -> None:
    counted = counting.counted
    counting.counted = lambda model: counted(model) - paceline.rank()


def truncates_its_checkpoint() -> None:
    save = paceline.save

    def changed(folder: Path, **objects: object) -> None:
        save(folder, **objects)
        for file in Path(folder).iterdir():
            os.truncate(file, file.stat().st_size // 2)

    paceline.save = changed


def after_finish(then: Callable[[], object]) -> None:
    """Do *then* when a worker has finished."""
    finish = paceline.DistributedOptimizer.finish

    def changed(optimizer: paceline.DistributedOptimizer) -> None:
        finish(optimizer)
        then()

    paceline.DistributedOptimizer.finish = changed


def in_step(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the loss of one step."""
    forward, step = counting.Counting.forward, itertools.count()

    def changed(model: counting.Counting, rank: int) -> torch.Tensor:
        loss = forward(model, rank)
        return change(loss) if next(step) == STEP else loss

    counting.Counting.forward = changed


globals()[sys.argv[4].replace(" ", "_")]()
runpy.run_path(str(Path(__file__).with_name("job.py")))
