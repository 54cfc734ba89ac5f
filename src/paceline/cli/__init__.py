"""The command line: one file per command, without logic of its own.

Arguments are parsed before torch is imported, which takes seconds. So --help, completion and misspelt options
are answered at once. A command imports its dependencies in its own function.

- `plan`, `compare`, `doctor`: choose a method, and find what slows a job down.
- `run`, `simulate`, `emulate`: train in the real, the simulated or the emulated runtime.
- `probe`, `profile`, `check`: measure a network, a training step, this machine.
- `serve`, `aggregate`, `plan_switches`: parameter servers, aggregators, and switches to upgrade.
- `list`: methods, compressors and collectives; `registry_entries`: their descriptions as data.
- `options`: options that several verbs share, and which runtimes have them.
- `arguments`: which arguments are paceline's, torchrun's and the script's.
- `script_run`: what verbs check of a job, and what `run`, `emulate` and `simulate` share beyond that.
- `script_plan`: a script's plan, for verbs that make one.
- `progress`: bars and status lines.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable
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

_VERBS: dict[str, dict[Callable[..., None], type[Command]]] = {
    "Choose a method": {
        plan.plan: LaunchCommand,
        compare.compare: Command,
        doctor.doctor: doctor.DoctorCommand,
    },
    "Train": {
        run.run: LaunchCommand,
        simulate.simulate: Command,
        emulate.emulate: Command,
    },
    "Measure": {
        probe.probe: LaunchCommand,
        profile.profile: LaunchCommand,
        check.check: Command,
    },
    "Servers": {
        serve.serve: Command,
        aggregate.aggregate: Command,
        plan_switches.plan_switches: Command,
    },
    "Reference": {list_command.list_: Command},
}
"""The panels of ``paceline --help``, and the parser of each command's arguments."""

app = typer.Typer(
    name="paceline",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    options_metavar="COMMAND [OPTIONS] SCRIPT [-- SCRIPT-ARGS]",
    subcommand_metavar="",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def paceline(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Data-parallel PyTorch training over slow networks."""
    log_to_stderr()


def _paragraphs(docstring: str | None) -> str:
    """Join the lines of each paragraph: a terminal wraps them at its own width."""
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    return "\n\n".join(" ".join(one.split()) for one in paragraphs)


for _panel, _verbs in _VERBS.items():
    for _verb, _command in _verbs.items():
        app.command(
            _verb.__name__.strip("_").replace("_", "-"),
            cls=_command,
            help=_paragraphs(_verb.__doc__),
            rich_help_panel=_panel,
            options_metavar="[OPTIONS]",
        )(_verb)


def main() -> None:
    """Run the console script.

    A deliberate error of paceline, or a signal to end (SIGINT, SIGTERM, SIGHUP), prints one message. A closed
    reader (``| head``) prints none. The exit status after a signal is a shell's: 130, 143, 129, and 141 for
    the reader.
    """
    try:
        with signals.listen():
            _run()
    except LauncherInterrupted as interruption:
        print(f"paceline: {interruption.name}: interrupted", file=sys.stderr)
        raise
    except SystemExit as ended:
        # rich and typer turn a broken pipe into an exit.
        unread = isinstance(ended.__context__, BrokenPipeError)
        if ended.code and (unread or reader_has_gone()):
            sys.exit(128 + signal.SIGPIPE)
        raise
    finally:
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            try:
                stream.flush()
            except BrokenPipeError:  # Python would flush it again at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def _run() -> None:
    try:
        app()
    except PacelineError as error:
        cause = error.__cause__
        unread = isinstance(cause, BrokenPipeError) and reader_has_gone()
        if isinstance(error, WorkerFailedError) and cause is not None and not unread:
            # The script's own exception, with its traceback.
            traceback.print_exception(cause.with_traceback(_script_frames(cause)))
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


def _script_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback from the script's first frame on, without paceline's frames before it."""
    frames = error.__traceback__
    while frames is not None and _RUNS_SCRIPTS in frames.tb_frame.f_code.co_filename:
        frames = frames.tb_next
    return frames or error.__traceback__


__all__ = ["app", "main"]
