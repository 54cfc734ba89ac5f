"""Evidence of clusters that are not there: what would be measured, with noise."""

import random
from dataclasses import dataclass, field

from paceline.cluster import Workload
from paceline.cluster.profiling.step_phases import Measured, StepPhases
from paceline.tools.doctor.evidence import (
    ConcurrentFlows,
    Evidence,
    Interface,
    PathEvidence,
    WorkerEvidence,
)
from tests.tools.plan.helpers import layers

GIGABIT = 125e6
ETHERNET = Interface(name="eth0", kind="ethernet", rate=GIGABIT, network="10.0.0.0/24")
BRIDGE = Interface(name="docker0", kind="virtual", network="172.17.0.0/16")
LOST = 2e-2
REPEATS = 6


@dataclass
class Site:
    """What is true. *slow*: by (host, way), the part of a link that is there; *paths*: by hosts, from and to, the
    same of what only they share; *varying*: by host, what is
    left while others use its link; *losing*: by host, the part of segments lost; *factors*: by worker, how
    many times longer passes take; *waits*: by worker, seconds before a pass."""

    hosts: int = 8
    each: int = 1
    racks: int = 1
    uplink: float = 0.0
    link: float = GIGABIT
    latency: float = 50e-6
    workload: Workload = field(default_factory=lambda: layers(8, 40.0, 0.1, 0.2))
    spec: str = "bsp:buckets=ddp"
    slow: dict = field(default_factory=dict)
    paths: dict = field(default_factory=dict)
    varying: dict = field(default_factory=dict)
    losing: dict = field(default_factory=dict)
    factors: dict = field(default_factory=dict)
    waits: dict = field(default_factory=dict)
    threads: dict = field(default_factory=dict)
    busy: dict = field(default_factory=dict)
    interfaces: dict = field(default_factory=dict)
    compiled: bool = False
    oversubscription: float = 1.0
    messages: float = 2.0
    noise: float = 0.05
    seed: int = 0

    def evidence(self):
        """What would be measured there."""
        return _Measures(self).evidence()


class _Measures:
    def __init__(self, site):
        self.site = site
        self.random = random.Random(site.seed)

    def evidence(self):
        site = self.site
        pairs = [(a, b) for a in range(site.hosts) for b in range(site.hosts) if a != b]
        return Evidence(
            runtime="real",
            workers=tuple(map(self.worker, range(site.hosts * site.each))),
            paths=tuple(self.path(a, b) for a, b in pairs),
            concurrent=tuple(map(self.concurrent, range(1, site.hosts))),
            workload=site.workload,
            spec=site.spec,
            script="train.py",
        )

    def noisy(self, value):
        return value * max(0.1, self.random.gauss(1.0, self.site.noise))

    def rack(self, host):
        return host * self.site.racks // self.site.hosts

    def rate(self, a, b):
        """What a path gives now, alone."""
        site = self.site
        rate = site.link * site.paths.get((a, b), 1.0)
        for host, way in ((a, "out"), (b, "in")):
            mine = site.link * site.slow.get((host, way), 1.0)
            if host in site.varying and self.random.random() < 0.5:
                mine *= site.varying[host]
            rate = min(rate, mine)
        if site.uplink and self.rack(a) != self.rack(b):
            rate = min(rate, site.uplink)
        return rate

    def path(self, a, b):
        losing = max(self.site.losing.get(host, 0.0) for host in (a, b))
        return PathEvidence(
            source=a,
            target=b,
            rates=tuple(self.noisy(self.rate(a, b)) for _ in range(REPEATS)),
            latency=self.noisy(self.site.latency),
            retransmitted=losing * self.random.uniform(0.5, 1.5)
            + self.random.choice((0, 0, 0, 5e-4)),
        )

    def concurrent(self, shift):
        hosts = range(self.site.hosts)
        targets = [(host + shift) % self.site.hosts for host in hosts]
        rates = []
        for a, b in zip(hosts, targets, strict=True):
            share = self.rate(a, b)
            if self.site.uplink and self.rack(a) != self.rack(b):
                beside = sum(
                    self.rack(x) != self.rack(y)
                    and (self.rack(x) == self.rack(a) or self.rack(y) == self.rack(b))
                    for x, y in zip(hosts, targets, strict=True)
                )
                share = min(share, self.site.uplink / beside)
            rates.append(self.noisy(share * self.site.oversubscription))
        return ConcurrentFlows(
            sources=tuple(hosts), targets=tuple(targets), rates=tuple(rates)
        )

    def worker(self, rank):
        site, host = self.site, rank // self.site.each
        used, *others = site.interfaces.get(host, (ETHERNET, BRIDGE))
        return WorkerEvidence(
            rank=rank,
            host=host,
            threads=site.threads.get(host, 1),
            cores=4,
            other_load=site.busy.get(host, 0.1),
            interface=used,
            others=tuple(others),
            step=self.step(rank),
        )

    def step(self, rank):
        site, work = self.site, self.site.workload

        def measured(seconds):
            # The error of a median over 16 steps, and the steps' own spread.
            part = site.noise / 4
            value = seconds * max(0.1, self.random.gauss(1.0, part))
            return Measured(value, seconds * site.noise * 0.67)

        factor = site.factors.get(rank, 1.0)
        forward = measured(work.forward_seconds * factor)
        backward = measured(work.backward_seconds * factor)
        wait = measured(site.waits.get(rank, 0.002))
        slowest = max(site.factors.values(), default=1.0)
        passes = (work.forward_seconds + work.backward_seconds) * slowest
        whole = passes + max(site.waits.values(), default=0.0)
        parts = [*site.slow.values(), *site.paths.values(), *site.varying.values()]
        least = min(parts, default=1.0)
        whole += 2 * sum(work.sizes) / (site.link * least)
        return StepPhases(
            steps=16,
            step=measured(whole),
            input=wait,
            forward=forward,
            backward=backward,
            update=Measured(0.0),
            first_wait=Measured(wait.median + forward.median + backward.median),
            exposed=measured(0.1),
            messages=site.messages,
            bytes_sent=float(sum(work.sizes)),
            at_end=1.0 if site.compiled else 0.2,
            compiled_whole=site.compiled,
        )
