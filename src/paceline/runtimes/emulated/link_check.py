"""Measures the goodput of each link of an emulated network.

TCP streams between hosts load each limited link as far as they can. The streams are plain sockets
in hosts, and one loop here serves them.

A token bucket passes its content at once, and TCP has to find its rate, so the first part of a
measurement does not count.
"""

from __future__ import annotations

import math
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from paceline import units
from paceline.runtimes.emulated.errors import EmulationError
from paceline.runtimes.emulated.network import EmulatedNetwork
from paceline.runtimes.emulated.shaping import UNLIMITED, segment_bytes, wire_rate

TOLERANCE = 0.05
"""A link is off if its goodput differs from the requested one by more than this share."""

_MOST_STREAMS = 32
_FULL = 0.999
"""A link counts as full from this share of its rate on."""
_WARM_UP_SECONDS = 0.25
_SECONDS = 0.5
_LONGEST_SECONDS = 10.0
_SEGMENTS = 100
"""Segments that a measurement has at least, which matters below 5 Mbit/s."""
_TRIES = 3
"""Measurements of a link that is off, since a busy machine makes links look slow."""
_CONNECT_SECONDS = 5.0
_CHUNK = bytes(1 << 18)
_AT_ONCE = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class MeasuredLink:
    """One directed link: the goodput asked for and found, in bytes per second.

    *possible* is the most that the rest of the cluster can send over the link. It is less than
    *asked* if all other hosts together are slower.
    """

    link: int
    name: str
    asked: float
    possible: float
    found: float

    @property
    def error(self) -> float:
        """The relative error: 0.03 means 3 % more than asked (or than possible)."""
        return self.found / min(self.asked, self.possible) - 1

    def __str__(self) -> str:
        asked, found = units.show_rate(self.asked), units.show_rate(round(self.found))
        return f"{self.name}: asked for {asked}, gives {found} ({self.error:+.1%})"


@dataclass(frozen=True)
class Report:
    """The measured goodput of every link, in the order of their numbers.

    ``idle`` names the links that could not be loaded: unlimited ones, and those that no pair of
    hosts uses.
    """

    links: tuple[MeasuredLink, ...]
    idle: tuple[str, ...]

    def off(self, tolerance: float = TOLERANCE) -> tuple[MeasuredLink, ...]:
        """Return the links that are off by more than *tolerance*."""
        return tuple(link for link in self.links if abs(link.error) > tolerance)

    @property
    def worst(self) -> float:
        """The largest relative error, without its sign; 0 if nothing was measured."""
        return max((abs(link.error) for link in self.links), default=0.0)

    def summary(self) -> str:
        """Return one line for the user."""
        if not self.links:
            return "no link could be measured"
        count = len(self.off())
        text = f"{len(self.links)} links measured, the worst {self.worst:.1%} off"
        return text + (
            f"; {count} are off by more than {TOLERANCE:.0%}" if count else ""
        )


def check_links(network: EmulatedNetwork) -> Report:
    """Load every link with TCP, for about a second each, in turn.

    Raises:
        EmulationError: Two hosts cannot connect, since a link is cut.
    """
    measured: dict[int, MeasuredLink] = {}
    idle: list[str] = []
    for link, rate in enumerate(network.rates):
        if link in measured:
            continue
        load = _plan_load(network, link) if wire_rate(rate) < UNLIMITED else None
        if load is None:
            idle.append(network.link_name(link))
        else:
            found = {found.link: found for found in _measure(network, load)}
            measured = found | measured
    return Report(
        links=tuple(measured[link] for link in sorted(measured)), idle=tuple(idle)
    )


@dataclass(frozen=True)
class _Load:
    """Streams that run together, their total rate, and the links that they measure.

    Every stream crosses each of these links.
    """

    streams: tuple[tuple[int, int], ...]
    rate: float
    links: tuple[int, ...]


