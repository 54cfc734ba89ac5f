"""The words of `Service.place`, in every world."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from paceline.errors import UsageError
from paceline.interfaces import Service, ServiceJob

BESIDE, HOST, RACK = "beside", "host", "rack"
AUTO = "auto"
ON_WORKERS_HOSTS = ("embedded", "per-node")

Spot = TypeVar("Spot")


def single(place: str) -> tuple[str, str] | None:
    """The two words of a place that is one, such as ``("rack", "0")``; None for any other.

    These words come first: a machine called "host" is addressed by its number.
    """
    word, _, name = place.partition(":")
    return (word, name) if word in (BESIDE, HOST, RACK) and name else None


def number_of(place: str, count: int, what: str) -> int:
    """The number in a place, of *count* that there are. Raises `UsageError`."""
    name = place.partition(":")[2]
    if not name.isdecimal() or int(name) >= count:
        raise UsageError(
            f"place {place!r}: expected {what}, 0 to {count - 1}, got {name!r}"
        )
    return int(name)


def spread(
    job: ServiceJob, find: Callable[[str], Sequence[Spot]]
) -> list[tuple[Service, Spot]]:
    """Every service that is to run, by its own name, and where: *find* tells the spots of a
    place. Raises `UsageError` for names and peers that do not fit together."""
    spread: list[tuple[Service, Spot]] = []
    for service in job.services:
        if service.beside:
            spread += _spread_peers(service, find)
            continue
        spots = find(service.place)
        names = [service.name]
        if single(service.place) is None:
            names = [f"{service.name} {number}" for number in range(len(spots))]
        for name, spot in zip(names, spots, strict=True):
            spread.append((replace(service, name=name), spot))
    _check([service for service, _ in spread])
    return spread


def _spread_peers(
    service: Service, find: Callable[[str], Sequence[Spot]]
) -> list[tuple[Service, Spot]]:
    """Those that one stands for with its *beside*. Raises `UsageError` where its place has too
    few spots."""
    ranks, spots = service.beside, list(find(service.place))
    if service.place == AUTO and len(spots) < len(ranks):
        spots = [spot for rank in ranks for spot in find(f"{BESIDE}:{rank}")]
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


def _check(services: Sequence[Service]) -> None:
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
