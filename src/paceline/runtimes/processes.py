"""Processes that a launcher has started: how it supervises and ends them, how they ended, what they print.

Theory of operation
-------------------
A launcher that is killed ends no other process. So it starts each worker by `ends_with_this`: the kernel then kills
the worker when its launcher ends (PR_SET_PDEATHSIG), from before the worker's command begins.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Protocol, TextIO

import msgspec

from paceline.errors import PeerLostError
from paceline.runtimes import exec_with_parent
from paceline.timeouts import timeouts

LAUNCHER_VARIABLE = "PACELINE_LAUNCHER"
"""Set for workers: the process id of their launcher."""


class Process(Protocol):
    """What `subprocess.Popen` and a process in an emulated host have in common."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class ProcessWithDescriptor(Process, Protocol):
    """A process that has a descriptor of its own, as one in an emulated host has."""

    def fileno(self) -> int:
        """Readable once the process has ended."""
        ...


SupervisedProcess = subprocess.Popen[bytes] | ProcessWithDescriptor


def as_launcher() -> dict[str, str]:
    """What tells workers that this process has started them."""
    return {LAUNCHER_VARIABLE: str(os.getpid())}


def leave_interrupts_to_launcher() -> None:
    """Let this worker say nothing of Ctrl-C, which its launcher tells; a worker's own children do say it."""
    if os.environ[LAUNCHER_VARIABLE] == str(os.getppid()):
        sys.excepthook = _without_interrupts


def ends_with_this(command: Sequence[str]) -> list[str]:
    """The command by which the kernel kills *command* when this process ends. Start it from a thread
    that lives as long as the process: the kernel watches the thread."""
    flags = [sys.executable, "-I", "-S", exec_with_parent.__file__]
    return [*flags, str(os.getpid()), *command]


def _without_interrupts(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)


def reader_has_gone() -> bool:
    """Whether standard output is a pipe whose reader has gone, as in ``| head -1``."""
    watch = select.poll()
    watch.register(1, 0)
    return any(found & select.POLLERR for _, found in watch.poll(0))


def wait_for_all(processes: Iterable[Process], seconds: float) -> None:
    """Until all have ended, or the time is up."""
    deadline = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def end_all(processes: Iterable[Process]) -> None:
    """Ask all to end, and kill those that have not within `Timeouts.terminate`.

    The kernel may delay the end of a killed process, in a driver's call for example: the wait for it has the
    same limit.
    """
    alive = [process for process in processes if process.poll() is None]
    for process in alive:
        process.terminate()
    wait_for_all(alive, timeouts.terminate)
    alive = [process for process in alive if process.poll() is None]
    for process in alive:
        process.kill()
    wait_for_all(alive, timeouts.terminate)


def how_it_ended(status: int) -> str:
    """An exit status as text; negative: the signal."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"


PEER_LOST_MARKERS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    PeerLostError.__name__,
)
"""Messages of gloo, NCCL and `peer_monitor` in a worker whose peer has ended: a consequence of another failure,
not a cause."""

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""File for a worker's final error, as torchrun and paceline's launchers expect it."""


class _Extra(msgspec.Struct):
    timestamp: str = "0"
    final: str = ""


class _Message(msgspec.Struct):
    message: str = ""
    extraInfo: _Extra = msgspec.field(default_factory=_Extra)  # noqa: N815 - torchrun's


class _Report(msgspec.Struct):
    message: _Message


@dataclass(frozen=True)
class ReportedError:
    """What a failed worker has left: see `ending.write_torchelastic_error`. *seconds*: since 1970. *final*: the
    same process, started again, would fail alike."""

    message: str = ""
    seconds: float = 0.0
    final: bool = False


