"""Servers that were there before their job: where they are, and what they are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.errors import UsageError
from paceline.interfaces import Endpoint, Service, ServiceJob
from paceline.interfaces.server_messages import Introduce
from paceline.runtimes.real.job_store import Address
from paceline.runtimes.real.server_process import (
    ADDRESSES_VARIABLE,
    INCARNATION_VARIABLE,
    SURVIVE_VARIABLE,
)
from paceline.transport.security import SECRET, TOKEN, dedicated_token


def addresses_at(place: str, environment: Mapping[str, str]) -> list[Address]:
    """Where the servers of a place run already. Raises `UsageError`."""
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
        # [::1]:29600, as addresses of IPv6 are written before a port
        host = host.removeprefix("[").removesuffix("]")
        addresses.append(Address(host=host, port=int(port), token=token))
    return addresses


def check_supervised(job: ServiceJob, environment: Mapping[str, str]) -> None:
    """Raise `UsageError` where a supervisor has started servers for another method than the
    script's: it knows the one of its command line alone."""
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
            f"--survive: this training's method wants {wanted} servers, and the supervisor has "
            f"started {started}: it knows what its command line says. Start the job with "
            f"--method SPEC, the whole spec of {name}"
        )


def introduce(
    services: Sequence[Service],
    addresses: Sequence[Address | None],
    ends: Sequence[Endpoint],
) -> None:
    """Tell those that are at an address already what they are, and then where their peers are:
    those that have peers, or are no parameter servers. Raises `UsageError` where one cannot be that."""
    at = {
        service.name: (address.host, address.port)
        for service, address in zip(services, addresses, strict=True)
        if address is not None
    }
    names = [service.name for service in services]
    # None is asked by a peer before it knows what it is.
    for tells_peers in (False, True):
        waiting = [
            end.request(
                Introduce(
                    kind=service.kind,
                    services=names,
                    number=number,
                    peers={p: at[p] for p in service.peers} if tells_peers else {},
                )
            )
            for number, (service, end) in enumerate(zip(services, ends, strict=True))
            if service.name in at and (service.peers or service.kind != "server")
        ]
        for reception in waiting:
            reception.wait()
