"""Starts a keeper and sends it requests; every failure becomes an exception, at once."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

from paceline.runtimes.emulated.control_messages import (
    Answer,
    AskStatus,
    ControlChannel,
    Failed,
    Ready,
    Request,
    Spawn,
    Spawned,
    Status,
)
from paceline.runtimes.emulated.errors import (
    EmulationError,
    EmulationPermissionError,
    KeeperLostError,
    KernelLacksError,
)
from paceline.runtimes.emulated.permission import how_to_get_permission

# The package's own __init__ imports torch, which costs three seconds and 200 MB that the keeper
# does not need. An empty package replaces it.
_START = """
import sys, types
package = types.ModuleType("paceline")
package.__path__ = [sys.argv[1]]
sys.modules["paceline"] = package
from paceline.runtimes.emulated.keeper import main
sys.exit(main(int(sys.argv[2]), int(sys.argv[3])))
"""

A = TypeVar("A", bound=Answer)


class Client:
    """A running keeper. Several threads may use it: it handles one request at a time.

    After an exception that interrupts a request (Ctrl-C), or after the keeper's end, every call
    raises `KeeperLostError`.
    """

    def __init__(self) -> None:
        """Start a keeper and store its first message in ``ready``.

        Raises `EmulationPermissionError` if namespaces are not permitted, and `EmulationError` if
        the system has none (it is not Linux).
        """
        if not sys.platform.startswith("linux"):
            raise EmulationError(
                f"expected Linux, got {sys.platform}: an emulated cluster is made of "
                "Linux namespaces; `paceline simulate` runs everywhere"
            )
        self._lock = threading.Lock()
        self._lost: str | None = None
        try:
            launcher = os.pidfd_open(os.getpid())
        except OSError as error:
            raise EmulationError(
                f"expected Linux 5.3 or newer (pidfd_open), got: {error}"
            ) from error
        ours, theirs = socket.socketpair()
        self._line = ControlChannel(ours)
        try:
            self._guard = subprocess.Popen(
                [
                    sys.executable,
                    # Import nothing from the current directory.
                    "-P",
                    "-c",
                    _START,
                    str(Path(__file__).parents[2]),
                    str(theirs.fileno()),
                    str(launcher),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), launcher),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(launcher)
        try:
            self.ready = self._receive_ready()
        except BaseException:
            self.close()
            raise

    def ask(self, request: Request, kind: type[A]) -> A:
        """Send a request; return the response, which is of *kind*."""
        answer, _ = self.ask_with(request, kind)
        return answer

    def ask_with(
        self, request: Request, kind: type[A], descriptors: Sequence[int] = ()
    ) -> tuple[A, list[int]]:
        """Send a request with descriptors; return the response and its descriptors.

        Raises `KernelLacksError` or `EmulationError` if the kernel refused, `OSError` if a process
        could not start, and `KeeperLostError` if the keeper has ended.
        """
        with self._lock:
            if self._lost is not None:
                raise KeeperLostError(self._lost)
            try:
                self._line.send(request, descriptors)
                answer, received = self._line.receive_answer()
            except (EOFError, OSError) as error:
                self._lost = (
                    "expected an answer from the process that holds the emulated "
                    "cluster, but it is gone (killed, or out of memory?), and all hosts "
                    "and their processes with it: start the cluster again"
                )
                raise KeeperLostError(self._lost) from error
            except BaseException:
                self._lost = (
                    "a question to the emulated cluster was interrupted half way: "
                    "close it and start another"
                )
                raise
        if isinstance(answer, Failed):
            _raise(answer)
        assert isinstance(answer, kind), answer
        return answer, received

    def close(self) -> None:
        """End the keeper and everything it holds; return when all of it is gone."""
        self._lost = "the emulated cluster was closed: start another"
        self._line.close()
        self._guard.wait()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _receive_ready(self) -> Ready:
        try:
            answer, _ = self._line.receive_answer()
        except (EOFError, OSError) as error:
            raise KeeperLostError(
                "the process that holds the emulated cluster ended before it could report an error; "
                "see standard error for its output"
            ) from error
        if isinstance(answer, Failed):
            _raise(answer)
        assert isinstance(answer, Ready), answer
        return answer


def _raise(failure: Failed) -> None:
    """Raise the exception for a keeper's failure."""
    match failure.kind:
        case "permission":
            raise EmulationPermissionError(how_to_get_permission(failure.text))
        case "kernel":
            raise KernelLacksError(failure.text)
        case "spawn":
            raise OSError(failure.number, failure.text, failure.filename)
        case "other":
            raise EmulationError(f"the kernel refused: {failure.text}")


Stream = int | IO[Any] | None
"""The values that `subprocess` takes: None, a descriptor, a file, ``PIPE``, ``DEVNULL``,
``STDOUT``."""
Argument = str | bytes | os.PathLike[str]


