"""The laws of a `Comm` in virtual time, and on three real processes in one job."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.virtual.helpers import run

from .cases import CASES, run_case

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("play", [False, True], ids=["priced", "played"])
@pytest.mark.parametrize("name", CASES)
def test_law_in_virtual_time(name, play):
    run(3, lambda rank: run_case(name), play=play)


def test_every_law_on_three_processes():
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node=3", "-m", "tests.collectives.all_cases"]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = set(done.stdout.splitlines())
    assert lines >= {f"rank {r} {name}: ok" for r in range(3) for name in CASES}
    assert lines >= {f"rank {r} leaves nothing" for r in range(3)}
