"""What simulated workers print: the first one's words, or all, each line with its rank.

All workers share one standard output. What the first prints goes through as it is; what
the others print is left out, or comes line by line behind ``[3]``. What anybody writes to
standard error is shown, so that no worker's trouble goes unseen.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TextIO

Shown = Literal["first", "all"]

_of_thread = threading.local()


class WorkerStream:
    """Stands for *stream*, and knows which worker writes. *shown*: what is done with the
    words of workers but the first."""

    def __init__(self, stream: TextIO, shown: Shown, *, prefix_first: bool) -> None:
        self._stream = stream
        self._shown = shown
        self._prefix_first = prefix_first
        self._begun: dict[int, str] = {}

    def write(self, text: str) -> int:
        rank = getattr(_of_thread, "rank", None)
        if rank is None or (rank == 0 and not self._prefix_first):
            self._stream.write(text)
        elif rank == 0 or self._shown == "all":
            *lines, rest = (self._begun.pop(rank, "") + text).split("\n")
            for line in lines:
                self._put(rank, line)
            if rest:
                self._begun[rank] = rest.rpartition("\r")[2]  # a bar draws itself anew
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def finish(self) -> None:
        """Write the lines that workers have not ended."""
        for rank, rest in self._begun.items():
            self._put(rank, rest)
        self._begun.clear()

    def _put(self, rank: int, line: str) -> None:
        self._stream.write(f"[{rank}] {line.rpartition(chr(13))[2]}\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def workers_output(shown: Shown | None) -> Iterator[None]:
    """Within it the streams know workers, those threads that `speak_as` one; None leaves
    all as it is."""
    if shown is None:
        yield
        return
    before = sys.stdout, sys.stderr
    streams = (
        WorkerStream(sys.stdout, shown, prefix_first=shown == "all"),
        WorkerStream(sys.stderr, "all", prefix_first=False),
    )
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams:
            stream.finish()


def speak_as(rank: int) -> None:
    """What the calling thread prints from now on is this worker's."""
    _of_thread.rank = rank
