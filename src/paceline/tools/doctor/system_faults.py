"""Detects faults of the network, of hosts and of other programs there, from the measurements.

Each fault is a detector with its thresholds above it, and a row of `SYSTEM_FAULTS`. A fault must meet two
conditions: it is beyond the noise of the measurements, and its fix saves time
(`paceline.tools.doctor.diagnosis`). Detectors decide the first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from statistics import median, median_high, median_low
from typing import Literal

from paceline.cluster import Workload
from paceline.cluster.profiling.step_phases import Measured
from paceline.tools.doctor.evidence import Interface, WorkerEvidence
from paceline.tools.doctor.network_model import (
    IN,
    LOST,
    OUT,
    SLOW_LINK,
    VARIES,
    Direction,
    NetworkModel,
    Pair,
)
from paceline.tools.doctor.training_model import TrainingModel
from paceline.units import show_count, show_rate, show_seconds

Hosts = frozenset[int]


@dataclass(frozen=True)
class Observed:
    """Input of a detector.

    Attributes:
        network: Links, hosts and workers as measured.
        training: The job for the simulated runtime. In the stage ``"training"`` without the system faults.
        explained: Hosts that a system detector skips: a root cause there explains this fault.
        processes: Number of simultaneous predictions of other methods.
    """

    network: NetworkModel
    training: TrainingModel
    explained: Hosts = frozenset()
    processes: int = 1


@dataclass(frozen=True)
class Detection:
    """A fault that was detected.

    Attributes:
        location: Host, link, path or rack.
        cause: The measurement, as a clause: ``"worker 2 has 100 Mbit/s, ..."``.
        advice: The recommended action, in one or two sentences.
        fix: Returns the training without the fault. None if it cannot be known.
        hosts: Hosts that have the fault.
        command: A command that fixes it, if there is one.
    """

    location: str
    cause: str
    advice: str
    fix: Callable[[TrainingModel], TrainingModel] | None
    hosts: Hosts = field(default=frozenset())
    command: str = ""

    def with_symptom(self, symptom: Detection, hosts: Hosts) -> Detection:
        """Return the same fault, whose fix also fixes *symptom* on *hosts*."""
        own, other = self.fix, symptom.fix
        if own is None or other is None:
            return self

        def fix(training: TrainingModel) -> TrainingModel:
            training = own(training)
            return training.with_hosts_of(other(training), hosts)

        return replace(self, fix=fix)


@dataclass(frozen=True, kw_only=True)
class FaultKind:
    """A row of the table of faults.

    Attributes:
        name: Its name in JSON.
        title: Its name for readers.
        checks: The check, in a word or two.
        measured_by: The measurements that show it.
        remedy: The general remedy.
        detect: The detector.
        symptoms: Faults of later rows that this one causes on the same hosts.
        stage: Faults of the training are detected after the system's are fixed.
        needs_script: It shows in steps, so a script must run.
        always_report: It is reported whatever its gain, since the simulated runtime does not model it.
        gain_is_unmodelled: The difference between measured and predicted step counts as its gain.
    """

    name: str
    title: str
    checks: str
    measured_by: str
    remedy: str
    detect: Callable[[Observed], Detection | None]
    symptoms: tuple[str, ...] = ()
    stage: Literal["system", "training"] = "system"
    needs_script: bool = False
    always_report: bool = False
    gain_is_unmodelled: bool = False


# ---- processors ----


def cpu_oversubscription(seen: Observed) -> Detection | None:
    """Hosts whose workers compute with more threads than they have cores."""
    network = seen.network
    bad: dict[int, tuple[int, int, int]] = {}
    for host in network.hosts:
        workers = network.on(host)
        count, cores = sum(one.threads for one in workers), workers[0].cores
        if count > cores:
            bad[host] = count, cores, len(workers)
    if not bad:
        return None
    count, cores, workers_there = max(bad.values(), key=lambda one: one[0] / one[1])
    each = cores // workers_there
    location = _hosts(network, bad)
    return Detection(
        location=location,
        cause=f"{show_count(workers_there, 'worker')} with {count} threads on "
        f"{show_count(cores, 'core')} ({location})",
        advice=f"Set OMP_NUM_THREADS={each} for each of them."
        if each
        else f"Start {show_count(cores, 'worker')} there.",
        # If all hosts have the fault, their full speed is unknown.
        fix=None
        if set(bad) == set(network.hosts)
        else _full_speed(_ranks(network, bad)),
        hosts=frozenset(bad),
        command=f"OMP_NUM_THREADS={each} torchrun ..." if each else "",
    )


# ---- interfaces ----

FASTER_INTERFACE = 2.0
"""Factor over the rate of the interface in use."""

NEAR_ITS_LIMIT = 0.4
"""Share of the interface's rate: the interface does not limit a link that gives less."""


