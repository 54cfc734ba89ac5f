"""What processes of tests have imported before they are forked (see `tests.support.forked`).

Nothing here may start a thread, or a process group: only importing is copied safely.
"""

import sys
import threading
from pathlib import Path

import pytest  # noqa: F401 - a child looks at its parent's main module
import torch.distributed.run  # noqa: F401

import paceline.cli
import paceline.core.distribute
import paceline.runtimes.emulated.keeper
import paceline.runtimes.real.runtime
import paceline.testing  # noqa: F401
from paceline.torch_internals import load_lazy_modules

load_lazy_modules()

THREADS = len(list(Path("/proc/self/task").iterdir()))
if THREADS > 1 or threading.active_count() > 1:
    sys.exit(
        f"tests.support.preloaded: {THREADS} threads: forking would leave them behind"
    )
