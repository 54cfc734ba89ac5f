"""The words of `ServiceSpec.place`, in every runtime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from paceline.errors import UsageError
from paceline.interfaces import ServiceJob, ServiceSpec

AUTO = "auto"
ON_WORKERS_HOSTS = ("embedded", "per-node")

Spot = TypeVar("Spot")


def spread(
    job: ServiceJob,
    find: Callable[[str], Sequence[Spot]],
    beside: Callable[[int], Spot],
) -> list[tuple[ServiceSpec, Spot]]:
    """Every service that is to run, by its own name, and where: *find* tells the spots of a
    place, *beside* the one beside a worker. Raises `UsageError` for names and peers that do not fit
    together."""
    spread: list[tuple[ServiceSpec, Spot]] = []
    for service in job.services:
        if service.beside:
            spread += _spread_peers(service, find, beside)
            continue
        for number, spot in enumerate(find(service.place)):
            spread.append((replace(service, name=f"{service.name} {number}"), spot))
    _check([service for service, _ in spread])
    return spread


def _spread_peers(
    service: ServiceSpec,
    find: Callable[[str], Sequence[Spot]],
    beside: Callable[[int], Spot],
) -> list[tuple[ServiceSpec, Spot]]:
    """Those that one stands for with its *beside*. Raises `UsageError` where its place has too
    few spots."""
    ranks, spots = service.beside, list(find(service.place))
    if service.place == AUTO and len(spots) < len(ranks):
        spots = [beside(rank) for rank in ranks]
    elif service.place in ON_WORKERS_HOSTS:
        spots = [spots[number % len(spots)] for number in range(len(ranks))]
    elif len(spots) < len(ranks):
        raise UsageError(
            f"servers={service.place}: this method has {len(ranks)} servers, one for each "
            f"group, and there are hosts for {len(spots)}: start as many more, ask for fewer "
            "groups, or leave servers out, so that each stands beside a worker of its group"
        )
    names = [f"{service.name} {number}" for number in range(len(ranks))]
    spread = []
    for name, spot in zip(names, spots, strict=False):  # spots may be left over
        peers = tuple(other for other in names if other != name)
        one = replace(service, name=name, peers=peers, beside=())
        spread.append((one, spot))
    return spread


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
