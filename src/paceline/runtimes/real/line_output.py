"""Lines of workers come out whole where several write to one place."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import Any


def write_whole_lines(streams: Iterable[Any] | None = None) -> None:
    """Python that is run unbuffered (``PYTHONUNBUFFERED``, as images of containers have it)
    writes each word of a ``print``, and the end of its line, by itself: those of another
    worker come in between. From now on *streams*, by default this process's own two, write
    line by line, and as promptly."""
    for stream in (sys.stdout, sys.stderr) if streams is None else streams:
        if isinstance(stream, io.TextIOWrapper) and stream.write_through:
            stream.reconfigure(line_buffering=True, write_through=False)