def reported_error(path: Path) -> ReportedError:
    """The error in that file; an empty one, where a worker has left none."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=_Report).message
        extra = report.extraInfo
        return ReportedError(report.message, float(extra.timestamp), bool(extra.final))
    except (OSError, msgspec.MsgspecError, ValueError):
        return ReportedError()


@dataclass(frozen=True, kw_only=True)
class WorkerExit:
    """How a worker's process ended.

    Attributes:
        rank: The worker's.
        pid: The process's.
        status: Its exit status; negative: the signal.
        seconds: When it ended, in seconds since 1970.
        message: The error that it reported, if it could.
        final: The same process, started again, would fail alike.
        by_launcher: The launcher ended it, because another worker had failed.
    """

    rank: int
    pid: int
    status: int
    seconds: float
    message: str = ""
    final: bool = False
    by_launcher: bool = False

    def describe(self) -> str:
        """How it ended, as a phrase."""
        if self.by_launcher:
            return "was ended by the launcher"
        how = f"{how_it_ended(self.status)} (process {self.pid})"
        return f"{how}: {self.message}" if self.message else how


class ProcessSupervisor:
    """Waits for the workers' processes of a job, and ends them.

    Each is in one poll set from `add` to its exit, and each exit is reported once.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._running: dict[int, _Supervised] = {}

    @property
    def is_running(self) -> bool:
        """Whether a process has not ended, as far as `wait` and `stop` have reported."""
        return bool(self._running)

    def add(
        self, rank: int, process: SupervisedProcess, error_file: Path | None = None
    ) -> None:
        """Supervise the *process* of worker *rank*, which leaves its error in *error_file*."""
        descriptor = _exit_descriptor(process)
        if descriptor is not None:
            self._poll.register(descriptor, select.POLLIN)
        self._running[rank] = _Supervised(process, descriptor, error_file)

    def wait(
        self, seconds: float = math.inf, wake: Sequence[int] = ()
    ) -> list[WorkerExit]:
        """Wait until a process ends, a descriptor of *wake* is readable, or *seconds* pass.

        Returns:
            The exits since the last call. Where no process is left: at once.
        """
        deadline = time.monotonic() + seconds
        for descriptor in wake:
            self._poll.register(descriptor, select.POLLIN)
        try:
            while not (exits := self._exits()) and self._running:
                left = min(deadline - time.monotonic(), self._longest_poll)
                if left <= 0:
                    break
                ready = self._poll.poll(None if left == math.inf else 1000 * left)
                if any(descriptor in wake for descriptor, _ in ready):
                    return self._exits()
            return exits
        finally:
            for descriptor in wake:
                self._poll.unregister(descriptor)

    def stop(self, grace: float = 0.0) -> list[WorkerExit]:
        """End all processes: SIGTERM after *grace* seconds, SIGKILL `Timeouts.terminate` later.

        Returns:
            The exits since the last call. A process that the kernel holds back after SIGKILL has none, and
            is no longer waited for.
        """
        exits = self._wait_for_all(grace)
        for one in self._running.values():
            one.process.terminate()
        exits += self._wait_for_all(timeouts.terminate)
        for one in self._running.values():
            one.killed = True
            one.process.kill()
        exits += self._wait_for_all(timeouts.terminate)
        for rank in list(self._running):
            self._forget(rank)
        return exits

    def _wait_for_all(self, seconds: float) -> list[WorkerExit]:
        deadline = time.monotonic() + seconds
        exits = self._exits()
        while self._running and (left := deadline - time.monotonic()) > 0:
            exits += self.wait(left)
        return exits

    @property
    def _longest_poll(self) -> float:
        """Seconds: a process without a descriptor is asked again and again."""
        if all(one.descriptor is not None for one in self._running.values()):
            return math.inf
        return _ASK_SECONDS

    def _exits(self) -> list[WorkerExit]:
        found = []
        for rank, one in list(self._running.items()):
            status = one.process.poll()
            if status is not None:
                self._forget(rank)
                found.append(one.exit(rank, status))
        return found

    def _forget(self, rank: int) -> None:
        one = self._running.pop(rank)
        if one.descriptor is not None:
            self._poll.unregister(one.descriptor)
            if isinstance(one.process, subprocess.Popen):
                os.close(one.descriptor)


_ASK_SECONDS = 0.1


