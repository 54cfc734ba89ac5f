"""What each link really gives: TCP streams between hosts, and what arrives.

Theory of operation
-------------------
The streams of a trial (see `trials`) are plain sockets that live in hosts and are served
here, by one loop.

A token bucket lets what it holds pass at once, and TCP has to find its pace, so the first
part of a trial does not count.
"""

from __future__ import annotations

import math
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from paceline import units
from paceline.cluster.bandwidth import BandwidthSharing, Flow
from paceline.runtimes.emulated.errors import EmulationError
from paceline.runtimes.emulated.network_plan import Host
from paceline.runtimes.emulated.shaping import UNLIMITED, segment_bytes, wire_rate

_BYTES_PER_CORE = 1.5e8
"""What streams may carry together for each core: a tenth of what one core can move."""
_MOST_STREAMS = 32


class Network(Protocol):
    """What is measured: a `EmulatedNetwork`."""

    hosts: tuple[Host, ...]
    rates: list[float]

    def path(self, source: int, destination: int) -> tuple[int, ...]: ...

    def link_name(self, link: int) -> str: ...

    def socket(self, host: int) -> socket.socket: ...


@dataclass(frozen=True)
class LinkTrial:
    """Streams that run together, the rates they should have, and whom that judges."""

    streams: tuple[tuple[int, int], ...]
    expected: tuple[float, ...]
    judged: tuple[int, ...]


def plan_trials(network: Network) -> tuple[list[LinkTrial], list[int]]:
    """Trials that judge every link that can be loaded, and the links that cannot."""
    trials: list[LinkTrial] = []
    idle: list[int] = []
    judged: set[int] = set()
    for link, rate in enumerate(network.rates):
        if link in judged:
            continue
        trial = _trial(network, link, judged) if wire_rate(rate) < UNLIMITED else None
        if trial is None:
            idle.append(link)
        else:
            trials.append(trial)
            judged.update(trial.judged)
    return trials, idle


def _trial(network: Network, link: int, judged: set[int]) -> LinkTrial | None:
    """The fewest streams that fill a link, or as many as help."""
    streams: list[tuple[int, int]] = []
    best: LinkTrial | None = None
    for stream in _crossing(network, link):
        streams.append(stream)
        rates = _fair_rates(network, streams)
        trial = LinkTrial(tuple(streams), tuple(rates), (link,))
        now = load(network, trial, link)
        if best is not None and now <= load(network, best, link) * 1.001:
            streams.pop()  # no help: another stream may
            continue
        best = trial
        if now >= network.rates[link] * 0.999 or len(streams) == _MOST_STREAMS:
            break
    if best is None:
        return None
    on_the_way = {way for s in best.streams for way in network.path(*s)} - judged
    full = {
        way
        for way in on_the_way
        if load(network, best, way) >= network.rates[way] * 0.999
    }
    return LinkTrial(best.streams, best.expected, tuple(sorted(full | {link})))


def _crossing(network: Network, link: int) -> Iterator[tuple[int, int]]:
    """Pairs of hosts whose way crosses a link, neighbours in a ring first."""
    count = len(network.hosts)
    for step in range(1, count):
        for source in range(count):
            pair = (source, (source + step) % count)
            if link in network.path(*pair):
                yield pair


def _fair_rates(network: Network, streams: Sequence[tuple[int, int]]) -> list[float]:
    """What each stream should get of the links as they were asked for."""
    sharing = BandwidthSharing([min(rate, UNLIMITED) for rate in network.rates])
    flows = []
    for stream in streams:
        demand = dict.fromkeys(network.path(*stream), 1)
        flow = Flow(demand, math.inf, lambda now: None)
        flows.append(flow)
        sharing.start(flow)
    sharing.advance(0.0)
    return [flow.rate for flow in flows]


def load(network: Network, trial: LinkTrial, link: int) -> float:
    """What a trial should put on a link."""
    return sum(
        rate
        for stream, rate in zip(trial.streams, trial.expected, strict=True)
        if link in network.path(*stream)
    )


def side_by_side(
    network: Network, trials: Sequence[LinkTrial]
) -> Iterator[list[LinkTrial]]:
    """Trials in groups that share no link and leave the cores at rest; at least
    one in each."""
    budget = _BYTES_PER_CORE * (os.cpu_count() or 1)
    waiting = list(trials)
    while waiting:
        group: list[LinkTrial] = []
        busy: set[int] = set()
        rate, streams = 0.0, 0
        for trial in waiting:
            links = {way for s in trial.streams for way in network.path(*s)}
            fits = (
                not links & busy
                and rate + sum(trial.expected) <= budget
                and streams + len(trial.streams) <= _MOST_STREAMS
            )
            if fits or not group:
                group.append(trial)
                busy |= links
                rate += sum(trial.expected)
                streams += len(trial.streams)
        waiting = [trial for trial in waiting if trial not in group]
        yield group


TOLERANCE = 0.05
"""A link that gives more or less than this share of what was asked is off."""