def wrong_interface(seen: Observed) -> Detection | None:
    """Detect hosts whose collectives use an interface although a better one is up."""
    network = seen.network
    if all(
        worker.interface is not None and worker.interface.kind == "loopback"
        for host in network.hosts
        for worker in network.on(host)
    ):
        return None  # Workers reach each other by it, so they are on one machine.
    found: dict[int, tuple[Interface, Interface]] = {}
    for host in network.hosts:
        for worker in network.on(host):
            better = _better_interface(network, worker)
            if worker.interface is not None and better is not None:
                found[host] = worker.interface, better
    if not found:
        return None
    used, better = next(iter(found.values()))
    others = [host for host in network.hosts if host not in found]
    rate = better.rate if better.kind == "ethernet" else None
    if others:
        rate = max(network.link(host, OUT) for host in others)
    location = _hosts(network, found)
    send = "send" if others and len(found) > 1 else "sends"
    return Detection(
        location=location,
        cause=f"{location} {send} gradients over {_described(used)} although "
        f"{_described(better)} is up",
        advice=f"Set GLOO_SOCKET_IFNAME={better.name} there (NCCL_SOCKET_IFNAME with GPUs), "
        "and MASTER_ADDR to an address that is reached by it.",
        fix=None
        if rate is None
        else _fast_links(dict.fromkeys(found, (OUT, IN)), rate),
        hosts=frozenset(found),
        command=f"GLOO_SOCKET_IFNAME={better.name} torchrun ...",
    )


def _better_interface(
    network: NetworkModel, worker: WorkerEvidence
) -> Interface | None:
    """Return the better interface for a worker's collectives, if all hosts have one in its network."""
    used = worker.interface
    if used is None:
        return None
    proper = ("ethernet", "container")

    def joins_all(other: Interface) -> bool:
        # An unknown network, or one with a single address, is no evidence.
        if _says_nothing(used.network):
            return _says_nothing(other.network)
        return bool(other.network) and all(
            any(one.network == other.network for one in _interfaces(network, host))
            for host in network.hosts
        )

    def is_better(other: Interface) -> bool:
        if used.kind not in proper:
            return other.kind in proper
        if used.rate is None or other.rate is None or other.kind != used.kind:
            return False
        fast = max(network.link(worker.host, way) for way in (OUT, IN))
        return (
            other.rate >= FASTER_INTERFACE * used.rate
            and fast >= NEAR_ITS_LIMIT * used.rate
        )

    usable = [one for one in worker.others if is_better(one) and joins_all(one)]
    return max(usable, key=lambda one: one.rate or 0.0, default=None)


def _says_nothing(network: str) -> bool:
    return not network or network.endswith(("/32", "/128"))


def _interfaces(network: NetworkModel, host: int) -> Iterable[Interface]:
    for worker in network.on(host):
        yield from worker.others
        if worker.interface is not None:
            yield worker.interface


def _described(one: Interface) -> str:
    rate = f", {_rate(one.rate)}" if one.rate and one.kind == "ethernet" else ""
    return f"{one.name} ({one.kind}{rate})"


# ---- links, paths and uplinks: their thresholds are in network_model.py ----


def packet_loss(seen: Observed) -> Detection | None:
    """Links on which many segments are retransmitted."""
    network = seen.network
    bad = _ends(seen, lambda host, way: network.loss(host, way) > LOST)
    if not bad:
        return None
    most = max(network.loss(host, way) for host, ways in bad.items() for way in ways)
    well = [host for host in network.hosts if host not in bad]
    usual = max(
        (network.link(host, way) for host in well for way in (OUT, IN)), default=0.0
    )
    location = _links(network, bad)
    return Detection(
        location=location,
        cause=f"{100 * most:.2g} % of the segments are retransmitted ({location})",
        advice="Check cable, port, driver and radio (ip -s link shows errors and drops).",
        fix=_fast_links(bad, usual) if well else None,
        hosts=frozenset(bad),
    )