def _plan_load(network: EmulatedNetwork, link: int) -> _Load | None:
    """Return the fewest streams that fill a link; None if no stream crosses it.

    One stream fills the link of a host. An uplink may need several: no two of them share another
    host's link, so the sum of their rates does not depend on how TCP shares.
    """
    left = [min(rate, UNLIMITED) for rate in network.rates]
    shared: set[int] = set()
    streams: list[tuple[int, int]] = []
    used: set[int] = set()
    for pair in _pairs(len(network.hosts)):
        path = network.path(*pair)
        ends = {path[0], path[-1]} - {link}
        room = min(left[way] for way in path)
        if link not in path or ends & used or room <= (1 - _FULL) * network.rates[link]:
            continue
        shared = shared & set(path) if streams else set(path)
        streams.append(pair)
        used |= ends
        for way in path:
            left[way] -= room
        if len(streams) == _MOST_STREAMS:
            break
    if not streams:
        return None
    rate = network.rates[link] - left[link]
    full = {way for way in shared if rate >= _FULL * network.rates[way]}
    return _Load(tuple(streams), rate, tuple(sorted(full | {link})))


def _pairs(hosts: int) -> Iterator[tuple[int, int]]:
    """Yield all pairs of hosts, neighbours in a ring first."""
    for step in range(1, hosts):
        for source in range(hosts):
            yield source, (source + step) % hosts


def _measure(network: EmulatedNetwork, load: _Load) -> list[MeasuredLink]:
    """Measure the links of a load; keep the trial whose streams came closest to the load's rate."""
    found = math.inf
    for _ in range(_TRIES):
        found = min(found, _run(network, load), key=lambda rate: abs(rate - load.rate))
        if abs(found / load.rate - 1) <= TOLERANCE:
            break
    return [
        MeasuredLink(
            link=link,
            name=network.link_name(link),
            asked=network.rates[link],
            possible=load.rate,
            found=found,
        )
        for link in load.links
    ]


def _run(network: EmulatedNetwork, load: _Load) -> float:
    """Return the goodput of streams that run together, in bytes per second."""
    seconds = max(_SECONDS, _SEGMENTS * segment_bytes(load.rate) / load.rate)
    seconds = min(seconds, _LONGEST_SECONDS)
    buffer = bytearray(1 << 20)
    arrived = 0
    first = last = 0.0
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for pair in load.streams:
            sender, receiver = _connect(network, stack, *pair)
            selector.register(sender, selectors.EVENT_WRITE)
            selector.register(receiver, selectors.EVENT_READ)
        start = time.perf_counter() + _WARM_UP_SECONDS * max(1, seconds / _SECONDS / 4)
        end = start + seconds
        while (now := time.perf_counter()) < end:
            for key, events in selector.select(end - now):
                stream = key.fileobj
                assert isinstance(stream, socket.socket)
                if events == selectors.EVENT_WRITE:
                    stream.send(_CHUNK)
                    continue
                count = stream.recv_into(buffer)
                last = time.perf_counter()
                # The first bytes after the warm-up start the interval, and do not count.
                if first:
                    arrived += count
                elif last >= start:
                    first = last
    return arrived / (last - first) if arrived else 0.0


def _connect(
    network: EmulatedNetwork, stack: ExitStack, source: int, destination: int
) -> tuple[socket.socket, socket.socket]:
    """Connect two hosts; return the sending and the receiving end."""
    address = network.hosts[destination].address
    with network.socket(destination) as listener:
        listener.bind((address, 0))
        listener.listen(1)
        listener.settimeout(_CONNECT_SECONDS)
        sender = stack.enter_context(network.socket(source))
        sender.settimeout(_CONNECT_SECONDS)
        # Discard unsent data at the end: the next trial needs the link.
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        try:
            sender.connect((address, listener.getsockname()[1]))
            receiver = stack.enter_context(listener.accept()[0])
        except OSError as error:
            ways = ", ".join(
                network.link_name(link)
                for pair in ((source, destination), (destination, source))
                for link in network.path(*pair)
            )
            raise EmulationError(
                f"expected a connection from {network.hosts[source].name} to "
                f"{network.hosts[destination].name}, got: {error}. Is one of these links "
                f"cut: {ways}?"
            ) from error
    sender.setblocking(False)
    receiver.setblocking(False)
    return sender, receiver
