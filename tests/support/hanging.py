"""When tests give up on what should come soon, and where what they start may listen.

No limit here measures anything: machines are shared, and may be many times slower than at other
times. A test that fails waits so long, and no other one.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

SECONDS = 240
"""What has not come by then hangs."""

FIRST_PORT, LAST_PORT = 10_000, 30_000
"""Below those that the kernel gives to whoever asks for any: nobody but tests takes one of
these between the moment when it is chosen and the moment when somebody listens there."""


def free_port() -> int:
    """A port that nobody listens at, and that nobody is given meanwhile. Neither is the one after
    it, where a server's liveness connections come."""
    for port in _ports:
        if all(map(_is_free, (port, port + 1))):
            return port
    raise AssertionError("unreachable: ports are gone through in a circle")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def eventually(measure: Callable[[], T], holds: Callable[[T], bool], tries: int) -> T:
    """What *measure* finds as soon as it *holds*, at the last of *tries* in any case: a machine
    that others use makes a network look slow, and seldom all of the time."""
    for _ in range(tries - 1):
        found = measure()
        if holds(found):
            return found
    return measure()


def _circle() -> Iterator[int]:
    """Every second port. Each process begins elsewhere."""
    count = (LAST_PORT - FIRST_PORT) // 2
    for number in itertools.count(os.getpid() * 97):
        yield FIRST_PORT + 2 * (number % count)


_ports = _circle()
