"""``paceline serve``: a parameter server on a host of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import UsageError


def serve(
    context: typer.Context,
    workers: Annotated[
        int, typer.Option(metavar="N", help="Number of workers of the job.")
    ],
    bind: Annotated[
        str, typer.Option(metavar="HOST", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", help="Port to listen on; 0: a free one.")
    ] = 29600,
    liveness_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            help="Port for liveness connections, by which the server notices workers that ended. "
            "Workers need both ports. \\[default: the port after --port]",
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option(help="End after one training, instead of waiting for more.")
    ] = False,
    survive: Annotated[
        bool,
        typer.Option(
            "--survive",
            help="Go on when a worker dies and is started again, as by paceline run --survive "
            "--server. For methods whose server updates.",
        ),
    ] = False,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --survive: file of the parameters, from which this command goes on when it "
            "is started again. \\[default: none]",
        ),
    ] = None,
    snapshot_seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="With --snapshot: time between two.",
            envvar="PACELINE_SNAPSHOT_SECONDS",
        ),
    ] = 30.0,
    evict_silent: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="With --survive: a worker is lost once it is silent for so long, and for 30 "
            "usual steps.",
            envvar="PACELINE_SILENT_SECONDS",
        ),
    ] = 60.0,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve Prometheus metrics at that address (PORT: at 127.0.0.1): steps, "
            "gradients, staleness, workers, bytes, refusals, snapshot's age. \\[default: none]",
        ),
    ] = None,
) -> None:
    """Run a parameter server.

    Workers name it: --method NAME:servers=HOST:PORT. Their method decides what the server does.
    Without --survive it serves several trainings, also at once.

    Without PACELINE_SECRET it prints a line that exports its token. Run that line where workers
    are started, and before further servers of theirs. Beyond loopback set PACELINE_SECRET, the
    same for all, or PACELINE_TRUSTED_NETWORK=1 where nobody else is on the network.

    Group servers talk to each other, under the names by which workers name them.

    With --survive, workers and this server may die and are started again with the same arguments:
    see docs/how-to/survive-failures.md.
    """
    import torch

    from paceline.parameter_server.process import serve as servers

    if workers < 1:
        raise UsageError(f"--workers: expected 1 or more, got {workers}")
    if bind.count(":") == 1 or bind.startswith("["):  # An IPv6 address has more colons.
        raise UsageError(
            f"--bind {bind}: expected an address alone, such as 10.0.0.9 or ::1; give the port by --port"
        )
    if snapshot is not None and not survive:
        raise UsageError(
            "--snapshot means nothing without --survive; add --survive, or leave it out"
        )
    if not survive and _was_typed(context, "evict_silent"):
        raise UsageError(
            "--evict-silent means nothing without --survive; add --survive, or leave it out"
        )
    if snapshot is None and _was_typed(context, "snapshot_seconds"):
        raise UsageError(
            "--snapshot-seconds means nothing without --snapshot; add --snapshot FILE, or leave it out"
        )
    torch.set_num_threads(1)
    if survive:
        servers.serve_surviving(
            workers,
            bind,
            port,
            liveness_port=liveness_port,
            metrics=metrics,
            once=once,
            snapshot=snapshot,
            snapshot_seconds=snapshot_seconds,
            evict_silent=evict_silent,
        )
    else:
        servers.serve(
            workers,
            bind,
            port,
            liveness_port=liveness_port,
            metrics=metrics,
            once=once,
        )


def _was_typed(context: typer.Context, parameter: str) -> bool:
    """Return whether the option is on the command line: its variable may be set for the whole machine."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"
