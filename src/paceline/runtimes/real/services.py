"""Servers and other services of real workers: started beside them, or found where they are.

Each worker starts those whose place is beside it, in one child process that ends with it.
*Embedded* is beside rank 0; *per node* beside the first worker of each node; a host is the first
worker's that runs there. Their addresses go to all workers through the job's store, and
their tokens as `job_store` says. One that cannot start says so there, so that every worker
raises, and none waits. Once all listen, who has started one tells it where its peers are.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from paceline.errors import PeerLostError, UsageError
from paceline.interfaces import Service, ServiceJob
from paceline.parameter_server.process.control import Introduction, Order, Place
from paceline.records import StepRecorder
from paceline.runtimes import service_placement
from paceline.runtimes.real import dedicated_servers, external_worker
from paceline.runtimes.real.addresses import (
    Meeting,
    at_master,
    found_at,
    towards_master,
)
from paceline.runtimes.real.job_store import Address, Board, Store
from paceline.runtimes.real.server_process import (
    ADDRESSES_VARIABLE,
    INCARNATION_VARIABLE,
    SERVER_ENVIRONMENT,
    SURVIVE_VARIABLE,
    end,
    line_within,
)
from paceline.timeouts import timeouts
from paceline.transport import liveness
from paceline.transport.connection import RemoteServer, check_listens
from paceline.transport.peers import PeerAddress
from paceline.transport.protocol import HAS_BEEN_HERE


class ServicePool:
    """One child process with all services that one worker starts."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "paceline.parameter_server.process.service_processes",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | SERVER_ENVIRONMENT,
        )
        assert isinstance(self._process.stdin, io.BufferedWriter)
        liveness.close_in_children(self._process.stdin)

    def start(self, order: Order, meeting: Meeting) -> Address:
        """One more service. Raises `UsageError` if it does not start."""
        place = self._say(order)
        if place.fault:
            raise UsageError(
                f"{order.name} did not start at {meeting.bind}: {place.fault}"
            )
        return Address(host=meeting.publish, port=place.port, token=order.token)

    def introduce(self, name: str, introduction: Introduction) -> None:
        """Tell a service where its peers are. Raises `UsageError` if it asks nobody."""
        place = self._say(introduction)
        if place.fault:
            raise UsageError(f"{name}: {place.fault}")

    def close(self) -> None:
        """End the process."""
        end(self._process)

    def _say(self, words: Order | Introduction) -> Place:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(words) + b"\n")
            self._process.stdin.flush()
        line = line_within(self._process.stdout, timeouts.server_start)
        try:
            return msgspec.json.decode(line, type=Place)
        except msgspec.MsgspecError:
            return Place(fault="its process has ended; see above for what it said")


@dataclass(frozen=True)
class Spot:
    """Where one service runs: at an *address* already; or it is started, maybe *here*."""

    here: bool = False
    address: Address | None = None


class RealServices:
    """One real worker's view of the job's services."""

    def __init__(
        self, rank: int, workers: int, store: Store, recorder: StepRecorder
    ) -> None:
        self._rank, self._workers = rank, workers
        self._store, self._recorder = store, recorder
        self._board: Board | None = None
        self._pool: ServicePool | None = None
        self._jobs = 0

    def find(
        self, job: ServiceJob, environment: Mapping[str, str] = os.environ
    ) -> list[RemoteServer]:
        """Start what this worker has to, and connect to all. Collective."""
        number, self._jobs = self._jobs, self._jobs + 1
        dedicated_servers.check_supervised(job, environment)
        where = Where(self._rank, self._workers, self._store, environment)
        placed = service_placement.spread(job, where.spots, where.beside)
        addresses = self._started(f"paceline/services/{number}", placed, environment)
        self._introduce(placed, addresses, environment)
        ends = [
            self._connect(service.name, address, environment, spot.address is None)
            for (service, spot), address in zip(placed, addresses, strict=True)
        ]
        if (
            environment.get(SURVIVE_VARIABLE) != "1"
        ):  # there who started them has done it
            services = [service for service, _ in placed]
            dedicated_servers.introduce(
                services, [spot.address for _, spot in placed], ends
            )
        return ends

    def close(self) -> None:
        """All trainings are over: end this worker's child."""
        if self._board is not None:
            self._board.close()
            self._board = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _started(
        self,
        key: str,
        placed: Sequence[tuple[Service, Spot]],
        environment: Mapping[str, str],
    ) -> list[Address]:
        """Where they all listen. Raises `UsageError` if one does not."""
        names = tuple(service.name for service, _ in placed)
        for service, spot in placed:
            if spot.here:
                address = self._start(service, names, environment)
                self._to_board(environment).post(f"{key}/{service.name}", address)
        addresses = [
            spot.address or self._to_board(environment).read(f"{key}/{service.name}")
            for service, spot in placed
        ]
        for address in addresses:
            if address.fault:
                raise UsageError(address.fault)
        return addresses

    def _to_board(self, environment: Mapping[str, str]) -> Board:
        if self._board is None:
            self._board = Board(self._store, self._workers, environment)
        return self._board

    def _start(
        self, service: Service, names: tuple[str, ...], environment: Mapping[str, str]
    ) -> Address:
        try:
            meeting = (
                at_master(self._workers, environment)
                if self._rank == 0
                else towards_master(environment)
            )
            order = Order(
                name=service.name,
                kind=service.kind,
                workers=self._workers,
                services=names,
                peers=service.peers,
                bind=meeting.bind,
                token=self._to_board(environment).new_token(),
            )
            if self._pool is None:
                self._pool = ServicePool()
            return self._pool.start(order, meeting)
        except (UsageError, OSError) as error:
            return Address(fault=str(error))

    def _introduce(
        self,
        placed: Sequence[tuple[Service, Spot]],
        addresses: Sequence[Address],
        environment: Mapping[str, str],
    ) -> None:
        """Each service that this worker has started meets its peers."""
        at = {
            service.name: PeerAddress(
                host=found_at(address.host, environment),
                port=address.port,
                token=address.token,
            )
            for (service, _), address in zip(placed, addresses, strict=True)
        }
        for number, (service, spot) in enumerate(placed):
            if spot.here and service.peers:
                assert self._pool is not None
                introduction = Introduction(
                    port=at[service.name].port,
                    sender=self._workers + number,
                    peers={peer: at[peer] for peer in service.peers},
                )
                self._pool.introduce(service.name, introduction)

    def _connect(
        self,
        name: str,
        address: Address,
        environment: Mapping[str, str],
        started: bool,
    ) -> RemoteServer:
        """This worker's end of a service; one that the job has *started* listens already."""
        host = found_at(address.host, environment)
        life = environment.get(INCARNATION_VARIABLE)
        numbered = life is not None or environment.get(SURVIVE_VARIABLE) != "1"

        def connect() -> RemoteServer:
            return RemoteServer(
                name,
                host,
                address.port,
                worker=self._rank,
                incarnation=int(life or 0) if numbered else None,
                workers=self._workers,
                token=address.token,
                recorder=self._recorder,
            )

        if not numbered:  # no supervisor does, so the server does
            return external_worker.connected(
                name, host, address.port, self._rank, connect
            )
        if started:
            check_listens(name, host, address.port)
        survives = environment.get(SURVIVE_VARIABLE) == "1"
        between_seconds = timeouts.server_start if survives else timeouts.next_training
        deadline = time.monotonic() + between_seconds
        while True:
            try:
                return connect()
            except (UsageError, PeerLostError) as error:
                # A dedicated server still serves the last training, which this worker has
                # left and others have not, or ends it just now; then comes the next one.
                between = isinstance(error, PeerLostError) or HAS_BEEN_HERE in str(
                    error
                )
                if started or not between or time.monotonic() > deadline:
                    raise
            threading.Event().wait(0.05)


