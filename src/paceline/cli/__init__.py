"""The command line: one file per verb, no logic of its own.

Words are read before torch is imported, which takes seconds: so --help and what is
misspelt are answered at once. A verb imports what it works with in its own function.

- `run`, `emulate`, `simulate`: run a script in the real, the emulated or the simulated runtime.
- `plan`, `plan_switches`: predict which method, or which upgraded switches, are fastest.
- `compare`: train with several methods, and compare them.
- `doctor`: find what slows a training down.
- `probe`, `profile`: measure a network, or a training step.
- `serve`, `aggregate`: a parameter server, or an aggregator, on a host of its own.
- `check`: what this machine can emulate.
- `list`: methods, compressors and collectives.
- `options`: options that several verbs share.
- `arguments`: which arguments are paceline's, torchrun's and the script's.
- `runtime_options`: options that describe a network or compute times.
- `script_run`: what `run`, `emulate` and `simulate` share, from a job to its result.
- `compute_times`, `script_plan`: a script's compute times, and its plan.
- `script_registrations`: whether a script adds rows to the registries, told without running it.
- `progress`: progress shown at a terminal.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer

from paceline import __version__
from paceline.cli import (
    aggregate,
    check,
    compare,
    doctor,
    emulate,
    plan,
    plan_switches,
    probe,
    profile,
    run,
    serve,
    simulate,
)
from paceline.cli import list as list_command
from paceline.cli.arguments import Command, LaunchCommand
from paceline.errors import PacelineError, WorkerFailedError
from paceline.parameter_server.process.logs import log_to_stderr
from paceline.runtimes.processes import reader_has_gone
from paceline.runtimes.temporary_folder import LauncherInterrupted, signals

_RUNS_SCRIPTS = str(Path("paceline", "runtimes", "simulated"))

app = typer.Typer(
    name="paceline",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def paceline(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Say which this is."
        ),
    ] = False,
) -> None:
    """Data-parallel PyTorch training over slow, shared or uneven networks."""
    log_to_stderr()


app.command(cls=LaunchCommand)(run.run)
app.command(cls=Command)(simulate.simulate)
app.command(cls=LaunchCommand)(profile.profile)
app.command(cls=Command)(emulate.emulate)
app.command(cls=Command)(check.check)
app.command(cls=LaunchCommand)(probe.probe)
app.command(cls=Command)(compare.compare)
app.command(cls=LaunchCommand)(plan.plan)
app.command(cls=Command)(plan_switches.plan_switches)
app.command(cls=doctor.DoctorCommand)(doctor.doctor)
app.command(cls=Command)(serve.serve)
app.command(cls=Command)(aggregate.aggregate)
app.command("list", cls=Command)(list_command.list_)


def main() -> None:
    """Console script: errors that paceline raises on purpose become one message, as does a signal to end
    (SIGINT, SIGTERM, SIGHUP); a reader that has gone (``| head``) none. The exit status of these two is a
    shell's for the signal: 130, 143, 129; 141."""
    try:
        with signals.listen():
            _run()
    except LauncherInterrupted as told:
        print(f"paceline: {told.name}: interrupted", file=sys.stderr)
        raise
    except SystemExit as ended:
        # rich and typer turn what failed, that nobody reads, into an exit
        unread = isinstance(ended.__context__, BrokenPipeError)
        if ended.code and (unread or reader_has_gone()):
            sys.exit(128 + signal.SIGPIPE)
        raise
    finally:
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            try:
                stream.flush()
            except BrokenPipeError:  # Python would flush it again at its end
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def _run() -> None:
    try:
        app()
    except PacelineError as error:
        cause = error.__cause__
        unread = isinstance(cause, BrokenPipeError) and reader_has_gone()
        if isinstance(error, WorkerFailedError) and cause is not None and not unread:
            # what the script itself raised, and where
            traceback.print_exception(cause.with_traceback(_script_frames(cause)))
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


def _script_frames(error: BaseException) -> TracebackType | None:
    """The traceback from the script's own frames on, without those that ran it."""
    frames = error.__traceback__
    while frames is not None and _RUNS_SCRIPTS in frames.tb_frame.f_code.co_filename:
        frames = frames.tb_next
    return frames or error.__traceback__


__all__ = ["app", "main"]
