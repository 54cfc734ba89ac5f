"""Faults of the network: each a function of the picture that names it, or finds nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from paceline.tools.doctor.evidence import Interface, WorkerEvidence
from paceline.tools.doctor.fault_kinds import Detection, Hosts, listed
from paceline.tools.doctor.network_model import IN, OUT, Direction, NetworkModel
from paceline.tools.doctor.racks import Pair
from paceline.tools.doctor.thresholds import (
    FASTER_INTERFACE,
    LOST,
    NEAR_ITS_LIMIT,
    SLOW_LINK,
    VARIES,
)
from paceline.tools.doctor.training_model import TrainingModel
from paceline.units import show_rate

Ends = dict[int, tuple[Direction, ...]]
"""By host, the directions in which something is wrong."""


def slow_link(picture: NetworkModel, spared: Hosts) -> Detection | None:
    """Hosts, fewer than half of them, whose link is far below the median host's."""
    usual = picture.usual_link
    bad = _ends(
        picture, spared, lambda h, way: picture.link(h, way) < SLOW_LINK * usual
    )
    if not bad or (len(bad) * 2 >= len(picture.hosts) and not _pair(picture, bad)):
        return None
    rates = [picture.link(host, way) for host, ways in bad.items() for way in ways]
    return Detection(
        where=_where(picture, bad),
        because=f"{_rates(rates)}, where {_rate(usual)} is usual",
        do=f"{_look(picture, bad)}: cable, port, duplex (ethtool); or train without it",
        mend=_links(bad, usual),
        hosts=frozenset(bad),
    )


def slow_path(picture: NetworkModel, spared: Hosts) -> Detection | None:
    """Two hosts, or a few such pairs, that reach all others well, and each other far slower."""
    bad = {
        pair: usual
        for pair, usual in picture.slow_paths.items()
        if not spared.intersection(pair)
    }
    if not bad:
        return None
    rates = [picture.rates[pair] for pair in bad]
    lost = max(picture.lost.get(pair, 0.0) for pair in bad)
    because = (
        f"{_rates(rates)}, where the others of both give {_rates(list(bad.values()))}"
    )
    if lost > LOST:
        because += f", and {100 * lost:.2g} % of segments are sent again"
    return Detection(
        where=listed(_paths(picture, bad)),
        because=because,
        do="look at what only they share: route, cable between switches, member of a bundle (LAG); "
        "or number hosts so that they are no neighbours in a ring",
        mend=lambda patient: replace(
            patient, paths=tuple(one for one in patient.paths if one[:2] not in bad)
        ),
        hosts=frozenset(host for pair in bad for host in pair),
    )


def scarce_uplink(picture: NetworkModel, spared: Hosts) -> Detection | None:
    """Racks whose hosts get less together beyond them than each alone."""
    seen = [(rack, found) for rack in picture.racks if (found := picture.uplink(rack))]
    if not seen:
        return None
    got, could = min(found for _, found in seen)
    smallest = sorted((rack for rack, _ in seen), key=len)
    who = [_rack(picture, rack) for rack in smallest]
    return Detection(
        where=f"between {listed(who)}" if len(who) > 1 else f"beyond {who[0]}",
        because=f"hosts that send at once get {_rate(got)} together, alone {_rate(could)}",
        do="a faster uplink; or a collective that sends less over it",
        mend=lambda patient: replace(patient, uplink=None),
    )


def loss(picture: NetworkModel, spared: Hosts) -> Detection | None:
    """Links on which many segments are sent again."""
    bad = _ends(picture, spared, lambda h, way: picture.loss(h, way) > LOST)
    if not bad:
        return None
    most = max(picture.loss(host, way) for host, ways in bad.items() for way in ways)
    well = [h for h in picture.hosts if h not in bad]
    usual = max((picture.link(h, way) for h in well for way in (OUT, IN)), default=0.0)
    return Detection(
        where=_where(picture, bad),
        because=f"{100 * most:.2g} % of segments are sent again",
        do=f"{_look(picture, bad)}: cable, port, driver, radio (ip -s link shows errors and drops)",
        mend=_links(bad, usual) if well else None,
        hosts=frozenset(bad),
    )


def contention(picture: NetworkModel, spared: Hosts) -> Detection | None:
    """Links that give much less at some times than at others."""
    bad = _ends(picture, spared, lambda h, way: picture.steady(h, way) < VARIES)
    if not bad:
        return None
    ends = [(host, way) for host, ways in bad.items() for way in ways]
    least = min(picture.steady(host, way) for host, way in ends)
    most = max(picture.heights(host, way)[1] for host, way in ends)
    return Detection(
        where=_where(picture, bad),
        because=f"gives {_rate(least * most)} at times and {_rate(most)} at others",
        do="find who else uses it at these times, and give one of the two another link or hour",
        mend=_links(bad, most),
        hosts=frozenset(bad),
    )


def wrong_interface(picture: NetworkModel, spared: Hosts) -> Detection | None:
    """Hosts whose collectives go over an interface that another one beats."""
    if all(
        _is_loopback(worker) for host in picture.hosts for worker in picture.on(host)
    ):
        return None  # they reach each other by it, so they are on one machine
    found: dict[int, tuple[WorkerEvidence, Interface]] = {}
    for host in picture.hosts:
        for worker in picture.on(host):
            better = _better(picture, worker)
            if better is not None:
                found[host] = worker, better
    if not found:
        return None
    worker, better = next(iter(found.values()))
    used = worker.interface
    assert used is not None
    others = [h for h in picture.hosts if h not in found]
    rate = better.rate if better.kind == "ethernet" else None
    if others:
        rate = max(picture.link(h, OUT) for h in others)
    hosts = [picture.label(host) for host in found]
    return Detection(
        where="every host" if not others else listed(hosts),
        because=f"gradients go over {_named(used)}, and {_named(better)} is there",
        do=f"GLOO_SOCKET_IFNAME={better.name} there (NCCL_SOCKET_IFNAME with GPUs), and "
        "MASTER_ADDR an address that is reached by it",
        mend=None if rate is None else _links(dict.fromkeys(found, (OUT, IN)), rate),
        hosts=frozenset(found),
        command=f"GLOO_SOCKET_IFNAME={better.name} torchrun ...",
    )


