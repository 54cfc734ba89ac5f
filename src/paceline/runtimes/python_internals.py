"""Every private name of Python's own library that paceline uses, in one place.

Checked against Python 3.11. (``os._exit`` and ``sys._getframe`` are documented, and public.)
"""

from __future__ import annotations

import argparse
import multiprocessing.util
import os
import sys
import threading
import weakref
from concurrent.futures import ProcessPoolExecutor
from types import FrameType

Environ = os._Environ
"""The class of ``os.environ``."""


def end_children() -> None:
    """End child processes that `multiprocessing` has started, as Python does at exit."""
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]


def call_finalizers() -> None:
    """Call what `weakref.finalize` keeps for exit: it removes temporary folders, too."""
    weakref.finalize._exitfunc()  # type: ignore[attr-defined]


def end_pool(pool: ProcessPoolExecutor) -> None:
    """Kill a pool's processes, whatever they are at, and wait for their ends."""
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(cancel_futures=True)


def main_thread_is_in(module: str) -> bool:
    """Whether the main thread executes a function of the *module*, or one that it has
    called."""
    frames = frames_of(threading.main_thread().ident or 0)
    return any(frame.f_globals.get("__name__") == module for frame in frames)


def frames_of(thread: int) -> list[FrameType]:
    """What a thread executes, the innermost frame first. Let go of them soon: frames keep
    their variables alive."""
    frame = sys._current_frames().get(thread)
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def options_of(parser: argparse.ArgumentParser) -> dict[str, int]:
    """A parser's options, and how many values each takes: 0, or 1 and maybe more."""
    return {
        option: 0 if action.nargs == 0 else 1
        for action in parser._actions
        for option in action.option_strings
    }