def contention(seen: Observed) -> Detection | None:
    """Links that give much less at some times than at others."""
    network = seen.network
    bad = _ends(seen, lambda host, way: network.steady(host, way) < VARIES)
    if not bad:
        return None
    ends = [(host, way) for host, ways in bad.items() for way in ways]
    least = min(network.steady(host, way) for host, way in ends)
    most = max(network.heights(host, way)[1] for host, way in ends)
    location = _links(network, bad)
    return Detection(
        location=location,
        cause=f"{location} {_has(bad)} {_rate(least * most)} at some times and {_rate(most)} "
        "at others",
        advice="Find out who else uses the link, and give one of the two another link or "
        "another time.",
        fix=_fast_links(bad, most),
        hosts=frozenset(bad),
    )


def scarce_uplink(seen: Observed) -> Detection | None:
    """Racks whose hosts together get less beyond the rack than each alone."""
    network = seen.network
    uplinks = [
        (rack, rates)
        for rack in network.racks
        if (rates := network.uplink(rack)) is not None
    ]
    if not uplinks:
        return None
    got, could = min(rates for _, rates in uplinks)
    racks = [
        _rack(network, rack) for rack, _ in sorted(uplinks, key=lambda one: len(one[0]))
    ]
    location = f"between {listed(racks)}" if len(racks) > 1 else f"beyond {racks[0]}"
    return Detection(
        location=location,
        cause=f"{location}, all hosts together get {_rate(got)}, though their links add up to "
        f"{_rate(could)}",
        advice="Use a faster uplink, or a collective that sends less over it.",
        fix=lambda training: replace(training, uplink=None),
    )


def slow_link(seen: Observed) -> Detection | None:
    """Hosts, fewer than half of them, whose link is far below the median host's."""
    network = seen.network
    usual = network.usual_link
    bad = _ends(seen, lambda host, way: network.link(host, way) < SLOW_LINK * usual)
    if not bad or (
        2 * len(bad) >= len(network.hosts) and not _is_one_path(network, bad)
    ):
        return None
    rates = [network.link(host, way) for host, ways in bad.items() for way in ways]
    location = _links(network, bad)
    without = listed([network.label(host) for host in bad])
    instead = "" if _is_one_path(network, bad) else f", or train without {without}"
    return Detection(
        location=location,
        cause=f"{location} {_has(bad)} {_rates(rates)}, the median is {_rate(usual)}",
        advice=f"Check cable, port and duplex (ethtool){instead}.",
        fix=_fast_links(bad, usual),
        hosts=frozenset(bad),
    )


def slow_path(seen: Observed) -> Detection | None:
    """Detect pairs of hosts that reach all other hosts well, but each other much slower."""
    network = seen.network
    bad = {
        pair: usual
        for pair, usual in network.slow_paths.items()
        if not seen.explained.intersection(pair)
    }
    if not bad:
        return None
    rates = [network.rates[pair] for pair in bad]
    lost = max(network.lost.get(pair, 0.0) for pair in bad)
    location = listed(_paths(network, bad))
    cause = (
        f"{location}: {_rates(rates)}; other paths of the same hosts have "
        f"{_rates(list(bad.values()))}"
    )
    if lost > LOST:
        cause += f"; {100 * lost:.2g} % of its segments are retransmitted"
    return Detection(
        location=location,
        cause=cause,
        advice="Check what only these hosts share: route, cable between switches, member of a "
        "bundle (LAG). Or number hosts so that they are not neighbours in a ring.",
        fix=lambda training: replace(
            training, paths=tuple(one for one in training.paths if one[:2] not in bad)
        ),
        hosts=frozenset(host for pair in bad for host in pair),
    )


Ends = dict[int, tuple[Direction, ...]]
"""By host, the directions of its link that have a fault."""


def _ends(seen: Observed, is_bad: Callable[[int, Direction], bool]) -> Ends:
    found: Ends = {}
    for host in seen.network.hosts:
        ways = tuple(way for way in (OUT, IN) if is_bad(host, way))
        if ways and host not in seen.explained:
            found[host] = ways
    return found


def _is_one_path(network: NetworkModel, bad: Ends) -> bool:
    """Return whether one of two hosts' two paths is bad: then the faulty link is unknown."""
    return len(network.hosts) == 2 and sorted(bad.values()) == [(IN,), (OUT,)]


def _links(network: NetworkModel, bad: Ends) -> str:
    """Links for readers; a host's whole link has the host's name."""
    if _is_one_path(network, bad):
        source = next(host for host, ways in bad.items() if ways == (OUT,))
        target = next(host for host in bad if host != source)
        return f"{network.label(source)} to {network.label(target)}"
    if set(bad) == set(network.hosts):
        return "the whole network"
    words: dict[tuple[Direction, ...], str] = {
        (OUT,): "outgoing link of ",
        (IN,): "incoming link of ",
    }
    return listed(
        [words.get(ways, "") + network.label(host) for host, ways in bad.items()]
    )


