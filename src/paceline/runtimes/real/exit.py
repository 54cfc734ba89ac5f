"""Ends a worker process: after success, after failure, or with its launcher.

*Detection.* Python's `atexit` does not say why a process ends. So from when a script joins a
runtime, this module watches uncaught exceptions, ``sys.exit`` and ``destroy_process_group``. It
replaces ``sys.excepthook`` and ``dist.destroy_process_group``. It also replaces ``sys.exit``,
``exit`` and ``quit`` if other workers would wait for this one or a launcher needs its exit status.
Each replacement calls the original, which is restored at the end. Importing paceline replaces
nothing.

*Success*: the script returned, or left with exit status 0. Results are written. An optimizer that
was not finished takes part in collectives until all workers finish. Then the process groups are
released with everything that refers to them: a thread of torch that is alive while the interpreter
shuts down may abort the process. If a script calls ``dist.destroy_process_group``, the same happens
just before that call.

*Failure*: an uncaught exception, or ``sys.exit`` with another status. Collectives are impossible,
since the other workers might not join them. So is a normal shutdown: a collective under way would
delay it, or abort it. So the process ends at once, after Python's own clean-up, and sends the
reason to the other workers (`peer_monitor`) and to the launcher. If the reader of the output has gone
(``| head``), the process prints nothing and has a shell's status, 141.

A bare ``raise SystemExit(3)`` looks like success: the worker continues with the others until they
end, and then has status 3.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import logging
import os
import signal
import sys
import threading
import time
import traceback as tracebacks
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import msgspec
import torch.distributed as dist

from paceline.errors import PacelineError, PeerLostError
from paceline.runtimes.exec_with_parent import end_with_parent
from paceline.runtimes.processes import is_consequence, reader_has_gone
from paceline.runtimes.python_internals import call_finalizers, end_children
from paceline.torch_internals import forget_default_group


class ExitWatcher:
    """Watches how this process ends.

    Args:
        steps: Returns the number of optimizer steps so far.
        close: Does the work of a successful end, before the process groups are released.
        leave: Called last, with None or the error.
        matters: Whether another process needs the exit status.
    """

    def __init__(
        self,
        steps: Callable[[], int],
        close: Callable[[], None],
        leave: Callable[[str | None], None],
        *,
        matters: bool,
    ) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._steps = steps
        self._close = close
        self._leave = leave
        self._process = os.getpid()
        # The exit status and cause of a failure, and the number of steps at that time. A script
        # that catches its SystemExit and continues to train has not ended.
        self._bad_end: tuple[int, str, int] | None = None
        self._watch(matters)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent()
        atexit.register(self._at_exit)

    def _watch(self, matters: bool) -> None:
        hook, leave, destroy = sys.excepthook, sys.exit, dist.destroy_process_group

        def note_exception(
            kind: type[BaseException],
            error: BaseException,
            traceback: TracebackType | None,
        ) -> None:
            interrupted = issubclass(kind, KeyboardInterrupt)
            unread = issubclass(kind, BrokenPipeError) and reader_has_gone()
            status = 1
            if interrupted or unread:
                status = 128 + (signal.SIGINT if interrupted else signal.SIGPIPE)
            cause = f"failed with {kind.__name__}: {error}"
            self._note_bad_end(status, "was interrupted" if interrupted else cause)
            if os.getpid() == self._process:
                write_torchelastic_error(error)
            if isinstance(error, PacelineError):
                traceback = _frames_of_script(traceback)
                error.__cause__, error.__suppress_context__ = None, True
            # A closed output pipe is not the script's fault.
            if not unread:
                hook(kind, error.with_traceback(traceback), traceback)

        @functools.wraps(leave)
        def note_exit(status: Any = None, /) -> NoReturn:
            in_main_thread = threading.current_thread() is threading.main_thread()
            if in_main_thread and status is not None and status != 0:
                number = status % 256 if isinstance(status, int) else 1
                self._note_bad_end(number, f"ended with exit status {number}")
            leave(status)

        @functools.wraps(destroy)
        def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
            # In a ``finally`` after an error, do not join the others' collectives.
            error = sys.exc_info()[1]
            good = error is None or (isinstance(error, SystemExit) and not error.code)
            if good and (group is None or group is dist.group.WORLD):
                self._close()
                forget_default_group()
            destroy(group)

        self._replace(sys, "excepthook", note_exception)
        self._replace(dist, "destroy_process_group", destroy_process_group)
        if matters:
            for place, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
                self._replace(place, name, note_exit)

    def _replace(self, place: Any, name: str, ours: Any) -> None:
        # builtins has no exit if Python was started without site.
        self._replaced.append((place, name, getattr(place, name, ours), ours))
        setattr(place, name, ours)

    def _put_back(self) -> None:
        """Restore the originals, except where other code has replaced them since."""
        for place, name, before, ours in self._replaced:
            if getattr(place, name, None) is ours:
                setattr(place, name, before)
        self._replaced.clear()

    def _note_bad_end(self, status: int, cause: str) -> None:
        self._bad_end = status, cause, self._steps()

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            # This is a forked child.
            return
        if self._bad_end is not None:
            status, cause, steps = self._bad_end
            if steps == self._steps():
                self._leave(cause)
                exit_now(status)
        try:
            self._close()
            if dist.is_initialized():
                dist.destroy_process_group()
        except BaseException as error:
            write_torchelastic_error(error)
            if isinstance(error, PacelineError):
                print(f"paceline: {error}", file=sys.stderr)
            else:
                tracebacks.print_exc()
            self._leave(f"failed at its end: {error}")
            exit_now(1)
        self._put_back()
        self._leave(None)


def _frames_of_script(traceback: TracebackType | None) -> TracebackType | None:
    """Return the frames to show of an error that paceline raises on purpose: those of the script."""
    ours = f"{Path(__file__).parent.parent.parent}{os.sep}"
    frames = []
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename.startswith(ours):
            break
        frames.append(traceback)
        traceback = traceback.tb_next
    shown: TracebackType | None = None
    for one in reversed(frames):
        shown = TracebackType(shown, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return shown


def write_torchelastic_error(error: BaseException) -> None:
    """Write the error to torchrun's file, in its format.

    torchrun's `ErrorHandler` would not show the traceback of an uncaught exception.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or not isinstance(error, Exception):
        return
    traceback = "".join(tracebacks.format_exception(error))
    # torchrun takes the error with the lowest time, in whole seconds, as the first cause. It dates
    # a killed worker when it notices the end. So give a consequence a time safely after its cause.
    lost_a_peer = isinstance(error, PeerLostError) or is_consequence(str(error))
    timestamp = int(time.time()) + (2 if lost_a_peer else 0)
    details = {"py_callstack": traceback, "timestamp": str(timestamp)}
    if isinstance(error, PacelineError) and not error.restart_helps:
        details["final"] = "1"
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": details}
    # The launcher may end this process meanwhile, and two threads may report errors.
    unfinished = Path(f"{path}.{threading.get_ident()}.part")
    with contextlib.suppress(OSError):
        unfinished.write_bytes(msgspec.json.encode({"message": message}))
        unfinished.replace(path)


def exit_now(status: int) -> NoReturn:
    """End this process without shutting the interpreter down.

    It does Python's own clean-up at exit: child processes, temporary folders, logs.
    """
    for tidy_up in (
        end_children,
        call_finalizers,
        logging.shutdown,
        sys.stdout.flush,
        sys.stderr.flush,
    ):
        try:
            tidy_up()
        except BrokenPipeError:
            # The reader of the output has ended.
            pass
        except Exception:
            tracebacks.print_exc()
    os._exit(status)
