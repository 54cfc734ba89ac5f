"""A line at the bottom of the terminal: how far the training is that a launcher waits for.

Theory of operation
-------------------
Only where standard error is a terminal, without ``--json``; elsewhere nothing is shown, and
nothing below happens. Workers are processes of their own, and write where this one does. So while the line is
there, this process's standard output and error, as far as they are terminals, are one
pseudo-terminal, which workers inherit. What comes out of it goes to the true one byte by byte:
the line is wiped first, and drawn again when what was written has ended its own line (so a script
with a progress bar has the last line for itself). At the end the line is wiped, and all is as
before.

How far the training is stands in a file (`paceline.runtimes.progress`).
"""

from __future__ import annotations

import os
import secrets
import select
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from fcntl import ioctl
from pathlib import Path

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from paceline.runtimes.progress import FILE_VARIABLE, Standing, read
from paceline.runtimes.scratch import scratch_folder
from paceline.units import show_seconds

Look = Callable[[], Standing | None]

_EVERY_SECONDS = 0.25
_PIECE = 1 << 16
_WIPE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


def is_shown(json: bool) -> bool:
    """Whether people look at standard error, and may be shown what moves."""
    return (
        not json and sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal
    )


@contextmanager
def live_line(
    json: bool, doing: str, steps: int | None = None, look: Look | None = None
) -> Iterator[None]:
    """Within it, the line of what is launched. *doing* says what that is before its first step;
    *steps*: how many it has at most, if that is known. *look*: how far it is; None: what worker 0
    writes."""
    if FILE_VARIABLE in os.environ and look is None:
        yield  # whoever has launched this shows it
        return
    if not is_shown(json):
        yield
        return
    with scratch_folder() as folder:
        file = Path(folder) / "progress"
        if look is None:
            os.environ[FILE_VARIABLE] = str(file)
        line: _Line | None = None
        with suppress(OSError):  # a machine may have no pseudo-terminal left
            line = _Line(look or (lambda: read(file)), doing, steps)
        try:
            yield
        finally:
            if line is not None:
                line.close()
            if look is None:
                del os.environ[FILE_VARIABLE]


def describe(standing: Standing, steps: int | None = None) -> str:
    """In one line how far a training is, what a step takes, and by what plan."""
    words = [
        f"step {standing.step}" + f" of {steps}" * bool(steps)
        if standing.step
        else "no step yet"
    ]
    if standing.step_seconds:
        words.append(
            f"{_three(standing.step_seconds)} a step, "
            f"{_three(standing.exposed_seconds)} exposed"
        )
    if standing.method:
        plan = ""
        if standing.deciding:
            plan = ", still deciding"
        elif not standing.settled:
            plan = ", still planning"
        elif standing.buckets:
            plan = f", {standing.buckets} bucket" + "s" * (standing.buckets > 1)
        words.append(standing.method + plan)
    words += [f"{name} {value:.4g}" for name, value in standing.metrics.items()]
    return " · ".join(words)


def _three(seconds: float) -> str:
    return show_seconds(float(f"{seconds:.3g}"))


class _Line:
    """The line, and what passes it. It is drawn by a thread of its own."""

    def __init__(self, look: Look, doing: str, steps: int | None) -> None:
        self._look, self._doing, self._steps = look, doing, steps
        self._last: Standing | None = None
        self._began = time.monotonic()
        self._drawn = ""
        self._is_at_line_start = True
        self._ours, theirs = os.openpty()
        terminal = os.fstat(2).st_rdev
        self._replaced = [
            fd for fd in (1, 2) if os.isatty(fd) and os.fstat(fd).st_rdev == terminal
        ]
        _flush()
        self._kept = [os.dup(fd) for fd in self._replaced]
        self._true = self._kept[-1]
        self._pass_unchanged(theirs)
        self._size = b""
        self._keep_size()
        for fd in self._replaced:
            os.dup2(theirs, fd)
        os.close(theirs)
        self._console = Console(
            file=open(self._true, "w", encoding="utf-8", closefd=False),  # noqa: SIM115 - until close()
            force_terminal=True,
        )
        self._is_over = False
        self._end = f"\0end of the live line {secrets.token_hex(8)}\0".encode()
        self._thread = threading.Thread(target=self._run, name="paceline live line")
        self._thread.start()

    def close(self) -> None:
        """Pass on what is left, wipe the line, and give the terminal back."""
        _flush()
        self._is_over = True
        os.write(2, self._end)  # what workers have written comes out before it
        self._thread.join()
        for fd, kept in zip(self._replaced, self._kept, strict=True):
            os.dup2(kept, fd)
        with suppress(OSError):
            self._console.file.close()
        for fd in (*self._kept, self._ours):
            os.close(fd)

    @staticmethod
    def _pass_unchanged(terminal: int) -> None:
        """The true terminal is the one that turns lines' ends into what it needs."""
        mode = termios.tcgetattr(terminal)
        mode[1] &= ~termios.OPOST
        mode[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
        termios.tcsetattr(terminal, termios.TCSANOW, mode)

    def _keep_size(self) -> None:
        """Workers that ask are told how wide the true one is now."""
        with suppress(OSError):
            size = ioctl(self._true, termios.TIOCGWINSZ, bytes(8))
            if size != self._size:
                ioctl(self._ours, termios.TIOCSWINSZ, size)
                self._size = size

    def _run(self) -> None:
        watch = select.poll()
        watch.register(self._ours, select.POLLIN)
        held = b""
        while self._end not in held:
            if watch.poll(1000 * _EVERY_SECONDS):
                held += os.read(self._ours, _PIECE)
                if not self._is_over:
                    self._pass(held)
                    held = b""
            self._keep_size()
            if not self._is_over:
                self._draw()
        self._wipe()
        self._pass(held.partition(self._end)[0])

    def _pass(self, written: bytes) -> None:
        if not written:
            return
        self._wipe()
        left = memoryview(written)
        with suppress(OSError):  # the terminal is gone: workers must not wait for it
            while left:
                left = left[os.write(self._true, left) :]
        self._is_at_line_start = written.endswith(b"\n")

    def _draw(self) -> None:
        if not self._is_at_line_start or not self._is_in_front():
            return
        self._last = self._look() or self._last
        text = self._doing if self._last is None else describe(self._last, self._steps)
        elapsed = timedelta(seconds=int(time.monotonic() - self._began))
        text = f"{text} · {elapsed}"
        if text == self._drawn:
            return
        self._wipe()
        line = Text(text, style="dim", no_wrap=True, overflow="ellipsis")
        line.truncate(self._console.width - 1, overflow="ellipsis")
        with suppress(OSError):
            self._console.print(line, end="", soft_wrap=True, highlight=False)
            self._console.file.flush()
        self._drawn = text

    def _wipe(self) -> None:
        if self._drawn:
            with suppress(OSError):
                self._console.control(_WIPE)
                self._console.file.flush()
            self._drawn = ""

    def _is_in_front(self) -> bool:
        """A job in the background writes no line into whatever is being typed."""
        try:
            return os.tcgetpgrp(self._true) == os.getpgrp()
        except OSError:
            return True  # it is nobody's controlling terminal


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
