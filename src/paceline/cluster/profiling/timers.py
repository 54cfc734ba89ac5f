"""Stopwatches on the host's clock or in a CUDA stream, and waits for processors.

The stopwatches do not slow the stream down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from paceline.interfaces import Stopwatch


class HostStopwatch:
    """A `Stopwatch` on a clock of the host.

    *repeats*: whether times on that clock repeat exactly.
    """

    def __init__(self, now: Callable[[], float], *, repeats: bool = False) -> None:
        self.mark, self.repeats = now, repeats

    def seconds(self, start: float, marks: Sequence[float]) -> list[float]:
        return [mark - start for mark in marks]


class CudaStopwatch:
    """A `Stopwatch` in the current stream of a CUDA device.

    Marks are events. Only `seconds` waits, for the last of them, and never for the whole device: a
    wait in each hook would remove the overlap that is to be measured.
    """

    repeats = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(
        self, start: torch.cuda.Event, marks: Sequence[torch.cuda.Event]
    ) -> list[float]:
        # The events may be on several streams.
        for mark in marks:
            mark.synchronize()
        return [start.elapsed_time(mark) / 1e3 for mark in marks]


def stopwatch_for(device: torch.device) -> Stopwatch:
    """Return the stopwatch for work on *device*."""
    if device.type == "cuda":
        return CudaStopwatch(device)
    return HostStopwatch(time.perf_counter)


def waited_for_processor(threads: str = "/proc/self/task/*") -> float:
    """Return the seconds for which these *threads* were ready to run, without a processor.

    0 if the system does not count them.
    """
    waited = 0
    for file in Path("/").glob(f"{threads[1:]}/schedstat"):
        # The thread has just ended.
        with suppress(OSError):
            waited += int(file.read_text().split()[1])
    return waited / 1e9
