"""Every case on three real processes, in one job: a launch costs more than they do."""

import os
import subprocess
import sys
from pathlib import Path

from .cases import CASES

ROOT = Path(__file__).parent.parent.parent


def test_every_case_on_three_processes(tmp_path):
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node=3", "-m", "tests.training.all_cases"]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PACELINE_TEST_FOLDER": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = set(done.stdout.splitlines())
    assert lines >= {f"rank {r} {name}: ok" for r in range(3) for name in CASES}
