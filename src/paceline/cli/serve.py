"""``paceline serve``: a parameter server on a host of its own."""

from __future__ import annotations

import secrets
import sys
from typing import Annotated

import typer

from paceline.errors import UsageError


def serve(
    workers: Annotated[int, typer.Option(help="Workers of the job.")],
    bind: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 29600,
    once: Annotated[
        bool, typer.Option(help="End after one training, instead of waiting for more.")
    ] = False,
) -> None:
    """Serve one training after the other; what each does is its method's to say.

    Workers name it: --method NAME:servers=HOST:PORT. Without PACELINE_SECRET it prints a
    line that exports its token: run that where workers are started, and before further
    servers of theirs. Servers of groups talk to each other: workers name them so that they reach each
    other under these names, too. Beyond loopback set PACELINE_SECRET, the same for all, or
    PACELINE_TRUSTED_NETWORK=1 where nobody else is on the network.
    """
    import torch

    from paceline.server.dedicated import make_shell
    from paceline.server.security import TOKEN, dedicated_token

    if workers < 1:
        raise UsageError(f"--workers: expected 1 or more, got {workers}")
    torch.set_num_threads(1)
    token = dedicated_token()
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
