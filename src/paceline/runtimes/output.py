"""What workers on an emulated cluster print: the first one's words, or all, by rank."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import BinaryIO, Literal, TextIO

from paceline.runtimes.emulated.host_process import HostProcess
from paceline.timeouts import timeouts

Shown = Literal["first", "all"]


class WorkerOutput:
    """Streams for workers' processes. *shown* None: they are this process's own. What worker
    0 prints goes where this process's goes; what others print is left out, or shown line by
    line behind their rank. Of all of them standard error is shown."""

    def __init__(self, shown: Shown | None) -> None:
        self._shown = shown
        self._threads: list[threading.Thread] = []

    def streams(self, worker: int) -> tuple[int | None, int | None]:
        """A worker's standard output and error, as `Fabric.popen` takes them."""
        if self._shown is None or (worker == 0 and self._shown == "first"):
            return None, None
        output = subprocess.PIPE if self._shown == "all" else subprocess.DEVNULL
        return output, subprocess.PIPE if worker else None

    def environment(self) -> Mapping[str, str]:
        """Without it Python keeps lines back where it writes into a pipe."""
        return {"PYTHONUNBUFFERED": "1"} if self._shown == "all" else {}

    def show(self, worker: int, process: HostProcess) -> None:
        """Pass on what the process writes, as it comes."""
        for source, target in (
            (process.stdout, sys.stdout),
            (process.stderr, sys.stderr),
        ):
            if source is not None:
                thread = threading.Thread(
                    target=_copy, args=(worker, source, target), daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def finish(self) -> None:
        """All processes have ended: wait for their last words."""
        for thread in self._threads:
            thread.join(timeouts.last_output)
        self._threads.clear()


def _copy(worker: int, source: BinaryIO, target: TextIO) -> None:
    with (
        source,
        suppress(BrokenPipeError),
    ):  # a worker whose words nobody reads hears it
        for line in source:
            text = line.decode(errors="replace").rstrip("\n").rpartition("\r")[2]
            target.write(f"[{worker}] {text}\n")
            target.flush()