class HostProcess:
    """A process in a host of an emulated cluster; it ends with the cluster at the latest.

    Attributes:
        pid: Its number on the machine (inside its host it has another), and that of its session and
            process group.
        returncode: None until `poll` or `wait` has seen its end, then as in `subprocess`.
        keeper_fault: Why the cluster's keeper ended, if the process ended with it; empty otherwise.
        stdin: A binary file if ``subprocess.PIPE`` was passed, else None; likewise *stdout* and
            *stderr*.
    """

    def __init__(
        self,
        client: Client,
        host: int,
        arguments: Sequence[Argument],
        *,
        environment: Mapping[str, str] | None,
        directory: Argument | None,
        stdin: Stream,
        stdout: Stream,
        stderr: Stream,
    ) -> None:
        self.args = arguments
        self.returncode: int | None = None
        self.keeper_fault = ""
        self._client = client
        self._lock = threading.Lock()
        pipes = _Pipes()
        try:
            standard_input = pipes.source(stdin, 0)
            output = pipes.sink(stdout, 1)
            joined = stderr == subprocess.STDOUT
            errors = output if joined else pipes.sink(stderr, 2)
            request = Spawn(
                host=host,
                arguments=[os.fsencode(word) for word in arguments],
                environment=[
                    (os.fsencode(name), os.fsencode(value))
                    for name, value in (
                        os.environ if environment is None else environment
                    ).items()
                ],
                directory=os.fsencode(os.getcwd() if directory is None else directory),
            )
            spawned, (descriptor,) = client.ask_with(
                request, Spawned, [standard_input, output, errors]
            )
        except BaseException:
            pipes.close_ours()
            raise
        finally:
            pipes.close_theirs()
        self.pid = spawned.pid
        self._number = spawned.process
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self.stdin = pipes.ours.get(0)
        self.stdout = pipes.ours.get(1)
        self.stderr = pipes.ours.get(2)

    def fileno(self) -> int:
        """Return a descriptor for `select` and the like: readable once the process has ended."""
        return self._descriptor

    def poll(self) -> int | None:
        """Return the exit status if the process has ended, else None."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process's end; return its exit status.

        Raises `subprocess.TimeoutExpired` after *timeout* seconds.
        """
        code = self._look(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(
                [os.fsdecode(word) for word in self.args], timeout
            )
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing happens if the process has ended."""
        with self._lock:
            if self.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._descriptor, number)

    def terminate(self) -> None:
        """Ask the process to end (SIGTERM)."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process (SIGKILL)."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is not None:
            return self.returncode
        watch = select.poll()
        watch.register(self._descriptor, select.POLLIN)
        if not watch.poll(None if timeout is None else max(0.0, timeout) * 1000):
            return None
        with self._lock:
            if self.returncode is None:
                try:
                    answer = self._client.ask(AskStatus(process=self._number), Status)
                    self.returncode = answer.code
                except KeeperLostError as error:
                    # The kernel has ended all processes that were still running.
                    self.keeper_fault = str(error)
                    self.returncode = -signal.SIGKILL
        return self.returncode

    def __repr__(self) -> str:
        return f"<HostProcess {self.pid} {self.args!r} returncode={self.returncode}>"


class _Pipes:
    """Turns the values that `subprocess` takes into descriptors, and keeps both ends."""

    def __init__(self) -> None:
        self.ours: dict[int, IO[bytes]] = {}
        self._theirs: list[int] = []

    def source(self, stream: Stream, number: int) -> int:
        """Return a descriptor to read from."""
        if stream == subprocess.PIPE:
            theirs, ours = os.pipe()
            self._keep(theirs, os.fdopen(ours, "wb"), number)
            return theirs
        return self._given(stream, number)

    def sink(self, stream: Stream, number: int) -> int:
        """Return a descriptor to write to."""
        if stream == subprocess.PIPE:
            ours, theirs = os.pipe()
            self._keep(theirs, os.fdopen(ours, "rb"), number)
            return theirs
        return self._given(stream, number)

    def close_ours(self) -> None:
        """Close this process's ends, after a failure."""
        for file in self.ours.values():
            file.close()

    def close_theirs(self) -> None:
        """Close the process's ends, since it has copies of its own."""
        for descriptor in self._theirs:
            os.close(descriptor)

    def _keep(self, theirs: int, ours: IO[bytes], number: int) -> None:
        self._theirs.append(theirs)
        self.ours[number] = ours

    def _given(self, stream: Stream, number: int) -> int:
        if stream is None:
            return number
        if stream == subprocess.DEVNULL:
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            self._theirs.append(null)
            return null
        return stream if isinstance(stream, int) else stream.fileno()