def _has(bad: Ends) -> str:
    return "have" if len(bad) > 2 else "has"


def _paths(network: NetworkModel, pairs: Collection[Pair]) -> list[str]:
    """Paths for readers; one phrase where both directions are bad."""
    found = []
    for source, target in sorted(pairs):
        ends = network.label(source), network.label(target)
        if (target, source) not in pairs:
            found.append(f"{ends[0]} to {ends[1]}")
        elif source < target:
            found.append(f"between {ends[0]} and {ends[1]}")
    return found


def _rack(network: NetworkModel, rack: tuple[int, ...]) -> str:
    """``"workers 0 to 3"`` where they follow each other and have no names."""
    labels = [network.label(host) for host in rack]
    word = labels[0].split(" ", 1)[0]
    follow = rack[-1] - rack[0] == len(rack) - 1
    numbered = all(re.fullmatch(rf"{word} \d+", one) for one in labels)
    if len(rack) > 1 and follow and numbered:
        return f"{word}s {labels[0].split()[1]} to {labels[-1].split()[1]}"
    return listed(labels)


def _fast_links(bad: Ends, rate: float) -> Callable[[TrainingModel], TrainingModel]:
    """Links of at least that rate where they are bad."""

    def fix(training: TrainingModel) -> TrainingModel:
        out, into = list(training.out), list(training.into)
        for host, ways in bad.items():
            for way, rates in ((OUT, out), (IN, into)):
                if way in ways:
                    rates[host] = max(rates[host], rate)
        return replace(training, out=tuple(out), into=tuple(into))

    return fix


# ---- hosts and what runs there ----

SLOW_PASSES = 1.15
"""Factor over the median worker's forward and backward time. Equal machines differ by a few percent, by heat
and by their neighbours."""

FEWEST_WORKERS = 3
"""Workers that are needed to call one slower than usual, if each speed was measured once."""

NOISE = 3.0
"""Standard errors by which a median must also differ, so that few or varying steps do not mislead."""

BUSY = 0.25
"""Share of a host's cores that other programs keep busy: more explains a slow host."""


def slow_host(seen: Observed) -> Detection | None:
    """Detect hosts, fewer than half of them, whose passes are far slower than the median worker's.

    Without a script each worker's speed was measured once. So two workers do not show the usual speed,
    and differences between processes of one machine are not its hardware.
    """
    network = seen.network
    evidence = network.evidence
    one_machine = evidence.shared_cores is not None
    if not network.trains and (one_machine or len(evidence.workers) < FEWEST_WORKERS):
        return None
    factors = _slowdowns(network)
    bad = {
        host: max(factors[one.rank] for one in network.on(host))
        for host in network.hosts
        if host not in seen.explained
        and any(factors.get(one.rank, 0.0) > SLOW_PASSES for one in network.on(host))
    }
    if not bad or 2 * len(bad) >= max(len(network.hosts), 3):
        return None
    busy = [
        one
        for host in bad
        for one in network.on(host)[:1]
        if one.other_load > BUSY * one.cores
    ]
    location = _hosts(network, bad)
    cause = f"{location} {_takes(bad)} {max(bad.values()):.2f}x the median compute time"
    shares = (
        "give it smaller batches: paceline.Sampler(shares="
        f"{_shares(network, _ranks(network, bad))})"
    )
    if busy:
        cause += f"; other programs keep {busy[0].other_load:.1f} of {busy[0].cores} cores busy"
        advice = "End these programs, or move the worker."
    elif one_machine:
        advice = (
            f"Check what it computes more than others of this machine, or {shares}."
        )
    else:
        advice = f"Check clock speed and temperature, or {shares}."
    return Detection(
        location=location,
        cause=cause,
        advice=advice,
        # An all-reduce alone does not show the cost of a slow host.
        fix=_full_speed(_ranks(network, bad)) if network.trains else None,
        hosts=frozenset(bad),
    )


MOST_SHARES = 16
"""Workers whose batch sizes an advice lists."""


