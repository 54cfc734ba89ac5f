"""A command on a terminal of its own, and what stands on that in the end."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import termios
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.forked import Forked
from tests.support.hanging import SECONDS

_WIDTH = 100
_PARTS = re.compile(rb"\x1b\[(\d*)(;\d+)*([A-Za-z])|\x1b\[\?\d+[hl]|\r|\n|[^\x1b\r\n]+")


class Screen:
    """As much of a terminal as lines need that are wiped and written anew."""

    def __init__(self) -> None:
        self.lines = [""]
        self._row = self._column = 0

    def write(self, data: bytes) -> None:
        for part in _PARTS.finditer(data):
            self._part(part)

    def _part(self, part: re.Match[bytes]) -> None:
        line = self.lines[self._row]
        match part.group(), part.group(3):
            case b"\r", _:
                self._column = 0
            case b"\n", _:
                self._row += 1
                if self._row == len(self.lines):
                    self.lines.append("")
            case _, b"K":
                self.lines[self._row] = "" if part.group(1) == b"2" else line
            case _, b"A":
                self._row -= int(part.group(1) or 1)
            case text, None if not text.startswith(b"\x1b"):
                shown = text.decode(errors="replace")
                end = self._column + len(shown)
                padded = line.ljust(self._column)
                self.lines[self._row] = padded[: self._column] + shown + padded[end:]
                self._column = end


def on_terminal(
    words: Sequence[str], folder: Path, look: Callable[[str], None]
) -> tuple[int, list[str]]:
    """Run ``paceline WORDS`` with a terminal as its outputs; *look* is told all that has been
    written there so far, each time that more comes. Returns the exit status, and the lines that stand
    there in the end."""
    ours, theirs = open_terminal()
    process = forked_on(theirs, words, folder)
    written = b""
    try:
        while True:
            assert select.select([ours], [], [], SECONDS)[0], written
            try:
                written += os.read(ours, 1 << 16)
            except OSError:  # no process has it open any more
                break
            if theirs >= 0:  # the process has it, too
                os.close(theirs)
                theirs = -1
            look(written.decode(errors="replace"))
        status = process.wait()
    finally:
        process.kill()
        os.close(ours)
    return status, lines_of(written)


def forked_on(terminal: int, words: Sequence[str], folder: Path) -> Forked:
    """Start ``paceline WORDS``, forked with all it starts, with a terminal as its outputs."""
    command = ["-m", "tests.support.forking", "paceline", *words]
    return Forked(command, folder, {"TERM": "xterm"}, terminal=os.ttyname(terminal))


def open_terminal() -> tuple[int, int]:
    """Both ends of a new terminal: the one that shows it, and the one of processes."""
    ours, theirs = os.openpty()
    size = struct.pack("HHHH", 40, _WIDTH, 0, 0)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    return ours, theirs


def lines_of(written: bytes) -> list[str]:
    """The lines of a terminal that *written* was written to."""
    screen = Screen()
    screen.write(written)
    return [line.rstrip() for line in screen.lines]
