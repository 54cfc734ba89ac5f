"""One worker of a job that survives deaths: its processes, one after the other."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import UsageError
from paceline.runtimes import progress
from paceline.runtimes.processes import (
    ERROR_FILE_VARIABLE,
    ends_with_this,
    how_it_ended,
    reported_error,
)
from paceline.runtimes.real.server_process import INCARNATION_VARIABLE
from paceline.timeouts import timeouts

MOST_RESTARTS = 100
"""Of one worker: a script that cannot run at all must not be started for ever."""
WRONG_USE = 2
"""The exit status of a command that was given arguments that it does not know."""
MOST_IN_VAIN = 3
"""Lives of one worker, or of the server, in a row without a completed step."""


class SurvivingWorker:
    """Worker *rank*, whose lives run *command* and note their steps in *folder*."""

    def __init__(self, rank: int, command: Sequence[str], folder: str) -> None:
        self.rank = rank
        self.incarnation = 0
        self.process: subprocess.Popen[bytes] | None = None
        """This life's."""
        self.done = False
        """Whether its script has ended well."""
        self.reached = 0
        """The step that its earlier lives have reached."""
        self._command = command
        self._progress = Path(folder) / f"progress-{rank}"
        self._error = Path(folder) / f"error-{rank}"
        self._restarts = 0
        self._in_vain = 0
        """Lives in a row without a completed step."""
        self._evicted: float | None = None
        """When this life was evicted by the server."""

    def start(self, environment: Mapping[str, str]) -> None:
        """Begin a life, with these variables and its own."""
        self._progress.unlink(missing_ok=True)
        self._error.unlink(missing_ok=True)
        self._evicted = None
        own = {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            INCARNATION_VARIABLE: str(self.incarnation),
            progress.FILE_VARIABLE: str(self._progress),
            ERROR_FILE_VARIABLE: str(self._error),
        }
        # Ctrl-C in a terminal is told to a session's processes: the supervisor ends this one.
        self.process = subprocess.Popen(
            ends_with_this(self._command),
            env={**environment, **own},
            start_new_session=True,
        )

    @property
    def steps(self) -> int:
        """The job's step that this life has completed; 0: none."""
        return progress.noted(self._progress)

    @property
    def standing(self) -> progress.WorkerProgress | None:
        """How far this life has come, if it has begun to train."""
        return progress.read(self._progress)

    def note_reached(self) -> None:
        """Keep this life's steps: it is over."""
        self.reached = max(self.reached, self.steps)

    def ended(self) -> int | None:
        """The exit status of this life, once: when it has ended."""
        status = None if self.process is None else self.process.poll()
        if status is not None:
            self.process = None
        return status

    def count_death(self, status: int) -> None:
        """This life has ended badly. Raises `UsageError` where one more would end like it, or like those
        before it."""
        how, error = how_it_ended(status), reported_error(self._error)
        if error.final:
            raise UsageError(
                f"worker {self.rank} failed, and would fail again: {error.message}"
            )
        if status == WRONG_USE and not self.steps:
            raise UsageError(
                f"worker {self.rank} {how}, as commands do that do not know their arguments: see above "
                "for what it said; those of the script stand behind it"
            )
        self._restarts += 1
        self._in_vain = 0 if self.steps else self._in_vain + 1
        self.note_reached()
        if self._in_vain == MOST_IN_VAIN:
            raise UsageError(
                f"worker {self.rank} {how}, for the {MOST_IN_VAIN}rd time in a row "
                "without completing a step: see above for what it said, and run the "
                "script without --survive to see it alone"
            )
        if self._restarts > MOST_RESTARTS:
            raise UsageError(f"worker {self.rank} {how}, {MOST_RESTARTS} times")

    def was_evicted(self, incarnation: int) -> None:
        """The server has evicted this life, or an earlier one."""
        if self.incarnation == incarnation:
            self._evicted = time.monotonic()

    def kill_if_evicted(self) -> None:
        """It has had `Timeouts.workers_end` to end by itself."""
        if self._evicted is None or self.process is None:
            return
        if time.monotonic() > self._evicted + timeouts.workers_end:
            self.process.kill()
