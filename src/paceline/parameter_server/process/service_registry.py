"""The kinds of services that a job can start: one row each.

A service is a state machine (`interfaces.server`), and a kind makes one from what it is told
when it starts. The row's name is what `Service.kind` says.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from paceline.errors import UsageError, unknown
from paceline.interfaces import AnyServer, Start
from paceline.parameter_server.groups.server import make_group_machine
from paceline.parameter_server.process.monitors import make_machine
from paceline.parameter_server.state_machine.server import ParameterServer

Factory = Callable[[Start], AnyServer]


def _server(start: Start) -> ParameterServer:
    if start.method is None:
        return make_machine(start.workers, start.name)
    discipline = start.method.server(start.workers)
    # Nothing that carries its messages loses one, so no request comes again.
    return ParameterServer(start.workers, discipline, start.name, remembers=False)


def _fallback_server(start: Start) -> AnyServer:
    """Of a part above this one, so it is imported where it is wanted."""
    module = importlib.import_module("paceline.collectives.in_network.sums_service")
    found: AnyServer = module.make(start)
    return found


KINDS: dict[str, Factory] = {
    "server": _server,
    "group-server": make_group_machine,
    "fallback-server": _fallback_server,
}


def make(kind: str, start: Start) -> AnyServer:
    """A service of that *kind*. Raises `UsageError` for one that there is not."""
    if kind not in KINDS:
        raise UsageError(unknown("kind of service", kind, KINDS))
    return KINDS[kind](start)