def _is_loopback(worker: WorkerEvidence) -> bool:
    return worker.interface is not None and worker.interface.kind == "loopback"


def _better(picture: NetworkModel, worker: WorkerEvidence) -> Interface | None:
    """The interface that should carry its collectives instead, if all hosts have one in the
    same network."""
    used = worker.interface
    if used is None:
        return None
    proper = ("ethernet", "container")

    def reaches(other: Interface) -> bool:
        everywhere = (
            any(i.network == other.network for i in _all(picture, host))
            for host in picture.hosts
        )
        # What nobody knows, and a network of one address, tell nothing.
        if _tells_nothing(used.network):
            return _tells_nothing(other.network)
        return bool(other.network) and all(everywhere)

    def beats(other: Interface) -> bool:
        if used.kind not in proper:
            return other.kind in proper
        if used.rate is None or other.rate is None or other.kind != used.kind:
            return False
        fast = max(picture.link(worker.host, way) for way in (OUT, IN))
        return (
            other.rate >= FASTER_INTERFACE * used.rate
            and fast >= NEAR_ITS_LIMIT * used.rate
        )

    usable = [other for other in worker.others if beats(other) and reaches(other)]
    return max(usable, key=lambda one: one.rate or 0.0, default=None)


def _tells_nothing(network: str) -> bool:
    return not network or network.endswith(("/32", "/128"))


def _all(picture: NetworkModel, host: int) -> Iterable[Interface]:
    for worker in picture.on(host):
        yield from worker.others
        if worker.interface is not None:
            yield worker.interface


# ---- words, and mends ----


def _ends(
    picture: NetworkModel, spared: Hosts, bad: Callable[[int, Direction], bool]
) -> Ends:
    found: Ends = {}
    for host in picture.hosts:
        ways = tuple(way for way in (OUT, IN) if bad(host, way))
        if ways and host not in spared:
            found[host] = ways
    return found


def _pair(picture: NetworkModel, bad: Ends) -> bool:
    """Whether of two hosts' two paths one is bad: what leaves the one reaches the other."""
    return len(picture.hosts) == 2 and sorted(bad.values()) == [(IN,), (OUT,)]


def _where(picture: NetworkModel, bad: Ends) -> str:
    if _pair(picture, bad):
        source = next(host for host, ways in bad.items() if ways == (OUT,))
        target = next(host for host in bad if host != source)
        return f"from {picture.label(source)} to {picture.label(target)}"
    if set(bad) == set(picture.hosts):
        return "the whole network"
    return listed([_end(picture, host, ways) for host, ways in bad.items()])


def _paths(picture: NetworkModel, pairs: Collection[Pair]) -> list[str]:
    """Each of two hosts in one direction, or in both."""
    found = []
    for source, target in sorted(pairs):
        ends = picture.label(source), picture.label(target)
        if (target, source) not in pairs:
            found.append(f"from {ends[0]} to {ends[1]}")
        elif source < target:
            found.append(f"between {ends[0]} and {ends[1]}")
    return found


def _end(picture: NetworkModel, host: int, ways: tuple[Direction, ...]) -> str:
    what = picture.label(host)
    if len(ways) == 2:
        return f"the link of {what}"
    return f"the link {'out of' if ways == (OUT,) else 'into'} {what}"


def _look(picture: NetworkModel, bad: Ends) -> str:
    return f"look at {'it' if len(bad) == 1 else 'them'}"


def _rack(picture: NetworkModel, rack: tuple[int, ...]) -> str:
    """``workers 0 to 3`` where they follow each other and have no names."""
    labels = [picture.label(host) for host in rack]
    word = labels[0].split(" ", 1)[0]
    follow = rack[-1] - rack[0] == len(rack) - 1
    if (
        len(rack) > 1
        and follow
        and all(re.fullmatch(rf"{word} \d+", one) for one in labels)
    ):
        return f"{word}s {labels[0].split()[1]} to {labels[-1].split()[1]}"
    return listed(labels)


def _links(bad: Ends, rate: float) -> Callable[[TrainingModel], TrainingModel]:
    """With links of at least that rate where they are bad."""

    def mend(patient: TrainingModel) -> TrainingModel:
        out, into = list(patient.out), list(patient.into)
        for host, ways in bad.items():
            for way, rates in ((OUT, out), (IN, into)):
                if way in ways:
                    rates[host] = max(rates[host], rate)
        return replace(patient, out=tuple(out), into=tuple(into))

    return mend


def _rate(rate: float) -> str:
    return show_rate(float(f"{8 * rate:.2g}") / 8)


def _rates(rates: list[float]) -> str:
    low, high = _rate(min(rates)), _rate(max(rates))
    return low if low == high else f"{low} to {high}"


def _named(one: Interface) -> str:
    rate = f", {_rate(one.rate)}" if one.rate and one.kind == "ethernet" else ""
    return f"{one.name} ({one.kind}{rate})"
