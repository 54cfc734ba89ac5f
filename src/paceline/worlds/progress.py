"""How far workers have come, as their launcher learns it.

A supervisor asks after a worker has died: that is in a file, which outlives its writer. The
rules of an emulated cluster take effect in a step: worker 0 says each on a socket.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

FILE_VARIABLE = "PACELINE_PROGRESS_FILE"
"""Where a worker writes the number of the step that it has done."""
SOCKET_VARIABLE = "PACELINE_PROGRESS"
"""The launcher's socket, where worker 0 says which step it has ended."""


def file_of(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where this worker is to note its steps, if anywhere."""
    path = environment.get(FILE_VARIABLE)
    return Path(path) if path else None


def noted(path: Path) -> int:
    """The step that a worker has noted; 0: none. (It may have died while it wrote one.)"""
    try:
        return int(path.read_text() or 1)
    except (OSError, ValueError):
        return 0


def teller(
    environment: Mapping[str, str] = os.environ,
) -> Callable[[int], None] | None:
    """What tells the launcher of each step, where it listens."""
    path = environment.get(SOCKET_VARIABLE)
    if not path:
        return None
    launcher = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    launcher.connect(path)
    return lambda step: launcher.sendall(b"%d\n" % step)
