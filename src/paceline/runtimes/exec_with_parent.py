"""Becomes a command that the kernel kills with its parent.

Usage: ``python exec_with_parent.py PARENT COMMAND``.

A launcher starts its workers through this program. So a script ends with the launcher even while it
imports its libraries, and even if it never imports paceline. Linux keeps the parent-death signal
across exec. The signal comes when the *thread* that started the process ends, so a launcher starts
workers from its main thread.

It runs by path, with ``-I -S``, and imports nothing of paceline: that takes some hundredths of a
second.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
"""prctl(2) option: the signal that a process gets when its parent ends."""


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that has started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def main(parent: int, command: list[str]) -> NoReturn:
    """Become *command*, unless *parent* ended before this process could register for the signal."""
    end_with_parent()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"paceline: cannot start {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
