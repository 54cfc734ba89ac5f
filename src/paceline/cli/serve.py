"""``paceline serve``: a parameter server on a host of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.server.surviving import SurvivingJob


def serve(
    workers: Annotated[int, typer.Option(help="Workers of the job.")],
    bind: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 29600,
    once: Annotated[
        bool, typer.Option(help="End after one training, instead of waiting for more.")
    ] = False,
    survive: Annotated[
        bool,
        typer.Option(
            "--survive",
            help="Go on when a worker dies: something starts it again, as paceline run "
            "--survive --server does. For methods whose server updates.",
        ),
    ] = False,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            help="With --survive: where parameters are kept, to go on from when this "
            "process is started again. \\[default: nowhere]"
        ),
    ] = None,
    snapshot_seconds: Annotated[
        float,
        typer.Option(
            help="With --snapshot: how often.", envvar="PACELINE_SNAPSHOT_SECONDS"
        ),
    ] = 10.0,
    evict_silent: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="With --survive: take a worker for lost that is silent for so long, and for 30 "
            "usual steps.",
            envvar="PACELINE_SILENT_SECONDS",
        ),
    ] = 60.0,
) -> None:
    """Serve one training after the other; what each does is its method's to say.

    Workers name it: --method NAME:servers=HOST:PORT. Without PACELINE_SECRET it prints a
    line that exports its token: run that where workers are started, and before further
    servers of theirs. Servers of groups talk to each other: workers name them so that they reach each
    other under these names, too. Beyond loopback set PACELINE_SECRET, the same for all, or
    PACELINE_TRUSTED_NETWORK=1 where nobody else is on the network.

    With --survive workers and this server may die, and are started again with the same words: see
    docs/parameter-server.md.
    """
    import torch

    from paceline.server.dedicated import make_shell
    from paceline.server.security import TOKEN, dedicated_token

    if workers < 1:
        raise UsageError(f"--workers: expected 1 or more, got {workers}")
    torch.set_num_threads(1)
    token = dedicated_token()
    if survive:
        if token is None:
            raise UsageError(
                f"--survive: set {TOKEN} (or PACELINE_SECRET), the same for this server and its "
                "workers: one that is started again cannot make another. Make it with: "
                'python -c "import secrets; print(secrets.token_hex(16))"'
            )
        while _survive(
            workers, bind, port, token, snapshot, snapshot_seconds, evict_silent
        ):
            if once:
                return
        sys.exit(128 + signal.SIGTERM)
    if snapshot is not None:
        raise UsageError("--snapshot means nothing without --survive")
    made = token is None
    if token is None:
        token = secrets.token_hex(16)
    while True:
        shell = make_shell(workers, bind, port, token)
        try:
            print(f"paceline: serving at {bind}:{shell.port}", file=sys.stderr)
            if made:  # once there is a server that asks for it
                print(f"export {TOKEN}={token}", flush=True)
                made = False
            shell.run(None)
        except KeyboardInterrupt:
            return
        finally:
            shell.close()
        if once:
            return


def _survive(
    workers: int,
    bind: str,
    port: int,
    token: str,
    snapshot: Path | None,
    snapshot_seconds: float,
    evict_silent: float,
) -> bool:
    """Serve one training; returns whether it has ended well, and not by a signal."""
    from paceline.server.surviving import SurvivingJob

    job = SurvivingJob(
        workers,
        bind,
        port,
        token,
        snapshot=snapshot,
        snapshot_seconds=snapshot_seconds,
        evict_silent=evict_silent,
    )
    try:
        _say_where(job, bind, snapshot)
        with _told_to_end() as stop:
            well = job.run(stop)
    finally:
        job.close()
    if well:
        print("paceline: the training is over", file=sys.stderr, flush=True)
    return well


@contextlib.contextmanager
def _told_to_end() -> Iterator[int]:
    """A descriptor that is at its end once a signal has come: so a server ends between two
    messages, and what it keeps then is whole."""
    read, write = os.pipe()
    heeded = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    open_end = [write]

    def hear(*_: object) -> None:
        while open_end:
            os.close(open_end.pop())

    before = {number: signal.signal(number, hear) for number in heeded}
    try:
        yield read
    finally:
        for number, how in before.items():
            signal.signal(number, how)
        hear()
        os.close(read)


def _say_where(job: SurvivingJob, bind: str, snapshot: Path | None) -> None:
    """What is to be known of a server that begins, or goes on."""
    if job.step:
        begins = f"the job goes on from {snapshot}: step {job.step}"
    elif snapshot is None:
        begins = (
            "if this process dies the training begins anew: --snapshot FILE keeps it"
        )
    else:
        begins = f"the job begins; {snapshot} is to keep it"
    print(
        f"paceline: serving at {bind}:{job.port}; {begins}", file=sys.stderr, flush=True
    )