def _shares(network: NetworkModel, slow: Collection[int]) -> str:
    """Batch sizes relative to equal ones with which slow workers take as long as the others."""
    workers = network.evidence.workers
    times = network.passes if network.trains else {w.rank: 1 / w.speed for w in workers}
    if len(workers) > MOST_SHARES or not all(times.values()):
        return "[...]"
    usual = median_low(times.values())
    parts = (usual / times[rank] if rank in slow else 1.0 for rank in sorted(times))
    return f"[{', '.join(f'{part:.2g}' for part in parts)}]"


SLOW_INPUT = 0.1
"""Share of a worker's passes that it may wait for its batch. Loaders that run ahead take a hundredth."""


def slow_input(seen: Observed) -> Detection | None:
    """Hosts whose workers wait long for their batch."""
    network = seen.network
    bad: dict[int, float] = {}
    for one in network.evidence.workers:
        if one.step is None or one.host in seen.explained:
            continue
        least = one.step.input.median - _error(one.step.input, one.step.steps)
        if least > SLOW_INPUT * network.passes[one.rank]:
            bad[one.host] = max(bad.get(one.host, 0.0), one.step.input.median)
    if not bad:
        return None
    usual = min(network.inputs.values())

    def fix(training: TrainingModel) -> TrainingModel:
        enough = min(usual, SLOW_INPUT / 10 * training.workload.forward_seconds)
        inputs = [
            min(wait, enough) if host in bad else wait
            for wait, host in zip(training.inputs, training.hosts, strict=True)
        ]
        return replace(training, inputs=tuple(inputs))

    location = _hosts(network, bad)
    waits = "wait" if len(bad) > 1 and location != "every host" else "waits"
    return Detection(
        location=location,
        cause=f"{location} {waits} {show_seconds(max(bad.values()))} per step "
        "for a batch",
        advice="Use DataLoader(num_workers=..., prefetch_factor=...), keep the data nearer, or "
        "do less between steps.",
        fix=fix,
        hosts=frozenset(bad),
    )


AT_END = 0.95
"""Share of the gradients' bytes in the last tenth of backward: nothing remains to overlap. Large tied embeddings
come last, too, and are seldom more than nine tenths of a model."""


def no_overlap(seen: Observed) -> Detection | None:
    """Return a model whose gradients all become ready at the end of backward."""
    network = seen.network
    steps = [one.step for one in network.evidence.workers if one.step is not None]
    if not steps or network.evidence.workload is None:
        return None
    at_end = median(step.at_end for step in steps)
    whole = any(step.compiled_whole for step in steps)
    if not whole and at_end < AT_END:
        return None
    cause = f"{100 * at_end:.0f} % of the gradients become ready in the last tenth of backward"
    return Detection(
        location="every worker",
        cause=f"{cause}, as the whole model is one compiled graph" if whole else cause,
        advice="Compile blocks: for block in model.blocks: block.compile()."
        if whole
        else "Let backward reach layers one by one: no checkpoint around the whole model.",
        fix=lambda training: replace(training, workload=_spread(training.workload)),
    )


def _spread(workload: Workload) -> Workload:
    """Return *workload* with its times spread over its tensors by bytes, in the same order."""
    spread = Workload.spread(
        workload.names,
        workload.sizes,
        workload.forward_seconds,
        workload.backward_seconds,
    )
    return replace(workload, forward=spread.forward, backward=spread.backward, order=())


def _slowdowns(network: NetworkModel) -> dict[int, float]:
    """Factor over the usual pass time by worker, without noise."""
    workers = network.evidence.workers
    if not network.trains or not all(network.passes.values()):
        usual = median_high(one.speed for one in workers)
        return {one.rank: usual / one.speed for one in workers}
    usual = median_low(network.passes.values())
    return {
        one.rank: (network.passes[one.rank] - _noise(one)) / usual for one in workers
    }


def _noise(worker: WorkerEvidence) -> float:
    step = worker.step
    if step is None:
        return 0.0
    return math.hypot(
        _error(step.forward, step.steps), _error(step.backward, step.steps)
    )


def _error(seconds: Measured, count: int) -> float:
    """`NOISE` standard errors of a median.

    It is 1.25 times a mean's error, and a standard deviation is 1.48 times the median distance.
    """
    return NOISE * 1.25 * 1.48 * seconds.spread / math.sqrt(max(count, 1))


def _full_speed(ranks: Collection[int]) -> Callable[[TrainingModel], TrainingModel]:
    """Return a fix that makes the workers *ranks* as fast as the median one."""

    def fix(training: TrainingModel) -> TrainingModel:
        usual = median_high(training.speeds)
        speeds = [
            max(speed, usual) if rank in ranks else speed
            for rank, speed in enumerate(training.speeds)
        ]
        return replace(training, speeds=tuple(speeds))

    return fix


