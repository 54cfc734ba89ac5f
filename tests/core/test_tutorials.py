"""Two plain DDP scripts, and the same moved by the diff in docs/tutorials/from-ddp.md."""

import json
import re
from pathlib import Path

import pytest

from tests.support import forked

SCRIPTS = Path(__file__).parent / "tutorials"
WRAP = re.compile(r"^(\s*)model = DistributedDataParallel\(model\)$", re.MULTILINE)


def moved(script):
    """The script after the one-line diff: DDP's wrapper out, `distribute` in."""
    assert len(WRAP.findall(script)) == 1
    script = WRAP.sub(r"\1optimizer = paceline.distribute(model, optimizer)", script)
    return "import paceline\n" + script


def losses(done):
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
    first, _ = forked.run_together(2, [plain], folder=tmp_path)
    expected = losses(first)
    assert len(expected) >= 20
    assert expected[-1] < 0.9 * expected[0]
    first, _ = forked.run_together(2, [ours], folder=tmp_path)
    assert losses(first) == pytest.approx(expected, rel=1e-5)
    virtual = ["-m", "paceline", "simulate", "--workers", 2, "--link", "100mbit", ours]
    done = forked.run(virtual, folder=tmp_path)
    assert losses(done) == pytest.approx(expected, rel=1e-5)
