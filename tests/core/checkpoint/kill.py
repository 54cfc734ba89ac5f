"""A process that is killed between two of its steps in a folder, without a process."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

_STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


class KilledError(BaseException):
    """Nobody handles it, as nobody handles a kill."""


class _Watch:
    """Sees every step in *folder*, for Python tells audit hooks of it before it is done."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.left = 0

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.folder is None or event not in _STEPS:
            return
        if event == "open" and not _writes(arguments):
            return
        path = arguments[0]
        if isinstance(path, int) or not os.fspath(path).startswith(self.folder):
            return
        if self.left == 0:
            raise KilledError  # and so is every later step: a killed process tidies nothing
        self.left -= 1


def _writes(arguments: tuple[object, ...]) -> bool:
    return bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))


_watch = _Watch()
sys.addaudithook(_watch)


def killed_after(steps: int, folder: Path, action: Callable[[], object]) -> bool:
    """Do *action*, which is killed when it has done so many steps in *folder*; returns
    whether it was, and did not end before."""
    _watch.folder, _watch.left = str(folder), steps
    try:
        action()
        return False
    except BaseException as error:
        if not _was_killed(error):
            raise
        return True
    finally:
        _watch.folder = None


def _was_killed(error: BaseException | None) -> bool:
    if error is None:
        return False
    text = f"{type(error).__name__}{error}"
    return "Killed" in text or _was_killed(error.__cause__ or error.__context__)
