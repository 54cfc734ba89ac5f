"""Processes that a launcher has started: how they are ended, and how they have ended."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterable
from typing import Protocol

TERMINATE_SECONDS = 5.0
"""What a process has to end after SIGTERM."""


class Process(Protocol):
    """What `subprocess.Popen` and a process in an emulated host have in common."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


def wait_for_all(processes: Iterable[Process], seconds: float) -> None:
    """Until all have ended, or the time is up."""
    deadline = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def end_all(processes: Iterable[Process]) -> None:
    """Ask all to end, and end those that have not within `TERMINATE_SECONDS`."""
    alive = [process for process in processes if process.poll() is None]
    for process in alive:
        process.terminate()
    wait_for_all(alive, TERMINATE_SECONDS)
    for process in alive:
        if process.poll() is None:
            process.kill()
            process.wait()


def how_it_ended(status: int) -> str:
    """An exit status in words; negative: the signal."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"
