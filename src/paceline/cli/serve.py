"""``paceline serve``: a parameter server on a host of its own."""

from __future__ import annotations

import os
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

    Workers name it: --method ssp:servers=HOST:PORT. Beyond loopback set PACELINE_SECRET,
    the same for all, or PACELINE_TRUSTED_NETWORK=1 where nobody else is on the network.
    """
    import torch

    from paceline.server.process import make_shell
    from paceline.worlds.servers import DEDICATED_TOKEN, TOKEN_VARIABLE

    if workers < 1:
        raise UsageError(f"--workers: expected 1 or more, got {workers}")
    torch.set_num_threads(1)
    token = os.environ.get(TOKEN_VARIABLE) or DEDICATED_TOKEN
    while True:
        shell = make_shell(workers, f"server at {bind}:{port}", bind, port, token)
        try:
            print(f"paceline: serving at {bind}:{shell.port}", file=sys.stderr)
            shell.run(None)
        except KeyboardInterrupt:
            return
        finally:
            shell.close()
        if once:
            return
