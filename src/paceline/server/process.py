"""What a server process does: one training, or one after the other."""

from __future__ import annotations

from typing import cast

from paceline import methods
from paceline.errors import UsageError
from paceline.interfaces import Discipline, UpdatesOnServer
from paceline.server.protocol import ParameterServer
from paceline.server.serve import Shell
from paceline.spec import parse


def discipline_of(text: str, workers: int) -> Discipline:
    """What a server does under the method that a spec names. Raises `UsageError`."""
    method, _ = methods.make(parse(text), set())
    if method.updates_on != "server":
        raise UsageError(f"method {text!r} needs no server: its workers update")
    return cast(UpdatesOnServer, method).server(workers)


def make_shell(workers: int, name: str, address: str, port: int, token: str) -> Shell:
    """A server for one training, listening. Raises `UsageError` where it cannot."""
    machine = ParameterServer(workers, name=name, make=discipline_of)
    return Shell(machine, address, port, workers=workers, token=token)
