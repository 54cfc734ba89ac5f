"""Supervises processes that a launcher has started, and passes on their output.

A launcher that is killed ends no other process. So it starts each worker by `ends_with_this`: the
kernel then kills the worker when its launcher ends (PR_SET_PDEATHSIG), from before the worker's
command begins.
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
    """The common interface of `subprocess.Popen` and a process in an emulated host."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class ProcessWithDescriptor(Process, Protocol):
    """A process with a descriptor of its own, such as a process in an emulated host."""

    def fileno(self) -> int:
        """Return a descriptor that is readable once the process has ended."""
        ...


SupervisedProcess = subprocess.Popen[bytes] | ProcessWithDescriptor


def as_launcher() -> dict[str, str]:
    """Return the variables by which workers know that this process started them."""
    return {LAUNCHER_VARIABLE: str(os.getpid())}


def leave_interrupts_to_launcher() -> None:
    """Print no traceback of Ctrl-C in this worker, since its launcher reports it.

    The worker's own child processes print theirs.
    """
    if os.environ[LAUNCHER_VARIABLE] == str(os.getppid()):
        sys.excepthook = _without_interrupts


def ends_with_this(command: Sequence[str]) -> list[str]:
    """Return the command that runs *command* so that the kernel kills it when this process ends.

    Start it from a thread that lives as long as the process: the kernel watches the thread.
    """
    flags = [sys.executable, "-I", "-S", exec_with_parent.__file__]
    return [*flags, str(os.getpid()), *command]


def _without_interrupts(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)


def reader_has_gone() -> bool:
    """Return whether standard output is a pipe without a reader, as after ``| head -1``."""
    watch = select.poll()
    watch.register(1, 0)
    return any(found & select.POLLERR for _, found in watch.poll(0))


def wait_for_all(processes: Iterable[Process], seconds: float) -> None:
    """Wait until all processes have ended, but at most *seconds*."""
    deadline = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def end_all(processes: Iterable[Process]) -> None:
    """Terminate all processes, and kill those still running after `Timeouts.terminate`.

    The kernel may delay the end of a killed process, in a driver's call for example: the wait for
    it has the same limit.
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
    """Return an exit status as text; a negative one is a signal."""
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
"""Messages of gloo, NCCL and `peer_monitor` in a worker whose peer has ended. Such an error is a
consequence of another failure, not a cause."""

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
    """The error that a failed worker has written: see `ending.write_torchelastic_error`.

    *seconds* counts since 1970. *final*: a restart of the process would fail in the same way.
    """

    message: str = ""
    seconds: float = 0.0
    final: bool = False


def reported_error(path: Path) -> ReportedError:
    """Return the error in that file; an empty one if the worker has written none."""
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
        rank: The worker's rank.
        pid: The process's number.
        status: Its exit status; negative: the signal.
        seconds: When it ended, in seconds since 1970.
        message: The error that it reported; empty: none.
        final: Whether a restart of the process would fail in the same way.
        by_launcher: Whether the launcher ended it, because another worker had failed.
    """

    rank: int
    pid: int
    status: int
    seconds: float
    message: str = ""
    final: bool = False
    by_launcher: bool = False

    def describe(self) -> str:
        """Return how it ended, as a phrase."""
        if self.by_launcher:
            return "was ended by the launcher"
        how = f"{how_it_ended(self.status)} (process {self.pid})"
        return f"{how}: {self.message}" if self.message else how


