"""Removes a launcher's temporary folder, whatever signal ends the launcher.

Python removes temporary folders when their blocks end, and Ctrl-C ends blocks. SIGTERM and SIGHUP
would end the process at once. Inside `scratch_folder` all three raise `LauncherInterrupted`, once:
a second one would disturb the clean-up of the first. A killed launcher (``kill -9``) leaves its
folder, and the next launcher removes it: each holds a lock on a file in its folder, which the
kernel releases with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

_PREFIX, _LOCK = "paceline-", ".lock"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_open: set[str] = set()
"""The temporary folders of this process."""


class LauncherInterrupted(SystemExit):
    """A signal has arrived.

    If not caught, it ends the process with a shell's status for that signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number
        self.name = signal.Signals(number).name

    def report(self) -> int:
        """Print the message of a launcher whose workers have been ended; return its exit status."""
        print(f"paceline: {self.name}: all workers were ended", file=sys.stderr)
        return 128 + self.number


@contextlib.contextmanager
def scratch_folder() -> Iterator[str]:
    """Yield a temporary folder, removed at the block's end.

    Inside, on the main thread, a signal raises `LauncherInterrupted`. A signal that was ignored
    before (``nohup``) is still ignored.
    """
    folder: tempfile.TemporaryDirectory[str] | None = None
    lock = -1
    with signals.listen():
        try:
            with signals.deferred():
                remove_left()
                folder = tempfile.TemporaryDirectory(prefix=_PREFIX)
                _open.add(folder.name)
                lock = _locked(Path(folder.name))
            yield folder.name
        finally:
            with signals.deferred():
                if folder is not None:
                    folder.cleanup()
                    _open.discard(folder.name)
                if lock >= 0:
                    os.close(lock)


def end_at_once(status: int) -> NoReturn:
    """End this process from any thread, and remove its temporary folders.

    It works even if the main thread is stuck.
    """
    for folder in list(_open):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(status)


def _locked(folder: Path) -> int:
    """Lock a new folder for this process's lifetime, before any other process sees the file."""
    unseen = folder / f"{_LOCK}.part"
    lock = os.open(unseen, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unseen.rename(folder / _LOCK)
    return lock


def remove_left() -> None:
    """Remove the folders that killed launchers of this user have left."""
    for file in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        # It is another user's file, or was removed meanwhile.
        with contextlib.suppress(OSError):
            if file.stat().st_uid != os.getuid():
                continue
            lock = os.open(file, os.O_RDWR | os.O_CLOEXEC)
            try:
                # Locking fails if the folder is in use.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(file.parent, ignore_errors=True)
            finally:
                os.close(lock)


class _Signals:
    """The signals that end a launcher: one object per process, as signal handlers are."""

    def __init__(self) -> None:
        self._depth = 0
        self._number: int | None = None
        """The first signal that arrived; None: none."""
        self._deferrals = 0
        self._is_due = False
        """Whether it arrived while signals were deferred, and is still to be raised."""
        self._heeded: list[signal.Signals] = []
        """Those that were not ignored before `listen`."""

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Let the first signal raise `LauncherInterrupted`, until the outermost block's end."""
        if threading.current_thread() is not threading.main_thread():
            # Only the main thread receives signals.
            yield
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        heeded = [n for n, how in before.items() if how not in (signal.SIG_IGN, None)]
        outer, self._heeded = self._heeded, heeded
        self._depth += 1
        try:
            self._install()
            yield
        finally:
            self._heeded = outer
            for number in heeded:
                signal.signal(number, before[number])
            self._depth -= 1
            if not self._depth:
                self._number = None

    def _install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in self._heeded:
                signal.signal(number, self._handle)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Raise a signal that arrives in this block at the block's end."""
        self._deferrals += 1
        # Code inside the block of `listen` may have set its own handlers, as torchrun does.
        self._install()
        try:
            yield
        finally:
            self._deferrals -= 1
            if self._is_due and not self._deferrals and self._number is not None:
                self._is_due = False
                raise LauncherInterrupted(self._number)

    def would_raise(self, number: int) -> bool:
        """Whether this signal raises `LauncherInterrupted` when Python handles it: it is the first."""
        return self._number is None and signal.getsignal(number) == self._handle

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._number is not None:
            return
        self._number = number
        if self._deferrals:
            self._is_due = True
        else:
            raise LauncherInterrupted(number)


signals = _Signals()
