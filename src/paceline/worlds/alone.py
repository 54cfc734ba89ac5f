"""Workers of a job that survives deaths on many machines: what each is told, and how it comes
to its server.

No supervisor knows them all. Each is a process that something starts, and starts again when it
ends badly: systemd, Kubernetes, Slurm, Ray, a loop in a shell. It has a rank, the job's size,
where the server is, and a token (see `environment_of`); the server numbers its lives. One that
is there before its server, or while that is started again, waits for it.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Event
from typing import NoReturn

from paceline import launchers, methods, spec
from paceline.errors import PeerLostError, UsageError
from paceline.options import RunOptions
from paceline.server.client import RemoteServer
from paceline.server.security import choose
from paceline.server.wire import IS_HERE
from paceline.settings import Settings
from paceline.worlds.dedicated import addresses_at
from paceline.worlds.servers import ADDRESSES_VARIABLE, SURVIVE_VARIABLE

WAIT_SECONDS = 300.0
"""How long nobody may listen where the server is to be."""
CONTEST_SECONDS = 15.0
"""How long a worker's place may be taken: an earlier life is lost meanwhile, or it is somebody
else's."""
_AGAIN_SECONDS = 1.0
_CONTEST_AGAIN_SECONDS = 3.0
_HELLO_SECONDS = 5.0


def environment_of(server: str, rank: int, workers: int) -> dict[str, str]:
    """What tells a process that it is worker *rank* of *workers*, whose server is at *server*
    (HOST:PORT). Beside these it needs the server's token, or the job's secret.

    Raises `UsageError` for a place that is none, and a rank that there is not.
    """
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or "+" in server:
        raise UsageError(
            f"--server: expected HOST:PORT, where `paceline serve --survive` listens, got "
            f"{server!r}"
        )
    if workers < 1:
        raise UsageError(f"--workers: expected 1 or more, got {workers}")
    if not 0 <= rank < workers:
        raise UsageError(
            f"--rank: expected 0 to {workers - 1}, of {workers} workers, got {rank}"
        )
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        SURVIVE_VARIABLE: "1",
        ADDRESSES_VARIABLE: server,
    }


def become(
    script: str,
    arguments: Sequence[str],
    options: RunOptions,
    server: str,
    rank: int | None,
    workers: int | None,
) -> NoReturn:
    """This process becomes the script, as one worker: so who started it starts, ends and counts
    the worker itself. *rank*, *workers*: None: as the launcher's variables say.

    Raises `UsageError` where they do not, and for a job that cannot be.
    """
    place = place_of(os.environ, server, rank, workers)
    own = place.to_environment() | environment_of(server, place.rank, place.size)
    environment = os.environ | own
    check(environment, options.method)
    if (
        options.json
    ):  # the object alone goes to standard output, all else to standard error
        sys.stdout.flush()
        kept = os.dup(1)
        os.set_inheritable(kept, True)
        os.dup2(2, 1)
        options = replace(options, result=f"/dev/fd/{kept}")
    environment |= options.to_environment()
    os.execve(sys.executable, [sys.executable, script, *arguments], environment)


def place_of(
    environment: Mapping[str, str], server: str, rank: int | None, workers: int | None
) -> launchers.Place:
    """What is given, else what the launcher's variables say. Raises `UsageError` where neither
    does, or they say different things."""
    if rank is not None and workers is not None:
        return launchers.Place(rank=rank, size=workers)
    # Workers meet at the server, so nobody needs to know where worker 0 is.
    host = server.rpartition(":")[0]
    said = launchers.find({"MASTER_ADDR": host, **environment})
    if said is None and (rank is None or workers is None):
        missing = " and ".join(
            option
            for option, value in (("--rank", rank), ("--workers", workers))
            if value is None
        )
        raise UsageError(
            f"{missing}: no launcher's variables say which worker this is, of how many: give "
            "--rank R --workers N, or set RANK and WORLD_SIZE"
        )
    assert said is not None
    if workers is not None and said.size != workers:
        raise UsageError(
            f"--workers {workers}, and the launcher's variables say {said.size}: give --rank, "
            "too, where they are of something else"
        )
    return said if rank is None else replace(said, rank=rank)


def check(environment: Mapping[str, str], method: str | None) -> None:
    """Raise `UsageError` for a job that cannot be: nothing tells the token, nothing protects
    the server's connections, or its workers would meet elsewhere than at the server."""
    (address,) = addresses_at(environment[ADDRESSES_VARIABLE], environment)
    choose(address.host, environment)
    if method is not None:
        parsed = spec.parse(method)
        made, _ = methods.make(parsed, set(spec.field_types(Settings)))
        methods.check_survives(made)


def connected(
    name: str, host: str, port: int, rank: int, connect: Callable[[], RemoteServer]
) -> RemoteServer:
    """What *connect* gives, once the server is there, and an earlier life of this worker gone.

    Raises `PeerLostError` where nobody listens for `WAIT_SECONDS`, and `UsageError` where the
    server does not want this worker.
    """
    waiting = time.monotonic() + WAIT_SECONDS
    contested: float | None = None
    while True:
        _wait_until_somebody_listens(name, host, port, rank, waiting)
        try:
            return connect()
        except PeerLostError:
            # It has just ended, or its network has: then it is to be waited for.
            if time.monotonic() > waiting:
                raise
            Event().wait(_AGAIN_SECONDS)
        except UsageError as error:
            if IS_HERE not in str(error):
                raise
            now = time.monotonic()
            contested = now + CONTEST_SECONDS if contested is None else contested
            if now > contested:
                raise
            Event().wait(_CONTEST_AGAIN_SECONDS)


def _wait_until_somebody_listens(
    name: str, host: str, port: int, rank: int, deadline: float
) -> None:
    said = False
    while True:
        try:
            socket.create_connection((host, port), _HELLO_SECONDS).close()
            return
        except OSError as error:
            where = f"{name} at {host}:{port}"
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"{where}: nobody has listened there for {WAIT_SECONDS:.0f} s ({error}): is "
                    "`paceline serve --survive` running there, or is the job over?"
                ) from None
            if not said:
                print(
                    f"paceline: worker {rank} waits for {where}: {error}",
                    file=sys.stderr,
                    flush=True,
                )
                said = True
        Event().wait(_AGAIN_SECONDS)
