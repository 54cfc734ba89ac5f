"""Parameter servers of real workers: started beside them, or found where they are.

*Embedded*: rank 0 starts one as a child process that ends with it. *Per node*: the first
worker of each node does. Their addresses go to all workers through the job's store, and
their tokens as `handover` says. A child that cannot start says so there, so that every worker raises, and none waits.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

import msgspec

from paceline import lifelines
from paceline.errors import PeerLostError, UsageError
from paceline.instruments import Journal
from paceline.interfaces import ServerJob
from paceline.server.client import RemoteServer
from paceline.server.orders import Order, Place
from paceline.server.security import SECRET, TOKEN, dedicated_token
from paceline.server.wire import HAS_BEEN_HERE
from paceline.worlds.addresses import Meeting, at_master, found_at, towards_master
from paceline.worlds.handover import Address, Board, Store

ADDRESSES_VARIABLE = "PACELINE_SERVERS"
"""Where dedicated servers are, HOST:PORT joined by "+"."""
SURVIVE_VARIABLE = "PACELINE_SURVIVE"
"""Set where a supervisor keeps the job alive: workers meet only at their servers."""
INCARNATION_VARIABLE = "PACELINE_INCARNATION"
START_SECONDS = 60.0
END_SECONDS = 10.0
SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Keep the memory of received chunks, instead of giving it back to the kernel and having
    # it zeroed again for the next: a tenth of the processor time of moving a gradient.
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    # Servers run on threads, whose own heaps would be too small to keep it.
    "MALLOC_ARENA_MAX": "1",
}
BETWEEN_SECONDS = 15.0
"""How long a server may take from the end of one training to the next."""


class ServerProcess:
    """A server as a child of this process; it ends when this process does. *step*: where it
    goes on, if it has read a snapshot."""

    def __init__(
        self,
        name: str,
        workers: int,
        host: str,
        *,
        port: int = 0,
        token: str = "",
        extra: Sequence[str] = (),
    ) -> None:
        """*port* 0 and no *token*: one of its own. *extra*: more options of
        ``python -m paceline.server``. Raises `UsageError` if it does not start."""
        self.token = token or secrets.token_hex(16)
        command = [
            *(sys.executable, "-m", "paceline.server", "--workers", str(workers)),
            *("--name", name, "--bind", host, "--port", str(port), *extra),
        ]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | SERVER_ENVIRONMENT,
        )
        assert isinstance(self.process.stdin, io.BufferedWriter)
        assert self.process.stdout is not None
        lifelines.close_in_children(self.process.stdin)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(self.token.encode() + b"\n")
            self.process.stdin.flush()
        line = _line_within(self.process.stdout, START_SECONDS)
        try:
            words = msgspec.json.decode(line)
            self.port, self.step = int(words["port"]), int(words["step"])
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
            self.close()
            raise UsageError(
                f"{name} did not start at {host}: it ended with status "
                f"{self.process.returncode}; see above for what it said"
            ) from None

    def say_done(self, worker: int) -> None:
        """Tell it that a worker's script has ended well, and is not started again."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            self.process.stdin.write(f"{worker}\n".encode())
            self.process.stdin.flush()

    def close(self) -> None:
        """End it, if its workers' goodbyes have not."""
        _end(self.process)


