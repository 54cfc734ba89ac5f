"""Where the things listen that all workers must reach, and at which address they find them.

A machine may know itself by an address that is of no use to others: Debian's ``/etc/hosts``
gives its own name 127.0.1.1, and some launchers call the first worker's machine "localhost" on that
machine alone. What is bound to such an address is reached by nobody else, and telling others
of it sends them to themselves. torch's own store listens everywhere, and each worker looks
for it at MASTER_ADDR as *it* resolves that; where this machine's own view is of no use, so
do we.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
AT_MASTER = ""
"""A published address: MASTER_ADDR, as whoever reads this resolves it."""


@dataclass(frozen=True)
class Meeting:
    """*bind*: where to listen; *publish*: what to tell the others."""

    bind: str
    publish: str


def resolve(name: str) -> str:
    """An address of *name*: of IP version 4, if it has one. Raises `OSError`."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def is_own(address: str) -> bool:
    """Whether this machine can listen there."""
    try:
        with socket.create_server((address, 0), family=family_of(address)):
            return True
    except OSError:
        return False


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def at_master(
    size: int,
    environment: Mapping[str, str] | None = None,
    *,
    resolve: Callable[[str], str] = resolve,
    is_own: Callable[[str], bool] = is_own,
) -> Meeting:
    """Where worker 0 of *size* listens, on the machine that is MASTER_ADDR.

    At the address that MASTER_ADDR has here, and nowhere else, wherever the others can use
    that one; else everywhere. A loopback address is taken at its word where all workers
    are on this machine, or nothing says where they are and MASTER_ADDR is written as one.
    Raises `OSError` where MASTER_ADDR cannot be resolved.
    """
    environment = os.environ if environment is None else environment
    master = environment.get("MASTER_ADDR", LOOPBACK)
    address = resolve(master)
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        local = environment.get("LOCAL_WORLD_SIZE")
        if local is None:
            usable = master in ("localhost", address)
        else:
            usable = int(local) >= size
    else:
        # The address of a service, or of a router in front of this machine, is not ours.
        usable = is_own(address)
    if usable:
        return Meeting(bind=address, publish=address)
    return Meeting(bind="::" if ":" in address else "0.0.0.0", publish=AT_MASTER)


def towards_master(environment: Mapping[str, str] | None = None) -> Meeting:
    """Where a worker of another machine listens: on the network that leads to worker 0."""
    environment = os.environ if environment is None else environment
    master = resolve(environment.get("MASTER_ADDR", LOOPBACK))
    with socket.socket(family_of(master), socket.SOCK_DGRAM) as probe:
        probe.connect((master, 1))  # sends nothing: only finds the way
        address = str(probe.getsockname()[0])
    return Meeting(bind=address, publish=address)


def found_at(published: str, environment: Mapping[str, str] | None = None) -> str:
    """The host to connect to for what somebody has published."""
    environment = os.environ if environment is None else environment
    return published or environment.get("MASTER_ADDR", LOOPBACK)
