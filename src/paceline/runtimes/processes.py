"""Processes that a launcher has started: how they are ended, and how they have ended.

Theory of operation
-------------------
A launcher that is killed ends nobody, so its workers ask the kernel to end them with it
(PR_SET_PDEATHSIG). That is too late where the launcher was gone before: so a worker looks, after it has
asked, whether the launcher that its environment names is alive. Its process number may be somebody else's by then:
the moment when it began tells them apart.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Protocol

from paceline.timeouts import timeouts

LAUNCHER_VARIABLE = "PACELINE_LAUNCHER"
"""To a worker: its launcher's process number, and when that process began, as /proc says it."""
_PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a process gets when its parent ends."""


class Process(Protocol):
    """What `subprocess.Popen` and a process in an emulated host have in common."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


def as_launcher() -> dict[str, str]:
    """What tells workers that this process has started them."""
    return {LAUNCHER_VARIABLE: f"{os.getpid()} {_began(os.getpid())}"}


def end_with_launcher() -> None:
    """Let the kernel end this worker when its launcher is gone, however that went (kill -9, Ctrl-C twice);
    end it now, where the launcher is gone already. Ctrl-C is the launcher's to tell: this worker says
    nothing of it."""
    if sys.platform != "linux":
        return
    process, _, began = os.environ[LAUNCHER_VARIABLE].partition(" ")
    if os.getppid() == int(process):  # not a child of a worker
        end_with_parent()
        sys.excepthook = _without_interrupts
    if _began(int(process)) != began:
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_parent() -> None:
    """Let the kernel end this process when the thread that has started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _began(process: int) -> str:
    """When a process began, in ticks of the machine's clock; nothing, if it is not alive."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if stat[0] in "ZX" else stat[19]


def _without_interrupts(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)


def reader_has_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more, as in ``| head -1``."""
    watch = select.poll()
    watch.register(1, 0)
    return any(found & select.POLLERR for _, found in watch.poll(0))


def wait_for_all(processes: Iterable[Process], seconds: float) -> None:
    """Until all have ended, or the time is up."""
    deadline = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def end_all(processes: Iterable[Process]) -> None:
    """Ask all to end, and end those that have not within `Timeouts.terminate`."""
    alive = [process for process in processes if process.poll() is None]
    for process in alive:
        process.terminate()
    wait_for_all(alive, timeouts.terminate)
    for process in alive:
        if process.poll() is None:
            process.kill()
            process.wait()


def how_it_ended(status: int) -> str:
    """An exit status in words; negative: the signal."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"