class ServerPool:
    """One child process with a server for each training."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paceline.server.pool"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | SERVER_ENVIRONMENT,
        )
        assert isinstance(self._process.stdin, io.BufferedWriter)
        lifelines.close_in_children(self._process.stdin)

    def start(self, name: str, workers: int, meeting: Meeting, token: str) -> Address:
        """One more server. Raises `UsageError` if it does not start."""
        order = Order(name=name, workers=workers, bind=meeting.bind, token=token)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
        line = _line_within(self._process.stdout, START_SECONDS)
        try:
            place = msgspec.json.decode(line, type=Place)
        except msgspec.MsgspecError:
            place = Place(fault="its process has ended; see above for what it said")
        if place.fault:
            raise UsageError(f"{name} did not start at {meeting.bind}: {place.fault}")
        return Address(host=meeting.publish, port=place.port, token=token)

    def close(self) -> None:
        """End the process."""
        _end(self._process)


class RealServers:
    """One real worker's view of the job's servers."""

    def __init__(self, rank: int, workers: int, store: Store, journal: Journal) -> None:
        self._rank, self._workers = rank, workers
        self._store, self._journal = store, journal
        self._board: Board | None = None
        self._pool: ServerPool | None = None

    def find(
        self, job: ServerJob, environment: Mapping[str, str] = os.environ
    ) -> list[RemoteServer]:
        """Start what this worker has to, and connect to all. Collective."""
        place = job.place
        if place == "auto":
            place = "dedicated" if environment.get(ADDRESSES_VARIABLE) else "embedded"
        if place in ("embedded", "per-node"):
            addresses = self._started(job.training, place, environment)
        else:
            addresses = _dedicated(place, environment)
        return [
            self._connect(number, address, environment)
            for number, address in enumerate(addresses)
        ]

    def _connect(
        self, number: int, address: Address, environment: Mapping[str, str]
    ) -> RemoteServer:
        deadline = time.monotonic() + BETWEEN_SECONDS
        while True:
            try:
                return RemoteServer(
                    f"server {number}",
                    found_at(address.host, environment),
                    address.port,
                    worker=self._rank,
                    incarnation=int(environment.get(INCARNATION_VARIABLE, "0")),
                    token=address.token,
                    journal=self._journal,
                )
            except (UsageError, PeerLostError) as error:
                # A dedicated server still serves the last training, which this worker has
                # left and others have not, or ends it just now; then comes the next one.
                between = isinstance(error, PeerLostError) or HAS_BEEN_HERE in str(
                    error
                )
                if not between or time.monotonic() > deadline:
                    raise
            threading.Event().wait(0.05)

    def close(self) -> None:
        """All trainings are over: end this worker's child."""
        if self._board is not None:
            self._board.close()
            self._board = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _started(
        self, training: int, place: str, environment: Mapping[str, str]
    ) -> list[Address]:
        on_node = int(environment.get("LOCAL_WORLD_SIZE", self._workers))
        nodes = 1 if place == "embedded" else max(1, self._workers // on_node)
        of_launcher = environment.get("GROUP_RANK") or environment.get("NODE_RANK", "0")
        node = int(of_launcher) if nodes > 1 else 0
        starts = (
            self._rank == 0
            if place == "embedded"
            else environment.get("LOCAL_RANK", "0") == "0"
        )
        keys = [f"paceline/servers/{training}/{i}" for i in range(nodes)]
        if self._board is None:
            self._board = Board(self._store, self._workers, environment)
        if starts:
            token = self._board.new_token()
            self._board.post(keys[node], self._start(node, token, environment))
        addresses = [self._board.read(key) for key in keys]
        for address in addresses:
            if address.fault:
                raise UsageError(address.fault)
        return addresses

    def _start(self, node: int, token: str, environment: Mapping[str, str]) -> Address:
        try:
            meeting = (
                at_master(self._workers, environment)
                if self._rank == 0
                else towards_master(environment)
            )
            if self._pool is None:
                self._pool = ServerPool()
            return self._pool.start(f"server {node}", self._workers, meeting, token)
        except (UsageError, OSError) as error:
            return Address(fault=str(error))


def _dedicated(place: str, environment: Mapping[str, str]) -> list[Address]:
    text = environment.get(ADDRESSES_VARIABLE, "") if place == "dedicated" else place
    if not text:
        raise UsageError(
            "servers=dedicated: no server has been started for this job; start each with "
            "`paceline serve --workers N --bind HOST --port PORT`, and name them with "
            "servers=HOST:PORT+HOST:PORT"
        )
    token = dedicated_token(environment)
    if token is None:
        raise UsageError(
            f"servers={text}: nothing tells this worker their token. `paceline serve` has "
            f"printed a line that exports it ({TOKEN}=...): run that line where the job is "
            f"started, for every worker; or set the same {SECRET} for servers and workers"
        )
    addresses = []
    for one in text.split("+"):
        host, _, port = one.rpartition(":")
        addresses.append(Address(host=host, port=int(port), token=token))
    return addresses


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def _line_within(stream: IO[bytes], seconds: float) -> bytes:
    ready, _, _ = select.select([stream], [], [], seconds)
    return stream.readline() if ready else b""