@dataclass
class _Supervised:
    """A process that has not ended. *killed*: by its supervisor."""

    process: SupervisedProcess
    descriptor: int | None
    error_file: Path | None
    killed: bool = field(default=False, init=False)

    def exit(self, rank: int, status: int) -> WorkerExit:
        """How it ended, with this *status*."""
        error = ReportedError()
        if self.error_file is not None:
            error = reported_error(self.error_file)
        return WorkerExit(
            rank=rank,
            pid=self.process.pid,
            status=status,
            seconds=error.seconds or time.time(),
            message=error.message,
            final=error.final,
            by_launcher=status == -signal.SIGTERM
            or (self.killed and status == -signal.SIGKILL),
        )


def _exit_descriptor(process: SupervisedProcess) -> int | None:
    """A descriptor that is readable once *process* has ended.

    None where the kernel has none to give: it is older than Linux 5.3, or a sandbox forbids the call.
    """
    if not isinstance(process, subprocess.Popen):
        return process.fileno()
    try:
        return os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        return None


def is_consequence(fault: str) -> bool:
    """Whether a *fault* only says that a peer has gone."""
    return any(words in fault for words in PEER_LOST_MARKERS)


def failure_summary(failures: Sequence[WorkerExit]) -> str:
    """A line per failed worker. What is a consequence comes after its cause."""

    def order(failure: WorkerExit) -> tuple[bool, bool, float]:
        consequence = is_consequence(failure.message)
        return failure.by_launcher, consequence, failure.seconds

    first, *others = sorted(failures, key=order)
    lines = [f"the job failed: rank {first.rank} {first.describe()}"]
    lines += [f"  then rank {one.rank} {_after(one, first)}" for one in others]
    return "\n".join(lines)


def _after(failure: WorkerExit, first: WorkerExit) -> str:
    """How one ended after the *first*, whose words are not said again; nor are gloo's of a peer that is
    gone, which name no cause."""
    how = replace(failure, message="").describe()
    if failure.by_launcher or not failure.message:
        return how
    if failure.message == first.message:
        return f"{how}: the same error"
    if is_consequence(failure.message):
        return f"{how}: it had lost a peer"
    return failure.describe()


Shown = Literal["first", "all"]


class WorkerOutput:
    """Streams for workers' processes. *shown* None: they are this process's own. What worker
    0 prints goes where this process's goes; what others print is left out, or shown line by
    line behind their rank. Of all of them standard error is shown."""

    def __init__(self, shown: Shown | None) -> None:
        self._shown = shown
        self._threads: list[threading.Thread] = []

    def streams(self, worker: int) -> tuple[int | None, int | None]:
        """A worker's standard output and error, as `EmulatedNetwork.popen` takes them."""
        if self._shown is None or (worker == 0 and self._shown == "first"):
            return None, None
        output = subprocess.PIPE if self._shown == "all" else subprocess.DEVNULL
        return output, subprocess.PIPE if worker else None

    def environment(self) -> Mapping[str, str]:
        """Without it Python keeps lines back where it writes into a pipe."""
        return {"PYTHONUNBUFFERED": "1"} if self._shown == "all" else {}

    def show(
        self, worker: int, output: IO[bytes] | None, errors: IO[bytes] | None
    ) -> None:
        """Print each line of its process when it arrives."""
        for source, target in ((output, sys.stdout), (errors, sys.stderr)):
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


def _copy(worker: int, source: IO[bytes], target: TextIO) -> None:
    with (
        source,
        suppress(BrokenPipeError),
    ):  # the worker gets a broken pipe
        for line in source:
            text = line.decode(errors="replace").rstrip("\n").rpartition("\r")[2]
            target.write(f"[{worker}] {text}\n")
            target.flush()


def write_whole_lines(streams: Iterable[Any] | None = None) -> None:
    """Python that is run unbuffered (``PYTHONUNBUFFERED``, as images of containers have it)
    writes each word of a ``print``, and the end of its line, by itself: those of another
    worker come in between. From now on *streams*, by default this process's own two, write
    line by line, and as promptly."""
    for stream in (sys.stdout, sys.stderr) if streams is None else streams:
        if isinstance(stream, io.TextIOWrapper) and stream.write_through:
            stream.reconfigure(line_buffering=True, write_through=False)
