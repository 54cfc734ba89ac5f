"""Launches workers over torchrun's launch API."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)
from torch.distributed.elastic.rendezvous import RendezvousError

from paceline.errors import UsageError
from paceline.run_options import ScriptJob
from paceline.runtimes.processes import (
    WorkerExit,
    as_launcher,
    ends_with_this,
    failure_summary,
)
from paceline.runtimes.python_internals import options_of
from paceline.runtimes.temporary_folder import (
    LauncherInterrupted,
    end_at_once,
    scratch_folder,
    signals,
)
from paceline.timeouts import timeouts

_PLACEMENT = (
    "--nnodes",
    "--rdzv-endpoint",
    "--rdzv-backend",
    "--master-addr",
    "--master-port",
    "--standalone",
)
_PLACEMENT_VARIABLES = tuple(
    "PET_" + option.removeprefix("--").upper().replace("-", "_")
    for option in _PLACEMENT
)
"""Variables of torchrun's options, which Kubeflow's trainer sets."""


def torchrun_options() -> dict[str, int]:
    """Return torchrun's options, and how many values each takes."""
    return options_of(torchrun.get_args_parser())


def launch(
    job: ScriptJob, workers: int | None, torchrun_options: Sequence[str] = ()
) -> int:
    """Run worker processes until all have ended; return the exit status.

    When one fails, torchrun's agent ends the others. Then a message names the rank that failed
    first. Neither processes nor temporary files are left.
    """
    words = list(torchrun_options)
    given = {word.partition("=")[0].replace("_", "-") for word in words}
    if workers is not None:
        if workers < 1:
            raise UsageError(f"--workers: expected 1 or more, got {workers}")
        if "--nproc-per-node" in given:
            raise UsageError(
                "--workers and --nproc-per-node are the same: give one of them"
            )
        words.append(f"--nproc-per-node={workers}")
    placed = not given.isdisjoint(_PLACEMENT) or any(
        os.environ.get(variable) for variable in _PLACEMENT_VARIABLES
    )
    if not placed:
        # Let it choose a free port, so that jobs do not collide.
        words.append("--standalone")
    if "--rdzv-endpoint" in given and given.isdisjoint(
        ("--rdzv-backend", "--node-rank")
    ):
        # By torchrun's default every machine would be the first one.
        words.append("--rdzv-backend=c10d")
    if "--shutdown-timeout" not in given:
        words.append(f"--shutdown-timeout={timeouts.workers_shutdown:.0f}")
    # torchrun would also set the number of threads, with a warning each time.
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    variables = threads | job.options.to_environment() | as_launcher()
    # The agent's message about a failed worker is replaced below, with the cause.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(
        logging.CRITICAL
    )
    with scratch_folder() as scratch, _environment(variables):
        if "--log-dir" not in given:
            # torchrun would not remove a folder of its own.
            words.append(f"--log-dir={scratch}")
        arguments = torchrun.parse_args([*words, job.script, *job.arguments])
        _tie_workers_to_launcher(arguments)
        try:
            with _ended_while_torch_waits():
                torchrun.run(arguments)
        except ChildFailedError as error:
            failures = [_failure(rank, f) for rank, f in error.failures.items()]
            print(f"paceline: {failure_summary(failures)}", file=sys.stderr)
            return 1
        except SignalException as error:
            name = error.sigval.name
            print(f"paceline: {name}: all workers were ended", file=sys.stderr)
            return 128 + error.sigval
        except LauncherInterrupted as interruption:
            # The signal arrived before torchrun installed its signal handlers.
            return interruption.report()
        except (
            RendezvousError,
            RuntimeError,
            ValueError,
        ) as error:
            # A port may be in use, for example.
            print(f"paceline: the job could not start: {error}", file=sys.stderr)
            return 1
    return 0


def _tie_workers_to_launcher(arguments: argparse.Namespace) -> None:
    """Let torchrun start its workers so that they end with this process."""
    if arguments.run_path or (arguments.no_python and arguments.module):
        # They are forked from this process, or torchrun refuses the command.
        return
    command = [arguments.training_script]
    if not arguments.no_python:
        python = os.environ.get("PYTHON_EXEC", sys.executable)
        command = [python, "-u", *(["-m"] if arguments.module else []), *command]
    words = ends_with_this([*command, *arguments.training_script_args])
    arguments.no_python, arguments.module = True, False
    arguments.training_script, *arguments.training_script_args = words


@contextlib.contextmanager
def _ended_while_torch_waits() -> Iterator[None]:
    """End this process if a signal arrives in torch's native code, before workers have started.

    torchrun's static rendezvous (``--node-rank``) waits there for other machines, for minutes, and
    Python runs no handler meanwhile. The C part of Python's handlers does run: it writes to a pipe.
    """
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread receives signals.
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    left = threading.Event()

    def watch() -> None:
        while came := os.read(reader, 1):
            number = came[0]
            # Once torchrun has started workers, it waits in Python and handles signals itself.
            if not signals.would_raise(number) or left.wait(timeouts.terminate):
                continue
            # The main thread is still in native code.
            if signals.would_raise(number):
                name = signal.Signals(number).name
                print(f"paceline: {name} before any worker started", file=sys.stderr)
                end_at_once(128 + number)

    watcher = threading.Thread(target=watch, name="paceline-signals", daemon=True)
    watcher.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        os.close(writer)
        watcher.join()
        os.close(reader)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Add these variables to this process in this block: torchrun's workers inherit them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _failure(rank: int, failure: ProcessFailure) -> WorkerExit:
    message = failure.error_file_data.get("message")
    return WorkerExit(
        rank=rank,
        pid=failure.pid,
        status=failure.exitcode,
        seconds=failure.timestamp,
        message=str(message["message"]) if isinstance(message, dict) else "",
        by_launcher=failure.exitcode == -signal.SIGTERM,
    )
