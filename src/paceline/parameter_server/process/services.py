"""Lists the kinds of services, one row each, and their factories.

A service is a state machine (`interfaces.server`). A `Describe` message names its kind. Only rows
of `SERVICES` can be made, and no name from outside is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from paceline import methods
from paceline.collectives.in_network import sums_service
from paceline.errors import UsageError, unknown
from paceline.interfaces import Discipline, Service, UpdatesOnServer
from paceline.interfaces.server_messages import Describe
from paceline.parameter_server.groups.local_server import LocalServer
from paceline.parameter_server.groups.server import GroupServer
from paceline.parameter_server.state_machine.server import (
    MakeDiscipline,
    ParameterServer,
)
from paceline.spec import parse
from paceline.timeouts import timeouts
from paceline.transport import liveness

MOST_SERVICES = 64
"""The most servers of a job that communicate with each other."""

Factory = Callable[[Describe, int, UpdatesOnServer | None], Service]
"""Makes a service from its description, for so many workers. The method is the one whose updates it
applies; None: the first worker names it."""


def discipline_of(text: str, workers: int) -> Discipline:
    """Return the discipline of the method that a spec names. Raises `UsageError`."""
    method, _ = methods.make(parse(text), set())
    if method.updates_on != "server":
        raise UsageError(f"method {text!r} needs no server: its workers update")
    return cast(UpdatesOnServer, method).server(workers)


def discipline_maker(method: UpdatesOnServer | None, workers: int) -> MakeDiscipline:
    """Return a function that makes the disciplines of one server.

    They are *method*'s, or without one those of the method that the first worker names.
    """

    def make(spec: str) -> Discipline | None:
        if method is not None:
            return method.server(workers)
        return discipline_of(spec, workers) if spec else None

    return make


def make_parameter_server(
    workers: int, name: str, method: UpdatesOnServer | None = None
) -> ParameterServer:
    """Make a parameter server; without a *method* the first worker names it."""
    return ParameterServer(workers, discipline_maker(method, workers), name)


def make_group_server(
    description: Describe,
    workers: int,
    method: UpdatesOnServer | None = None,
    *,
    incarnation: int = 0,
    enters: bool = False,
    patience: float | None = None,
) -> GroupServer:
    """Make the server of one group: see `GroupServer`. *patience*: by default, until a restart."""
    local = LocalServer(
        description.number,
        workers,
        discipline_maker(method, workers),
        description.name,
    )
    return GroupServer(
        local,
        description.services,
        incarnation=incarnation,
        enters=enters,
        patience=liveness.patience() if patience is None else patience,
    )


SERVICES: dict[str, Factory] = {
    "server": lambda description, workers, method: make_parameter_server(
        workers, description.name, method
    ),
    # Only supervised servers are restarted.
    "group-server": lambda *described: make_group_server(
        *described, patience=timeouts.peer_return
    ),
    "atp-server": lambda *_: sums_service.SumsService(),
}


def make_service(
    description: Describe, workers: int, method: UpdatesOnServer | None = None
) -> Service:
    """Make the described service. Raises `UsageError` for an invalid description."""
    names, number = description.services, description.number
    if description.kind not in SERVICES:
        raise UsageError(unknown("kind of service", description.kind, SERVICES))
    if not (len(set(names)) == len(names) <= MOST_SERVICES):
        raise UsageError(
            f"describe: expected up to {MOST_SERVICES} services with names of their own, got "
            f"{len(names)}"
        )
    if not 0 <= number < len(names):
        raise UsageError(f"describe: there is no service {number}")
    if not description.peers.keys() <= set(names) - {description.name}:
        raise UsageError(
            f"describe: expected peers of {description.name} among the other services, got "
            f"{', '.join(description.peers)}"
        )
    return SERVICES[description.kind](description, workers, method)
