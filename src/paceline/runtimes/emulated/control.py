"""Starts a keeper and asks it; every failure comes back as an exception, at once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from paceline.runtimes.emulated.control_messages import (
    Answer,
    Failed,
    Line,
    Ready,
    Request,
)
from paceline.runtimes.emulated.errors import (
    EmulationError,
    EmulationPermissionError,
    KeeperLostError,
    KernelLacksError,
)
from paceline.runtimes.emulated.permission import how_to_get_permission

# The package's own __init__ imports torch: three seconds and 200 MB that the keeper has no
# use for. An empty package stands in for it.
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
    """A running keeper. Safe to use from several threads: one question at a time.

    After an exception that interrupts a question (Ctrl-C), or after the keeper's end,
    every call raises `KeeperLostError`.
    """

    def __init__(self) -> None:
        """Start a keeper and hear its first words, in ``ready``.

        Raises `EmulationPermissionError` where namespaces are not permitted, and
        `EmulationError` where there are none (another system than Linux).
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
        self._line = Line(ours)
        try:
            self._guard = subprocess.Popen(
                [
                    sys.executable,
                    "-P",  # nothing from the current directory
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
            self.ready = self._hear_first_words()
        except BaseException:
            self.close()
            raise

    def ask(self, request: Request, kind: type[A]) -> A:
        """Ask, and return the answer, which is of *kind*."""
        answer, _ = self.ask_with(request, kind)
        return answer

    def ask_with(
        self, request: Request, kind: type[A], descriptors: Sequence[int] = ()
    ) -> tuple[A, list[int]]:
        """Ask, sending descriptors along; returns the answer and its descriptors.

        Raises `KernelLacksError`, `EmulationError` for what the kernel refused, `OSError`
        for a process that could not start, `KeeperLostError` if there is no keeper.
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
        """End the keeper and everything it holds; returns when that is gone."""
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

    def _hear_first_words(self) -> Ready:
        try:
            answer, _ = self._line.receive_answer()
        except (EOFError, OSError) as error:
            raise KeeperLostError(
                "the process that should hold the emulated cluster ended before it "
                "could say why; its own words, if any, are on standard error"
            ) from error
        if isinstance(answer, Failed):
            _raise(answer)
        assert isinstance(answer, Ready), answer
        return answer


def _raise(failure: Failed) -> None:
    """Raise what a keeper's failure means here."""
    match failure.kind:
        case "permission":
            raise EmulationPermissionError(how_to_get_permission(failure.text))
        case "kernel":
            raise KernelLacksError(failure.text)
        case "spawn":
            raise OSError(failure.number, failure.text, failure.filename)
        case "other":
            raise EmulationError(f"the kernel refused: {failure.text}")
