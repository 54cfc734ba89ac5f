"""Decides where services run, in every runtime, from `ServiceSpec.place`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from paceline.errors import UsageError
from paceline.interfaces import ServiceJob, ServiceSpec

AUTO = "auto"
ON_WORKERS_HOSTS = ("embedded", "per-node")

Placement = TypeVar("Placement")


def place_services(
    job: ServiceJob,
    find: Callable[[str], Sequence[Placement]],
    beside: Callable[[int], Placement],
) -> list[tuple[ServiceSpec, Placement]]:
    """Decide where each service runs.

    Args:
        job: The job's services.
        find: Returns the placements for a value of `ServiceSpec.place`.
        beside: Returns the placement beside a worker, by its rank.

    Returns:
        Every service that is to run, by its own name, and its placement.

    Raises:
        UsageError: Names and peers do not fit together, or there are too few hosts.
    """
    placed: list[tuple[ServiceSpec, Placement]] = []
    for service in job.services:
        if service.beside:
            placed += _spread_peers(service, find, beside)
            continue
        for number, placement in enumerate(find(service.place)):
            placed.append(
                (replace(service, name=f"{service.name} {number}"), placement)
            )
    _check([service for service, _ in placed])
    return placed


def _spread_peers(
    service: ServiceSpec,
    find: Callable[[str], Sequence[Placement]],
    beside: Callable[[int], Placement],
) -> list[tuple[ServiceSpec, Placement]]:
    """Return the services that one spec stands for by its *beside*, with their placements.

    Raises `UsageError` if its place has too few placements.
    """
    ranks, placements = service.beside, list(find(service.place))
    if service.place == AUTO and len(placements) < len(ranks):
        placements = [beside(rank) for rank in ranks]
    elif service.place in ON_WORKERS_HOSTS:
        placements = [
            placements[number % len(placements)] for number in range(len(ranks))
        ]
    elif len(placements) < len(ranks):
        raise UsageError(
            f"servers={service.place}: this method has {len(ranks)} servers, one for each "
            f"group, and there are hosts for {len(placements)}: start as many more, ask for fewer "
            "groups, or leave servers out, so that each stands beside a worker of its group"
        )
    names = [f"{service.name} {number}" for number in range(len(ranks))]
    placed = []
    # There may be more placements than services.
    for name, placement in zip(names, placements, strict=False):
        peers = tuple(other for other in names if other != name)
        one = replace(service, name=name, peers=peers, beside=())
        placed.append((one, placement))
    return placed


def _check(services: Sequence[ServiceSpec]) -> None:
    names = Counter(service.name for service in services)
    for service in services:
        if names[service.name] > 1:
            raise UsageError(
                f"{names[service.name]} services are called {service.name!r}: give each a "
                "name of its own"
            )
        for peer in service.peers:
            if peer not in names or peer == service.name:
                raise UsageError(
                    f"{service.name}: expected peers that are other services of its job "
                    f"({', '.join(sorted(set(names) - {service.name})) or 'it has none'}), "
                    f"got {peer!r}"
                )
