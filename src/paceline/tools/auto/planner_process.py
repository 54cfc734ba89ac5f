"""The planner's process: predictions beside the training, at low priority.

A simulation takes its process for itself, so predictions cannot be made in a worker. The process
reads a `Question` from a file, prints an `Answer`, and ends with the worker in any case: it watches its
standard input, a pipe that carries nothing and that the worker's end closes. Whatever goes wrong with it is an `Answer`, too.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import IO

import msgspec

from paceline.tools.auto.decision import Answer, Question

MODULE = "paceline.tools.auto"
PATIENCE, LEAST_PATIENCE = 30.0, 120.0
"""Times its budget, and seconds at least: a process of low priority on a busy machine."""
_NOT_INHERITED = (
    *("PACELINE_", "TORCHELASTIC_", "PET_", "GROUP_", "ROLE_", "LOCAL_", "MASTER_"),
    *("RANK", "WORLD_SIZE", "OMPI_", "PMI_", "SLURM_"),
)
"""Variables that would make the process a worker."""


class PlannerProcess:
    """One question on its way. Raises nothing: `answer` says what went wrong."""

    def __init__(
        self, question: Question, environment: Mapping[str, str] = os.environ
    ) -> None:
        patience = max(LEAST_PATIENCE, PATIENCE * question.budget_seconds)
        self._deadline = time.monotonic() + patience
        # Files, and not pipes: whoever trains neither reads, nor waits until somebody reads.
        self._errors, self._output, asked = _file(), _file(), _file()
        self._fault = ""
        self._process: subprocess.Popen[bytes] | None = None
        kept = {
            name: value
            for name, value in environment.items()
            if not name.startswith(_NOT_INHERITED)
        }
        kept["OMP_NUM_THREADS"] = "1"
        try:
            asked.write(msgspec.json.encode(question))
            asked.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(asked.fileno())],
                pass_fds=[asked.fileno()],
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._errors,
                env=kept,
            )
        except OSError as error:
            self._fault = f"it cannot be started: {error}"
        finally:
            asked.close()

    @property
    def is_over(self) -> bool:
        """Whether there is an answer."""
        if self._process is None or self._fault:
            return True
        if self._process.poll() is not None:
            return True
        if time.monotonic() > self._deadline:
            self._fault = "it has taken too long"
            self._process.kill()
            return True
        return False

    def wait(self) -> None:
        """Until there is an answer, however long it takes: where time is virtual, what is predicted must
        not depend on how fast this machine is."""
        if self._process is not None:
            self._process.wait()

    def answer(self) -> Answer:
        """What it has said, once it is over."""
        status = None if self._process is None else self._process.poll()
        said, errors = _content(self._output), _content(self._errors)
        self.end()
        if not self._fault and status == 0:
            try:
                return msgspec.json.decode(said, type=Answer)
            except msgspec.MsgspecError as error:
                self._fault = f"its answer is none: {error}"
        lines = errors.decode(errors="replace").strip().splitlines()
        last = lines[-1][:300] if lines else "without a word"
        return Answer(fault=self._fault or f"it ended with status {status}: {last}")

    def end(self) -> None:
        """End it, if it still runs."""
        self._output.close()
        self._errors.close()
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.kill()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        process.wait()


def _file() -> IO[bytes]:
    return tempfile.TemporaryFile()


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()
