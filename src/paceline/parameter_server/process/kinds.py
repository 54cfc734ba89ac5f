"""The kinds of services that a job can start: one row each.

A service is a state machine (`interfaces.server`), and a kind makes one from what it is told
when it starts. The row's name is what `Service.kind` says. A kind of your own needs no row:
``MODULE:FACTORY`` names a factory that is imported where the service runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from paceline.errors import UsageError, unknown
from paceline.interfaces import AnyServer
from paceline.interfaces.server import Start
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
    """Of a part above this one, as a kind of somebody's own is."""
    return make("paceline.collectives.in_network.sums_service:make", start)


KINDS: dict[str, Factory] = {
    "server": _server,
    "group-server": make_group_machine,
    "fallback-server": _fallback_server,
}


def make(kind: str, start: Start) -> AnyServer:
    """A service of that *kind*. Raises `UsageError` for one that there is not."""
    factory = KINDS.get(kind)
    if factory is not None:
        return factory(start)
    module, _, name = kind.partition(":")
    if not name:
        known = unknown("kind of service", kind, KINDS)
        raise UsageError(f"{known} Or name a factory of your own: MODULE:FACTORY.")
    try:
        found: Factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"kind of service {kind!r}: expected MODULE:FACTORY that can be imported where "
            f"the service runs, and got: {error}"
        ) from None
    return found(start)
