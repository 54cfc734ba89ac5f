"""Reports the progress of workers to their launcher.

- *File*: for readers that poll: a supervisor after a death, since the file outlives its writer, and
  the status lines at a terminal.
- *Socket*: the rules of an emulated cluster take effect in a step, so worker 0 sends each step.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from paceline.records import Phase, StepRecorder

FILE_VARIABLE = "PACELINE_PROGRESS_FILE"
"""The file that a worker writes its `WorkerProgress` to."""
SOCKET_VARIABLE = "PACELINE_PROGRESS"
"""The launcher's socket, which worker 0 sends each completed step to."""

_EVERY_SECONDS = 0.2
_LAST_STEPS = 10
"""Displayed figures are means over at least so many steps, and over whole periods."""
_MOST_METRICS = 2


class WorkerProgress(msgspec.Struct, omit_defaults=True):
    """The steps that a worker has completed, and the present times of a step.

    Attributes:
        step: The last completed step of the job.
        step_seconds: Mean of its last few steps.
        exposed_seconds: Mean exposed communication time of its last few steps.
        buckets: Number of buckets of its plan.
        phase: Phase of its last step.
    """

    step: int = 0
    step_seconds: float = 0.0
    exposed_seconds: float = 0.0
    method: str = ""
    buckets: int = 0
    phase: Phase = "warm-up"
    metrics: dict[str, float] = {}

    @classmethod
    def of(cls, recorder: StepRecorder) -> WorkerProgress:
        """Read it from a worker's recorder, which another thread may write to meanwhile."""
        # The copy is atomic.
        steps = list(recorder.steps)
        count = recorder.period * -(-_LAST_STEPS // recorder.period)
        # The first step includes start-up costs.
        last = steps[1:][-count:] or steps
        metrics = list(dict(recorder.metrics).items())
        return cls(
            step=steps[-1].step if steps else 0,
            step_seconds=_mean([one.step_seconds for one in last]),
            exposed_seconds=_mean([one.exposed_communication_seconds for one in last]),
            method=recorder.brief,
            buckets=recorder.buckets,
            phase=steps[-1].phase if steps else "warm-up",
            metrics=dict(metrics[:_MOST_METRICS]),
        )

    def write(self, path: Path) -> None:
        """Write it to a file for `read`. Training goes on if that fails."""
        with contextlib.suppress(OSError):
            path.write_bytes(msgspec.json.encode(self))


def read(path: Path) -> WorkerProgress | None:
    """Read the file; None: there is none yet, or a worker is writing it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=WorkerProgress)
    except (OSError, msgspec.MsgspecError):
        return None


def last_step(path: Path) -> int:
    """Return the last step that a worker wrote; 0: none. It may have died while it wrote one."""
    progress = read(path)
    if progress is None:
        return int(path.exists())
    return progress.step


def place(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file for this process's `WorkerProgress`; None: its launcher reads none."""
    file = environment.get(FILE_VARIABLE)
    return Path(file) if file else None


def attach_progress_writer(
    recorder: StepRecorder,
    first_step: Callable[[], int],
    *,
    server_only: bool,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Write this worker's steps to its launcher's file, if there is one.

    A supervisor continues from the last step (*server_only*), so it gets each one. Other launchers
    get a step now and then, from one worker per machine. *first_step* returns the steps that the
    job had completed when this worker joined it.
    """
    file = place(environment)
    if file is not None and (server_only or environment.get("LOCAL_RANK", "0") == "0"):
        recorder.observers.append(_Writer(file, recorder, first_step, server_only))


class _Writer:
    """Observes a recorder, and writes its progress."""

    def __init__(
        self,
        path: Path,
        recorder: StepRecorder,
        first_step: Callable[[], int],
        each: bool,
    ) -> None:
        self._path, self._recorder = path, recorder
        self._first_step, self._each = first_step, each
        self._progress = WorkerProgress()
        self._looked = -_EVERY_SECONDS

    def __call__(self, step: int) -> None:
        now = time.monotonic()
        is_due = now - self._looked >= _EVERY_SECONDS
        if is_due:
            self._looked, self._progress = now, WorkerProgress.of(self._recorder)
        elif not self._each:
            return
        if step:
            # Count the job's steps, not this incarnation's: see `DistributedOptimizer.first_step`.
            self._progress.step = self._first_step() + step
        self._progress.write(self._path)


def step_reporter(
    environment: Mapping[str, str] = os.environ,
) -> Callable[[int], None] | None:
    """Return a function that reports each step to the launcher; None: the launcher does not listen."""
    path = environment.get(SOCKET_VARIABLE)
    if not path:
        return None
    launcher = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    launcher.connect(path)
    return lambda step: launcher.sendall(b"%d\n" % step)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
