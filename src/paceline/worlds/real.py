"""The real world: one process per worker, launched by torchrun or whatever sets its
variables, on the wall clock.

How a worker ends
-----------------
*Well*: the script returned, or left with exit status 0. What was put off until now is done
(an optimizer that was not finished keeps the others company, results are written), and
then the process groups go, with everything that refers to them: torch's threads end with
the last reference, and a thread that is alive while the interpreter is taken down may
abort the process. A script that calls ``dist.destroy_process_group`` itself gets the same,
just before.

*Badly*: an exception that nobody caught, or ``sys.exit`` with another status. Nothing
collective may be done: the others might not come. Nor may the interpreter be taken down:
a collective under way would hold it up until all peers have come, or abort it. So the
process ends at once, after Python's own tidying up. The lost connections tell the other
workers, and the launcher tells people.

A bare ``raise SystemExit(3)`` cannot be told from a good end: the worker goes on in step
with the others until they end, and has status 3 then.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import functools
import gc
import logging
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback as tracebacks
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NoReturn

import msgspec
import torch
import torch.distributed as dist

from paceline.collectives.comm import TorchComm
from paceline.context import current_world, enter_world
from paceline.errors import UsageError
from paceline.instruments import Journal
from paceline.interfaces import World
from paceline.options import RunOptions
from paceline.report.files import write_worker
from paceline.report.result import Result, Summary, gather_summaries
from paceline.torch_private import local_store
from paceline.worlds.seeding import seed_everything

LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
)
"""What gloo and NCCL say in a worker whose peer ended: a consequence, not the cause."""

_PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a process gets when its parent ends."""


class RealWorld:
    """This process as one worker of a job.

    ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` say which; without them
    the process is a job of one.
    """

    name: ClassVar[str] = "real"
    compute = None
    speeds = None

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self.rank = _whole("RANK", 0)
        self.size = _whole("WORLD_SIZE", 1)
        self.journal = Journal(
            self.rank, self.now, keep_spans=options.records is not None
        )
        self._exit_actions: list[Callable[[], None]] = []
        self.trained: list[tuple[torch.nn.Module, torch.optim.Optimizer]] = []
        self._results_written = False
        self._process = os.getpid()
        # The exit status of a bad end, and the number of steps when it was asked for:
        # a script that catches its SystemExit and trains on has not ended.
        self._bad_end: tuple[int, int] | None = None
        self._watch_exits()
        _end_with_launcher()
        atexit.register(self._at_exit)

    def connect(self) -> None:
        if dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self.journal.worker = self.rank
            return
        backend = "gloo"
        if torch.cuda.is_available():
            local = _whole("LOCAL_RANK", 0)
            if local < torch.cuda.device_count():
                torch.cuda.set_device(local)
                backend = "cpu:gloo,cuda:nccl"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=local_store(), rank=0, world_size=1)

    def now(self) -> float:
        return time.perf_counter()

    def pace(self, seconds: float) -> None:
        if seconds:
            time.sleep(seconds)

    def at_exit(self, action: Callable[[], None]) -> None:
        self._exit_actions.append(action)

    # ---- the end ----

    def _watch_exits(self) -> None:
        """Learn of bad ends, which `atexit` does not tell from good ones, and of the end of
        the process groups."""
        hook, leave, destroy = sys.excepthook, sys.exit, dist.destroy_process_group

        def note_exception(
            kind: type[BaseException],
            error: BaseException,
            traceback: TracebackType | None,
        ) -> None:
            interrupted = issubclass(kind, KeyboardInterrupt)
            self._note_bad_end(128 + signal.SIGINT if interrupted else 1)
            if os.getpid() == self._process:
                _report_to_launcher(error)
            hook(kind, error, traceback)

        @functools.wraps(leave)
        def note_exit(status: Any = None, /) -> NoReturn:
            in_main_thread = threading.current_thread() is threading.main_thread()
            if in_main_thread and status is not None and status != 0:
                self._note_bad_end(status % 256 if isinstance(status, int) else 1)
            leave(status)

        @functools.wraps(destroy)
        def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
            # In a ``finally`` on the way out of an error nobody is kept company.
            error = sys.exc_info()[1]
            good = error is None or (isinstance(error, SystemExit) and not error.code)
            if good and (group is None or group is dist.group.WORLD):
                self._close()
            destroy(group)

        sys.excepthook = note_exception
        for place, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
            setattr(place, name, note_exit)
        setattr(dist, destroy.__name__, destroy_process_group)

    def _note_bad_end(self, status: int) -> None:
        self._bad_end = status, len(self.journal.steps)

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            return  # a child that was forked off
        if self._bad_end is not None:
            status, steps = self._bad_end
            if steps == len(self.journal.steps):
                _end_at_once(status)
        try:
            self._close()
            if dist.is_initialized():
                dist.destroy_process_group()
        except BaseException as error:
            _report_to_launcher(error)
            tracebacks.print_exc()
            _end_at_once(1)
        _release_groups()

    def _close(self) -> None:
        """Do what was put off until the end."""
        if dist.is_initialized():
            for action in self._exit_actions:
                action()
        self._exit_actions.clear()
        self._write_results()

    def _write_results(self) -> None:
        if not self.journal.method or self._results_written:
            return
        self._results_written = True
        if self.options.records is not None:
            write_worker(self.options.records, self.journal)
        if self.options.json:
            mine = Summary.of(self.journal)
            summaries = gather_summaries(mine) if dist.is_initialized() else [mine]
            if self.rank == 0:
                result = Result.of("real", self.size, self.journal, summaries)
                if self.options.result is not None:
                    Path(self.options.result).write_text(result.to_json() + "\n")
                else:
                    # In one piece: other workers may write to the same place.
                    sys.stdout.write(result.to_json() + "\n")
                    sys.stdout.flush()


