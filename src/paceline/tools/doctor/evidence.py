"""Everything that ``paceline doctor`` measures, before any conclusion: plain data, JSON both ways.

Times are seconds, sizes bytes, rates bytes per second.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from paceline.cluster import Workload
from paceline.cluster.profiling.step_phases import StepPhases

Kind = Literal["ethernet", "container", "wireless", "virtual", "loopback"]
"""Kind of a network interface. *ethernet* has a device of its own, *container* is a container's (or an
emulated host's) end of a pair, *virtual* is made of others (bridge, tunnel)."""


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """A network interface that is up and has an address.

    Attributes:
        name: Such as ``"eth0"``.
        kind: What it is made of.
        rate: Bytes per second, as the system reports it; None where it does not.
        network: Network of its IPv4 address, such as ``"10.0.0.0/24"``; empty where unknown.
    """

    name: str
    kind: Kind
    rate: float | None = None
    network: str = ""


class WorkerEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One worker and the host that it runs on.

    Attributes:
        rank: Its rank.
        host: The host's number, as in the cluster.
        name: The host's own name.
        threads: Threads that compute in this worker.
        cores: Cores that the host has for all its workers. Simulated hosts have one per thread.
        other_load: How many of these cores other programs keep busy.
        speed: Speed of a matrix product, relative to the fastest worker.
        interface: Carries the collectives; None where unknown.
        others: The other interfaces that are up.
        step: Phases of its steps; None where no script ran.
    """

    rank: int
    host: int
    name: str = ""
    threads: int = 1
    cores: int = 1
    other_load: float = 0.0
    speed: float = 1.0
    interface: Interface | None = None
    others: tuple[Interface, ...] = ()
    step: StepPhases | None = None


class PathEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The path from one host to another, measured while nothing else is sent.

    Attributes:
        source: Number of the sending host.
        target: Number of the receiving host.
        rates: Goodput in bytes per second, of several measurements that are apart in time.
        latency: One-way seconds of a message without content.
        retransmitted: Part of the segments that was sent again; None where the system does not
            count. It is measured while little is sent, as a full queue loses some on any network.
    """

    source: int
    target: int
    rates: tuple[float, ...]
    latency: float
    retransmitted: float | None = None


class ConcurrentFlows(msgspec.Struct, frozen=True, kw_only=True):
    """A round in which several hosts send at the same time.

    Attributes:
        sources: Sending hosts, each at most once.
        targets: Receiving hosts, each at most once.
        rates: Bytes per second of each flow.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    rates: tuple[float, ...]


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All measurements of one examination.

    Attributes:
        runtime: ``"real"``, ``"emulated"`` or ``"simulated"``.
        workers: One entry per worker.
        paths: Every path between two hosts.
        concurrent: Rounds in which all hosts send at the same time.
        cluster: Text of the cluster file that the probe inferred. Latency, processors and
            workers per host are taken from it.
        workload: What was trained; None where no script ran.
        spec: The method that was used.
        script: The script's file, for the commands that are recommended.
        arguments: Its arguments.
        shared_cores: Cores that all hosts share, as emulated hosts do.
        notes: Reasons why the figures may mislead.
    """

    runtime: str
    workers: tuple[WorkerEvidence, ...]
    paths: tuple[PathEvidence, ...]
    concurrent: tuple[ConcurrentFlows, ...] = ()
    cluster: str = ""
    workload: Workload | None = None
    spec: str = "bsp"
    script: str = ""
    arguments: tuple[str, ...] = ()
    shared_cores: int | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: bytes) -> Evidence:
        """Read JSON.

        Raises:
            msgspec.MsgspecError: The text is not evidence.
        """
        return msgspec.json.decode(text, type=cls)

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)
