"""Runs workers that survive deaths on many machines, and finds their server.

There is no supervisor. Another program starts each worker and restarts it after a failure: systemd,
Kubernetes, Slurm, Ray, or a loop in a shell. A worker has a rank, the server's address and its
token (see `environment_of`). The server numbers incarnations and knows the number of workers. A
worker waits for a server that has not started yet, or is restarting.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from threading import Event
from typing import NoReturn, TypeVar

from paceline import methods, spec
from paceline.core.settings import Settings
from paceline.errors import PeerLostError, UsageError
from paceline.run_options import ScriptJob
from paceline.runtimes import launchers
from paceline.runtimes.real.job_store import host_to_connect
from paceline.runtimes.real.server_process import (
    ADDRESSES_VARIABLE,
    SURVIVE_VARIABLE,
    addresses_at,
)
from paceline.timeouts import timeouts
from paceline.transport.connection import ServerConnection
from paceline.transport.protocol import BEFORE_IT_STOOD, IS_HERE
from paceline.transport.security import choose

T = TypeVar("T")


def environment_of(server: str, rank: int, workers: int) -> dict[str, str]:
    """Return the variables of worker *rank* of *workers*, whose server is at *server* (HOST:PORT).

    The process also needs the server's token, or the job's secret. Raises `UsageError` for an
    invalid address, and for a rank out of range.
    """
    _check_server(server)
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


def _check_server(server: str) -> None:
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or "+" in server:
        raise UsageError(
            f"--server, or {ADDRESSES_VARIABLE}: expected HOST:PORT, where `paceline serve --survive` listens, got "
            f"{server!r}"
        )


def exec_as_worker(
    job: ScriptJob, server: str, rank: int | None, workers: int | None
) -> NoReturn:
    """Become the job's script, as one worker.

    The program that started this process then starts, ends and counts the worker itself. *rank* and
    *workers*: None: from the launcher's variables, or for *workers* from the server. This process
    asks the server in any case, so a job that the server would refuse ends before its script has
    loaded data.

    Raises `UsageError` for such a job, or without a rank, and `PeerLostError` if no server listens.
    """
    place = place_of(os.environ, server, rank, workers)
    if place.size:
        # This raises an error for invalid values.
        environment_of(server, place.rank, place.size)
    options = job.options
    check(server, os.environ, options.method)
    size = fetch_world_size(server, place.rank, place.size, os.environ)
    # Keep other variables of the launcher, such as LOCAL_RANK.
    launcher = replace(place, size=size).to_environment() | os.environ
    environment = launcher | environment_of(server, place.rank, size)
    # Only the JSON object goes to standard output.
    if options.json:
        sys.stdout.flush()
        kept = os.dup(1)
        os.set_inheritable(kept, True)
        os.dup2(2, 1)
        options = replace(options, result=f"/dev/fd/{kept}")
    environment |= options.to_environment()
    os.execve(sys.executable, [sys.executable, job.script, *job.arguments], environment)


def place_of(
    environment: Mapping[str, str], server: str, rank: int | None, workers: int | None
) -> launchers.Place:
    """Return the given rank and size, or those of the launcher's variables.

    The size is 0 if neither has it, since the server knows it. Raises `UsageError` without a rank,
    or for sizes that differ.
    """
    _check_server(server)
    if rank is not None and workers is not None:
        return launchers.Place(rank=rank, size=workers)
    launched = _place_from_launcher(environment, server, rank)
    if rank is None and launched is None:
        raise UsageError(
            "--rank: no launcher's variables say which worker this is: give --rank R, or set RANK"
        )
    size = 0 if launched is None else launched.size
    if workers is not None and size not in (0, workers):
        raise UsageError(
            f"--workers {workers}, but the launcher's variables name {size} workers: give --rank, "
            "too, if the variables belong to another job"
        )
    place = launched or launchers.Place(rank=0, size=0)
    return replace(
        place, rank=place.rank if rank is None else rank, size=workers or size
    )


def _place_from_launcher(
    environment: Mapping[str, str], server: str, given: int | None
) -> launchers.Place | None:
    """Return the place in the launcher's variables, among which RANK may be alone.

    *given* is the rank that overrides it, if any. Raises `UsageError` if the variables contradict
    each other.
    """
    rank = launchers.lone_rank(environment)
    if rank is not None:
        if given is None:
            launchers.check_lone_rank(environment, rank)
        return launchers.Place(rank=rank, size=0)
    # Workers connect to the server, so they do not need the address of worker 0.
    host = server.rpartition(":")[0]
    return launchers.find({"MASTER_ADDR": host, **environment})


def fetch_world_size(
    server: str, rank: int, workers: int, environment: Mapping[str, str]
) -> int:
    """Return the number of workers of the job of *server*, once that listens.

    *workers* is the number that worker *rank* expects; 0: unknown. Raises `UsageError` if the
    server has another number, has no such rank, or does not know this job; `PeerLostError` as
    `connect_with_retry` does.
    """
    (address,) = addresses_at(server, environment)
    name, host = "server 0", host_to_connect(address.host, environment)

    def ask() -> int:
        end = ServerConnection(
            name,
            host,
            address.port,
            worker=rank,
            incarnation=None,
            workers=workers,
            asks=True,
            token=address.token,
        )
        end.close()
        return end.workers

    return connect_with_retry(name, host, address.port, rank, ask)


def add_world_size(environment: MutableMapping[str, str]) -> None:
    """Add the number of workers to the variables of a worker whose rank was set by hand.

    Such a worker was not started by `exec_as_worker`, and would treat itself as the only one.
    Raises the errors of `fetch_world_size`, and `UsageError` if no server is named.
    """
    rank = launchers.lone_rank(environment)
    if environment.get(SURVIVE_VARIABLE) != "1" or rank is None:
        return
    server = environment.get(ADDRESSES_VARIABLE, "")
    if not server:
        raise UsageError(
            f"{SURVIVE_VARIABLE}=1 and RANK={rank}, but the number of workers is unknown: set "
            f"{ADDRESSES_VARIABLE}=HOST:PORT, whose server knows it, or WORLD_SIZE"
        )
    _check_server(server)
    environment["WORLD_SIZE"] = str(fetch_world_size(server, rank, 0, environment))


def check(server: str, environment: Mapping[str, str], method: str | None) -> None:
    """Raise `UsageError` for an impossible job.

    It has no token, no protected connections to the server, or workers that communicate past the
    server.
    """
    (address,) = addresses_at(server, environment)
    choose(address.host, environment)
    if method is not None:
        parsed = spec.parse(method)
        made, _ = methods.make(parsed, set(spec.field_types(Settings)))
        methods.check_survives(made)


def connect_with_retry(
    name: str, host: str, port: int, rank: int, connect: Callable[[], T]
) -> T:
    """Return the result of *connect*, once the server listens and an earlier incarnation has left.

    Raises `PeerLostError` if no process listens for `Timeouts.server_listen`, or the listener does
    not admit this worker, and `UsageError` if the server refuses it.
    """
    waiting = time.monotonic() + timeouts.server_listen
    contested: float | None = None
    reported: set[str] = set()
    while True:
        if _wait_for_listener(name, host, port, rank, waiting):
            contested = None  # It may be another server.
        try:
            return connect()
        except (PeerLostError, UsageError) as error:
            message, now = str(error), time.monotonic()
            if IS_HERE in message or BEFORE_IT_STOOD in message:
                contested = now if contested is None else contested
                limit = (
                    timeouts.rank_taken if IS_HERE in message else timeouts.server_close
                )
                if now > contested + limit:
                    raise
            elif isinstance(error, UsageError) or now > waiting:
                raise
            # The server, or its network, has just failed: wait for it.
            if isinstance(error, PeerLostError) and message not in reported:
                reported.add(message)
                _report(f"worker {rank} tries again: {message}")
            taken = IS_HERE in message
        Event().wait(timeouts.rank_retry if taken else timeouts.server_retry)


def _report(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def _wait_for_listener(
    name: str, host: str, port: int, rank: int, deadline: float
) -> bool:
    """Wait for a listener; return whether there was none at first."""
    waited = False
    while True:
        try:
            socket.create_connection((host, port), timeouts.hello).close()
            return waited
        except OSError as error:
            where = f"{name} at {host}:{port}"
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"{where}: no server has listened there for {timeouts.server_listen:.0f} s ({error}): "
                    "is `paceline serve --survive` running there, or is the job over?"
                ) from None
            if not waited:
                _report(f"worker {rank} waits for {where}: {error}")
                waited = True
        Event().wait(timeouts.server_retry)