_WARM_UP_SECONDS = 0.25
_SECONDS = 0.5
_LONGEST_SECONDS = 10.0
_SEGMENTS = 100
"""A trial takes in so many segments at least, which matters below 5 Mbit/s."""
_TRIES = 3
"""A busy machine makes a link look slow; what is off once is tried again."""
_CONNECT_SECONDS = 5.0
_CHUNK = bytes(1 << 18)
_AT_ONCE = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class MeasuredLink:
    """One directed link: the goodput asked for and found, in bytes per second.

    *possible* is what the rest of the cluster can put on the link, less than *asked*
    where all other hosts together are slower.
    """

    link: int
    name: str
    asked: float
    possible: float
    found: float

    @property
    def error(self) -> float:
        """Relative: 0.03 for 3 % more than asked (or than was possible)."""
        return self.found / min(self.asked, self.possible) - 1

    def __str__(self) -> str:
        asked, found = units.show_rate(self.asked), units.show_rate(round(self.found))
        return f"{self.name}: asked for {asked}, gives {found} ({self.error:+.1%})"


@dataclass(frozen=True)
class Report:
    """What every link gave, in the order of their numbers.

    ``idle`` names the links that could not be loaded: unlimited ones, and those that no
    pair of hosts uses.
    """

    links: tuple[MeasuredLink, ...]
    idle: tuple[str, ...]

    def off(self, tolerance: float = TOLERANCE) -> tuple[MeasuredLink, ...]:
        """The links that are off by more than *tolerance*."""
        return tuple(link for link in self.links if abs(link.error) > tolerance)

    @property
    def worst(self) -> float:
        """The largest relative error, without its sign; 0 where nothing was measured."""
        return max((abs(link.error) for link in self.links), default=0.0)

    def summary(self) -> str:
        """One line for people."""
        if not self.links:
            return "no link could be measured"
        count = len(self.off())
        text = f"{len(self.links)} links measured, the worst {self.worst:.1%} off"
        return text + (
            f"; {count} are off by more than {TOLERANCE:.0%}" if count else ""
        )


def measure(network: Network) -> Report:
    """Load every link; see the top of this file.

    Raises `EmulationError` if two hosts cannot connect (a cut link).
    """
    trials, idle = plan_trials(network)
    measured: dict[int, MeasuredLink] = {}
    for _ in range(_TRIES):
        for together in side_by_side(network, trials):
            for link in _judge(network, together):
                before = measured.get(link.link)
                if before is None or abs(link.error) < abs(before.error):
                    measured[link.link] = link
        trials = [
            trial
            for trial in trials
            if any(abs(measured[link].error) > TOLERANCE for link in trial.judged)
        ]
    return Report(
        links=tuple(measured[link] for link in sorted(measured)),
        idle=tuple(network.link_name(link) for link in idle),
    )


def _judge(network: Network, trials: Sequence[LinkTrial]) -> Iterator[MeasuredLink]:
    """Run trials together, and say what their links gave."""
    streams = [stream for trial in trials for stream in trial.streams]
    expected = [rate for trial in trials for rate in trial.expected]
    found = dict(zip(streams, _run(network, streams, expected), strict=True))
    for trial in trials:
        for link in trial.judged:
            crossing = [s for s in trial.streams if link in network.path(*s)]
            yield MeasuredLink(
                link=link,
                name=network.link_name(link),
                asked=network.rates[link],
                possible=load(network, trial, link),
                found=sum(found[stream] for stream in crossing),
            )


class _Arrivals:
    """Counts one stream's bytes once the warm-up is over."""

    def __init__(self, start: float) -> None:
        self._start = start
        self._first: float | None = None
        self._last = 0.0
        self._bytes = 0

    def arrived(self, count: int, now: float) -> None:
        """The bytes before the first instant that counts opened the interval."""
        if self._first is not None:
            self._bytes += count
            self._last = now
        elif now >= self._start:
            self._first = self._last = now

    @property
    def rate(self) -> float:
        """Bytes per second."""
        if self._first is None or self._last == self._first:
            return 0.0
        return self._bytes / (self._last - self._first)


def _run(
    network: Network,
    streams: Sequence[tuple[int, int]],
    expected: Sequence[float],
) -> list[float]:
    """The goodput of streams that run together, in bytes per second."""
    slowest = min(expected)
    seconds = max(_SECONDS, _SEGMENTS * segment_bytes(slowest) / slowest)
    seconds = min(seconds, _LONGEST_SECONDS)
    buffer = bytearray(1 << 20)
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        pairs = [_connect(network, stack, *stream) for stream in streams]
        start = time.perf_counter() + _WARM_UP_SECONDS * max(1, seconds / _SECONDS / 4)
        end = start + seconds
        arrivals = []
        for sender, receiver in pairs:
            arrivals.append(_Arrivals(start))
            selector.register(sender, selectors.EVENT_WRITE)
            selector.register(receiver, selectors.EVENT_READ, arrivals[-1])
        while (now := time.perf_counter()) < end:
            for key, _ in selector.select(end - now):
                stream = key.fileobj
                assert isinstance(stream, socket.socket)
                if key.data is None:
                    stream.send(_CHUNK)
                else:
                    count = stream.recv_into(buffer)
                    key.data.arrived(count, time.perf_counter())
        return [arrival.rate for arrival in arrivals]


def _connect(
    network: Network, stack: ExitStack, source: int, destination: int
) -> tuple[socket.socket, socket.socket]:
    """A connection between two hosts: the sending and the receiving end."""
    address = network.hosts[destination].address
    with network.socket(destination) as listener:
        listener.bind((address, 0))
        listener.listen(1)
        listener.settimeout(_CONNECT_SECONDS)
        sender = stack.enter_context(network.socket(source))
        sender.settimeout(_CONNECT_SECONDS)
        # At the end throw away what was not sent yet: the next trial wants the link.
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
