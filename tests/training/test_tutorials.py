"""Two plain DDP scripts, and the same moved by the diff in docs/from-ddp.md."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "tutorials"
WRAP = re.compile(r"^(\s*)model = DistributedDataParallel\(model\)$", re.MULTILINE)


def moved(script):
    """The script after the one-line diff: DDP's wrapper out, `distribute` in."""
    assert len(WRAP.findall(script)) == 1
    script = WRAP.sub(r"\1optimizer = paceline.distribute(model, optimizer)", script)
    return "import paceline\n" + script


def losses(path, launcher, folder):
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("losses "))
    return json.loads(line.removeprefix("losses "))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["elastic_checkpoint", "language_model"],
)
def test_moved_script_has_the_same_loss_curve(name, tmp_path):
    plain = SCRIPTS / f"{name}.py"
    ours = tmp_path / f"{name}.py"
    ours.write_text(moved(plain.read_text()))
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    expected = losses(plain, torchrun, tmp_path)
    assert len(expected) >= 20
    assert expected[-1] < 0.9 * expected[0]
    assert losses(ours, torchrun, tmp_path) == pytest.approx(expected, rel=1e-5)
    virtual = ["paceline", "simulate", "--workers", "2", "--link", "100mbit"]
    assert losses(ours, virtual, tmp_path) == pytest.approx(expected, rel=1e-5)
