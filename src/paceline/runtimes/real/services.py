"""Starts or finds servers and other services of real workers.

Each worker starts the services whose place is beside it, all in one child process that ends with
it. *Embedded* means beside rank 0, *per node* beside the first worker of each node. A host's
service belongs to the first worker that runs there. Addresses go to all workers through the job's
store, and tokens as `job_store` describes. A service that cannot start publishes its error, so
every worker raises it and none waits. When all services listen, workers send each one its
description and the addresses of its peers.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import PeerLostError, UsageError
from paceline.interfaces import Endpoint, ServiceJob, ServiceSpec
from paceline.interfaces.server_messages import Describe, PeerAddress
from paceline.records import StepRecorder
from paceline.runtimes import service_placement
from paceline.runtimes.real import external_worker
from paceline.runtimes.real.job_store import (
    Address,
    JobStore,
    host_to_connect,
    on_master,
    toward_master,
)
from paceline.runtimes.real.server_process import (
    ADDRESSES_VARIABLE,
    INCARNATION_VARIABLE,
    SURVIVE_VARIABLE,
    ServerProcess,
    addresses_at,
)
from paceline.timeouts import timeouts
from paceline.transport.connection import ServerConnection, check_listens
from paceline.transport.protocol import HAS_BEEN_HERE, ServiceKey


@dataclass(frozen=True)
class Placement:
    """The place of one service: an existing *address*, or else a worker starts it, maybe *here*."""

    here: bool = False
    address: Address | None = None


class RealServices:
    """One real worker's access to the job's services."""

    def __init__(
        self, rank: int, workers: int, job_store: JobStore, recorder: StepRecorder
    ) -> None:
        self._rank, self._workers = rank, workers
        self._job_store, self._recorder = job_store, recorder
        self._process: ServerProcess | None = None
        """The process with all services that this worker starts."""
        self._trainings = 0

    def find(
        self, job: ServiceJob, environment: Mapping[str, str] = os.environ
    ) -> list[ServerConnection]:
        """Start this worker's services, and connect to all services of *job*. Collective."""
        number, self._trainings = self._trainings, self._trainings + 1
        check_supervised(job, environment)
        resolver = PlacementResolver(
            self._rank, self._workers, self._job_store, environment
        )
        placed = service_placement.place_services(
            job, resolver.placements, resolver.beside
        )
        key = f"paceline/services/{number}"
        addresses = self._started(key, placed, environment)
        survives = environment.get(SURVIVE_VARIABLE) == "1"
        # Under --survive a server process serves one training, and workers share no store that
        # could give it a name.
        training = 0 if survives else self._training(key)
        ends = [
            self._connect(
                service.name,
                address,
                environment,
                ServiceKey(training, number),
                starts=placement.address is None,
            )
            for number, ((service, placement), address) in enumerate(
                zip(placed, addresses, strict=True)
            )
        ]
        # Under --survive the process that started the services describes them.
        if not survives:
            at = [
                PeerAddress(
                    host=host_to_connect(address.host, environment),
                    port=address.port,
                    token=address.token,
                )
                for address in addresses
            ]
            describe([service for service, _ in placed], at, ends)
        return ends

    def close(self) -> None:
        """End this worker's child process, after all trainings."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _started(
        self,
        key: str,
        placed: Sequence[tuple[ServiceSpec, Placement]],
        environment: Mapping[str, str],
    ) -> list[Address]:
        """Return the addresses of all services. Raises `UsageError` if one does not listen."""
        for service, placement in placed:
            if placement.here:
                address = self._start(service, environment)
                self._job_store.publish_address(f"{key}/{service.name}", address)
        addresses = [
            placement.address or self._job_store.address(f"{key}/{service.name}")
            for service, placement in placed
        ]
        for address in addresses:
            if address.fault:
                raise UsageError(address.fault)
        return addresses

    def _start(self, service: ServiceSpec, environment: Mapping[str, str]) -> Address:
        try:
            listen_address = (
                on_master(self._workers, environment)
                if self._rank == 0
                else toward_master(environment)
            )
            if self._process is None:
                process = ServerProcess(
                    service.name,
                    self._workers,
                    listen_address.bind,
                    token=self._job_store.new_token(),
                    extra=["--described"],
                )
                process.listens()
                self._process = process
            return Address(
                host=listen_address.advertise,
                port=self._process.port,
                token=self._process.token,
            )
        except (UsageError, OSError) as error:
            return Address(fault=str(error))

    def _training(self, key: str) -> int:
        """Return a number that no other training has, of this job or another one.

        A server that existed before serves several trainings, and the next one may begin before the
        last has ended everywhere.
        """
        if self._rank == 0:
            self._job_store.publish(f"{key}/training", str(secrets.randbits(63)))
        return int(self._job_store.get(f"{key}/training"))

    def _connect(
        self,
        name: str,
        address: Address,
        environment: Mapping[str, str],
        service: ServiceKey,
        *,
        starts: bool,
    ) -> ServerConnection:
        """Connect to a service; one that the job *starts* listens already."""
        host = host_to_connect(address.host, environment)
        incarnation = environment.get(INCARNATION_VARIABLE)
        survives = environment.get(SURVIVE_VARIABLE) == "1"

        def connect() -> ServerConnection:
            return ServerConnection(
                name,
                host,
                address.port,
                worker=self._rank,
                incarnation=(
                    None if survives and incarnation is None else int(incarnation or 0)
                ),
                workers=self._workers,
                token=address.token,
                service=service,
                recorder=self._recorder,
            )

        # The server numbers incarnations.
        if survives and incarnation is None:
            return external_worker.connect_with_retry(
                name, host, address.port, self._rank, connect
            )
        if survives:
            return _connected_between_trainings(connect)
        if starts:
            check_listens(name, host, address.port)
        return connect()


def _connected_between_trainings(
    connect: Callable[[], ServerConnection],
) -> ServerConnection:
    """Connect to a server under a supervisor, between two trainings.

    The server of the last training may still be there, or end just now, if this worker has left it
    and others have not. Then the supervisor starts the next one.
    """
    deadline = time.monotonic() + timeouts.server_start
    while True:
        try:
            return connect()
        except (UsageError, PeerLostError) as error:
            between = isinstance(error, PeerLostError) or HAS_BEEN_HERE in str(error)
            if not between or time.monotonic() > deadline:
                raise
        threading.Event().wait(0.05)


@dataclass(frozen=True)
class PlacementResolver:
    """Finds the placements of places, for one worker."""

    rank: int
    workers: int
    job_store: JobStore
    environment: Mapping[str, str]

    def placements(self, place: str) -> list[Placement]:
        """Return where services of that place run. Raises `UsageError`."""
        if place == "auto":
            named = self.environment.get(ADDRESSES_VARIABLE)
            place = "dedicated" if named else "embedded"
        if place not in ("embedded", "per-node"):
            there = addresses_at(place, self.environment)
            return [Placement(address=one) for one in there]
        if self.environment.get(SURVIVE_VARIABLE) == "1":
            raise UsageError(
                f"servers={place}: a job that survives deaths (--survive) uses only the servers that "
                "its supervisor has started, since its workers cannot find others. Leave servers=... "
                "out"
            )
        return [self.beside(0)] if place == "embedded" else self._nodes()

    def beside(self, rank: int) -> Placement:
        """Return the placement of a service on the machine of worker *rank*."""
        return Placement(here=self.rank == rank)

    def _nodes(self) -> list[Placement]:
        on_node = int(self.environment.get("LOCAL_WORLD_SIZE", self.workers))
        return [
            Placement(here=self.rank == first) for first in self._first_ranks(on_node)
        ]

    def _first_ranks(self, on_node: int) -> list[int]:
        """Return the rank of each node's first worker; ranks may be numbered in any way.

        Collective. Raises `UsageError`, on every worker, unless each node has *on_node* workers, as
        this one has, and one of local rank 0. Otherwise all would wait for a server that no worker
        starts.
        """
        local = self.environment.get("LOCAL_RANK", "0")
        self.job_store.publish(_node_key(self.rank), f"{on_node} {local}")
        nodes_and_ranks = [
            self.job_store.get(_node_key(rank)).split() for rank in range(self.workers)
        ]
        sizes = sorted({int(size) for size, _ in nodes_and_ranks})
        if len(sizes) > 1:
            raise UsageError(
                "servers=per-node: the nodes have different numbers of workers "
                f"({', '.join(map(str, sizes))}, as LOCAL_WORLD_SIZE says there), expected as many on "
                "each: start as many on each, or take one server (servers=embedded)"
            )
        if on_node >= self.workers:
            return [0]
        nodes = self.workers // on_node
        first = [
            rank for rank, (_, local) in enumerate(nodes_and_ranks) if int(local) == 0
        ]
        if len(first) != nodes:
            raise UsageError(
                f"servers=per-node: ranks {', '.join(map(str, first)) or 'none'} have LOCAL_RANK=0, expected "
                f"{nodes} such ranks, one on each node ({self.workers} workers, {on_node} on a node): set "
                "LOCAL_RANK and LOCAL_WORLD_SIZE for each worker"
            )
        return first


def _node_key(rank: int) -> str:
    return f"paceline/starters/{rank}"


def check_supervised(job: ServiceJob, environment: Mapping[str, str]) -> None:
    """Raise `UsageError` if a supervisor's servers do not fit the script's method.

    The supervisor knows only the method of its command line.
    """
    if environment.get(SURVIVE_VARIABLE) != "1":
        return
    started = len(environment.get(ADDRESSES_VARIABLE, "").split("+"))
    wanted = sum(len(service.beside) or 1 for service in job.services)
    if started != wanted and INCARNATION_VARIABLE not in environment:
        raise UsageError(
            f"--survive --server: this training's method wants {wanted} servers, and such a job "
            f"has one, got {started}. Take one with a single server (see `paceline list methods`), or "
            "survive on one machine: paceline run --survive --workers N"
        )
    if started != wanted:
        name = "its" if job.method is None else job.method.name
        raise UsageError(
            f"--survive: this training's method needs {wanted} servers, and the supervisor has "
            f"started {started}, by the method of its command line. Start the job with --method "
            f"SPEC, the whole spec of {name}"
        )


def describe(
    services: Sequence[ServiceSpec],
    addresses: Sequence[PeerAddress],
    ends: Sequence[Endpoint],
) -> None:
    """Send each service its description, and its peers' addresses.

    Raises `UsageError` if a service refuses its description.
    """
    names = [service.name for service in services]
    at = dict(zip(names, addresses, strict=True))
    waiting = [
        end.request(
            Describe(
                kind=service.kind,
                services=names,
                number=number,
                peers={peer: at[peer] for peer in service.peers},
            )
        )
        for number, (service, end) in enumerate(zip(services, ends, strict=True))
    ]
    for pending_reply in waiting:
        pending_reply.wait()
