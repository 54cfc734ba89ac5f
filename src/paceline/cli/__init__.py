"""The command line: one file per verb, no logic of its own."""

from __future__ import annotations

import sys

import typer

from paceline.cli import compare, methods, run, simulate
from paceline.errors import PacelineError

app = typer.Typer(
    name="paceline",
    help="Data-parallel PyTorch training over slow, shared or uneven networks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(context_settings=run.CONTEXT)(run.run)
app.command()(simulate.simulate)
app.command()(compare.compare)
app.command()(methods.methods)


def main() -> None:
    """Console script: errors that paceline raises on purpose become one message."""
    try:
        app()
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(1)


__all__ = ["app", "main"]
