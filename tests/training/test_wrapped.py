"""Other tools that average gradients or spread parameters, beside distribute."""

import os
import subprocess
import sys
from pathlib import Path

from tests.real.helpers import free_port

ROOT = Path(__file__).parent.parent.parent


def test_other_tools_on_the_same_model_are_refused_in_words():
    """In a process of its own: torch's tools need a process group."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.wrapped_cases"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ
        | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all tried"
