"""Wraps every private name of Python's own library that paceline uses, in one place.

Checked against Python 3.11. (``os._exit`` and ``sys._getframe`` are documented, and public.)
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing.util
import os
import re
import sys
import tempfile
import threading
import weakref
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ESCAPE = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")

Environ = os._Environ
"""The class of ``os.environ``."""


def end_children() -> None:
    """End child processes that `multiprocessing` has started, as Python does at exit."""
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]


def call_finalizers() -> None:
    """Call the finalizers of `weakref.finalize` that wait for exit.

    They remove temporary folders, too.
    """
    weakref.finalize._exitfunc()  # type: ignore[attr-defined]


def end_pool(pool: ProcessPoolExecutor) -> None:
    """Kill a pool's processes, whatever they are doing, and wait for their ends."""
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(cancel_futures=True)


class Frame(NamedTuple):
    """A function call, and its present line."""

    file: str
    line: int
    function: str


def main_thread_is_in(module: str) -> bool:
    """Return whether the main thread executes a function of *module*, or a function called by one."""
    file = file_of(module)
    frames = frames_of(threading.main_thread().ident or 0)
    return any(frame.file == file for frame in frames)


def file_of(module: str) -> str:
    """The source file of an imported module; "" if it has none."""
    return getattr(sys.modules.get(module), "__file__", None) or ""


def frames_of(thread: int) -> list[Frame]:
    """Return the calls that a thread executes, the innermost first; at most 100 of them.

    They come from ``faulthandler``, which reads all of them at once. The frames of
    ``sys._current_frames`` are read one by one, with ``f_back``, while the thread continues. For a
    frame that the thread had left, CPython 3.11 has returned an object that is no frame.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        text = file.read().decode("ascii", errors="replace")
    found: list[Frame] = []
    is_its = False
    for line in text.splitlines():
        if begin := _THREAD.match(line):
            is_its = int(begin[1], 16) == thread
        elif is_its and (call := _CALL.match(line)):
            found.append(Frame(_unescaped(call[1]), int(call[2]), _unescaped(call[3])))
    return found


def _unescaped(text: str) -> str:
    r"""Decode characters that ``faulthandler`` escapes: \xHH, \uHHHH or \UHHHHHHHH."""
    return _ESCAPE.sub(lambda found: chr(int(found[0][2:], 16)), text)


def options_of(parser: argparse.ArgumentParser) -> dict[str, int]:
    """Return a parser's options, and how many values each takes: 0, or 1 and maybe more."""
    return {
        option: 0 if action.nargs == 0 else 1
        for action in parser._actions
        for option in action.option_strings
    }