def _ranks(network: NetworkModel, hosts: Collection[int]) -> list[int]:
    return [one.rank for one in network.evidence.workers if one.host in hosts]


# ---- text ----


def listed(words: list[str]) -> str:
    """Format as ``"a, b and c"``; only the first few of many."""
    if len(words) > 4:
        words = [*words[:3], f"{len(words) - 3} more"]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _hosts(network: NetworkModel, bad: Collection[int]) -> str:
    if len(network.hosts) > 1 and set(bad) == set(network.hosts):
        return "every host"
    return listed([network.label(host) for host in sorted(bad)])


def _takes(bad: Collection[int]) -> str:
    return "takes" if len(bad) == 1 else "take"


def _rate(rate: float) -> str:
    return show_rate(float(f"{8 * rate:.2g}") / 8)


def _rates(rates: list[float]) -> str:
    low, high = _rate(min(rates)), _rate(max(rates))
    return low if low == high else f"{low} to {high}"


# ---- the table ----

SYSTEM_FAULTS: tuple[FaultKind, ...] = (
    FaultKind(
        name="cpu-oversubscription",
        title="CPU oversubscription",
        checks="CPU threads",
        measured_by="threads of all workers of a host, against the host's cores",
        remedy="set `OMP_NUM_THREADS` to cores divided by workers; torchrun sets 1 by default",
        detect=cpu_oversubscription,
        # A lack of processor time also slows sending and receiving.
        symptoms=("slow-host", "slow-input", "contention"),
        always_report=True,
    ),
    FaultKind(
        name="wrong-interface",
        title="Wrong interface",
        checks="interface",
        measured_by="the interface that carries the collectives, and the other interfaces that are up",
        remedy="set `GLOO_SOCKET_IFNAME` (NCCL: `NCCL_SOCKET_IFNAME`), and `MASTER_ADDR` to an address of that network",
        detect=wrong_interface,
        symptoms=("packet-loss", "contention", "slow-link", "slow-path"),
    ),
    FaultKind(
        name="packet-loss",
        title="Packet loss",
        checks="packet loss",
        measured_by="retransmitted TCP segments between each two hosts",
        remedy="check cable, port, driver, radio",
        detect=packet_loss,
        symptoms=("contention", "slow-link", "slow-path"),
        always_report=True,
        gain_is_unmodelled=True,
    ),
    FaultKind(
        name="contention",
        title="Contention",
        checks="contention",
        measured_by="goodput between each two hosts, measured at several times",
        remedy="give one of the link's two users another link or another time",
        detect=contention,
        symptoms=("slow-link", "slow-path"),
    ),
    FaultKind(
        name="scarce-uplink",
        title="Scarce uplink",
        checks="uplinks",
        measured_by="goodput while all hosts send at once, against goodput while one host sends",
        remedy="use a faster uplink, or `collective=hierarchical`",
        detect=scarce_uplink,
    ),
    FaultKind(
        name="slow-link",
        title="Slow link",
        checks="links",
        measured_by="the best goodputs of each host with other hosts, in each direction",
        remedy="check cable, port, duplex; or train without that host",
        detect=slow_link,
    ),
    FaultKind(
        name="slow-path",
        title="Slow path",
        checks="paths",
        measured_by="goodput between two hosts that both reach other hosts faster",
        remedy="check what only these hosts share: route, cable between switches, member of a bundle (LAG); or give both hosts other neighbors in the ring",
        detect=slow_path,
    ),
    FaultKind(
        name="slow-host",
        title="Slow host",
        checks="hosts",
        measured_by="forward and backward times of each worker, without waits",
        remedy="end other programs on that host, or give it smaller batches: `paceline.Sampler(shares=...)`",
        detect=slow_host,
    ),
    FaultKind(
        name="slow-input",
        title="Slow input",
        checks="input",
        measured_by="each worker's time from a step's end to the next forward pass",
        remedy="start more loader processes, or do less work between steps",
        detect=slow_input,
        needs_script=True,
    ),
    FaultKind(
        name="no-overlap",
        title="No overlap",
        checks="overlap",
        measured_by="the time in backward at which gradients become ready; whether the model is compiled whole",
        remedy="compile blocks: `for block in model.blocks: block.compile()`",
        detect=no_overlap,
        needs_script=True,
    ),
)
"""Root causes first."""