class ProcessSupervisor:
    """Waits for the workers' processes of a job, and ends them.

    Each process is in one poll set from `add` to its exit, and each exit is reported once.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._running: dict[int, _Supervised] = {}

    @property
    def is_running(self) -> bool:
        """Whether a process is still running, as far as `wait` and `stop` have reported."""
        return bool(self._running)

    def add(
        self, rank: int, process: SupervisedProcess, error_file: Path | None = None
    ) -> None:
        """Supervise the *process* of worker *rank*, which writes its error to *error_file*."""
        descriptor = _exit_descriptor(process)
        if descriptor is not None:
            self._poll.register(descriptor, select.POLLIN)
        self._running[rank] = _Supervised(process, descriptor, error_file)

    def wait(
        self, seconds: float = math.inf, wake: Sequence[int] = ()
    ) -> list[WorkerExit]:
        """Wait until a process ends, a descriptor of *wake* is readable, or *seconds* pass.

        Returns:
            The exits since the last call. If no process is left, it returns at once.
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
            The exits since the last call. A process whose end the kernel delays after SIGKILL has
            none, and
            is no longer supervised.
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
        """Return the longest wait in seconds: a process without a descriptor must be polled."""
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
    """A process that has not ended. *killed*: its supervisor has killed it."""

    process: SupervisedProcess
    descriptor: int | None
    error_file: Path | None
    killed: bool = field(default=False, init=False)

    def exit(self, rank: int, status: int) -> WorkerExit:
        """Return how it ended, with this *status*."""
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
    """Return a descriptor that is readable once *process* has ended.

    None if the kernel cannot make one: it is older than Linux 5.3, or a sandbox forbids the call.
    """
    if not isinstance(process, subprocess.Popen):
        return process.fileno()
    try:
        return os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        return None


def is_consequence(fault: str) -> bool:
    """Return whether a *fault* is only the loss of a peer."""
    return any(words in fault for words in PEER_LOST_MARKERS)


def failure_summary(failures: Sequence[WorkerExit]) -> str:
    """Return a line per failed worker. Consequences come after their cause."""

    def order(failure: WorkerExit) -> tuple[bool, bool, float]:
        consequence = is_consequence(failure.message)
        return failure.by_launcher, consequence, failure.seconds

    first, *others = sorted(failures, key=order)
    lines = [f"the job failed: rank {first.rank} {first.describe()}"]
    lines += [f"  then rank {one.rank} {_after(one, first)}" for one in others]
    return "\n".join(lines)


def _after(failure: WorkerExit, first: WorkerExit) -> str:
    """Return how a worker ended after the *first* one.

    It omits a message that repeats the first one's, and gloo's messages of a lost peer, which name
    no cause.
    """
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
    """Streams for workers' processes.

    *shown* None: workers write to this process's own streams. Otherwise worker 0's output goes to
    this process's output. *shown* says whether the other workers' output is dropped, or printed
    line by line behind their rank. Standard error of all workers is printed.
    """

    def __init__(self, shown: Shown | None) -> None:
        self._shown = shown
        self._threads: list[threading.Thread] = []

    def streams(self, worker: int) -> tuple[int | None, int | None]:
        """Return a worker's standard output and error, as `EmulatedNetwork.popen` takes them."""
        if self._shown is None or (worker == 0 and self._shown == "first"):
            return None, None
        output = subprocess.PIPE if self._shown == "all" else subprocess.DEVNULL
        return output, subprocess.PIPE if worker else None

    def environment(self) -> Mapping[str, str]:
        """Return variables for workers, as Python would buffer lines that it writes to a pipe."""
        return {"PYTHONUNBUFFERED": "1"} if self._shown == "all" else {}

    def show(
        self, worker: int, output: IO[bytes] | None, errors: IO[bytes] | None
    ) -> None:
        """Print each line of a worker's process when it arrives."""
        for source, target in ((output, sys.stdout), (errors, sys.stderr)):
            if source is not None:
                thread = threading.Thread(
                    target=_copy, args=(worker, source, target), daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def finish(self) -> None:
        """Wait for the last output of processes, all of which have ended."""
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
    """Let *streams* write whole lines, as promptly; by default this process's own two.

    Unbuffered Python (``PYTHONUNBUFFERED``, as container images set it) writes each word of a
    ``print``, and the end of its line, by itself. Then words of other workers come in between.
    """
    for stream in (sys.stdout, sys.stderr) if streams is None else streams:
        if isinstance(stream, io.TextIOWrapper) and stream.write_through:
            stream.reconfigure(line_buffering=True, write_through=False)