def join_world() -> World:
    """The caller's world; where there is none yet, this process becomes a real worker."""
    world = current_world()
    if world is None:
        options = RunOptions.from_environment()
        world = RealWorld(options)
        enter_world(world)
        if options.seed is not None:
            seed_everything(options.seed)
    return world


def _whole(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"environment variable {variable}: expected a whole number, got {text!r}"
        ) from None


def _end_with_launcher() -> None:
    """Let the kernel end this worker when its launcher is gone, however that went (kill
    -9, Ctrl-C twice): nobody would be left to end it."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _report_to_launcher(error: BaseException) -> None:
    """Leave the error where torchrun looks for it, in its form: `ErrorHandler`'s would
    not show the traceback of an exception that nobody handles."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or not isinstance(error, Exception):
        return
    traceback = "".join(tracebacks.format_exception(error))
    # torchrun takes the lowest of these, in whole seconds, for the first cause, and dates
    # a killed worker when it notices: a consequence is put safely after its cause.
    lost_a_peer = any(words in str(error) for words in LOST_PEER)
    timestamp = int(time.time()) + (2 if lost_a_peer else 0)
    details = {"py_callstack": traceback, "timestamp": str(timestamp)}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": details}
    unfinished = Path(path + ".part")  # the launcher may end this process meanwhile
    with contextlib.suppress(OSError):
        unfinished.write_bytes(msgspec.json.encode({"message": message}))
        unfinished.replace(path)


def _release_groups() -> None:
    """Drop what refers to process groups that were destroyed: their threads end with the
    last reference."""
    gc.collect()
    for thing in gc.get_objects():
        if type(thing) is TorchComm:
            vars(thing)["_group"] = None
    gc.collect()


def _end_at_once(status: int) -> NoReturn:
    """End this process without taking the interpreter down.

    What Python tidies up at exit is tidied up: child processes, temporary folders, logs.
    """
    for tidy_up in (
        multiprocessing.util._exit_function,  # type: ignore[attr-defined]
        weakref.finalize._exitfunc,  # type: ignore[attr-defined]
        logging.shutdown,
        sys.stdout.flush,
        sys.stderr.flush,
    ):
        try:
            tidy_up()
        except Exception:
            tracebacks.print_exc()
    os._exit(status)
