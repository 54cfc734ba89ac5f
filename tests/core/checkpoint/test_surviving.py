"""`save` and `load` where workers meet only at their servers, and die: in real processes."""

import pytest
import torch

import paceline
from paceline.core.checkpoint import files
from paceline.testing.problems import Counting
from tests.core.checkpoint.test_save_load import Counter
from tests.support.hanging import SECONDS
from tests.support.processes import run
from tests.support.training import simulate

RATE = 0.25
KEPT = "training0.method.asp"


def begin(method):
    model = Counting()
    plain = torch.optim.SGD(model.parameters(), lr=RATE)
    return model, paceline.distribute(model, plain, method=method, buckets="wfbp")


def write(folder, steps):
    """A checkpoint in which so many steps were done."""
    model, optimizer = begin("bsp")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-RATE * steps)
    paceline.save(folder, script=Script(steps))
    optimizer.finish()


class Script(Counter):
    """As the script has it."""

    def state_dict(self):
        return {"step": self.value}

    def load_state_dict(self, state):
        self.value = state["step"]


def read(folder):
    """How many steps' gradients are in a checkpoint, what its script had, and whose parts it
    has."""
    model, optimizer = begin("bsp")
    script = Script(None)
    paceline.load(folder, script=script)
    optimizer.finish()
    values = torch.cat([-p.detach().reshape(-1) / RATE for p in model.parameters()])
    assert values.min() == pytest.approx(values.max().item(), abs=1e-3)
    own = {place.stem: files.read(place) for place in folder.glob("worker-*")}
    kept = {name: part[KEPT] for name, part in own.items() if KEPT in part}
    return values.mean().item(), script.value, kept


def workers(*ranks, step):
    return {f"worker-{rank}": {"rank": rank, "step": step} for rank in ranks}


@pytest.mark.slow
def test_who_dies_and_who_comes_back_destroys_no_checkpoint(tmp_path):
    """Of three workers the first dies while it saves, and is back for the last save: in each
    checkpoint is all that was done by then, and a part of each that trained."""
    folder = tmp_path / "here"
    folder.mkdir()
    simulate(1, lambda rank: write(folder / "begin", 100))
    job = run(
        3,
        "survive_save.py",
        folder,
        folder=tmp_path / "job",
        options=["--survive"],
        forked="all",
    )
    job.wait(2 * SECONDS).check_ended_well()

    def found(name):
        (result,) = simulate(1, lambda rank: read(folder / name))
        return result

    assert found("3") == (pytest.approx(104, abs=1e-3), 3, workers(0, 1, 2, step=3))
    # Worker 0 did 6 steps by then, and the others 9.
    assert found("8") == (pytest.approx(108, abs=1e-3), 8, workers(1, 2, step=8))
    # It is back from step 9 on, and what it loads again is not used.
    assert found("10") == (pytest.approx(110, abs=1e-3), 10, workers(0, 1, 2, step=10))
    assert found("end") == (pytest.approx(111, abs=1e-3), 11, {})
    together = {path.name for path in folder.glob("*.with-*")}
    assert together >= {f"{step}.with-{r}" for step in (3, 10) for r in range(3)}
    assert "8.with-2" in together
    left = {path.name for path in folder.iterdir()} - together
    assert left - {"5.partial"} == {"begin", "3", "8", "10", "end", "eighth", "back"}