@dataclass(frozen=True)
class Where:
    """What one worker makes of places."""

    rank: int
    workers: int
    store: Store
    environment: Mapping[str, str]

    def spots(self, place: str) -> list[Spot]:
        """Where services of that place run. Raises `UsageError`."""
        if place == "auto":
            named = self.environment.get(ADDRESSES_VARIABLE)
            place = "dedicated" if named else "embedded"
        if place not in ("embedded", "per-node"):
            there = dedicated_servers.addresses_at(place, self.environment)
            return [Spot(address=one) for one in there]
        if self.environment.get(SURVIVE_VARIABLE) == "1":
            raise UsageError(
                f"servers={place}: a job that survives deaths (--survive) has the servers that "
                "its supervisor has started, and no others: its workers share nothing else "
                "by which they could find one. Leave servers=... out"
            )
        return [self.beside(0)] if place == "embedded" else self._nodes()

    def beside(self, rank: int) -> Spot:
        """Where a service runs on the machine of worker *rank*."""
        return Spot(here=self.rank == rank)

    def _nodes(self) -> list[Spot]:
        on_node = int(self.environment.get("LOCAL_WORLD_SIZE", self.workers))
        nodes = max(1, self.workers // on_node)
        mine = self._node() if nodes > 1 else 0
        first = self.environment.get("LOCAL_RANK", "0") == "0"
        self._check_nodes(on_node, nodes, mine if first else None)
        return [Spot(here=first and node == mine) for node in range(nodes)]

    def _check_nodes(self, on_node: int, nodes: int, mine: int | None) -> None:
        """Raise `UsageError`, on every worker, unless each node has as many workers as this one,
        *on_node*, and one that starts its server; all would wait for what nobody starts. *mine*: the
        node that this worker starts one for. Collective, whatever this worker was told."""
        words = f"{on_node} {'-' if mine is None else mine}"
        self.store.set(_node_key(self.rank), words)
        said = [self.store.get(_node_key(rank)).split() for rank in range(self.workers)]
        sizes = sorted({int(size) for size, _ in said})
        if len(sizes) > 1:
            raise UsageError(
                "servers=per-node: the nodes have different numbers of workers "
                f"({', '.join(map(str, sizes))}, as LOCAL_WORLD_SIZE says there), expected as many on "
                "each: start as many on each, or take one server (servers=embedded)"
            )
        found = sorted(int(number) for _, number in said if number != b"-")
        if nodes > 1 and found != list(range(nodes)):
            raise UsageError(
                f"servers=per-node: the first workers of the nodes say that these are nodes "
                f"{', '.join(map(str, found)) or 'of no number'}, expected each of 0 to {nodes - 1} "
                "once: number workers node by node (mpirun --map-by slot), or set NODE_RANK and "
                "LOCAL_RANK for each"
            )

    def _node(self) -> int:
        of_launcher = self.environment.get("GROUP_RANK")
        return int(of_launcher or self.environment.get("NODE_RANK", "0"))


def _node_key(rank: int) -> str:
    return f"paceline/starters/{rank}"
