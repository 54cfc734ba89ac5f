"""Which streams to run, and together with which, so that every link is loaded once.

A *trial* loads one link fully: it takes streams that cross it until what they may carry, by
max-min fairness over the links as they were asked for, fills it. Where that fills other
links of the way too, they are judged by the same trial. Trials that share no link run
together, as long as the sum of their rates leaves the machine's cores at rest.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.cluster.bandwidth import Sharing
from paceline.cluster.flow import Activity
from paceline.runtimes.emulated.network_plan import Host
from paceline.runtimes.emulated.shaping import UNLIMITED, wire_rate

_BYTES_PER_CORE = 1.5e8
"""What streams may carry together for each core: a tenth of what one core can move."""
_MOST_STREAMS = 32


class Network(Protocol):
    """What is measured: a `Fabric`."""

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
    sharing = Sharing([min(rate, UNLIMITED) for rate in network.rates])
    activities = []
    for stream in streams:
        demand = dict.fromkeys(network.path(*stream), 1)
        activity = Activity(demand, math.inf, lambda now: None)
        activities.append(activity)
        sharing.start(activity)
    sharing.settle(0.0)
    return [activity.rate for activity in activities]


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
